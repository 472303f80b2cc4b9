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
    floor, kept = ({str(n): {"build_ms": build, "instantiate_ms": 4.0} for n in (1, 2)} for build in (6.0, 8.0))
    switched = {"again": 20.0, "switching": 1020.0, "update": 900.0, "launch": 25.0, "again_native": 15.0}
    switched |= {"one_template": True, "equal": True, "slowed": [0.99, 1.0, 1.02], "refused": ""}
    across = {"again": 20.0, "switching": 10_020.0, "one_template": False, "update": None, "slowed": None}
    whole = {
        "native": [{"asked": 2, "ready_ms": 400.0}],
        "floor": [{"asked": 2, "floor": floor, "floor_kept": kept}],
        "capture": {"image_bytes": 8e6, "stored_bytes": {"modules": 1e6, "members": 10e6, "rules": 2e6}},
        "restore": [restored],
        "pairs": [{"compared_with_native": {"1": pair}}],
        "switch": [{"switched": {"1 and 2": switched, "2 and 3": across}}],
        "templates": {"graphs": 3, "templates": 2, "same": [[1, 2]], "across": [[2, 3]]},
        "plan": {"computed_ms": 0.1, "kept_ms": 0.001},
        "reference": {"load": {"hottest_ms": 110.0, "all_served_ms": 210.0}},
    }
    return whole | changes


def verdicts(targets, world=1, **changes):
    return {row["figure"]: row["target met"] for row in targets.rows("tp1", world, reports(**changes))}


def test_every_figure_has_a_row_whether_measured_or_not(targets):
    known = targets.rows("tp1", 1, reports())
    own = [row["figure"] for row in known if row["target"] == "a row of its own"]
    assert own == ["attach and identity, ms", "another template's executable, batches 2 and 3, ms"]
    assert {row["target met"] for row in known if row["figure"] not in own} == {"met"}
    assert {row["target met"] for row in known if row["figure"] in own} == {"-"}
    unknown = targets.rows("tp1", 1, {})
    assert {row["target met"] for row in unknown} == {"not measured"}
    assert len(unknown) == len(known) == 19
    assert {tuple(row) for row in (*known, *unknown)} == {tuple(known[0])}  # one heading for all


