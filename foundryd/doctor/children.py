# SPDX-License-Identifier: Apache-2.0
"""Child processes of the checks; each has a deadline."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Probed:
    """What a probe printed, or in one phrase why it did not."""

    value: dict[str, Any]
    failure: str = ""
    stderr: str = ""


def probe(part: str, env: Mapping[str, str], timeout: float) -> Probed:
    """Runs one part of ``foundryd.doctor.probe`` in a process with this environment."""
    line = [sys.executable, "-P", "-m", "foundryd.doctor.probe", part]
    try:
        done = subprocess.run(
            line, env=dict(env), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return Probed({}, f"it did not end within {timeout:g} s")
    stderr = done.stderr.decode(errors="replace")
    if done.returncode < 0:
        return Probed({}, f"it was ended by {signal.Signals(-done.returncode).name}", stderr)
    try:
        value = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = stderr.strip().splitlines()[-1:] or ["no output"]
        return Probed({}, f"it ended with status {done.returncode}: {last[0][:300]}", stderr)
    return Probed(value, stderr=stderr)
