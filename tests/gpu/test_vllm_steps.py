# SPDX-License-Identifier: Apache-2.0
"""What the script for vLLM takes for right and wrong, on programs that stand for vLLM; none of it needs a GPU."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "vllm"

# Stands for a start of vLLM: the protocol is the real one, tokens follow from prompts, and a restore is one that the
# environment asks for.
ENGINE = """
import json, os, sys
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, {folder!r})
import answers

restoring = os.environ.get("FOUNDRYD_MODE") == "restore"
mood = os.environ.get("MOOD", "")


class Engine:
    import_s = init_s = 0.5

    def __init__(self, model, options):
        way, fallback = ("restored" if restoring else "native"), None
        archived = json.loads(Path(os.environ["ARCHIVED"]).read_text())
        if restoring and (options != archived or mood == "refuses"):
            message = "vllm.max_num_seqs is 16 and the archive has 8"
            way, fallback = "native", {{"reason": "identity", "message": message}}
        self.way = way
        report = Path(os.environ["FOUNDRYD_STARTUP_REPORT"])
        report.mkdir()
        phases = {{"attach": 1.0, "graphs": 2.0}}
        rank = {{"way": way, "fallback": fallback, "graphs": 4, "kv_blocks": 7, "restore_ms": {{}}}}
        rank |= {{"phases_ms": phases, "parts_ms": {{"graphs.bind": 1.5}}, "collector_ms": {{"graphs": 0.5}}}}
        (report / "rank-0.json").write_text(json.dumps(rank))

    def answer(self, batch, tokens, adapters=()):
        if mood == "ends":
            sys.exit(3)
        wrong = restoring and mood == "wrong" and tokens > 2
        numbers = [each[0] if each and mood != "deaf" else 0 for each in adapters] or [0] * len(batch)
        found = [
            [(sum(prompt) + 10 * number + k) % 97 for k in range(tokens)]
            for prompt, number in zip(batch, numbers, strict=True)
        ]
        if wrong:
            found[-1][-1] += 1
        return found

    def check_addresses(self):
        return 0 if mood == "whole" else 3

    @contextmanager
    def counting(self, folder, worker):
        kind = "restored" if self.way == "restored" else "native"
        found = {{"native": 0, "restored": 0, "captured": 0 if kind == "restored" else 4}}
        found["captured"] += mood == "captures"
        yield
        found[kind] += 0 if mood == "eager" else 64
        Path(folder).mkdir()
        (Path(folder) / f"{{worker}}.json").write_text(json.dumps(found))


answers.Engine = Engine
answers.main()
"""

# Stands for vllm serve: an engine of its own process, which has the file open that stands for a GPU.
SERVER = """
import json, os, signal, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

restoring = os.environ.get("FOUNDRYD_MODE") == "restore"
mood = os.environ.get("MOOD", "")
report = Path(os.environ["FOUNDRYD_STARTUP_REPORT"])
report.mkdir()
for worker in os.environ.get("WORKERS", "rank-0").split():
    way = "restored" if restoring and not (mood == "half" and worker != "rank-0") else "native"
    (report / f"{worker}.json").write_text(json.dumps({"way": way, "fallback": None}))
hold = "import sys, time; f = open(sys.argv[1]); print('.', flush=True); time.sleep(300)"
engine = subprocess.Popen([sys.executable, "-c", hold, os.environ["GPU"]], stdout=subprocess.PIPE)
engine.stdout.read(1)


def end(*_):
    if not (restoring and mood == "leaves"):
        engine.kill()
    os._exit(7 if restoring and mood == "code" else 0)