@pytest.mark.parametrize(
    ("figure", "mark", "good", "bad"),
    [
        ("first replay of the hottest graph, ms", "hottest_ms", 150.0, 150.1),
        ("every graph can be replayed, ms", "all_served_ms", 400.0, 400.1),
        ("own executables, a graph, by the driver's floor", "all_own_ms", 22.9, 23.1),  # 2 x 10 x 1.15
        ("own executables, a graph, by a floor that keeps them", "all_own_ms", 27.5, 27.7),  # 2 x 12 x 1.15
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


BY_UPDATE = "another graph's executable, batches 1 and 2, by the driver's update"
WITH_LAUNCH = f"{BY_UPDATE} and the launch after it"


def switch_rows(targets, *ranks):
    """The rows of ranks that were measured so."""
    switch = [{"switched": {"1 and 2": reports()["switch"][0]["switched"]["1 and 2"] | rank}} for rank in ranks]
    found = {row["figure"]: row for row in targets.rows("tp1", 1, reports(switch=switch))}
    return found[BY_UPDATE], found[WITH_LAUNCH]


def test_an_update_that_the_driver_refuses_is_named(targets):
    refused = {"update": None, "launch": None, "again_native": None, "refused": "cuGraphExecUpdate failed"}
    for ranks in ([refused], [{}, refused]):
        for row in switch_rows(targets, *ranks):
            assert row["measured"] == "cuGraphExecUpdate failed"
            assert row["target met"] == "not measured"


@pytest.mark.parametrize(
    ("switching", "launch", "alone", "with_launch"),
    [
        (1190.0, 15.0, "met", "met"),  # 1170 = 900 x 1.3
        (1190.1, 15.0, "MISSED", "MISSED"),
        (1190.1, 16.0, "MISSED", "met"),
        (1840.0, 515.0, "MISSED", "met"),  # 1820 = (900 + 515 - 15) x 1.3
        (1840.1, 515.0, "MISSED", "MISSED"),
    ],
)
def test_a_launch_after_an_update_is_part_of_the_driver_s_price_in_a_row_of_its_own(
    targets, switching, launch, alone, with_launch
):
    slow = {"switching": switching, "launch": launch}
    for ranks in ([slow], [{}, slow], [slow, {}]):
        assert [row["target met"] for row in switch_rows(targets, *ranks)] == [alone, with_launch]


def test_each_row_of_a_switch_is_of_the_rank_that_is_slowest_in_it(targets):
    alone, with_launch = switch_rows(targets, {"switching": 1120.0, "launch": 915.0}, {"switching": 1070.0})
    assert alone["measured"].endswith("(1,100.00 / 900.00 us)")
    assert with_launch["measured"].endswith("(1,050.00 / 910.00 us)")


def test_a_switch_from_before_the_launch_without_an_update_was_measured_leaves_that_row_open(targets):
    measured = reports()["switch"][0]["switched"]["1 and 2"]
    old = {name: value for name, value in measured.items() if name != "again_native"}
    found = verdicts(targets, switch=[{"switched": {"1 and 2": old}}])
    assert (found[BY_UPDATE], found[WITH_LAUNCH]) == ("met", "not measured")


SLOWED = "replay of an updated executable, batches 1 and 2, by a fresh one"
ACROSS = "another template's executable, batches 2 and 3, ms"


def two_ranks(targets, **changes):
    """The rows where another rank, before or after the first, measured something else of the pair of one template."""
    measured = reports()["switch"][0]["switched"]["1 and 2"]
    ranks = [{"switched": {"1 and 2": rank}} for rank in (measured, measured | changes)]
    found = [targets.rows("tp2", 2, reports(switch=order)) for order in (ranks, ranks[::-1])]
    assert found[0] == found[1]
    return {row["figure"]: row for row in found[0]}


@pytest.mark.parametrize(
    ("slowed", "verdict"), [([1.0, 1.009, 1.3], "met"), ([1.0, 1.02, 1.03], "MISSED"), (None, "not measured")]
)
def test_the_rank_whose_updated_executables_replay_slowest_counts(targets, slowed, verdict):
    assert two_ranks(targets, slowed=slowed)[SLOWED]["target met"] == verdict


def test_an_update_that_makes_a_wrong_graph_is_a_miss_however_fast_it_is(targets):
    rows = two_ranks(targets, equal=False)
    assert (rows[SLOWED]["measured"], rows[SLOWED]["target met"]) == ("wrong", "MISSED")
    for figure in (BY_UPDATE, WITH_LAUNCH):
        assert (rows[figure]["measured"], rows[figure]["target met"]) == (
            "the updated executable is wrong",
            "not measured",
        )


def test_outputs_that_were_not_compared_leave_the_replay_of_an_updated_executable_open(targets):
    assert two_ranks(targets, equal=None)[SLOWED]["target met"] == "not measured"


def test_another_template_s_executable_is_told_of_the_slowest_rank(targets):
    across = reports()["switch"][0]["switched"]["2 and 3"]
    ranks = [{"switched": {"2 and 3": across | {"switching": us}}} for us in (11_020.0, 13_520.0, 10_020.0)]
    rows = {row["figure"]: row for row in targets.rows("tp4", 4, reports(switch=ranks))}
    assert (rows[ACROSS]["measured"], rows[ACROSS]["target met"]) == ("13.50", "-")
    assert sum(row["target met"] == "not measured" for row in rows.values()) == 3  # those of one template


@pytest.mark.parametrize(
    ("same", "across", "count", "why"),
    [
        ("", "2 and 3", 3, "no two graphs have one template"),
        ("1 and 2", "", 1, "all graphs have one template"),
        ("", "", None, "-"),
    ],
)
def test_where_there_is_no_such_pair_a_row_says_why(targets, same, across, count, why):
    (measured,) = reports()["switch"]
    switch = [{"switched": {pair: measured["switched"][pair] for pair in (same, across) if pair}}]
    known = {} if count is None else {"graphs": 3, "templates": count, "same": [], "across": []}
    found = targets.rows("tp1", 1, reports(switch=switch, templates=known))
    missing = [row for row in found if row["target met"] == "not measured"]
    assert len(found) == 19
    assert len(missing) == 3 * (not same) + (not across)
    assert {row["measured"] for row in missing} == {why}


def test_pairs_from_before_they_were_chosen_by_templates_leave_their_rows_open(targets):
    measured = reports()["switch"][0]["switched"]["1 and 2"]
    old = {name: value for name, value in measured.items() if name not in ("one_template", "equal")}
    whole = reports(switch=[{"switched": {"1 and 2": old}}])
    del whole["templates"]
    found = targets.rows("tp1", 1, whole)
    assert len(found) == 19
    assert sum(row["target met"] == "not measured" for row in found) == 4


def test_a_rank_that_was_cut_off_before_any_pair_leaves_their_rows_open(targets):
    switch = [*reports()["switch"], {"asked": 2}]
    assert sum(verdict == "not measured" for verdict in verdicts(targets, switch=switch).values()) == 4


@pytest.mark.parametrize(
    ("figure", "name"),
    [
        ("own executables, a graph, by the driver's floor", "floor"),
        ("own executables, a graph, by a floor that keeps them", "floor_kept"),
    ],
)
def test_a_floor_that_was_cut_off_leaves_its_row_open(targets, figure, name):
    """The step wrote what it had before."""
    (whole,) = reports()["floor"]
    assert verdicts(targets, floor=[{"asked": 2}])[figure] == "not measured"
    assert verdicts(targets, floor=[whole | {name: {}}])[figure] == "not measured"
    rest = {key: value for key, value in whole.items() if key != name}
    assert verdicts(targets, floor=[rest])[figure] == "not measured"
    assert sum(verdict == "not measured" for verdict in verdicts(targets, floor=[rest]).values()) == 1


def test_one_rank_without_a_figure_leaves_it_open(targets):
    restored = reports()["restore"]
    found = verdicts(targets, restore=[*restored, {"asked": 2}])
    assert found["first replay of the hottest graph, ms"] == "not measured"
    assert found["own CPU time beside the driver's"] == "not measured"
