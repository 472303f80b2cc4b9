# SPDX-License-Identifier: Apache-2.0
"""A restored rank is right, or refuses, whatever comes between: threads, interrupts, forks, failures of the driver."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
PROGRAM = (FOLDER / "disturbing.py").read_text()


@pytest.fixture(scope="module")
def four(e2e, tmp_path_factory):
    """A world of one rank with four graphs."""
    config = e2e.config_of("tp=1", batch_sizes=(1, 2, 3, 5))
    return e2e.capture_archive(tmp_path_factory.mktemp("four") / "four.foundry", config)


@pytest.fixture
def run(e2e, worlds):
    """Runs a scenario of disturbing.py on every rank; each must end well."""

    def run_it(captured, scenario, policy=None, **env):
        env |= {"SCENARIO": scenario, "POLICY": json.dumps(policy or {}), "PYTHONPATH": str(FOLDER)}
        ranks = worlds.run(captured.config, captured.env(**env), every=e2e.Change(program=PROGRAM))
        for rank in ranks:
            assert rank.code == 0, rank.err[-3000:]
        return [rank.result for rank in ranks]

    return run_it


def test_no_executable_is_launched_that_another_thread_closes(e2e, run, four):
    (found,) = run(four, "closes_under_replays")
    assert (found["closed"], found["dead"], found["alive"], found["living"]) == (None, [], 0, 0)
    assert [kind for kind, _ in found["ended"]] == ["UsageError"] * 4
    assert all(e2e.sentence(message) for _, message in found["ended"])


@pytest.mark.parametrize("policy", [{"executables": 1}, {"executables": 2, "background": False}])
def test_interrupts_leave_graphs_right_and_closable(run, four, policy):
    (found,) = run(four, "is_interrupted", policy)
    assert found["interrupts"] == 300
    assert (found["wrong"], found["other"], found["closed"]) == ([], [], None)
    assert found["took"] < 3


def test_no_handle_is_lost_to_an_interrupt_behind_the_call_that_made_it(run, four):
    (found,) = run(four, "is_interrupted_behind_calls")
    assert (found["other"], found["wrong"], found["left"]) == ([], [], [])
    assert set(found["raised"]) == {
        "build_graph", "cuGraphInstantiate", "cuGraphExecUpdate", "cuGraphExecDestroy", "destroy_graph",
    }  # fmt: skip
    assert min(found["raised"].values()) > 1


def test_an_executable_whose_change_did_not_end_is_not_launched_again(run, four):
    (found,) = run(four, "a_change_does_not_end", {"executables": 1})
    for kind, ended in found["found"].items():
        assert ended["raised"][0] == kind
        assert ended["wrong"] == []
    assert found["updates"] > 4
    assert found["living"] == 1


def test_failures_at_random_give_the_right_graph_or_a_typed_error(run, four):
    (found,) = run(four, "fails_at_random")
    assert found["failed"] > 5
    assert found["right"] > 50
    assert {name: found[name] for name in ("wrong", "untyped", "over", "left")} == {
        "wrong": [],
        "untyped": [],
        "over": 0,
        "left": 0,
    }


def test_a_forked_child_is_refused_at_once_and_closes(e2e, run, four):
    (found,) = run(four, "forks")
    assert found["codes"] == [0, 0]
    (ready, other, waited, closed), took = found["said"]
    assert took < 2
    for kind, message in (ready, other):
        assert kind == "UsageError"
        assert "forked" in message
        assert e2e.sentence(message)
    assert (waited, closed) == (None, None)
    assert found["tokens"]


def test_an_executable_that_cannot_be_destroyed_keeps_nothing_else(run, four):
    (found,) = run(four, "cannot_destroy")
    kind, message = found["closed"]
    assert kind == "DriverCallFailed"
    assert message.startswith("cuGraphExecDestroy failed")
    assert found["destroyed"] == found["graphs"] - 1
    assert found["mapped"] == 0


def test_an_interrupted_restore_is_undone_and_can_be_tried_again(run, four):
    (found,) = run(four, "restore_is_interrupted")
    assert len(found["raised"]) > 3
    assert {kind for kind, _ in found["raised"]} == {"KeyboardInterrupt"}
    assert set(found["held"]) == {0}
    assert found["tokens"]


@pytest.mark.parametrize("kind", ["RuntimeError", "KeyboardInterrupt"])
def test_a_restore_that_an_error_of_the_engine_ends_is_told_to_the_others_and_undone(run, pair, kind):
    other, failed = run(pair, "connect_fails", KIND=kind)
    assert failed["raised"] == [kind, "no peers today"]
    assert other["raised"][0] == "PeerFailed"
    assert f"{kind}('no peers today')" in other["raised"][1]
    for rank in (other, failed):
        assert rank["took"] < 20
        assert rank["held"] == 0
        assert rank["living"] == 0
