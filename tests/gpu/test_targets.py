# SPDX-License-Identifier: Apache-2.0
"""Figures beside their targets: met and missed by the number, of the slowest rank, and never without a measurement."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def targets(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("targets")


def reports(**changes):
    """What a world of one rank with two graphs reported, everything as it should be."""
    since = {"returned_ms": 90.0, "hottest_ms": 100.0, "all_served_ms": 200.0, "all_own_ms": 22.0}
    restored = {"asked": 2, "phases": {"attach": 30.0}, "from_restore": since}
    restored["cpu"] = {"own_ms": 4.0, "driver_ms": 100.0}
    pair = {"ratio": [0.9, 1.0, 1.1], "spread": [0.95, 1.0, 1.05]}
    floor = {str(n): {"build_ms": 6.0, "instantiate_ms": 4.0} for n in (1, 2)}
    switched = {"again": 20.0, "switching": 1020.0, "update": 900.0, "launch": 25.0, "refused": ""}
    whole = {
        "native": [{"asked": 2, "ready_ms": 400.0}],
        "floor": [{"asked": 2, "floor": floor}],
        "capture": {"image_bytes": 8e6, "stored_bytes": {"modules": 1e6, "members": 10e6, "rules": 2e6}},
        "restore": [restored],
        "pairs": [{"compared_with_native": {"1": pair}}],
        "switch": [{"switched": {"1 and 2": switched}}],
        "plan": {"computed_ms": 0.1, "kept_ms": 0.001},
        "reference": {"load": {"hottest_ms": 110.0, "all_served_ms": 210.0}},
    }
    return whole | changes


def verdicts(targets, world=1, **changes):
    return {row["figure"]: row["target met"] for row in targets.rows("tp1", world, reports(**changes))}


def test_every_figure_has_a_row_whether_measured_or_not(targets):
    known = targets.rows("tp1", 1, reports())
    assert [row["target met"] for row in known] == ["-", *["met"] * (len(known) - 1)]
    unknown = targets.rows("tp1", 1, {})
    assert {row["target met"] for row in unknown} == {"not measured"}
    assert len(unknown) == len(known) == 15
    assert {tuple(row) for row in (*known, *unknown)} == {tuple(known[0])}  # one heading for all


@pytest.mark.parametrize(
    ("figure", "mark", "good", "bad"),
    [
        ("first replay of the hottest graph, ms", "hottest_ms", 150.0, 150.1),
        ("every graph can be replayed, ms", "all_served_ms", 400.0, 400.1),
        ("own executables, a graph, by the driver's floor", "all_own_ms", 22.9, 23.1),  # 2 x 10 x 1.15
        ("own executables, a graph, by native", "all_own_ms", 33.3, 33.4),  # 400 / 12
    ],
)
def test_a_time_is_judged_by_the_slowest_rank(targets, figure, mark, good, bad):
    def judged(value):
        fast = reports()["restore"][0]
        slow = fast | {"from_restore": fast["from_restore"] | {mark: value}}
        return verdicts(targets, restore=[fast, slow])[figure]

    assert judged(good) == "met"
    assert judged(bad) == "MISSED"


def test_several_ranks_have_more_time(targets):
    since = {"hottest_ms": 200.0, "all_served_ms": 700.0, "all_own_ms": 25.0}
    slow = [reports()["restore"][0] | {"from_restore": since}]
    alone, several = verdicts(targets, restore=slow), verdicts(targets, world=2, restore=slow)
    for figure in list(alone)[1:4]:
        assert (alone[figure], several[figure]) == ("MISSED", "met")


def test_a_replay_that_is_faster_than_native_is_no_miss(targets):
    def judged(ratio):
        pair = {"ratio": [ratio - 0.01, ratio, ratio + 0.01], "spread": [0.99, 1.0, 1.01]}
        return verdicts(targets, pairs=[{"compared_with_native": {"8": pair}}])["replay, batch 8, by native"]

    assert judged(0.9) == judged(1.01) == "met"
    assert judged(1.011) == "MISSED"


def test_an_update_that_the_driver_refuses_is_named(targets):
    refused = {"again": 1.0, "switching": 9.0, "update": None, "launch": None, "refused": "cuGraphExecUpdate failed"}
    (row,) = [
        row
        for row in targets.rows("tp1", 1, reports(switch=[{"switched": {"1 and 2": refused}}]))
        if "another" in row["figure"]
    ]
    assert row["measured"] == "cuGraphExecUpdate failed"
    assert row["target met"] == "not measured"


def test_a_floor_that_was_cut_off_leaves_its_row_open(targets):
    """The step wrote what it had before."""
    figure = "own executables, a graph, by the driver's floor"
    assert verdicts(targets, floor=[{"asked": 2}])[figure] == "not measured"
    assert verdicts(targets, floor=[{"asked": 2, "floor": {}}])[figure] == "not measured"


def test_one_rank_without_a_figure_leaves_it_open(targets):
    restored = reports()["restore"]
    found = verdicts(targets, restore=[*restored, {"asked": 2}])
    assert found["first replay of the hottest graph, ms"] == "not measured"
    assert found["own CPU time beside the driver's"] == "not measured"
