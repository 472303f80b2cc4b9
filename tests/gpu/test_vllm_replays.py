# SPDX-License-Identifier: Apache-2.0
"""How the script for vLLM knows that graphs answered, in one process and in several; none of it needs a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

# Stand for vLLM: ranks are processes that are told by name what to do, as its executor tells them, and a graph is of
# PyTorch's or foundryd's own class, without a driver behind it.
ENGINE = """
import importlib, multiprocessing, os
from types import SimpleNamespace

import torch
from foundryd.engines.torch.graph import TorchRestored

torch.cuda.CUDAGraph.replay = lambda graph: None
TorchRestored.replay = lambda graph, stream=None: None
SamplingParams = SimpleNamespace


def worker_of(name, tp, rank, experts=False, replicas=1, replica=0):
    parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=tp, world_size=tp, local_world_size=tp)
    parallel.nnodes_within_dp, parallel.distributed_executor_backend, parallel.data_parallel_backend = 1, "mp", "mp"
    parallel.data_parallel_index = parallel.data_parallel_rank_local = replica
    together = experts and replicas > 1
    parallel.data_parallel_size, parallel.data_parallel_rank = (replicas, replica) if together else (1, 0)
    module, _, owner = name.rpartition(".")
    worker = getattr(importlib.import_module(module), owner)
    return worker(vllm_config=SimpleNamespace(parallel_config=parallel), local_rank=rank, rank=rank)


def busy(pipe, *place):
    worker = worker_of(*place)
    worker.init_device()
    while True:
        method, arguments = pipe.recv()
        try:
            getattr(worker, method)(*arguments)
            pipe.send(None)
        except Exception as error:
            pipe.send(error)


class LLM:
    def __init__(self, model, tensor_parallel_size=1, worker_cls="vllm.v1.worker.gpu_worker.Worker", **options):
        self.pipes, self.worker = [], None
        if tensor_parallel_size == 1:
            self.worker = worker_of(worker_cls, 1, 0)
            self.worker.init_device()
        for rank in range(tensor_parallel_size) if tensor_parallel_size > 1 else ():
            ours, theirs = multiprocessing.Pipe()
            place = (theirs, worker_cls, tensor_parallel_size, rank)
            multiprocessing.get_context("fork").Process(target=busy, args=place, daemon=True).start()
            self.pipes.append(ours)
        # Which no batch asked for.
        self.collective_rpc("execute_model", args=(1,))

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        if self.worker:
            return [getattr(self.worker, method)(*args)]
        for pipe in self.pipes:
            pipe.send((method, args))
        found = [pipe.recv() for pipe in self.pipes]
        if any(found):
            raise RuntimeError(str(found))
        return found

    def generate(self, asked, sampling, **_):
        for step in range(sampling.max_tokens):
            self.collective_rpc("execute_model", args=(step,))
            if self.pipes:
                self.collective_rpc("execute_dummy_batch")
        answers = [[(sum(p.prompt_token_ids) + k) % 97 for k in range(sampling.max_tokens)] for p in asked]
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]
"""
WORKER = """
import json, os
from pathlib import Path

import torch
from foundryd.engines.torch.graph import TorchRestored
from vllm.compilation.counter import compilation_counter


class Worker:
    def __init__(self, vllm_config, local_rank, rank):
        self.vllm_config, self.local_rank, self.rank = vllm_config, local_rank, rank

    def init_device(self):
        restored = os.environ.get("FOUNDRYD_MODE") == "restore"
        self.mood = os.environ.get("MOOD", "") if self.rank == self.vllm_config.parallel_config.world_size - 1 else ""
        own = not restored or self.mood == "captures"
        self.graph = object.__new__(torch.cuda.CUDAGraph if own else TorchRestored)
        compilation_counter.num_cudagraph_captured = 4 if own else 0
        report = {"way": "restored" if restored else "native", "fallback": None, "graphs": 4, "kv_blocks": 7}
        report |= {"restore_ms": {}, "phases_ms": {}, "parts_ms": {}, "collector_ms": {}}
        folder = Path(os.environ["FOUNDRYD_STARTUP_REPORT"])
        folder.mkdir(exist_ok=True)
        (folder / f"rank-{self.rank}.json").write_text(json.dumps(report))

    def execute_model(self, step):
        if self.mood != "eager" and not (self.mood == "fewer" and step % 5 == 0):
            self.graph.replay()

    def execute_dummy_batch(self):
        self.graph.replay()
"""
COUNTER = """
class compilation_counter:
    num_cudagraph_captured = 0
"""
INPUTS = """
from types import SimpleNamespace as TokensPrompt
"""
# Each worker of a world in turn: one step is counted.
COUNTS = """
import json, sys
from vllm import worker_of

name, tp, experts, replicas, folder = json.loads(sys.argv[1])
for replica in range(replicas):
    for rank in range(tp):
        worker = worker_of(name, tp, rank, experts, replicas, replica)
        worker.init_device()
        worker.begin_replay_counts()
        worker.execute_model(1)
        worker.write_replay_counts(folder)
        worker.execute_model(1)
