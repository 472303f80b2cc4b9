# SPDX-License-Identifier: Apache-2.0
"""The software driver answers the conformance rows as the table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
    assert observe("1") == observe("2")


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
