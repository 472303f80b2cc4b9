# SPDX-License-Identifier: Apache-2.0
"""Memory that a child maps itself, the way an allocator with segments that grow does."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu
from soft import ok

PIECE = 20 << 20
SMALL = 2 << 20
TORCH = (141 << 30) * 9 // 8 // PIECE * PIECE  # what such an allocator reserves on a device of 141 GiB


def properties(device: int = 0) -> Any:
    out = cu.CUmemAllocationProp()
    out.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    out.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    out.location.id = device
    return out


def access(device: int = 0) -> Any:
    out = cu.CUmemAccessDesc()
    out.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    out.location.id = device
    out.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return out


def reserve(size: int, alignment: int = 0, wish: int = 0) -> int:
    return int(ok(cu.cuMemAddressReserve(size, alignment, wish, 0)))


class Segment:
    """A reservation with pieces of one size from its start on; ``pieces`` has handles, None where none is mapped."""

    def __init__(self, piece: int = PIECE, size: int = TORCH) -> None:
        self.size, self.piece = size, piece
        self.base = reserve(size)
        self.pieces: list[Any] = []

    def at(self, index: int) -> int:
        return self.base + index * self.piece

    def map(self, index: int) -> int:
        """Maps fresh memory as piece ``index``; its address."""
        self.pieces += [None] * (index + 1 - len(self.pieces))
        memory = ok(cu.cuMemCreate(self.piece, properties(), 0))
        ok(cu.cuMemMap(self.at(index), self.piece, 0, memory, 0))
        ok(cu.cuMemSetAccess(self.at(index), self.piece, [access()], 1))
        self.pieces[index] = memory
        return self.at(index)

    def grow(self, count: int = 1) -> None:
        for _ in range(count):
            self.map(len(self.pieces))

    def unmap(self, first: int, count: int = 1) -> None:
        """Unmaps pieces in one call and releases their memory."""
        ok(cu.cuMemUnmap(self.at(first), count * self.piece))
        for index in range(first, first + count):
            ok(cu.cuMemRelease(self.pieces[index]))
            self.pieces[index] = None

    def close(self) -> None:
        for index, memory in enumerate(self.pieces):
            if memory is not None:
                self.unmap(index)
        ok(cu.cuMemAddressFree(self.base, self.size))