"""
STEPS = 6 * 64  # six batches, 64 tokens each


@pytest.fixture
def context(script, tmp_path, monkeypatch):
    """A context with two GPUs, whose vLLM is the stand-in."""
    for name, text in (
        ("__init__", ENGINE),
        ("inputs", INPUTS),
        ("compilation/counter", COUNTER),
        ("v1/worker/gpu_worker", WORKER),
    ):
        file = tmp_path / "site" / "vllm" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    for name in ("tp2", "small"):
        (tmp_path / f"{name}.foundry").write_text("not read")
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    every = script("setups").setups(1, 0.2)
    results = script("results").Results(tmp_path)
    return script("steps").Context(tmp_path, results, every, lambda setup: tmp_path / "model", 60.0, gpus=2)


def done(script, context, name):
    """The row of a step of that name, kept as the script keeps it."""
    steps = script("steps")
    does = steps.native if name.endswith("native") else steps.restore
    row = steps.timed(steps.Step(name, 1, does, context.setups[name.partition(".")[0]].ranks), context)
    context.results.add(name, row)
    return row


@pytest.mark.parametrize(("name", "workers"), [("small", ["rank-0"]), ("tp2", ["rank-0", "rank-1"])])
@pytest.mark.parametrize("gpus", [1, 2])
def test_every_rank_says_how_often_it_replayed_for_the_batches_and_nothing_else(script, context, name, workers, gpus):
    context.crowded, context.gpus = True, gpus
    native, restored = done(script, context, f"{name}.native"), done(script, context, f"{name}.restore")
    assert native["verdict"] == restored["verdict"] == "ok", (native, restored)
    assert native["replays"] == {worker: {"native": STEPS, "restored": 0, "captured": 4} for worker in workers}
    assert restored["replays"] == {worker: {"native": 0, "restored": STEPS, "captured": 0} for worker in workers}
    said = " + ".join([str(STEPS)] * len(workers)) + " replays"
    assert native["detail"].endswith(said)
    assert restored["detail"].endswith(said)


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("eager", f"rank-1: 0 replays of restored graphs, where the native start had {STEPS}"),
        ("fewer", f"rank-1: {6 * (64 - 13)} replays of restored graphs, where the native start had {STEPS}"),
        ("captures", f"rank-1: vLLM captured 4 graphs itself and replayed such {STEPS} times"),
    ],
)
def test_one_rank_whose_restored_graphs_did_not_answer_fails_the_step_and_is_named(
    script, context, monkeypatch, mood, words
):
    assert done(script, context, "tp2.native")["verdict"] == "ok"
    monkeypatch.setenv("MOOD", mood)
    row = done(script, context, "tp2.restore")
    assert (row["verdict"], row["equal"], row["ways"]) == ("failed", 64, ["restored"])
    assert words in row["detail"]
    assert "rank-0: " not in row["detail"]


def test_a_native_start_with_a_rank_without_graphs_is_nothing_to_compare_with(script, context, monkeypatch):
    monkeypatch.setenv("MOOD", "eager")
    row = done(script, context, "tp2.native")
    assert row["verdict"] == "failed"
    assert row["detail"].startswith("rank-1: vLLM ran without graphs")


def test_a_native_start_from_before_ranks_counted_is_to_be_run_again(script, context):
    assert done(script, context, "tp2.native")["verdict"] == "ok"
    (context.counts("tp2.native") / "rank-1.json").unlink()
    row = done(script, context, "tp2.restore")
    assert row["verdict"] == "failed"
    assert "rank-1 has not counted its replays" in row["detail"]
    assert "run tp2.native again" in row["detail"]


def test_a_start_does_not_take_counts_of_the_one_before_for_its_own(script, context, monkeypatch):
    assert done(script, context, "tp2.native")["verdict"] == "ok"
    setup = context.setups["tp2"]
    context.environment(context.started(setup), "tp2.native")
    with pytest.raises(script("launch").RunFailed, match="rank-0 has not counted"):
        context.replays("tp2.native", setup.workers)


@pytest.mark.parametrize("name", ["tp2", "ep2", "dp2", "moe_dp2"])
@pytest.mark.parametrize("gpus", [1, 2])
def test_workers_call_their_counts_as_their_reports(context, name, gpus):
    context.crowded, context.gpus = True, gpus
    setup = context.started(context.setups[name])
    owner, tp = setup.options["worker_cls"], setup.options.get("tensor_parallel_size", 1)
    told = [owner, tp, setup.model.experts, setup.replicas, str(context.counts(name))]
    environment = context.environment(setup, name)
    command = [sys.executable, "-P", "-c", COUNTS, json.dumps(told)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr
    found = context.replays(name, setup.workers)
    assert found == {worker: {"native": 1, "restored": 0, "captured": 4} for worker in setup.workers}
    assert len(list(context.counts(name).iterdir())) == setup.ranks


def test_a_worker_that_was_not_told_to_count_does_not_say_that_it_found_nothing(context):
    code = "import sys; from replay_counts import ReplayCounts; from pathlib import Path; "
    code += "ReplayCounts().write(Path(sys.argv[1]), 'rank-0')"
    environment = context.environment(context.started(context.setups["tp2"]), "tp2")
    command = [sys.executable, "-P", "-c", code, str(context.counts("tp2"))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert "rank-0 was asked for its replays and never told to count them" in ran.stderr
    assert not context.counts("tp2").exists()
