# SPDX-License-Identifier: Apache-2.0
"""How the script for vLLM lets ranks share a GPU; none of it needs one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "vllm"
WORLDS = ("tp2", "ep2", "dp2", "moe_dp2")

# What vLLM's worker does with its place before it has a device, and what it leans on, on a host with one GPU.
WORKER = """
import os
import torch


class Worker:
    def __init__(self, vllm_config, local_rank, rank):
        self.vllm_config, self.parallel_config = vllm_config, vllm_config.parallel_config
        self.local_rank, self.rank = local_rank, rank

    def init_device(self):
        parallel = self.parallel_config
        local = parallel.data_parallel_rank_local
        if local is None:
            local = parallel.data_parallel_index
        self.local_rank += local * parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        assert self.local_rank < torch.accelerator.device_count(), "out of bounds"
        assert parallel.local_world_size <= torch.accelerator.device_count(), "too few"
        self.device = f"cuda:{self.local_rank}"
        # As when the first communicator is made.
        self.host = os.environ.get("NCCL_HOSTID")
"""
TORCH = """
class accelerator:
    @staticmethod
    def device_count():
        return 1
"""
# Makes workers as vLLM does: the class is imported by its name, ranks and GPUs are counted within the replica.
STARTS = """
import importlib, json, sys
from types import SimpleNamespace
import torch

name, tp, replicas = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
module, _, owner = name.rpartition(".")
Worker, found = getattr(importlib.import_module(module), owner), []
for replica in range(replicas):
    for rank in range(tp):
        parallel = SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=tp, world_size=tp)
        parallel.local_world_size, parallel.data_parallel_index = tp, replica
        parallel.data_parallel_rank_local = replica if replicas > 1 else None
        worker = Worker(SimpleNamespace(parallel_config=parallel), rank, rank)
        worker.init_device()
        found.append([worker.rank, worker.local_rank, worker.device, worker.host])