signal.signal(signal.SIGTERM, end)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.answer(200, b"")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/collective_rpc":
            return self.call(asked["method"], *asked["args"])
        if asked["max_tokens"] > 1000:
            engine.wait()
            threading.Timer(0.1, os._exit, [1]).start()
            return self.answer(500, b"engine died")
        replica = int(self.headers.get("X-data-parallel-rank", 0))
        wrong = int(restoring and mood == "wrong" and replica == 1)
        tokens = [[sum(prompt) % 97 + wrong] * asked["max_tokens"] for prompt in asked["prompt"]]
        choices = [{"index": i, "token_ids": found} for i, found in enumerate(tokens)]
        self.answer(200, json.dumps({"choices": choices[::-1]}).encode())

    def call(self, method, *folder):
        # vLLM has this only where it is asked for, and these methods only of its worker with counts.
        if os.environ.get("VLLM_SERVER_DEV_MODE") != "1" or "ed_worker.Worker" not in " ".join(sys.argv):
            return self.answer(404, b"no such path")
        for worker in os.environ["WORKERS"].split() if folder else ():
            found = {"native": 0, "restored": 0, "captured": 0 if restoring else 4}
            found["restored" if restoring else "native"] = 8 if mood == "idle" and worker != "rank-0" else 64
            Path(folder[0]).mkdir(exist_ok=True)
            (Path(folder[0]) / f"{worker}.json").write_text(json.dumps(found))
        self.answer(200 if mood != "deaf" else 500, b"{}")

    def answer(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def context(script, tmp_path, monkeypatch):
    """A context whose starts of vLLM are the stand-ins above."""
    steps, setups = script("steps"), script("setups")
    engine = tmp_path / "engine.py"
    engine.write_text(ENGINE.format(folder=str(FOLDER)))
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(SERVER)
    every = setups.setups(1, 0.2)
    (tmp_path / "archived.json").write_text(json.dumps(dict(every["small"].options)))
    (tmp_path / "nvidia-uvm").write_text("")
    (tmp_path / "small.foundry").write_text("not read")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"vocab_size": 1000}))
    monkeypatch.setattr(steps, "ANSWERS", engine)
    monkeypatch.setattr(script("servers"), "SETTLE", 1.0)
    # An empty entry would be the working directory.
    paths = [str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", ":".join(paths))
    monkeypatch.setenv("ARCHIVED", str(tmp_path / "archived.json"))
    monkeypatch.setenv("GPU", str(tmp_path / "nvidia-uvm"))
    results = script("results").Results(tmp_path)
    return steps.Context(tmp_path, results, every, lambda setup: tmp_path / "model", 60.0)


def done(script, context, name, does, gpus=1):
    """The row of a step, kept as the script keeps it."""
    row = script("steps").timed(script("steps").Step(name, 1, does, gpus), context)
    context.results.add(name, row)
    return row


# --- starts -----------------------------------------------------------------------------------------------------------


def test_a_restore_with_the_answers_of_the_native_start_is_ok(script, context):
    steps = script("steps")
    assert done(script, context, "small.native", steps.native)["verdict"] == "ok"
    row = done(script, context, "small.restore", steps.restore)
    assert (row["verdict"], row["equal"], row["answers"]) == ("ok", 64, 64)
    shown = script("results").tables(context.results.rows)
    assert "answers equal: 64 of 64" in shown
    for words in ("part: graphs.bind", "collector: graphs"):
        [line] = [line for line in shown.splitlines() if words in line]
        assert line.split()[-2:] == ["1.5"] * 2 or line.split()[-2:] == ["0.5"] * 2


def test_graphs_of_pieces_are_restored_once_more_under_the_eyes_of_vllm(script, context, monkeypatch):
    [step] = [step for step in script("compare").steps() if step.name == "pieces.addresses"]
    setup = replace(context.setups["small"], name="pieces")
    context = replace(context, setups={**context.setups, "pieces": setup})
    (context.out / "pieces.foundry").write_text("not read")
    assert done(script, context, "pieces.native", script("steps").native)["verdict"] == "ok"
    assert done(script, context, step.name, step.does)["verdict"] == "ok"
    monkeypatch.setenv("MOOD", "whole")
    row = done(script, context, step.name, step.does)
    assert (row["verdict"], "no pieces whose addresses" in row["detail"]) == ("failed", True)


def test_the_functions_of_a_start_are_written_natively_and_restored(script, context):
    steps = script("steps")
    for way in ("native", "restore"):
        row = done(script, context, f"small.calls-{way}", steps.calls)
        assert row["verdict"] == "ok"
        text = (context.out / f"small.calls-{way}.txt").read_text()
        assert "Ordered by: cumulative time" in text
        assert "Ordered by: internal time" in text
        assert "engine.py" in text  # the stand-in's constructor


def test_adapters_have_to_change_what_is_answered(script, context, monkeypatch):
    steps, setups = script("steps"), script("setups")
    monkeypatch.setattr(setups.Model, "adapter", lambda self, folder, number: folder / f"adapter-{number}")
    row = done(script, context, "lora.native", steps.native)
    assert (row["verdict"], row["by_adapter"], row["answers"]) == ("ok", 3, 64)
    monkeypatch.setenv("MOOD", "deaf")
    row = done(script, context, "lora.native", steps.native)
    assert row["verdict"] == "failed"
    assert "2 adapters and none gave one prompt 1 answers" in row["detail"]


def test_one_token_that_differs_is_found_and_named(script, context, monkeypatch):
    steps = script("steps")
    done(script, context, "small.native", steps.native)
    monkeypatch.setenv("MOOD", "wrong")
    row = done(script, context, "small.restore", steps.restore)
    assert (row["verdict"], row["equal"]) == ("failed", 58)  # one of each batch
    assert "answer 0 from token 63" in row["detail"]


def test_a_restore_that_fell_back_is_not_ok_though_its_answers_are(script, context, monkeypatch):
    steps = script("steps")
    done(script, context, "small.native", steps.native)
    monkeypatch.setenv("MOOD", "refuses")
    row = done(script, context, "small.restore", steps.restore)
    assert (row["verdict"], row["equal"]) == ("failed", 64)
    assert "vllm.max_num_seqs is 16" in row["detail"]


@pytest.mark.parametrize(
    ("mood", "words"),
    [("eager", "0 replays of restored graphs, where the native start had 64"), ("captures", "vLLM captured 1 graphs")],
)
def test_right_answers_that_did_not_come_from_restored_graphs_are_a_failure(script, context, monkeypatch, mood, words):
    steps = script("steps")
    done(script, context, "small.native", steps.native)
    monkeypatch.setenv("MOOD", mood)
    row = done(script, context, "small.restore", steps.restore)
    assert (row["verdict"], row["equal"]) == ("failed", 64)
    assert words in row["detail"]


def test_a_native_start_without_graphs_is_nothing_to_compare_with(script, context, monkeypatch):
    monkeypatch.setenv("MOOD", "eager")
    row = done(script, context, "small.native", script("steps").native)
    assert row["verdict"] == "failed"
    assert "ran without graphs" in row["detail"]


def test_a_restore_without_a_native_start_or_an_archive_says_what_to_run(script, context):
    steps = script("steps")
    assert "run small.native first" in done(script, context, "small.restore", steps.restore)["detail"]
    assert "run full.capture first" in done(script, context, "full.restore", steps.restore)["detail"]


def test_a_start_that_fails_or_is_late_says_so_and_the_rest_stays(script, context, monkeypatch):
    steps = script("steps")
    done(script, context, "small.native", steps.native)
    monkeypatch.setenv("MOOD", "ends")
    row = done(script, context, "small.restore", steps.restore)
    assert row["verdict"] == "failed"
    assert "ended with 3" in row["detail"]
    context.limit = 0.0
    assert done(script, context, "small.again", steps.restore)["verdict"] == "late"
    again = script("results").Results(context.out)
    assert {name: row["verdict"] for name, row in again.rows.items()} == {
        "small.native": "ok",
        "small.restore": "failed",
        "small.again": "late",
    }


@pytest.mark.parametrize(
    ("name", "mood", "verdict", "words"),
    [
        ("seqs", "", "ok", "vllm.max_num_seqs is 16"),
        ("blocks", "", "failed", "and not for identity: vllm.num_gpu_blocks_override is "),
    ],
)
def test_a_refusal_is_right_only_if_it_names_what_was_changed(script, context, monkeypatch, name, mood, verdict, words):
    monkeypatch.setenv("MOOD", mood)
    row = done(script, context, f"refuse.{name}", script("steps").refusal(*script("compare").REFUSALS[name]))
    assert row["verdict"] == verdict
    assert words in row["detail"]


def test_what_should_have_been_refused_and_was_restored_is_a_failure(script, context):
    row = done(script, context, "refuse.nothing", script("steps").refusal(lambda setup: setup, "identity", "x"))
    assert row["verdict"] == "failed"
    assert "it was restored" in row["detail"]


def test_the_time_of_a_token_is_taken_from_three_starts_in_turns(script, context):
    row = done(script, context, "small.pace", script("steps").pace)
    assert set(row["pace"]) == {"1", "8", "32"}
    for found in row["pace"].values():
        assert len(found["again_ratios"]) == len(found["restored_ratios"]) == 7
    assert "small.pace, ms a token" in script("results").tables(context.results.rows)


def test_each_round_is_compared_with_natives_of_that_round(script):
    row = script("steps").compared({"native": [1.0, 2.0, 4.0], "again": [1.0, 2.0, 2.0], "restored": [2.0, 4.0, 8.0]})
    assert row["restored_ratios"] == [2.0, 2.0, 2.0]
    assert (row["again_ratio"], row["native"], row["restored"]) == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("captured", "heldout", "verdict", "words"),
    [
        ([0, 1, 2, 3, 7], [5], "ok", "predicted ranks [5]"),
        ([0, 1, 2, 3, 7], [4, 5, 6], "ok", "predicted ranks [4, 5, 6]"),
        ([0, 1, 2, 3, 5, 7], [4], "failed", "did not predict ranks [5]"),
        (list(range(8)), [], "failed", "every rank was captured"),
    ],
)
def test_a_rank_that_joined_the_samples_was_not_predicted(script, captured, heldout, verdict, words):
    row = script("steps").predicted({"captured_ranks": captured, "heldout_ranks": heldout}, [5], 8)
    assert row["verdict"] == verdict
    assert words in row["detail"]


