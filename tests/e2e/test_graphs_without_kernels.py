# SPDX-License-Identifier: Apache-2.0
"""Graphs of fills and copies, and of nothing, are restored like others; a second set of graphs captures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ENGINE = (sys.executable, "-P", "-c", (Path(__file__).parent / "plain_graphs.py").read_text())


@pytest.fixture(scope="module")
def archive(e2e, tmp_path_factory):
    path = tmp_path_factory.mktemp("plain") / "plain.foundry"
    return e2e.capture_archive(path, e2e.config_of("tp=1"), engine=ENGINE).path


@pytest.mark.parametrize("limits", [{}, {"FOUNDRYD_EXECUTABLES": "1"}], ids=["all", "one executable"])
def test_they_do_what_native_ones_do(e2e, foundryd, archive, limits):
    done = foundryd("run", "--driver", "soft", "--archive", archive, "--", *ENGINE, env=limits)
    assert done.code == 0, done.err
    found = json.loads(done.out.splitlines()[-1])
    assert found["restored"] is True
    assert found["second"] == "AttachTooLate"
    assert found["made"] == found["again"] == found["natively"]
    same = {made for made, _ in found["made"].values()}
    assert len(same) == len(found["made"]) - 1  # two do nothing
    kind, message = found["closed"]
    assert kind == "UsageError"
    assert e2e.sentence(message)
