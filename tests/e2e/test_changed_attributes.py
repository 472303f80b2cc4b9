# SPDX-License-Identifier: Apache-2.0
"""Executables that pass between graphs whose kernels have other attributes do what the graph says."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

ENGINE = (sys.executable, "-P", "-c", (Path(__file__).parent / "attribute_graphs.py").read_text())
KEYS = ("plain", "two", "two again", "four", "four elsewhere", "cooperative", "longer")
# Every graph after every other, itself left out.
EVERY_PAIR = [key for pair in itertools.permutations(KEYS, 2) for key in pair]


@pytest.fixture(scope="module")
def archive(e2e, tmp_path_factory):
    path = tmp_path_factory.mktemp("attributes") / "attributes.foundry"
    return e2e.capture_archive(path, e2e.config_of("tp=1"), engine=ENGINE).path


@pytest.fixture
def replays(foundryd, archive):
    """Replays of a restored process in that order: each key, its updates, instantiations and which are ready then."""

    def run(order, *, executables):
        env = {
            "FOUNDRYD_EXECUTABLES": str(executables),
            "FOUNDRYD_RESTORE_BACKGROUND": "0",
            "ORDER": json.dumps(order),
        }
        done = foundryd("run", "--driver", "soft", "--archive", archive, "--", *ENGINE, env=env)
        assert done.code == 0, done.err
        found = json.loads(done.out.splitlines()[-1])
        assert found["restored"] is True
        clusters = [found["natively"][key][0] - value for value, key in enumerate(KEYS[:-1], 1)]
        assert clusters == [1, 2, 2, 4, 4, 1]
        assert [seen for _, _, _, seen, _ in found["replays"]] == [found["natively"][key] for key in order]
        templates = found["templates"]
        assert templates["two"] == templates["two again"]
        assert len(set(templates.values())) == len(KEYS) - 1
        return [(key, changed, made, ready) for key, changed, made, _, ready in found["replays"]]

    return run


def test_every_graph_is_right_after_every_other(replays):
    """An update would leave a cluster as it is and report success (row ``exec.update_cluster`` of conformance)."""
    found = replays(EVERY_PAIR, executables=1)
    for before, (key, changed, made, ready) in itertools.pairwise(found):
        of_one = {key, before[0]} == {"two", "two again"}
        assert (changed, made) == ((0, 0) if key == before[0] else (int(of_one), int(not of_one)))
        assert ready == [key]


def test_an_executable_of_the_template_is_taken_and_among_equals_the_one_of_longest_ago(replays):
    # The one of longest ago has another template, the last one the graph's.
    assert replays(["four", "two", "two again"], executables=2)[-1] == ("two again", 1, 0, ["four", "two again"])
    # None has the template.
    assert replays(["longer", "two", "four"], executables=2)[-1] == ("four", 0, 1, ["four", "two"])
