# SPDX-License-Identifier: Apache-2.0
"""The background takes memory once and not for each graph: page faults of its thread outside the driver, counted.

A page fault takes 0.2 us on a machine and 2 us in some virtual ones.  The heap gives large blocks back at once here, as
it does in a thread of which the driver takes its memory elsewhere.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundryd.archive.inflate import inflate
from foundryd.archive.reader import ArchiveReader

BACKGROUND = Path(__file__).parent / "child" / "background.py"
STEADY = slice(20, 60)  # graphs after those that are the first of a template


@pytest.fixture
def background(
    archive_of: Callable[..., Path], driver_environment: Callable[[bool], dict[str, str]], tmp_path: Path
) -> Callable[..., dict[str, Any]]:
    """What the child says of the background of a shape."""

    def run(*arguments: str, **shape: int) -> dict[str, Any]:
        path = tmp_path / "raw.foundry"
        with ArchiveReader.open(archive_of(graphs=64, nodes=2600, **shape)) as reader, path.open("wb+") as file:
            inflate(reader, file)
        line = [sys.executable, "-P", str(BACKGROUND), str(path), "5", *arguments]
        env = driver_environment(True) | {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
        done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run


# One template has so many members that their columns are turned.
@pytest.mark.parametrize("templates", [1, 4])
def test_graphs_of_the_background_use_the_memory_of_those_before(
    background: Callable[..., dict[str, Any]], templates: int
) -> None:
    """Forty graphs have two faults by chance; where each takes memory anew, 3,960 in the hook, and 270 for columns."""
    found = background(templates=templates, noise=7500, programmatic=300)
    assert len(found["hook"]) == len(found["session"]) == 62
    assert sum(found["hook"][STEADY]) < 200
    assert sum(found["session"][STEADY]) < 120
    # The driver's own are none of these, and there were some.
    assert found["driver"] > 100 * 62


def test_nothing_of_it_is_kept_when_every_graph_was_built(background: Callable[..., dict[str, Any]]) -> None:
    assert background(templates=4)["kept"] == 0
