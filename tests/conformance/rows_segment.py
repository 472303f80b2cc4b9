# SPDX-License-Identifier: Apache-2.0
"""Rows about memory that a program maps itself: large reservations that fill piece by piece."""

from __future__ import annotations

import contextlib
from typing import Any

from bench import GRANULE, Bench, code, cu, ok, row


@row("segment.apart")
def apart(x: Bench) -> Any:
    """Large reservations one behind the other at fixed places, far up; each is used, given back and had again."""
    first, size, step = 0x6000_0000_0000 + 70 * (256 << 30), 158 << 30, 159 << 30
    out: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        places = [first + i * step for i in (0, 1, 12, 60)]
        got = [stack.enter_context(x.reserved(size, place)) for place in places]
        out["there"] = [a == b for a, b in zip(got, places, strict=True)]
        out["used"] = []
        for place in places:
            last = place + size - GRANULE
            with x.memory() as memory, x.at(last, GRANULE, memory):
                out["used"].append(code(cu.cuMemsetD8(last, 1, GRANULE)))
                ok(cu.cuCtxSynchronize())
    with x.reserved(GRANULE, first) as small, x.reserved(size, first + (1 << 30)) as large:
        out["again"] = [small == first, large == first + (1 << 30)]
    return out


@row("segment.grow")
def several(x: Bench) -> Any:
    """What an allocator with segments that grow does: pieces of 20 MiB, several unmapped in one call, mapped again."""
    piece = 20 << 20
    properties = cu.CUmemAllocationProp()
    properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = 0
    base = int(ok(cu.cuMemAddressReserve(16 * piece, 0, 0, 0)))

    def grow(index: int) -> list[str]:
        created, memory = cu.cuMemCreate(piece, properties, 0)
        place = base + index * piece
        mapped = code(cu.cuMemMap(place, piece, 0, memory, 0))
        codes = [created.name, mapped, code(cu.cuMemSetAccess(place, piece, [x.access()], 1))]
        return [*codes, code(cu.cuMemRelease(memory))]  # the mapping keeps the memory

    out: dict[str, Any] = {"grow": [grow(i) for i in range(4)]}
    out["fill"] = code(cu.cuMemsetD8(base, 3, 4 * piece))
    ok(cu.cuCtxSynchronize())
    out["unmap"] = code(cu.cuMemUnmap(base + piece, 2 * piece))
    out["kept"] = sorted({*x.read(base, 1), *x.read(base + 3 * piece, 1)})
    out["again"] = grow(1)
    out["unmap_all"] = [code(cu.cuMemUnmap(base, 2 * piece)), code(cu.cuMemUnmap(base + 3 * piece, piece))]
    out["address_free"] = code(cu.cuMemAddressFree(base, 16 * piece))
    return out
