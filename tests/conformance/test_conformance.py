# SPDX-License-Identifier: Apache-2.0
"""The software driver answers the conformance rows as the table says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foundryd import _native

HERE = Path(__file__).resolve().parent


def observe(seed: str) -> dict[str, object]:
    environment = dict(os.environ, LD_LIBRARY_PATH=str(_native.soft_folder()), SOFTCUDA_SEED=seed)
    out = Path(environment.get("TMPDIR", "/tmp")) / f"conformance-{os.getpid()}-{seed}.json"
    try:
        command = [sys.executable, "-P", str(HERE / "run.py"), "--json", str(out), "--check"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        report = json.loads(out.read_text())
    finally:
        out.unlink(missing_ok=True)
    assert report["driver"]["software"], "this test is about the software driver"
    return dict(report["rows"])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rows_are_as_expected_whatever_the_seed() -> None:
    """No row depends on what differs between processes: addresses, the order of nodes, padding."""
    with ThreadPoolExecutor(2) as side_by_side:
        first, second = side_by_side.map(observe, ["1", "2"])
    assert first == second


ROWS_THAT_END = """
import os, signal
from bench import GRANULE, Bench, cu, ok, row

@row("odd.first")
def first(x: Bench): return os.getpid()

@row("odd.crash")
def crash(x: Bench): os.kill(os.getpid(), signal.SIGSEGV)

@row("odd.raises")
def raises(x: Bench):
    with x.reserved(512 * GRANULE, 0x610000000000): raise KeyError("midway")

@row("odd.same_place")
def same_place(x: Bench):
    with x.reserved(512 * GRANULE, 0x610000000000) as base: return base

@row("odd.in_its_tidying")
def in_its_tidying(x: Bench): x.later.callback(os._exit, 3)

@row("odd.last")
def last(x: Bench): return os.getpid()
"""


TWO_GROUPS = """
from bench import Bench, row

@row("one.row")
def one(x: Bench): return 1

@row("two.row")
def two(x: Bench): return 2
"""


def test_a_row_that_ends_its_process_costs_itself(tmp_path: Path) -> None:
    for name in ("run.py", "bench.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "rows_odd.py").write_text(ROWS_THAT_END)
    environment = dict(os.environ, LD_LIBRARY_PATH=str(_native.soft_folder()))
    command = [sys.executable, "-P", str(tmp_path / "run.py"), "--json", str(tmp_path / "out.json")]
    subprocess.run(command, env=environment, capture_output=True, timeout=100, check=True)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert rows["odd.crash"] == {"failed": "the process ended here (exit -11)"}
    assert rows["odd.raises"] == {"failed": "KeyError: 'midway'"}
    assert rows["odd.same_place"] == 0x6100_0000_0000
    assert rows["odd.in_its_tidying"] == {"failed": "the process ended here (exit 3)"}
    assert isinstance(rows["odd.last"], int)
    assert rows["odd.last"] != rows["odd.first"]


def test_a_run_of_one_group_says_nothing_of_the_others(tmp_path: Path) -> None:
    """Neither what it compares nor what is accepted of it."""
    for name in ("run.py", "bench.py", "kernels.cpp"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "rows_two.py").write_text(TWO_GROUPS)
    rows = {"one.row": {"value": 1, "gpu": "H200"}, "two.row": {"value": 3, "gpu": "H200"}}
    rows["two.gone"] = {"value": 4, "gpu": "H200"}
    (tmp_path / "expected.json").write_text(json.dumps(rows))
    command = [sys.executable, "-P", str(tmp_path / "run.py")]
    environment = dict(os.environ, LD_LIBRARY_PATH=str(_native.soft_folder()))

    def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=60)

    report = tmp_path / "out.json"
    assert ran("--only", "one", "--check", "--json", str(report)).returncode == 0
    other = ran("--only", "two", "--check")
    assert other.returncode == 1
    assert other.stdout.splitlines()[1:] == [
        "two.gone: in expected.json, but there is no such row",
        "two.row (H200): expected 3, saw 2",
    ]
    found = json.loads(report.read_text())
    found["driver"]["software"] = False
    for only, value, marks in (("one", 1, ["H200"] * 3), ("one", 7, ["unseen", "H200", "H200"])):
        report.write_text(json.dumps(found | {"only": only, "rows": {"one.row": value}}))
        # The page of this copy is not there.
        ran("--accept", str(report), "--seen", "H200")
        table = json.loads((tmp_path / "expected.json").read_text())
        assert [table[name]["gpu"] for name in ("one.row", "two.gone", "two.row")] == marks


def test_page_shows_the_table() -> None:
    """docs/conformance.md says what expected.json says; run.py --accept and --add rewrite it."""
    environment = dict(os.environ, LD_LIBRARY_PATH=str(_native.soft_folder()))
    command = [sys.executable, "-P", str(HERE / "run.py"), "--table"]
    table = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert table in (HERE.parents[1] / "docs" / "conformance.md").read_text()


def test_table_is_complete() -> None:
    """Every row says whether a GPU was seen to answer so, and every deliberate difference says why."""
    table = json.loads((HERE / "expected.json").read_text())
    for name, row in table.items():
        assert set(row) <= {"value", "gpu", "soft", "why"}, name
        assert isinstance(row["gpu"], str), name
        assert row["gpu"], name
        assert ("soft" in row) == ("why" in row), name