print(json.dumps({"workers": found, "counted": torch.accelerator.device_count()}))
"""


@pytest.fixture
def context(script, tmp_path):
    """A context with that many GPUs, which ranks may share or not."""

    def made(crowded, gpus):
        results = script("results").Results(tmp_path)
        every = script("setups").setups(1, 0.2)
        return script("steps").Context(
            tmp_path, results, every, lambda setup: tmp_path / "model", 60.0, crowded=crowded, gpus=gpus
        )

    return made


def path_of(environment):
    return environment.get("PYTHONPATH", "").split(os.pathsep)


@pytest.mark.parametrize("name", WORLDS)
def test_starts_of_a_world_get_the_worker_that_shares_only_where_gpus_are_too_few(context, name, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    for crowded, gpus in ((False, 1), (False, 2), (True, 2), (True, 8)):
        alone = context(crowded, gpus)
        setup = alone.started(alone.setups[name])
        assert setup.options == {**alone.setups[name].options, "worker_cls": "counted_worker.Worker"}
        assert path_of(alone.environment(setup, "x")) == [str(FOLDER / "workers"), "/elsewhere"]
        assert path_of(alone.environment(alone.setups[name], "x")) == ["/elsewhere"]
    shared = context(True, 1)
    setup = shared.started(shared.setups[name])
    options = {"worker_cls": "crowded_worker.Worker", "distributed_executor_backend": "mp"}
    assert setup.options == {**shared.setups[name].options, **options}
    assert setup.flags[setup.flags.index("--worker-cls") + 1] == "crowded_worker.Worker"
    environment = shared.environment(setup, "x")
    assert path_of(environment) == [str(FOLDER / "workers"), "/elsewhere"]
    assert Path(environment["VLLM_CACHE_ROOT"]).parent == shared.out


def test_a_path_without_others_has_no_empty_entry(context, monkeypatch):
    # That would be the working directory.
    monkeypatch.delenv("PYTHONPATH", raising=False)
    shared = context(True, 1)
    assert path_of(shared.started(shared.setups["tp2"]).environment) == [str(FOLDER / "workers")]


def test_a_setup_of_one_rank_is_never_crowded_and_has_vllms_own_worker(context):
    for gpus in (0, 1):
        shared = context(True, gpus)
        assert shared.started(shared.setups["small"]) is shared.setups["small"]


def test_a_crowded_or_counted_start_is_no_other_machine_and_no_other_vllm_to_an_archive(script, context):
    from foundryd.archive.identity import environment_facts
    from foundryd.engines.vllm.identity import environment

    for shared, name in product((context(True, 1), context(False, 2)), WORLDS):
        setup = shared.setups[name]
        before = shared.environment(setup, "x")
        after = shared.environment(shared.started(setup), "x") | {"NCCL_HOSTID": "host-of-rank-1"}
        after |= script("servers").CALLABLE
        assert environment_facts(after) == environment_facts(before)
        assert environment(after) == environment(before)


@pytest.mark.parametrize("name", WORLDS)
def test_a_capture_is_the_same_crowded_or_not(script, context, monkeypatch, name):
    steps, said = script("steps"), []

    def foundryd(*arguments, timeout, log, environment):
        said.append((arguments, environment))
        return json.dumps({"archive_bytes": 1, "captured_ranks": [0], "heldout_ranks": []})

    monkeypatch.setattr(steps, "foundryd", foundryd)
    for crowded in (False, True):
        row = steps.timed(steps.Step(f"{name}.capture", 1, steps.capture), context(crowded, 1))
        assert (row["verdict"], row.get("crowded")) == ("ok", None)
    assert said[0] == said[1]
    arguments, environment = said[0]
    assert "worker" not in " ".join(arguments)
    assert str(FOLDER / "workers") not in path_of(environment)


@pytest.mark.parametrize(
    ("tp", "replicas", "hosts"),
    [(2, 1, [0, 1]), (1, 2, [0, 1]), (2, 2, [0, 1, 2, 3]), (4, 1, [0, 1, 2, 3])],
)
def test_workers_that_share_have_the_first_gpu_and_a_host_for_each_rank(context, tmp_path, tp, replicas, hosts):
    site = tmp_path / "site"
    (site / "vllm" / "v1" / "worker").mkdir(parents=True)
    (site / "vllm" / "v1" / "worker" / "gpu_worker.py").write_text(WORKER)
    (site / "torch.py").write_text(TORCH)
    shared = context(True, 1)
    setup = shared.started(shared.setups["tp2"])

    def started(worker):
        path = os.pathsep.join((path_of(setup.environment)[0], str(site)))
        return subprocess.run(
            [sys.executable, "-P", "-c", STARTS, worker, str(tp), str(replicas)],
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    done = started(setup.options["worker_cls"])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [worker[3] for worker in found["workers"]] == [f"host-of-rank-{rank}" for rank in hosts]
    assert [worker[0] for worker in found["workers"]] == [rank % tp for rank in hosts]
    assert {tuple(worker[1:3]) for worker in found["workers"]} == {(0, "cuda:0")}
    assert found["counted"] == 1
    # With vLLM's own worker the same host has too few.
    done = started("vllm.v1.worker.gpu_worker.Worker")
    assert done.returncode != 0
    assert "AssertionError: " in done.stderr


def test_a_step_for_more_gpus_than_there_are_is_not_begun_and_says_what_to_add(script, context):
    steps, begun = script("steps"), []
    step = steps.Step("tp2.native", 1, lambda c, name: begun.append(name) or {"verdict": "ok"}, gpus=2)
    row = steps.timed(step, context(False, 1))
    assert (row["verdict"], begun) == ("failed", [])
    assert "takes 2 GPUs and this host has 1: add --crowded" in row["detail"]
    for gpus, crowded in ((1, True), (2, None)):
        row = steps.timed(step, context(True, gpus))
        assert (row["verdict"], row.get("crowded")) == ("ok", crowded)
    assert begun == ["tp2.native"] * 2


def test_rows_and_tables_say_that_ranks_shared_a_gpu(script):
    results = script("results")
    row = {"verdict": "ok", "seconds": 1.0, "detail": "64 of 64", "phases_ms": {"graphs": 1.0}, "crowded": True}
    row |= {"import_s": 1.0, "init_s": 1.0, "ready_s": 1.0, "equal": 64, "answers": 64}
    shown = results.tables({"tp2.native": row, "tp2.restore": row})
    assert "tp2, crowded: ranks shared a GPU, so these times say nothing" in shown
    assert shown.count("crowded: 64 of 64") == 2
    assert "crowded" not in results.tables({"tp2.native": row | {"crowded": False}})


def test_a_start_that_is_late_names_the_workers_that_have_not_started(script, context, monkeypatch):
    steps, launch = script("steps"), script("launch")
    shared = context(True, 1)

    def run(label, command, environment, *, timeout, log):
        report = Path(environment["FOUNDRYD_STARTUP_REPORT"])
        report.mkdir()
        (report / "rank-0.json").write_text("{}")
        raise launch.TimeUp(f"{label} did not end in {timeout:g} s")

    (shared.out / "tp2.foundry").write_text("not read")
    monkeypatch.setattr(steps, "run", run)
    for way, does in (("native", steps.native), ("restore", steps.restore)):
        row = steps.timed(steps.Step(f"tp2.{way}", 1, does, gpus=2), shared)
        assert (row["verdict"], row["crowded"]) == ("late", True)
        assert row["detail"].endswith("not started: rank-1")
