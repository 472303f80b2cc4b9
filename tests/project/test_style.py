# SPDX-License-Identifier: Apache-2.0
"""The tree passes its own linters, and no file outgrows one reading."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command):
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_ruff_finds_nothing():
    run(sys.executable, "-m", "ruff", "check", "foundryd", "packaging", "tests")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_types_hold():
    run(sys.executable, "-m", "mypy")


def test_cpp_is_formatted():
    files = [
        str(p)
        for folder in ("cmake", "hook", "stubs", "rankpatch", "foundryd")
        for p in (ROOT / folder).rglob("*.*")
        if p.suffix in {".cpp", ".h"}
    ]
    run("clang-format", "--dry-run", "--Werror", *files)


def test_no_file_is_too_long_to_read_at_once():
    long = {
        str(p.relative_to(ROOT)): lines
        for folder in ("cmake", "foundryd", "hook", "packaging", "stubs", "rankpatch", "tests")
        for p in (ROOT / folder).rglob("*")
        if p.suffix in {".py", ".cpp", ".hpp", ".h"} and (lines := p.read_text().count("\n")) > 500
    }
    assert not long