# --- servers ----------------------------------------------------------------------------------------------------------


def serve(script, context, way, what):
    return done(script, context, f"serve.{way}-{what}", script("serving").served(what, way))


@pytest.mark.parametrize("what", ["term", "kill"])
def test_a_server_that_does_as_the_native_one_is_ok(script, context, what):
    native, plugin = serve(script, context, "native", what), serve(script, context, "plugin", what)
    assert (native["verdict"], native["left"], native["ways"]) == ("ok", 0, ["native"])
    assert (plugin["verdict"], plugin["left"], plugin["ways"]) == ("ok", 0, ["restored"])
    assert native["code"] == (0 if what == "term" else 1)
    assert native.get("request") == (None if what == "term" else "failed")
    assert done(script, context, f"serve.same-{what}", script("serving").same(what))["verdict"] == "ok"


@pytest.mark.parametrize(("mood", "named"), [("code", "code [7, 0]"), ("leaves", "left [1, 0]")])
def test_a_server_that_ends_otherwise_is_found(script, context, monkeypatch, mood, named):
    monkeypatch.setenv("MOOD", mood)
    serve(script, context, "native", "term")
    serve(script, context, "run", "term")
    row = done(script, context, "serve.same-term", script("serving").same("term"))
    assert row["verdict"] == "failed"
    assert f"run: {named}" in row["detail"]


