# SPDX-License-Identifier: Apache-2.0
"""Tests of the native parts on builds with sanitizers: only when ``SANITIZE`` names some, as in ``address thread``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("sanitize.py")
WANTED = os.environ.get("SANITIZE", "").split()


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("sanitizer", ["address", "undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer: str) -> None:
    if sanitizer not in WANTED:
        pytest.skip(f"builds everything again: set SANITIZE={sanitizer} to run it")
    done = subprocess.run([sys.executable, str(PROGRAM), sanitizer], capture_output=True, text=True, timeout=7000)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
