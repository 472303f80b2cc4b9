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

    def run(order, *, executables, updates):
        env = {
            "FOUNDRYD_EXECUTABLES": str(executables),
            "FOUNDRYD_RESTORE_BACKGROUND": "0",
            "ORDER": json.dumps(order),
            "UPDATES": str(int(updates)),
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


@pytest.mark.parametrize("updates", [False, True])
def test_every_graph_is_right_after_every_other(replays, updates):
    found = replays(EVERY_PAIR, executables=1, updates=updates)
    for before, (key, changed, made, ready) in itertools.pairwise(found):
        last = before[0]
        if key == last:
            assert (changed, made) == (0, 0)
        elif {key, last} == {"two", "two again"}:
            assert (changed, made) == (1, 0)
        elif "longer" in (key, last) or not updates:
            # Another topology is not even tried.
            assert (changed, made) == (0, 1)
        else:
            # The driver refuses to make a kernel cooperative, and to make it one that is not.
            assert (changed, made) == (1, int("cooperative" in (key, last)))
        assert ready == [key]


def test_the_nearest_executable_is_taken_and_among_equals_the_one_of_longest_ago(replays):
    # The one of longest ago has another topology.
    order = ["longer", "two", "four"]
    assert replays(order, executables=2, updates=True)[-1] == ("four", 1, 0, ["four", "longer"])
    assert replays(order, executables=2, updates=False)[-1] == ("four", 0, 1, ["four", "two"])
    # The one of longest ago has the topology, another one the template.
    order = ["four", "two", "two again"]
    for updates in (False, True):
        assert replays(order, executables=2, updates=updates)[-1] == ("two again", 1, 0, ["four", "two again"])
    # All have the topology and none the template.
    order = ["four", "two", "plain", "four elsewhere"]
    assert replays(order, executables=3, updates=True)[-1][1:3] == (1, 0)
    assert replays(order, executables=3, updates=True)[-1][3] == ["four elsewhere", "plain", "two"]


def test_across_templates_nothing_is_updated_until_a_gpu_was_seen_to_do_it_right():
    """The rows that a GPU has to be seen to answer are there, and the switch follows them."""
    from foundryd.session import executables

    source = Path(executables.__file__).read_text()
    comment = source[: source.index("_UPDATES_ATTRIBUTES = ")].rpartition("\n\n")[2]
    named = {part for part in comment.split("``") if part.startswith("exec.")}
    table = json.loads((Path(__file__).parents[1] / "conformance" / "expected.json").read_text())
    assert {name for name in table if name.startswith("exec.update_")} - named == {
        "exec.update_keeps_handles",
        "exec.update_refusals",
    }
    assert not executables._UPDATES_ATTRIBUTES or all(table[name]["gpu"] != "unseen" for name in named)
