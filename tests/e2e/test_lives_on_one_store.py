# SPDX-License-Identifier: Apache-2.0
"""A world that is started again on the store of the one before restores, or falls back, as if that had not been."""

from __future__ import annotations

import pytest

from foundryd.demo.rendezvous import StoreServer

# A rank whose graphs agree over a store that outlives it; its communicators find each other over one of their own.
RANK = """
import json, os
from pathlib import Path
from foundryd.demo import config
from foundryd.demo.device import Device
from foundryd.demo.engine import Engine
from foundryd.demo.rendezvous import SocketStore
from foundryd.demo.worker import parser
from foundryd.session.graphset import GraphSet
from foundryd.settings import settings

args = parser().parse_args()
env = settings()
store, kept = SocketStore(args.store), SocketStore(Path(os.environ["KEPT_STORE"]))
graphs = GraphSet.from_env(store=kept)
engine = Engine(config.from_args(args, world=env.world_size), env.rank, Device(env.local_rank), graphs, store)
engine.prepare()
error = graphs.fallback
tokens = {str(batch): rows.tolist() for batch, rows in engine.decode().items()}
fallback = None if error is None else {"reason": error.reason, "message": str(error)}
print(json.dumps({"rank": env.rank, "tokens": tokens, "restored": graphs.restored, "fallback": fallback}), flush=True)
engine.close()
"""


@pytest.mark.parametrize(
    "broken",
    [{"FOUNDRYD_ARCHIVE": "/nowhere.foundry"}, {"FOUNDRYD_FAULT": "restore:error"}],
    ids=["before it joins", "when it joined"],
)
@pytest.mark.parametrize("breaks", [0, 1])
def test_no_life_hears_of_another(e2e, worlds, pair, tmp_path_factory, broken, breaks):
    place = tmp_path_factory.mktemp("k") / "store"
    with StoreServer(place):
        kept = {"KEPT_STORE": str(place)}
        for life, whole in enumerate((True, False, True, False, True)):
            changes = {} if whole else {breaks: e2e.Change(program=RANK, env=kept | broken)}
            ranks = worlds.run(
                pair.config, pair.env(), changes=changes, every=e2e.Change(program=RANK, env=kept), timeout=40
            )
            assert e2e.right_tokens(pair.config, ranks)
            assert [rank.result["restored"] for rank in ranks] == [whole, whole], life
            if not whole:
                reason, message = ranks[1 - breaks].fallback
                assert reason == "peer_failed"
                assert message.startswith(f"rank {breaks} gave up in or before phase '")
