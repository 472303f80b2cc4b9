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
    with contextlib.ExitStack() as stack:
        out["again"] = [stack.enter_context(x.reserved(size, place)) == place for place in places]
    return out


@row("segment.zones")
def zones(x: Bench) -> Any:
    """What the arenas keep for reservations of engines: 2 TiB each, one behind the other, used at either end."""
    first, size = 0x6000_0000_0000 + 70 * (256 << 30), 8 * (256 << 30)
    places = [first + i * size for i in range(5)]
    with contextlib.ExitStack() as stack:
        got = [stack.enter_context(x.reserved(size, place)) for place in places]
        used = []
        for place in places:
            for piece in (place, place + size - GRANULE):
                with x.memory() as memory, x.at(piece, GRANULE, memory):
                    used.append(code(cu.cuMemsetD8(piece, 1, GRANULE)))
                    ok(cu.cuCtxSynchronize())
        return [[a == b for a, b in zip(got, places, strict=True)], sorted(set(used))]


@row("segment.wished")
def wished(x: Bench) -> Any:
    """Large reservations at a place of one's choice: a free one is granted, also when it has been freed; a taken one
    gives another place, not an error; a crooked one is wrong.
    """
    wish, size = 0x6100_0000_0000, 4 << 30

    def attempt(stack: contextlib.ExitStack, address: int) -> str:
        got = cu.cuMemAddressReserve(size, 0, address, 0)
        if code(got) != "SUCCESS":
            return code(got)
        stack.callback(cu.cuMemAddressFree, got[1], size)
        return "there" if int(got[1]) == address else "elsewhere"

    with contextlib.ExitStack() as stack:
        out = {
            "free": attempt(stack, wish),
            "taken": attempt(stack, wish),
            "inside": attempt(stack, wish + size // 2),
            "crooked": attempt(stack, wish + 4 * size + 4096),
        }
    with contextlib.ExitStack() as stack:
        out["free_again"] = attempt(stack, wish)
    return out


@row("segment.small")
def small(x: Bench) -> Any:
    """Small reservations come out at a free place in the end, if those that came out elsewhere are kept until then; and
    again after all were given back.
    """

    def had(size: int, place: int) -> bool:
        with contextlib.ExitStack() as stack:
            return any(stack.enter_context(x.reserved(size, place)) == place for _ in range(64))

    sizes = (GRANULE, 16 << 20, 128 << 20)
    return [[had(size, 0x6100_0000_0000) for _ in range(2)] for size in sizes]


@row("segment.map_limits")
def map_limits(x: Bench) -> Any:
    """Where whole memory cannot be mapped."""
    with x.mapped() as (base, memory):

        def attempt(address: int) -> str:
            got = code(cu.cuMemMap(address, GRANULE, 0, memory, 0))
            if got == "SUCCESS":
                ok(cu.cuMemUnmap(address, GRANULE))
            return got

        return {
            "taken": attempt(base),
            "crooked": attempt(base + 2 * GRANULE + 4096),
            "behind": attempt(base + 4 * GRANULE - GRANULE),
            "unreserved": attempt(0x6200_0000_0000),
        }


@row("segment.described")
def described(x: Bench) -> Any:
    """What the calls say of memory in the middle of a reservation: one speaks of the mapping, another of the
    reservation.
    """
    names = ("RANGE_START_ADDR", "RANGE_SIZE")  # cuda.bindings cannot ask for those of the mapping
    with x.reserved(8 * GRANULE) as base, contextlib.ExitStack() as stack:
        for index in (2, 5):
            memory = stack.enter_context(x.memory())
            stack.enter_context(x.at(base + index * GRANULE, GRANULE, memory))

        def described_at(address: int) -> list[int]:
            out = []
            for name in names:
                kind = getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}")
                value = int(ok(cu.cuPointerGetAttribute(kind, address)))
                out.append(value if name.endswith("SIZE") else value - base)
            start, size = ok(cu.cuMemGetAddressRange(address))
            return [*out, int(start) - base, int(size)]

        return [described_at(base + index * GRANULE + 4096) for index in (2, 5)]


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
