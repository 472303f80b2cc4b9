# SPDX-License-Identifier: Apache-2.0
"""The reference implementation is measured beside foundryd where it is installed, and skipped in words elsewhere."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
DIGESTS = {"1": ["a", "b"], "2": ["c", "d"]}


@pytest.fixture
def script(monkeypatch):
    """A module of the driver script, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A module foundry that cannot be imported, with a hook beside it."""
    package = tmp_path / "site" / "foundry"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ImportError('imported')")
    (package / "libcuda_hook.so").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    return package


@pytest.fixture
def absent(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)


class Processes:
    """Stands in for a GPU: takes down which processes were started, and answers what they would."""

    def __init__(self, reference, monkeypatch):
        self.ran = []
        self.fail = ""
        self.digests = {"load": DIGESTS, "load ahead": DIGESTS}
        self._failed = importlib.import_module("launch").RunFailed
        monkeypatch.setattr(reference, "native", self.native)

    def native(self, program, world, *, timeout, environment):
        role, folder = program.arguments[0], Path(program.arguments[-1])
        ahead = environment.get("FOUNDRY_EXEC_POOL_PREWARM") == "1"
        way = "load ahead" if ahead else role
        self.ran.append((way, environment))
        if way == self.fail:
            raise self._failed(f"{way} failed")
        memory = {"memory": {"device_used": 2 * 10**9}}
        if role == "native":
            return [memory | {"digests": DIGESTS}]
        if role == "save":
            assert not list(folder.iterdir()), "what was saved before is still there"
            (folder / "graph_0_2.json").write_bytes(bytes(3000))
            (folder / "modules.img").write_bytes(bytes(5000))
            return [memory | {"version": "0.1.0"}]
        hottest, served = (50.0, 170.0) if ahead else (60.0, 200.0)
        loaded = {"hottest_ms": hottest, "all_served_ms": served, "shared": False}
        return [memory | loaded | {"digests": self.digests[way]}]


@pytest.fixture
def processes(script, installed, monkeypatch):
    return Processes(script("reference"), monkeypatch)


def bench(script, out, variant="tp=1", seconds=60.0):
    return script("benchmark").Bench(out, variant, ["--layers", "2"], script("launch").Deadline(seconds))


def by_case(rows):
    return {row["case"]: row for row in rows}


def test_where_it_is_not_installed_the_step_is_skipped_and_says_so(script, absent, tmp_path):
    summary, row = bench(script, tmp_path).run(["reference"])
    assert row == {"case": "bench-tp1 reference", "verdict": "skipped", "detail": row["detail"]}
    assert "no module foundry" in row["detail"]
    assert summary["verdict"] == "skipped", "nothing was measured and nothing may pass"
    (figure,) = [r for r in script("targets").rows("tp1", 1, {}) if r["figure"].startswith("own executables, by the")]
    assert figure["target met"] == "not measured"


def test_skipping_is_no_failure_beside_steps_that_were_measured(script, absent, tmp_path):
    native = {"asked": 1, "native": {}, "memory": {"device_used": 1}, "ready_ms": 5.0}
    rows = script("benchmark").rows("bench", {"native": [native]}, {}, {"reference": "none"})
    assert [row["verdict"] for row in rows] == ["ok", "skipped"]
    results = script("run_all").Results(tmp_path, 1)
    results.add(*rows)
    assert not results.bad


def test_several_ranks_are_skipped(script, installed, tmp_path):
    row = bench(script, tmp_path, "tp=2").run(["reference"])[1]
    assert (row["verdict"], "one rank" in row["detail"]) == ("skipped", True)


def test_another_module_of_that_name_is_skipped(script, installed, tmp_path):
    (installed / "libcuda_hook.so").unlink()
    row = bench(script, tmp_path).run(["reference"])[1]
    assert (row["verdict"], "libcuda_hook.so" in row["detail"]) == ("skipped", True)


def test_it_is_saved_and_loaded_in_processes_of_their_own_with_its_hook(script, processes, installed, tmp_path):
    bench(script, tmp_path).run(["reference"])
    assert [way for way, _ in processes.ran] == ["native", "save", "load", "load ahead"]
    (_, natively), *others = processes.ran
    assert natively == {}
    hook = str(installed / "libcuda_hook.so")
    assert {(e["LD_PRELOAD"], e["FOUNDRY_MODE"]) for _, e in others} == {(hook, "save"), (hook, "load")}
    bench(script, tmp_path).run(["reference"])  # over what was saved before


def test_its_rows_stand_beside_ours_in_equal_columns(script, processes, tmp_path):
    (tmp_path / "bench-tp1.json").write_text(
        json.dumps(
            {
                "arguments": ["--mesh", "tp=1", "--layers", "2"],
                "capture": {
                    "capture_ms": 9e3,
                    "archive_bytes": 7e6,
                    "image_bytes": 9e6,
                    "stored_bytes": {"modules": 3e6, "rules": 4e6},
                },
                "restore": [
                    {
                        "asked": 2,
                        "from_restore": {"hottest_ms": 25.0, "all_served_ms": 100.0, "all_own_ms": 340.0},
                        "memory": {"device_used": 10**9},
                    }
                ],
            }
        )
    )
    measured = bench(script, tmp_path)
    rows = by_case(measured.run(["reference"]))
    ours, theirs = rows["bench-tp1: foundryd"], rows["bench-tp1: foundry-core 0.1.0"]
    assert list(ours) == list(theirs)
    assert list(ours.values())[1:] == [9.0, 7.0, 4.0, 25.0, 100.0, 340.0, 1.0, None]
    assert list(theirs.values())[2:] == [0.008, 0.003, 60.0, 200.0, 200.0, 2.0, "2 of 2"]
    assert rows["bench-tp1: foundry-core 0.1.0, executables' memory ahead"]["every graph ms"] == 170.0
    met = {row["figure"]: row["target met"] for row in script("targets").rows("tp1", 1, measured.reports)}
    assert met["every graph can be replayed, by the reference"] == "met"
    assert met["own executables, by the reference"] == "MISSED"  # 340 beside 170, the better of the two


def test_replays_that_differ_from_native_ones_are_counted(script, processes, tmp_path):
    processes.digests["load"] = DIGESTS | {"2": ["c", "other"]}
    rows = by_case(bench(script, tmp_path).run(["reference"]))
    assert rows["bench-tp1: foundry-core 0.1.0"]["replays as natively"] == "1 of 2"


def test_what_was_measured_before_it_failed_is_kept(script, processes, tmp_path):
    processes.fail = "load"
    rows = by_case(bench(script, tmp_path).run(["reference"]))
    assert rows["bench-tp1"]["verdict"] == "failed"
    assert "load failed" in rows["bench-tp1"]["detail"]
    assert (tmp_path / "bench-tp1.reference.log").read_text() == "load: load failed\n"
    row = rows["bench-tp1: foundry-core 0.1.0"]
    assert (row["archive MB"], row["hottest ms"], row["replays as natively"]) == (0.008, None, None)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("save",), "save needs --folder"),
        (("load", "--folder", "x", "--mesh", "tp=2"), "one rank"),
        (("native", "--rng"), "one rank that takes the best token"),
        (("restore",), "invalid choice"),
    ],
)
def test_the_program_refuses_what_it_cannot_measure(arguments, named):
    pytest.importorskip("torch", reason="PyTorch is not installed; it is no dependency of foundryd nor of its tests")
    program = str(FOLDER / "programs" / "reference_rank.py")
    done = subprocess.run(
        [sys.executable, "-P", program, *arguments], env=os.environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2, done.stderr
    assert named in done.stderr


def test_memory_that_moved_is_named_before_graphs_are_loaded(monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed; it is no dependency of foundryd nor of its tests")
    monkeypatch.syspath_prepend(str(FOLDER / "programs"))
    program = importlib.import_module("reference_rank")
    saved = {"start": 64, "addresses": {"tokens": program.BASE, "keys.0": program.BASE + 512}}
    program.check_layout(saved, saved)
    for changed, named in (
        ({"addresses": saved["addresses"] | {"keys.0": program.BASE}}, "keys.0"),
        ({"addresses": {"tokens": 4096}}, "outside of the region"),
        ({"start": 32}, "graphs begin at 32"),
    ):
        with pytest.raises(SystemExit, match=named):
            program.check_layout(saved, saved | changed)
