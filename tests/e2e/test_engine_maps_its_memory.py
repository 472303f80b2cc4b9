# SPDX-License-Identifier: Apache-2.0
"""An engine that maps all of its device memory itself is captured and restored like any other."""

from __future__ import annotations

import sys

import pytest

from foundryd.session.arena import ARENAS

BASE, STRIDE = 0x600000000000, 256 << 30
PIECE = 2 << 20

# The demo's rank with an allocator of its own: a segment that grows for each arena, cut into what is asked for.
GROWING = """
import contextlib, math, os, sys
from cuda.bindings import driver as cu
from foundryd.demo import device, engine, worker
from foundryd.demo.device import checked
from foundryd.session.arena import arena

PIECE, RESERVED = 2 << 20, 158 << 30
selected, segments = ["default"], {}

@contextlib.contextmanager
def remembering(name):
    with arena(name):
        selected.append(name if name != "host" else selected[-1])
        yield
        selected.pop()

class Segment:
    def __init__(self):
        self.base = int(checked(cu.cuMemAddressReserve, RESERVED, 0, 0, 0))
        self.used = self.mapped = 0

    def take(self, size):
        address = self.base + self.used
        self.used += -(-size // 512) * 512
        while self.mapped < self.used:
            self.map(self.base + self.mapped)
            self.mapped += PIECE
        return address

    def map(self, address):
        properties, access = cu.CUmemAllocationProp(), cu.CUmemAccessDesc()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        memory = checked(cu.cuMemCreate, PIECE, properties, 0)
        checked(cu.cuMemMap, address, PIECE, 0, memory, 0)
        checked(cu.cuMemSetAccess, address, PIECE, [access], 1)

def allocate(self, shape, itemsize=4):
    if selected[-1] not in segments:
        segments[selected[-1]] = Segment()
        if os.environ.get("RESERVES_TWICE") == selected[-1]:
            segments[selected[-1]] = Segment()
    return segments[selected[-1]].take(max(1, math.prod(shape)) * itemsize)

device.Device.allocate = allocate
engine.arena = worker.arena = remembering
sys.exit(worker.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def growing(e2e, tmp_path_factory):
    config = e2e.config_of("ep=2", layers=2)
    engine = [sys.executable, "-P", "-c", GROWING, *config.to_args()]
    return e2e.capture_archive(tmp_path_factory.mktemp("growing") / "g.foundry", config, engine=engine)


def test_its_graphs_are_restored_with_the_right_tokens(e2e, worlds, growing):
    for number, arena in enumerate(ARENAS[:5]):
        first = BASE + (70 + 8 * number) * STRIDE
        rows = e2e.allocations(growing.path, arena)
        assert all(size == PIECE and first <= address < first + (158 << 30) for address, size in rows)
        assert bool(rows) == (arena in ("weights", "kv", "io", "graph"))
    ranks = worlds.run(growing.config, growing.env(), every=e2e.Change(program=GROWING))
    assert [r.result["restored"] for r in ranks] == [True, True]
    assert e2e.right_tokens(growing.config, ranks)
    assert [r.result["counters"]["engine"]["captures"] for r in ranks] == [0, 0]


@pytest.mark.parametrize("arena", ["weights", "kv", "io"])
def test_a_segment_elsewhere_is_named_and_the_engine_captures(e2e, worlds, growing, arena):
    twice = e2e.Change(program=GROWING, env={"RESERVES_TWICE": arena})
    ranks = worlds.run(growing.config, growing.env(), changes={1: twice}, every=e2e.Change(program=GROWING))
    assert e2e.right_tokens(growing.config, ranks)
    reason, message = ranks[1].fallback
    assert reason == "layout_diverged"
    assert message.startswith(
        f"allocation 0 of arena {arena!r} ({PIECE} bytes) is mapped by the engine itself at another"
    )
    assert ranks[0].fallback[0] == "peer_failed"


def test_an_engine_with_plain_memory_does_not_take_it_for_its_own(e2e, worlds, growing):
    ranks = worlds.run(growing.config, growing.env())
    assert e2e.right_tokens(growing.config, ranks)
    assert ranks[0].fallback[0] == "layout_diverged"