def of_replicas(script, context, monkeypatch, way, gpus=1):
    monkeypatch.setenv("WORKERS", " ".join(context.setups["dp2"].workers))
    (context.out / "dp2.foundry").write_text("not read")
    return done(script, context, f"dp2.{way}", script("replicas").replicas, gpus)


def test_every_replica_of_a_server_answers_as_natively(script, context, monkeypatch):
    assert "run dp2.native first" in of_replicas(script, context, monkeypatch, "restore")["detail"]
    native = of_replicas(script, context, monkeypatch, "native")
    assert (native["verdict"], native["ways"], len(native["served"])) == ("ok", ["native"], 16)
    restored = of_replicas(script, context, monkeypatch, "restore")
    assert (restored["verdict"], restored["ways"]) == ("ok", ["restored"])


@pytest.mark.parametrize(
    ("mood", "words"),
    [
        ("wrong", "answer 8 from token 0"),
        ("half", "['native', 'restored']"),
        ("idle", "replica-1-rank-0: 8 replays of restored graphs, where the native start had 64"),
        ("deaf", "begin_replay_counts: HTTP 500"),
    ],
)
def test_one_replica_that_differs_from_the_native_start_is_found(script, context, monkeypatch, mood, words):
    of_replicas(script, context, monkeypatch, "native")
    monkeypatch.setenv("MOOD", mood)
    row = of_replicas(script, context, monkeypatch, "restore")
    assert row["verdict"] == "failed"
    assert words in row["detail"]


