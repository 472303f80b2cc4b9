# SPDX-License-Identifier: Apache-2.0
"""Graphs get executables as a policy says, and every key gives what it should at any time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

PROGRAM = (Path(__file__).parent / "restoring.py").read_text()
SIZES = (1, 2, 3, 5, 6, 8)  # captured the other way round


@pytest.fixture(scope="session")
def several(e2e, tmp_path_factory):
    """A world of one rank with more graphs than templates."""
    config = e2e.config_of("tp=1", batch_sizes=SIZES)
    return e2e.capture_archive(tmp_path_factory.mktemp("several") / "several.foundry", config)


@pytest.fixture
def run(e2e, worlds):
    """Runs a scenario of restoring.py on every rank; each must end well, with right tokens where it decoded any."""

    def run_it(captured, scenario, policy=None, *, order=None, decodes=True, **env):
        env |= {"SCENARIO": scenario, "POLICY": json.dumps(policy or {}), "ORDER": json.dumps(order or [])}
        ranks = worlds.run(captured.config, captured.env(**env), every=e2e.Change(program=PROGRAM))
        for rank in ranks:
            assert rank.code == 0, rank.err[-3000:]
        assert not decodes or e2e.right_tokens(captured.config, ranks)
        return ranks

    return run_it


def keys(*batches):
    return [["decode", batch] for batch in batches]


@pytest.mark.parametrize("order", [SIZES, (3, 8, 1, 6, 2, 5)])
@pytest.mark.parametrize(
    ("policy", "ready"),
    [
        ({}, [8]),
        ({"background": False}, [8]),
        ({"first": "all"}, [8, 6, 5, 3, 2, 1]),
        ({"first": keys(2, 6), "then": keys(1)}, [2, 6]),
        ({"first": [], "background": False}, []),
        ({"executables": 2}, [8]),
        ({"executables": 1, "background": False, "first": keys(3)}, [3]),
    ],
    ids=["default", "on demand", "all", "two", "none", "capped", "one executable"],
)
def test_every_key_is_right_whatever_the_policy_and_the_order(run, several, policy, ready, order):
    (rank,) = run(several, "serves", policy, order=order)
    found = rank.result
    # What a slow machine's background builds before this is looked at is ready, too.
    assert found["ready"][: len(ready)] == ready
    if not policy.get("background", True) or policy.get("first") == "all":
        assert (found["ready"], found["made"], found["background_ms"]) == (ready, len(ready), None)
    else:
        assert found["background_ms"] > 0
    limit = policy.get("executables", len(SIZES))
    assert len(found["ready_later"]) == limit
    assert found["most"] == limit
    # A graph is of no use any more where nobody will take its executable.
    assert found["graphs"] == (len(SIZES) if limit < len(SIZES) else 0)
    assert list(found["phases"])[-2:] == ["graphs", "done"]
    # One instantiation for each graph, unless executables are few; then they are changed instead.
    assert (found["updates"] > 0) == ("executables" in policy)
    assert found["counters"]["engine"]["captures"] == 0
    assert found["counters"]["engine"]["launches"] == 0


@pytest.mark.parametrize("policy", [{}, {"executables": 3}, {"first": "all"}])
def test_the_time_in_the_driver_is_part_of_each_phase_and_told_on_demand(run, several, policy):
    # Without replays, so that what is left is built in the background.
    (rank,) = run(several, "serves", policy, decodes=False, FOUNDRYD_DRIVER_CLOCK="1")
    found = rank.result
    # All but attach, which needs no driver.
    assert list(found["driver_ms"]) == [phase for phase in found["phases"] if phase != "attach"]
    for phase, spent in found["driver_ms"].items():
        assert 0 <= spent <= found["phases"][phase]
    assert min(found["driver_ms"][phase] for phase in ("modules", "functions", "content", "graphs")) > 0
    if policy.get("first") == "all":
        assert found["background_driver_ms"] is None
    else:
        assert 0 < found["background_driver_ms"] <= found["background_ms"]
    (rank,) = run(several, "serves", policy, decodes=False)
    assert rank.result["driver_ms"] == {}
    assert not rank.result["background_driver_ms"]


@pytest.mark.parametrize("limit", [1, 2])
def test_an_executable_that_cannot_be_changed_is_replaced(run, several, limit):
    order = [1, 2, 1, 3, 8, 3]
    (rank,) = run(several, "serves", {"executables": limit, "background": False}, order=[*order, *SIZES], REFUSES="1")
    found = rank.result
    assert found["updates"] > 0
    assert found["made_later"] == found["made"] + found["updates"] + limit - 1
    assert found["most"] == limit
    assert len(found["ready_later"]) == limit


@pytest.mark.parametrize("policy", [{}, {"background": False}, {"executables": 1}])
def test_graphs_with_collectives_are_built_without_the_other_rank(run, pair, policy):
    ranks = run(pair, "serves", policy, order=[1, 3, 1])
    for rank in ranks:
        assert rank.result["counters"]["communication"]["captures"] > 0


def test_code_is_loaded_when_a_graph_needs_it(e2e, run, several):
    (rank,) = run(several, "loads")
    needs, found = rank.result["needs"], rank.result["found"]
    so_far: set[int] = set()
    assert found[0][0] == []
    for wanted, (functions, _) in zip(needs, found[1:], strict=True):
        so_far |= set(wanted)
        assert functions == sorted(so_far)
    assert so_far
    loads = [count for _, count in found]
    assert loads == sorted(loads)
    assert loads[0] < loads[-1]
    kind, message = rank.result["raised"]
    assert kind == "RestoreError"
    assert message.startswith("rank 0 could not build graph ('decode', 1) in phase 'replay': module ")
    assert "has no function named nobody" in message
    assert e2e.sentence(message)


def test_the_background_begins_when_the_engine_has_asked_for_every_graph(run, several):
    (rank,) = run(several, "prepares")
    assert rank.result["before"] == {"builders": [], "ready": [8]}
    assert sorted(rank.result["after"]["ready"]) == list(SIZES)
    assert rank.result["after"]["background_ms"] > 0


def test_the_environment_s_policy_is_used_where_there_is_none(e2e, worlds, several):
    first = json.dumps(keys(5))
    env = several.env(FOUNDRYD_RESTORE_FIRST=first, FOUNDRYD_RESTORE_BACKGROUND="0", FOUNDRYD_EXECUTABLES="3")
    (rank,) = worlds.run(several.config, env)
    assert e2e.right_tokens(several.config, [rank])
    assert rank.result["restored"]
    assert rank.result["counters"]["engine"]["instantiations"] == 3


def test_a_policy_that_the_archive_cannot_have_is_refused(e2e, worlds, several):
    env = several.env(FOUNDRYD_RESTORE_FIRST=json.dumps(keys(4)))
    (rank,) = worlds.run(several.config, env)
    assert e2e.right_tokens(several.config, [rank])
    reason, message = rank.fallback
    assert reason == "not_in_archive"
    assert "('decode', 4)" in message
    assert e2e.sentence(message)


def test_random_policies_and_replays(run, several):
    (rank,) = run(several, "at_random")
    assert rank.result["examples"] >= 50
    assert rank.result["replays"] > 100
    assert rank.result["updates"] > 10


@pytest.mark.parametrize("policy", [{}, {"executables": 1}, {"executables": 2, "background": False}])
def test_threads_ask_for_graphs_side_by_side(run, several, policy):
    (rank,) = run(several, "from_threads", policy)
    assert rank.result["failed"] == []
    assert rank.result["alive"] == 0
    assert rank.result["most"] <= policy.get("executables", len(SIZES))


def test_a_graph_that_the_background_cannot_build_is_named_and_the_others_are_served(e2e, run, several):
    (rank,) = run(several, "fails_in_the_background", FOUNDRYD_LOG="info", FOUNDRYD_LOG_FORMAT="text")
    key = tuple(rank.result["lost"])
    for name, phase in (("waited", "background"), ("raised", "replay")):
        kind, message = rank.result[name]
        assert kind == "DriverCallFailed"
        assert message.startswith(f"rank 0 could not build graph {key!r} in phase '{phase}': cuGraphInstantiate failed")
        assert e2e.sentence(message)
    assert f"rank 0 could not build graph {key!r} in phase 'background': cuGraphInstantiate failed" in rank.err
    assert f"rank 0 built {len(SIZES) - 2} more graphs in" in rank.err
    assert rank.result["builders"] == []


def test_a_background_without_a_context_names_every_graph_and_replays_build_them(e2e, run, several):
    (rank,) = run(several, "has_no_context_in_the_background", FOUNDRYD_LOG="info", FOUNDRYD_LOG_FORMAT="text")
    kind, message = rank.result["waited"]
    assert kind == "DriverCallFailed"
    assert "in phase 'background': cuCtxPushCurrent failed" in message
    assert e2e.sentence(message)
    assert len(rank.result["ready"]) == 1
    assert sorted(rank.result["failures"]) == sorted(set(SIZES) - set(rank.result["ready"]))
    assert "rank 0 has no context to build in: cuCtxPushCurrent failed" in rank.err
    assert rank.err.count("could not build graph") == len(SIZES) - 1


def test_a_first_graph_that_cannot_be_built_makes_the_engine_capture_natively(run, several):
    (rank,) = run(several, "fails_first")
    kind, message = rank.result["fallback"]
    assert kind == "DriverCallFailed"
    assert message.startswith("cuGraphInstantiate failed")
    assert rank.result["restored"] is False
    assert rank.result["builders"] == []


def test_closing_while_the_background_works_leaves_nothing(run, several):
    (rank,) = run(several, "closes_early", decodes=False)
    found = rank.result
    assert found["working"] == 1
    assert found["built"] < found["graphs"]
    assert found["living"] == 0
    assert found["builders"] == []
    before, after = found["descriptors"]
    assert after <= before
    assert found["refused"] == []


def test_a_process_that_ends_while_the_background_works_ends_well(run, several):
    (rank,) = run(several, "ends_without_closing", decodes=False)
    assert rank.result["builders"] == ["foundryd-graphs"]
    assert "at the end: []" in rank.err


def test_a_replay_waits_for_one_graph_at_most(run, several):
    (rank,) = run(several, "asks_while_it_builds")
    begun, not_ready = rank.result["begun"], rank.result["not_ready"]
    assert begun["ready"] <= 1
    assert not_ready["ready"] >= 3
    # The one in the making had begun; then its own, and perhaps the next.
    assert 1 <= begun["last"] <= 2
    assert not_ready["last"] >= 1


def test_a_capture_in_global_mode_goes_on_while_the_background_builds(run, several):
    (rank,) = run(several, "captures_while_it_builds")
    assert rank.result["during"] >= 2
    assert rank.result["was_ready"] is False
    assert rank.result["values"] == [7]
