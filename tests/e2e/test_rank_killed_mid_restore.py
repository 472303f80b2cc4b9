# SPDX-License-Identifier: Apache-2.0
"""A rank that dies or gives up while the world restores is named to the others within their deadline."""

from __future__ import annotations

import pytest

# A rank that makes its memory and communicators and then restores by itself, or dies where it is told to.
RANK = """
import json, os, signal, sys
from foundryd.demo import config
from foundryd.demo.device import Device
from foundryd.demo.engine import Engine
from foundryd.demo.rendezvous import SocketStore
from foundryd.demo.worker import parser
from foundryd.errors import FoundrydError
from foundryd.session.graphset import GraphSet
from foundryd.session.materialize import Materializer
from foundryd.settings import settings

args = parser().parse_args()
env = settings()
store = SocketStore(args.store)
graphs = GraphSet.from_env(store=store)
engine = Engine(config.from_args(args, world=env.world_size), env.rank, Device(env.local_rank), graphs, store)
if os.environ.get("DIES_IN") == "start":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("DIES_IN") == "layout":
    Materializer.arrange = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
if os.environ.get("DIES_IN") == "graphs":
    Materializer.build_graphs = lambda self: os.kill(os.getpid(), signal.SIGKILL)
error = None
try:
    graphs.session.restore(store, deadline=3.0)
except FoundrydError as failed:
    error = failed
print(json.dumps({"reason": error.reason, "message": str(error), "restored": graphs.restored}), flush=True)
os._exit(0)  # communicators whose peer is gone have nobody to say goodbye to
"""


@pytest.mark.parametrize(("dies", "phase"), [("start", "join"), ("layout", "ops"), ("graphs", "done")])
def test_a_rank_that_is_killed_is_named_with_its_phase(e2e, worlds, pair, dies, phase):
    changes = {0: e2e.Change(program=RANK), 1: e2e.Change(program=RANK, env={"DIES_IN": dies})}
    alive, dead = worlds.run(pair.config, pair.env(), changes=changes, timeout=40)
    assert dead.code == -9
    assert alive.code == 0, alive.err
    assert alive.result["reason"] == "deadline"
    assert alive.result["restored"] is False
    message = alive.result["message"]
    assert message.startswith(f"rank 1 did not reach phase '{phase}' within 3 s of rank 0")
    assert e2e.sentence(message)
