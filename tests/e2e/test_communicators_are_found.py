# SPDX-License-Identifier: Apache-2.0
"""What else an engine makes of communicators, and when, does not change which ones graphs use."""

from __future__ import annotations

# The demo's worker, whose ranks make communicators in another way when they restore.
RANK = """
import os, sys
from foundryd.demo import engine
from foundryd.demo.nccl import Communicator
from foundryd.demo.worker import main

made = engine.Engine._communicator
engine.Engine.extra = []

def differently(self, axis, store, timeout):
    world = range(self.config.mesh.world)
    def extra(name):
        self.extra.append(Communicator(list(world), self.rank, name, store, timeout))
        return self.extra[-1]
    if os.environ["MAKES"] == "others first":
        extra(f"before {axis}")
    if os.environ["MAKES"] == "another declared":
        self.graphs.declare_communicator(extra("unknown").handle, world)
    if os.environ["MAKES"] == "none":
        self.graphs.declare_communicator(0, world)
        return extra("unknown")
    return made(self, axis, store, timeout)

engine.Engine._communicator = differently
sys.exit(main())
"""


def run(e2e, worlds, pair, makes):
    changes = {rank: e2e.Change(program=RANK, env={"MAKES": makes}) for rank in range(2)}
    return worlds.run(pair.config, pair.env(), changes=changes)


def test_communicators_of_others_come_between(e2e, worlds, pair):
    ranks = run(e2e, worlds, pair, "others first")
    assert e2e.right_tokens(pair.config, ranks)
    assert all(rank.result["fallback"] is None for rank in ranks)


def test_the_one_that_is_declared_in_its_place_is_taken(e2e, worlds, pair):
    """Both join all ranks, so that only the order of declarations tells which one the archive means."""
    ranks = run(e2e, worlds, pair, "another declared")
    assert e2e.right_tokens(pair.config, ranks)
    assert all(rank.result["fallback"] is None for rank in ranks)


def test_one_that_graphs_use_and_nobody_made_is_named(e2e, worlds, pair):
    ranks = run(e2e, worlds, pair, "none")
    assert e2e.right_tokens(pair.config, ranks)
    assert {r.fallback[0] for r in ranks} <= {"communicator", "peer_failed"}
    message = "communicator 0 of the archive, over ranks [0, 1], was not declared here"
    assert any(message in r.fallback[1] for r in ranks)


BACKWARDS = """
import sys
from foundryd.demo import engine
from foundryd.demo.nccl import Communicator
from foundryd.demo.worker import main

def backwards(self, axis, store, timeout):
    ranks = self.config.mesh.group(self.rank, (axis,))[::-1]
    communicator = Communicator(ranks, self.rank, axis, store, timeout)
    self.graphs.declare_communicator(communicator.handle, ranks)
    return communicator

engine.Engine._communicator = backwards
sys.exit(main())
"""


def test_one_whose_ranks_do_not_ascend_is_restored(e2e, worlds, tmp_path):
    config = e2e.config_of("tp=2")
    python, isolated, _, _, *flags = e2e.worker_command(config)
    engine = [python, isolated, "-c", BACKWARDS, *flags]
    captured = e2e.capture_archive(tmp_path / "backwards.foundry", config, engine=engine)
    ranks = worlds.run(config, captured.env(), every=e2e.Change(program=BACKWARDS))
    assert e2e.right_tokens(config, ranks)
    assert [rank.result["fallback"] for rank in ranks] == [None, None]
    # And it is not taken for one whose ranks do.
    ranks = worlds.run(config, captured.env())
    assert e2e.right_tokens(config, ranks)
    assert {rank.fallback[0] for rank in ranks} <= {"communicator", "peer_failed"}
