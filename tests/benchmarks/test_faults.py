# SPDX-License-Identifier: Apache-2.0
"""The background takes memory once and not for each graph: page faults of its thread outside the driver, counted.

A page fault takes 0.2 us on a machine and 2 us in some virtual ones.  The heap gives large blocks back at once here, as
it does in a thread of which the driver takes its memory elsewhere, unless the driver's own faults are what is counted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

STEADY = slice(20, 60)  # graphs after those that are the first of a template


@pytest.fixture
def background(
    served_archive_of: Callable[..., Path],
    driver_environment: Callable[[bool], dict[str, str]],
    run: Callable[..., dict[str, Any]],
) -> Callable[..., dict[str, Any]]:
    """What the child says of the background of a shape."""

    def background(*, given_back: bool = True, **shape: int) -> dict[str, Any]:
        env = driver_environment(True)
        if given_back:
            env |= {"MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_TRIM_THRESHOLD_": "0"}
        return run("background.py", env, served_archive_of(graphs=64, nodes=2600, **shape), 5)

    return background


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


@pytest.mark.usefixtures("large_pages")
def test_what_the_driver_keeps_is_in_large_pages(background: Callable[..., dict[str, Any]]) -> None:
    """A thousand faults a graph where the heap gives nothing that was made for it: each graph's executable is kept."""
    small = background(templates=4)["driver"]
    assert small > 900 * 62
    assert background(templates=4, given_back=False)["driver"] < small / 5
