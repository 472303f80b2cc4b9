# SPDX-License-Identifier: Apache-2.0
"""Ranks that would issue different collectives learn so before they issue any, and capture together."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def other_dispatch(e2e, tmp_path_factory):
    """The same engine, with tokens going to their experts by other collectives."""
    config = e2e.config_of("ep=2", layers=2, dispatch="allgather")
    return e2e.capture_archive(tmp_path_factory.mktemp("other") / "other.foundry", config)


def check_refused_together(e2e, config, ranks, *words):
    assert e2e.right_tokens(config, ranks)
    assert {r.fallback[0] for r in ranks} <= {"op_list", "peer_failed"}
    named = [r.fallback[1] for r in ranks if r.fallback[0] == "op_list"]
    assert named
    for message in named:
        assert e2e.sentence(message)
        assert "that ranks " in message
        assert "on rank 0" in message
        assert "on rank 1" in message
        for word in words:
            assert word in message
    # Nobody issued anything.
    assert all(r.result["counters"]["communication"]["captures"] == 0 for r in ranks)


def test_archives_of_two_engines(e2e, worlds, pair, other_dispatch):
    change = e2e.Change(env={"FOUNDRYD_ARCHIVE": str(other_dispatch.path)})
    ranks = worlds.run(pair.config, pair.env(), changes={1: change})
    check_refused_together(e2e, pair.config, ranks, "collective 0", "all-to-all", "all-gather")


def test_one_op_that_differs_in_its_count(e2e, worlds, pair, tmp_path):
    def edit(recording, ranked):
        recording.comm_ops["count"][2] += 1

    other = e2e.rewrite(pair.path, tmp_path / "other.foundry", edit=edit)
    ranks = worlds.run(pair.config, pair.env(), changes={0: e2e.Change(env={"FOUNDRYD_ARCHIVE": str(other)})})
    check_refused_together(e2e, pair.config, ranks, "collective 2")
