# SPDX-License-Identifier: Apache-2.0
"""Each test of the software driver runs its program in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundryd import _native

HERE = Path(__file__).resolve().parent
PRELUDE = f"import sys; sys.path.insert(0, {str(HERE)!r})\nfrom soft import *\nfrom soft import _native\n"


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SOFTCUDA_", "CUDA_"))}
    return kept | {"LD_LIBRARY_PATH": str(_native.soft_folder())} | more


@pytest.fixture
def program() -> Callable[..., Any]:
    """Runs source text on the software driver; the last line that it prints, as JSON."""

    def run(source: str, *arguments: str, **variables: str) -> Any:
        command = [sys.executable, "-P", "-c", PRELUDE + textwrap.dedent(source), *arguments]
        done = subprocess.run(
            command, env=environment(**variables), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def start_program() -> Any:
    """Starts source text with pipes for standard input and output; ends it after the test."""
    started: list[subprocess.Popen[str]] = []

    def run(source: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-P", "-c", PRELUDE + textwrap.dedent(source), *arguments],
            env=environment(**variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        return child

    yield run
    for child in started:
        child.kill()
        child.wait(20)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()
