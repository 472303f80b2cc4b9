# SPDX-License-Identifier: Apache-2.0
"""An engine whose graphs read its peers' memory is captured without peers and restored with them."""

from __future__ import annotations

import sys

import pytest

# A rank that gathers from its tensor-parallel group by reading: its input, and what the graph itself made of it.  It
# also has two buffers whose content differs by rank and that only a peer shows: `table`, which the peer reads, and
# `outbox`, which goes into the peer's `inbox` and nowhere else.
ENGINE = """
import argparse, ctypes, json, os
from pathlib import Path
import numpy as np
from cuda.bindings import driver as cu
from foundryd._native import _hook
from foundryd.demo.device import Device, checked
from foundryd.demo.rendezvous import FakeStore, SocketStore
from foundryd.rankpatch.mesh import Mesh
from foundryd.session.arena import ARENAS, arena
from foundryd.session.graphset import GraphSet
from foundryd.settings import Mode, settings

parser = argparse.ArgumentParser()
parser.add_argument("--store", type=Path)
args, _ = parser.parse_known_args()
env = settings()
capturing = env.mode is Mode.CAPTURE
store = FakeStore() if capturing else SocketStore(args.store)
hook = _hook.Hook()
group = Mesh.parse(env.variant).group(env.rank, ("tp",))

def ipc_handle(data):
    handle = cu.CUipcMemHandle()
    ctypes.memmove(int(handle.getPtr()), data, 64)
    return handle

def peers(name, address, opens=True):
    own = ctypes.string_at(int(checked(cu.cuIpcGetMemHandle, address).getPtr()), 64)
    if capturing:
        handles = [own if rank == env.rank else hook.ipc_peer_handle(own, rank) for rank in group]
    else:
        store.set(f"{name}/{env.rank}", own)
        handles = [store.get(f"{name}/{rank}", 30.0) for rank in group]
    return [int(checked(cu.cuIpcOpenMemHandle, ipc_handle(h), 1)) for h in handles if opens]

def connect():
    held = hook.report().arena_base + ARENAS.index("graph") * hook.report().arena_stride
    for place, name in enumerate(("scratch", "table")):
        peers(name, held + 512 * place, opens=env.rank != int(os.environ.get("OPENS_NOTHING", "-1")))

def barrier(name):
    store.set(f"{name}/{env.rank}", b"")
    for rank in group:
        store.get(f"{name}/{rank}", 30.0)

graphs = GraphSet.from_env(store=store)
graphs.connect_with(connect)
device = Device(env.local_rank)
with arena("io"):
    own, out, inbox = device.allocate((4,)), device.allocate((64,)), device.allocate((4,))
for address, count in ((own, 4), (out, 64), (inbox, 4)):
    device.upload(address, np.zeros(count, np.int32))
inputs, inboxes = peers("inputs", own), peers("inbox", inbox)
scratch, made = 0, []
other = 1 - group.index(env.rank)
if capturing:
    with arena("graph"):
        scratch, table, outbox = device.allocate((4,)), device.allocate((4,)), device.allocate((4,))
    device.upload(table, np.full(4, 7000 + env.rank, np.int32))
    device.upload(outbox, np.full(4, 8000 + env.rank, np.int32))
    made = [*peers("scratch", scratch), peers("table", table)[other]]

def step():
    if scratch:
        checked(cu.cuMemcpyDtoDAsync, scratch, own, 16, device.stream)
        checked(cu.cuMemcpyDtoDAsync, inboxes[other], outbox, 16, device.stream)
    for place, address in enumerate([*inputs, *made]):
        checked(cu.cuMemcpyDtoDAsync, out + 16 * place, address, 16, device.stream)

graph, _ = graphs.capture_or_restore("gather", step, stream=device.stream)
graphs.finish()
seen = None
if not capturing:
    device.upload(own, np.full(4, 100 + env.rank, np.int32))
    barrier("written")
    graph.replay(device.stream)
    device.synchronise()
    barrier("replayed")
    graph.replay(device.stream)
    device.synchronise()
    barrier("again")
    seen = [int(device.read(address, (1,), "int32")[0]) for address in (*range(out, out + 80, 16), inbox)]
    barrier("read")
fallback = graphs.fallback and {"reason": graphs.fallback.reason, "message": str(graphs.fallback)}
windows = [[int(w["rank"]), int(w["address"])] for w in hook.windows()]
print(json.dumps({"restored": graphs.restored, "fallback": fallback, "seen": seen, "windows": windows}), flush=True)
"""


@pytest.fixture(scope="module")
def captured(e2e, tmp_path_factory):
    config = e2e.config_of("dp=2,tp=2")
    path = tmp_path_factory.mktemp("peers") / "peers.foundry"
    return e2e.capture_archive(path, config, engine=[sys.executable, "-P", "-c", ENGINE])


def test_every_rank_reads_its_own_group_s_memory(e2e, worlds, captured):
    ranks = worlds.run(captured.config, captured.env(), every=e2e.Change(program=ENGINE))
    for rank in ranks:
        assert rank.code == 0, rank.err
        assert rank.result["restored"], rank.result["fallback"]
        first = rank.rank // 2 * 2
        peer = first + 1 - rank.rank % 2
        assert rank.result["seen"] == [100 + first, 101 + first, 100 + first, 101 + first, 7000 + peer, 8000 + peer]
    assert ranks[0].result["windows"] == ranks[1].result["windows"]
    assert ranks[2].result["windows"] == ranks[3].result["windows"] != ranks[0].result["windows"]


def test_the_archive_says_which_windows_were_open(e2e, foundryd, captured):
    assert foundryd("verify", captured.path).code == 0
    with e2e.ArchiveReader.open(captured.path) as reader:
        assert reader.header.min_reader == 1
        for variant in reader.index.variants:
            assert variant.windows.own
            table = reader.array(variant.windows.section, e2e._hook.window_dtype)
            assert table["rank"].tolist() == [0] * 4 + [1] * 4
            assert table["bytes"].tolist() == [16] * 8


def test_a_rank_that_did_not_open_its_peers_captures_and_so_does_everybody(e2e, worlds, captured):
    ranks = worlds.run(captured.config, captured.env(OPENS_NOTHING="1"), every=e2e.Change(program=ENGINE))
    assert [rank.code for rank in ranks] == [0] * 4, [rank.err for rank in ranks]
    reason, message = ranks[1].fallback
    assert reason == "window_missing"
    assert "of rank 0 at 0x" in message
    assert "is not open on rank 1" in message
    assert e2e.sentence(message)
    for rank in (ranks[0], *ranks[2:]):
        assert rank.fallback[0] == "peer_failed"
        assert "is not open on rank 1" in rank.fallback[1]
