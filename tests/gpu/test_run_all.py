# SPDX-License-Identifier: Apache-2.0
"""The GPU driver script under short time: what was measured is kept and shown, and nothing outlives it."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def script(monkeypatch):
    """A module of the driver script, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def stopped(script):
    launch = script("launch")
    launch.STOP.set()
    yield launch
    launch.STOP.clear()


def python(source):
    return [sys.executable, "-P", "-c", source]


def run_all(*arguments):
    return [sys.executable, "-P", str(FOLDER / "run_all.py"), *arguments]


def test_steps_share_a_deadline(script):
    launch = script("launch")
    deadline = launch.Deadline(0.4)
    assert deadline.left(0.1) == 0.1
    assert 0 < deadline.left() <= 0.4
    time.sleep(0.5)
    with pytest.raises(launch.TimeUp, match=r"the 0\.4 s"):
        deadline.left()


def test_told_to_stop_no_time_is_left_but_what_must_be_cleaned_up_still_runs(stopped):
    with pytest.raises(stopped.TimeUp):
        stopped.Deadline(60).left()
    sleep = python("import time; time.sleep(0.5); print('cleaned')")
    with pytest.raises(stopped.TimeUp):
        stopped.run("sleep", sleep, os.environ, timeout=60)
    assert stopped.run("sleep", sleep, os.environ, timeout=60, stoppable=False) == "cleaned\n"


def test_a_late_command_is_interrupted_so_that_it_ends_what_it_started(script, tmp_path):
    launch = script("launch")
    source = f"""
import time
try:
    time.sleep(60)
except KeyboardInterrupt:
    open({str(tmp_path / "ended")!r}, "w").close()
"""
    started = time.monotonic()
    with pytest.raises(launch.TimeUp, match="sleeper did not end in 1 s"):
        launch.run("sleeper", python(source), os.environ, timeout=1)
    assert (tmp_path / "ended").exists()
    assert time.monotonic() - started < 20


def test_a_command_s_log_is_kept_when_it_fails(script, tmp_path):
    launch = script("launch")
    source = "import sys; print('why it failed', file=sys.stderr); sys.exit(3)"
    with pytest.raises(launch.RunFailed, match="fails ended with 3: why it failed"):
        launch.run("fails", python(source), os.environ, timeout=30, log=tmp_path / "log")
    assert "why it failed" in (tmp_path / "log").read_text()


def test_progress_of_rank_zero_is_shown_while_it_runs(script, capfd):
    source = """
import json, os, sys, time
print("progress: half of it, rank " + os.environ["RANK"], file=sys.stderr, flush=True)
print("a warning of some library", file=sys.stderr, flush=True)
time.sleep(1)
print(json.dumps({}))
"""
    seen = []
    watcher = threading.Timer(0.9, lambda: seen.append(capfd.readouterr().err))
    watcher.start()
    script("launch").run_ranks(python(source), 2, {}, timeout=60)
    watcher.join()
    assert "".join([*seen, capfd.readouterr().err]).splitlines() == ["half of it, rank 0"]


def test_a_case_without_time_is_late_and_not_started(script, tmp_path):
    matrix = script("matrix")
    case = matrix.Case("absent", "tp=1", script("launch").Program("absent.py"))
    outcome = matrix.run_case(case, 1, tmp_path, limit=0)
    assert (outcome.verdict, outcome.capture) == ("late", {})
    assert matrix.late(case, 5).verdict == "late"


def captured(ranks, held_out):
    return {"captured_ranks": ranks, "heldout_ranks": held_out, "rules": {"image": 3, "affine": 12}}


def test_rules_that_no_held_out_rank_checked_are_not_proven(script):
    matrix = script("matrix")
    assert "no rank was held out" in matrix.not_proven(captured([0, 1, 2, 7], []), 8)
    assert matrix.not_proven(captured([0, 1, 2, 3, 7], [3]), 8) == ""
    assert matrix.not_proven(captured([0, 1], []), 2) == ""
    assert matrix.rules_text(captured([0], [])) == "affine 12, image 3"


def test_a_case_keeps_its_variables_on_one_gpu(script):
    matrix = script("matrix")
    (case,) = [c for c in matrix.CASES if c.name == "dense-expandable"]
    assert case.on(3).environment == {**matrix.EXPANDABLE, "CUDA_VISIBLE_DEVICES": "3"}
    assert "CUDA_VISIBLE_DEVICES" not in case.environment


def test_cases_side_by_side_are_spread_over_the_gpus(script):
    run_all_, matrix = script("run_all"), script("matrix")
    together = threading.Barrier(4)
    seen = []

    def one(case):
        together.wait(20)  # all four run at a time
        seen.append(case.environment["CUDA_VISIBLE_DEVICES"])

    program = script("launch").Program("decode.py")
    run_all_.side_by_side([matrix.Case(str(i), "tp=1", program) for i in range(8)], 4, 2, one)
    assert sorted(seen) == ["0"] * 4 + ["1"] * 4


