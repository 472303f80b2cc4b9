# SPDX-License-Identifier: Apache-2.0
"""Pinned memory that graphs use comes back where it was, whatever else a launch pins behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from foundryd._native import _hook
from foundryd.archive.reader import ArchiveReader
from foundryd.session.arena import ARENAS

PROGRAM = (sys.executable, "-P", "-c", (Path(__file__).parent / "pinned_engine.py").read_text())


@pytest.fixture(scope="module")
def archive(e2e, tmp_path_factory):
    path = tmp_path_factory.mktemp("pinned") / "pinned.foundry"
    return e2e.capture_archive(path, e2e.config_of("tp=1"), engine=(*PROGRAM, "behind")).path


def test_what_no_graph_reaches_is_not_archived(archive):
    with ArchiveReader.open(archive) as reader:
        rows = reader.array(reader.index.variants[0].allocations, _hook.allocation_dtype)
    assert (rows["arena"] == ARENAS.index("host")).sum() == 1


@pytest.mark.parametrize("turn", range(3))
def test_a_launch_that_pins_otherwise_restores(foundryd, archive, turn):
    done = foundryd("run", "--driver", "soft", "--archive", archive, "--", *PROGRAM, "behind")
    assert done.code == 0, done.err
    assert json.loads(done.out.splitlines()[-1]) == {"restored": True, "copied": [True] * 3, "fallback": None}


def test_what_comes_before_a_buffer_of_a_graph_has_to_be_alike(e2e, tmp_path):
    done = e2e.run_command(
        "capture", "-o", tmp_path / "a.foundry", "--variant", "tp=1", "--driver", "soft", "--", *PROGRAM, "before"
    )
    assert done.code != 0
    assert "of arena host" in done.err
    assert "make the engine allocate alike on every rank" in done.err