def test_replicas_that_share_a_gpu_are_not_compared_with_those_that_had_their_own(script, context, monkeypatch):
    of_replicas(script, context, monkeypatch, "native")
    context.crowded, context.gpus = True, 1
    row = of_replicas(script, context, monkeypatch, "restore", gpus=2)
    assert (row["verdict"], "run dp2.native again" in row["detail"]) == ("failed", True)
    native = of_replicas(script, context, monkeypatch, "native", gpus=2)
    assert (native["verdict"], native["crowded"]) == ("ok", True)
    restored = of_replicas(script, context, monkeypatch, "restore", gpus=2)
    assert (restored["verdict"], restored["crowded"], restored["ways"]) == ("ok", True, ["restored"])


def test_nothing_of_a_server_outlives_its_block(script, context, monkeypatch):
    monkeypatch.setenv("MOOD", "leaves")
    assert serve(script, context, "plugin", "term")["left"] == 1
    held = [pid for pid in os.listdir("/proc") if pid.isdigit() and script("servers")._has_gpu(int(pid))]
    assert not [pid for pid in held if str(context.out / "nvidia-uvm") in opened(pid)]


def opened(pid):
    try:
        return [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return []


# --- choice and time --------------------------------------------------------------------------------------------------


def test_every_step_has_its_setup_and_a_name_of_its_own(script):
    every, setups = script("compare").steps(), script("setups").setups(8, 0.3)
    names = [step.name for step in every]
    assert len(set(names)) == len(names)
    assert {name.partition(".")[0] for name in names} <= {*setups, "refuse", "serve"}
    # What a step compares with precedes it.
    for setup in ("decode", "full", "pieces", "moe", "tp2"):
        assert names.index(f"{setup}.capture") < names.index(f"{setup}.native") < names.index(f"{setup}.restore")


def test_steps_are_chosen_by_patterns_and_keep_their_order(script):
    compare = script("compare")
    chosen = [step.name for step in compare.chosen(compare.steps(), "pieces.[cnr]*,decode.native")]
    assert chosen == ["decode.native", "pieces.capture", "pieces.native", "pieces.restore"]
    with pytest.raises(ValueError, match="nothing"):
        compare.chosen(compare.steps(), "nothing.*")


def test_steps_after_the_limit_are_late_and_not_begun(script, context):
    compare, steps = script("compare"), script("steps")
    begun = []
    wanted = [steps.Step(f"small.{i}", 1, lambda c, name: begun.append(name) or {"verdict": "ok"}) for i in range(2)]
    assert not compare.run_all(context, wanted, 0.0)
    assert begun == []
    assert [row["verdict"] for row in context.results.rows.values()] == ["late", "late"]
    assert compare.run_all(context, wanted, 60.0)
    assert begun == ["small.0", "small.1"]


def test_a_setup_has_the_folder_of_the_model_that_drafts(script, context):
    asked = []
    context.models = lambda setup: asked.append(setup.model.layers) or context.out / "model"
    setup = context.setup_of("draft.restore")
    assert asked == [1]
    settings = json.loads(setup.flags[setup.flags.index("--speculative-config") + 1])
    assert settings == {"method": "draft_model", "model": str(context.out / "model"), "num_speculative_tokens": 3}
    assert context.setup_of("small.restore") == context.setups["small"]


def test_answers_that_differ_are_named_with_their_first_token(script):
    differences = script("results").differences
    assert differences([[1, 2]], [[1, 2]]) == []
    assert differences([[1, 2], [1]], [[1, 3], [1]]) == ["answer 0 from token 1"]
    assert differences([[1]], [[1, 2]]) == ["answer 0 from token 1"]
    assert differences([], [[1]]) == ["answer 0 is missing"]
