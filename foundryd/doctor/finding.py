# SPDX-License-Identifier: Apache-2.0
"""What the checks say, and what they look at."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what is so, and what to do about it.

    Attributes
    ----------
    facts : the same for programs.
    """

    check: str
    level: Level
    message: str
    fix: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What is examined.

    Attributes
    ----------
    env : the environment that an engine would be started with.
    runtime_dir : where the daemon is.
    root : where ``proc``, ``sys`` and ``dev`` are mounted.
    timeout : seconds for each child process and for the daemon's answer.
    """

    env: Mapping[str, str]
    runtime_dir: Path
    root: Path = Path("/")
    timeout: float = 60.0

    def child_environment(self, **changes: str) -> dict[str, str]:
        """For a child that only looks: the hook, if it is preloaded, has nothing to record or restore there."""
        env = {k: v for k, v in self.env.items() if k != "FOUNDRYD_MODE"}
        return {**env, "LC_ALL": "C", "OPENBLAS_NUM_THREADS": "1", **changes}


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def same_file(one: str | Path, other: str | Path) -> bool:
    """Whether two paths are one file."""
    try:
        return os.path.samefile(one, other)
    except OSError:
        return False
