# SPDX-License-Identifier: Apache-2.0
"""A few thousand damages of every kind: refused with a typed error, within bounds of time and memory.

``damage.py`` does it in a process of its own, so that a crash is a failed test too, and says how to repeat one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("damage.py")
COUNT = 2500
SECONDS = 18.0
LEAST = 300  # damages on a machine that is slow or busy


def damage(archive: Path, *options: object) -> dict[str, Any]:
    """Runs the program to a good end; its report."""
    line = [sys.executable, PROGRAM, archive, *options]
    done = subprocess.run([*map(str, line)], capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout[-6000:]}{done.stderr[-4000:]}"
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="module")
def richest(tmp_path_factory: pytest.TempPathFactory, make_draft: Callable[[], Any]) -> Path:
    """The sample with windows, so that every part of the format is there."""
    draft = make_draft()
    stride = 1 << 38
    origin = int(draft.allocations["address"][1])
    windows = int(draft.allocations["address"][0]) + 5 * stride  # arena 1 is where allocation 0 starts
    draft.windows = np.array([(windows, 512, origin, 0, 0), (windows + stride, 512, origin, 1, 0)], draft.dtypes.window)
    path: Path = draft.write(tmp_path_factory.mktemp("richest") / "richest.foundry")
    return path


def test_damages_are_refused_within_bounds(richest: Path) -> None:
    report = damage(richest, "--count", COUNT, "--seconds", SECONDS, "--seed", 1)
    assert report["failures"] == 0
    assert report["damages"] >= LEAST
    assert len(report["kinds"]) == 17
    # Each kind of refusal occurs, and some nonsense makes sense: the program looks at all of it.
    assert report["refused"].keys() == {"ArchiveDigestError", "ArchiveFormatError", "ArchiveVersionError"}
    mild = {"frame recoded", "section words", "section resized", "section exchanged", "index"}
    assert report["made_sense"].keys() <= mild
    assert sum(report["refused"].values()) + sum(report["made_sense"].values()) == report["damages"]
    assert report["peak_mib"] < 300


def test_a_reader_that_does_not_look_is_caught(richest: Path, tmp_path: Path) -> None:
    """The program fails where nobody looks between sections: the test above can fail."""
    blind = tmp_path / "blind.py"
    blind.write_text(
        "import sys, runpy\n"
        f"sys.path.insert(0, {str(PROGRAM.parent)!r})\n"
        "from foundryd.archive.reader import ArchiveReader\n"
        "ArchiveReader._check_padding = lambda self, start, end: None\n"
        f"sys.argv[0] = {str(PROGRAM)!r}\n"
        f"runpy.run_path({str(PROGRAM)!r}, run_name='__main__')\n"
    )
    line = [sys.executable, str(blind), str(richest), "--count", "100"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["failures"] > 0