def test_a_case_that_needs_all_gpus_sees_them_beside_others(script):
    matrix, seen = script("matrix"), {}

    def one(case):
        seen[case.name] = case.environment.get("CUDA_VISIBLE_DEVICES")

    program = script("launch").Program("x.py")
    cases = [matrix.Case(variant, variant, program) for variant in ("tp=1", "tp=2", "tp=8")]
    script("run_all").side_by_side(cases, 1, 2, one)
    assert seen == {"tp=1": "0", "tp=2": None, "tp=8": "0"}


def test_a_failure_side_by_side_is_not_lost(script):
    matrix = script("matrix")

    def one(case):
        raise ValueError(case.name)

    with pytest.raises(ValueError, match="lost"):
        script("run_all").side_by_side([matrix.Case("lost", "tp=1", script("launch").Program("x.py"))], 2, 1, one)


def test_the_table_is_printed_when_there_was_no_time(tmp_path):
    command = run_all("--out", str(tmp_path), "--part", "matrix", "--part", "bench", "--bench-variant", "tp=1")
    done = subprocess.run([*command, "--part-limit", "0"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("case")
    assert any(line.startswith("dense-tp2 ") and " late " in line for line in lines)
    assert any(line.startswith("bench-tp1 ") and " late " in line for line in lines)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert {row["verdict"] for row in rows if "verdict" in row} == {"late"}
    # What has a target is in the table, too, and not taken for met.
    beside = {row["figure"]: row["target met"] for row in rows if "figure" in row}
    assert len(beside) >= 12
    assert set(beside.values()) == {"not measured"}


def test_the_table_is_printed_when_it_is_told_to_end(tmp_path):
    binary, begun = tmp_path / "binary", tmp_path / "begun"
    binary.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec sleep 100\n")
    binary.chmod(0o755)
    command = run_all("--out", str(tmp_path), "--part", "hook", "--hook-cost-binary", str(binary))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            end = time.monotonic() + 60
            while not (begun.exists() and begun.read_text().strip()):
                assert process.poll() is None, process.communicate()
                assert time.monotonic() < end
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1, err
    assert "hook  late" in out
    assert not Path("/proc", begun.read_text().strip()).exists()


def test_a_case_that_does_not_exist_is_named(tmp_path):
    command = run_all("--out", str(tmp_path), "--part", "matrix", "--case", "dens")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "'dens'" in done.stdout


def test_the_hook_s_part_says_which_folder_it_lacks(tmp_path):
    command = run_all("--out", str(tmp_path), "--part", "hook", "--hook-include", str(tmp_path))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"{tmp_path} has no foundryd/hook.h" in done.stdout
    assert "--hook-include" in done.stdout


def test_without_the_header_the_hook_s_cost_says_what_to_pass(tmp_path):
    program = FOLDER / "programs" / "hook_cost" / "run.py"
    command = [sys.executable, "-P", str(program), "--build", str(tmp_path), "--include", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert f"{tmp_path} has no foundryd/hook.h: give --include" in done.stderr


@pytest.fixture
def on_software(script, monkeypatch):
    launch = script("launch")
    monkeypatch.setattr(launch, "DRIVER", "soft")
    return launch


class Command:
    """Stands in for a program of the folder ``programs``."""

    def __init__(self, *command):
        self.command = [sys.executable, "-P", *command]


@pytest.mark.timeout(200)
def test_processes_restore_one_after_another_and_from_a_daemon_started_anew(on_software, tmp_path):
    """The functions that the GPU tests are made of, with the demo's engine on the software driver."""
    worker = Command("-m", "foundryd.demo.worker", "--parallel", "tp=1", "--batch-sizes", "1,2")
    archive = tmp_path / "demo.foundry"
    captured = on_software.capture(worker, "tp=1", 1, archive, timeout=120)
    assert captured["captured_ranks"] == [0]
    assert "capturing as rank 0" in archive.with_suffix(".log").read_text().splitlines()[0]
    reports = []
    with on_software.daemon([archive]) as runtime:
        for _ in range(2):
            reports += on_software.restore(archive, worker, "tp=1", 1, runtime, timeout=60)
        on_software.foundryd("stop", "--runtime-dir", str(runtime))
        on_software.foundryd("start", "--runtime-dir", str(runtime), str(archive))
        reports += on_software.restore(archive, worker, "tp=1", 1, runtime, timeout=60)
    assert all(report["restored"] for report in reports), reports
    assert reports[0]["tokens"] == reports[1]["tokens"] == reports[2]["tokens"] != {}
    with pytest.raises(on_software.RunFailed):
        on_software.foundryd("ls", "--runtime-dir", str(runtime))


@pytest.mark.timeout(120)
def test_a_capture_that_is_late_takes_its_engine_along(on_software, tmp_path):
    pid = tmp_path / "pid"
    engine = Command("-c", f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(100)")
    with pytest.raises(on_software.TimeUp, match="foundryd capture did not end in 8 s"):
        on_software.capture(engine, "tp=1", 1, tmp_path / "late.foundry", timeout=8)
    assert not Path("/proc", pid.read_text()).exists()
