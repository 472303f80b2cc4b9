# SPDX-License-Identifier: Apache-2.0
"""Memory that an engine maps itself has places that depend on its arena alone, and is otherwise the driver's."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
GRANULE = 2 << 20
PIECE = 20 << 20
TORCH = (141 << 30) * 9 // 8 // PIECE * PIECE
ROOM = 8 * STRIDE  # for the reservations of one arena
DEFAULT, WEIGHTS, KV, IO, GRAPH, BEHIND = range(6)


def zone(arena: int) -> int:
    return BASE + (70 + 8 * arena) * STRIDE


PRELUDE = """
import fdyhook as fdy, soft
from vmmkit import *
cu = soft.cu
"""


def test_places_follow_the_arenas_own_sequence_and_nothing_else(hooked: Any) -> None:
    source = (
        PRELUDE
        + """
soft.start()
out = {a: [] for a in range(5)}
for arena, size in fdy.given():
    with fdy.arena(arena):
        if size:
            out[arena].append(reserve(size))
        else:
            soft.malloc(3 << 20)
fdy.answer([out[a] for a in range(5)])
"""
    )
    own = {DEFAULT: [TORCH, GRANULE, TORCH], WEIGHTS: [GRANULE, TORCH], KV: [TORCH], IO: [], GRAPH: [PIECE, PIECE]}
    by_arena = [(arena, size) for arena, sizes in own.items() for size in sizes]
    rounds = [(a, own[a][i]) for i in range(3) for a in reversed(own) if i < len(own[a])]
    mixed = [step for pair in rounds for step in (pair, (pair[0], 0), (IO, 0))]
    first, second, third = (hooked.python(source, "capture", given=steps) for steps in (by_arena, rounds, mixed))
    assert first == second == third
    for arena, places in enumerate(first):
        assert places[:1] == [zone(arena)] * bool(places)
        spans = [(p, p + size) for p, size in zip(places, own[arena], strict=True)]
        assert all(a[1] < b[0] for a, b in pairwise(sorted(spans)))  # with something between them
        assert all(zone(arena) <= low and high <= zone(arena) + ROOM for low, high in spans)


def test_a_place_given_back_is_used_again_and_alignment_is_kept(hooked: Any) -> None:
    places = hooked.python(
        PRELUDE
        + """
soft.start()
a, b, c = (reserve(TORCH) for _ in range(3))
soft.ok(cu.cuMemAddressFree(b, TORCH))
small = reserve(SMALL)
large = reserve(TORCH)
aligned = reserve(2 << 20, alignment=1 << 40)
fdy.answer([a, b, c, small, large, aligned])
""",
        "capture",
    )
    a, b, c, small, large, aligned = places
    assert a < b < c
    assert small == b
    assert large > c
    assert aligned % (1 << 40) == 0
    assert zone(DEFAULT) < aligned < zone(WEIGHTS)


def test_mapped_pieces_are_allocations_of_the_arena(hooked: Any) -> None:
    """Each with its place in the arena's sequence; an unmapped one is freed, in whatever company."""
    found = hooked.python(
        PRELUDE
        + """
soft.start()
with fdy.arena(fdy.WEIGHTS):
    soft.malloc(1000)
    segment = Segment()
    lost = Segment(piece=SMALL)
segment.grow(2)  # outside of the arena's selection: the reservation is what counts
with fdy.arena(fdy.KV):
    segment.grow(2)
    lost.grow()
segment.unmap(1, 2)
segment.map(1)
lost.close()
fdy.answer([segment.base, lost.base, [a for a in fdy.allocations() if a.arena == fdy.WEIGHTS], fdy.allocations()])
""",
        "capture",
    )
    base, lost, weights, everything = found
    at = [base + i * PIECE for i in range(4)]
    assert weights == everything
    assert [r[1] for r in weights] == list(range(7))
    assert [r[2:] for r in weights[1:]] == [
        [at[0], PIECE, 1],
        [at[1], PIECE, 0],
        [at[2], PIECE, 0],
        [at[3], PIECE, 1],
        [lost, GRANULE, 0],
        [at[1], PIECE, 1],
    ]


SAME_AS_DRIVER = (
    PRELUDE
    + """
soft.start()
size = 64 << 20
base = reserve(size)
def name(result):
    return result[0].name
def relative(address):
    return int(address) - base
A = cu.CUpointer_attribute
names = ("MEMORY_TYPE", "DEVICE_POINTER", "IS_MANAGED", "DEVICE_ORDINAL", "RANGE_SIZE", "RANGE_START_ADDR", "MAPPED",
         "MAPPING_SIZE", "MAPPING_BASE_ADDR", "ALLOWED_HANDLE_TYPES", "IS_LEGACY_CUDA_IPC_CAPABLE")
wanted = [getattr(A, "CU_POINTER_ATTRIBUTE_" + n) for n in names]
def attributes(address):
    out = []
    for n, w in zip(names, wanted):
        code, value = cu.cuPointerGetAttribute(w, address)
        number = int(value) if code == soft.SUCCESS else 0
        out.append([n, code.name, number - base if number >= base else number])
    return out
def together(address):
    code, values = cu.cuPointerGetAttributes(len(wanted), wanted, address)
    return [code.name, [int(v) - base if int(v) >= base else int(v) for v in values or []]]
def driver_numbers_it(address):
    number = A.CU_POINTER_ATTRIBUTE_BUFFER_ID
    one = int(soft.ok(cu.cuPointerGetAttribute(number, address)))
    return [one < 1 << 62, int(soft.ok(cu.cuPointerGetAttributes(1, [number], address))[0]) == one]
def described(address):
    code, start, length = cu.cuMemGetAddressRange(address)
    return [code.name, relative(start) if length else None, length]
def retained(address):
    code, handle = cu.cuMemRetainAllocationHandle(address)
    if code == soft.SUCCESS:
        soft.ok(cu.cuMemRelease(handle))
    return [code.name, code == soft.SUCCESS and handle in [int(m) for m in memories]]
out = []
memories = [soft.ok(cu.cuMemCreate(PIECE, properties(), 0)) for _ in range(2)]
out.append(["before", described(base), retained(base), attributes(base)])
for i, memory in enumerate(memories):
    out.append(name(cu.cuMemMap(base + i * PIECE, PIECE, 0, memory, 0)))
out.append(["map", name(cu.cuMemMap(base, PIECE, 0, memories[0], 0)),
            name(cu.cuMemMap(base + size - SMALL, PIECE, 0, memories[0], 0)),
            name(cu.cuMemMap(base + 4096, PIECE, 0, memories[0], 0))])
description = access()
out.append(["access", soft.ok(cu.cuMemGetAccess(description.location, base)),
            name(cu.cuMemSetAccess(base, SMALL, [description], 1)),
            name(cu.cuMemSetAccess(base, 3 * PIECE, [description], 1)),
            name(cu.cuMemSetAccess(base, 2 * PIECE, [description], 1)),
            soft.ok(cu.cuMemGetAccess(description.location, base))])
out.append(["described", described(base + PIECE + 77), retained(base + PIECE), attributes(base + PIECE + 77),
            together(base + 5), driver_numbers_it(base + 5), attributes(base + 2 * PIECE)])
out.append(["across", name(cu.cuMemsetD8(base + PIECE - 64, 7, 128)), list(fdy.download(base + PIECE - 64, 128))])
out.append(["not freed", name(cu.cuMemFree(base)), name(cu.cuMemFreeAsync(base, 0)),
            name(cu.cuMemAddressFree(base, size)), name(cu.cuMemAddressFree(base, SMALL)),
            name(cu.cuMemAddressFree(base + SMALL, size - SMALL))])
out.append(["unmap", name(cu.cuMemUnmap(base, SMALL)), name(cu.cuMemUnmap(base + SMALL, PIECE)),
            name(cu.cuMemUnmap(base, 3 * PIECE)), name(cu.cuMemUnmap(base, 2 * PIECE)),
            name(cu.cuMemUnmap(base, 2 * PIECE)), described(base), retained(base)])
out.append([name(cu.cuMemRelease(m)) for m in memories])
out.append(["freed", name(cu.cuMemAddressFree(base, size)), name(cu.cuMemAddressFree(base, size))])
out.append(["reserve", [name(cu.cuMemAddressReserve(*a)) for a in
            ((0, 0, 0, 0), (4096, 0, 0, 0), (SMALL, 3 << 20, 0, 0), (SMALL, 0, 4096, 0), (SMALL, 0, 0, 1))]])
fdy.answer(out)
"""
)


def test_calls_on_such_memory_answer_as_the_bare_driver(hooked: Any) -> None:
    bare = hooked.python(SAME_AS_DRIVER, None)
    assert bare[4][0] == "access"
    assert [bare[4][1], bare[4][5]] == [0, 3]  # the program above does what it means to
    for mode in ("capture", "restore"):
        assert hooked.python(SAME_AS_DRIVER, mode) == bare


def test_nothing_can_be_done_where_the_program_has_reserved_nothing(hooked: Any) -> None:
    """Nor across the end of what it has, though all of it is one reservation to the driver."""
    bare, captured = (
        hooked.python(
            PRELUDE
            + """
soft.start()
first, second = sorted(reserve(4 << 20) for _ in range(2))
given, size = fdy.given(), 2 << 20
gap = given or first + (4 << 20)
memory = soft.ok(cu.cuMemCreate(size, properties(), 0))
whole = soft.ok(cu.cuMemCreate(4 << 20, properties(), 0))
calls = [cu.cuMemMap(gap, size, 0, memory, 0), cu.cuMemMap(first + size, 4 << 20, 0, whole, 0),
         cu.cuMemMap(second - size, 4 << 20, 0, whole, 0), cu.cuMemUnmap(gap, size),
         cu.cuMemUnmap(first + size, 4 << 20), cu.cuMemSetAccess(gap, size, [access()], 1),
         cu.cuMemAddressFree(gap, size), cu.cuMemAddressFree(first, second + size * 2 - first), cu.cuMemFree(gap)]
soft.ok(cu.cuMemMap(first, size, 0, memory, 0))
calls += [cu.cuMemAddressFree(first, 4 << 20), cu.cuMemUnmap(first, size), cu.cuMemAddressFree(first, 4 << 20),
          cu.cuMemMap(first, size, 0, memory, 0)]
fdy.answer([c[0].name for c in calls])
""",
            mode,
            given=given,
        )
        for mode, given in ((None, 0x6F0000000000), ("capture", None))
    )
    assert captured == bare
    assert [i for i, name in enumerate(bare) if name == "CUDA_SUCCESS"] == [10, 11]
    assert set(bare) == {"CUDA_SUCCESS", "CUDA_ERROR_INVALID_VALUE"}


def test_a_place_is_had_again_however_small_and_whatever_was_reserved_in_between(hooked: Any) -> None:
    """The driver itself serves small reservations elsewhere while it has room by it, and what was freed by chance."""
    places = hooked.python(
        PRELUDE
        + """
soft.start()
out = []
for size in (SMALL, TORCH, SMALL, 16 << 20):
    place = reserve(size)
    soft.ok(cu.cuMemAddressFree(place, size))
    other = soft.ok(cu.cuMemHostAlloc(SMALL, 0))
    out.append(place)
fdy.answer(out)
""",
        "capture",
    )
    assert places == [zone(DEFAULT)] * 4


@pytest.mark.parametrize("stride", [4 << 20, 16 << 20])
def test_spaces_so_small_that_the_driver_has_room_for_them_lie_where_they_must(hooked: Any, stride: int) -> None:
    """The arenas, and the window of a rank."""
    base, place, opened = hooked.python(
        PRELUDE
        + """
from ipcpeer import get, open_handle
soft.start()
place = soft.malloc(2000)
fdy.answer([fdy.report().arena_base, place, open_handle(get(place)) if fdy.given() else 0])
""",
        "capture",
        given=stride >= 16 << 20,  # else a window has no room for a granule
        env={"FOUNDRYD_ARENA_STRIDE": str(stride)},
    )
    assert base == place == BASE
    assert opened == (BASE + 6 * stride if stride >= 16 << 20 else 0)


def test_memory_of_the_arenas_is_plain_memory_to_these_calls(hooked: Any) -> None:
    codes, content = hooked.python(
        PRELUDE
        + """
soft.start()
address = soft.malloc(4 << 20)
fdy.upload(address, b"still here")
memory = soft.ok(cu.cuMemCreate(SMALL, properties(), 0))
codes = [cu.cuMemUnmap(address, 4 << 20)[0].name, cu.cuMemMap(address, SMALL, 0, memory, 0)[0].name,
         cu.cuMemAddressFree(address, 4 << 20)[0].name, cu.cuMemAddressFree(fdy.BASE, 5 * fdy.STRIDE)[0].name]
fdy.answer([codes, fdy.download(address, 10).decode()])
""",
        "capture",
    )
    assert codes == ["CUDA_ERROR_INVALID_VALUE"] * 4
    assert content == "still here"


def test_an_address_that_the_engine_chose_is_its_own(hooked: Any) -> None:
    """Where it can be had; a wish that cannot be met is no reason for an address by chance."""
    there, taken, inside, recorded = hooked.python(
        PRELUDE
        + """
soft.start()
wish = 0x500000000000
there, taken, inside = reserve(SMALL, wish=wish), reserve(SMALL, wish=wish), reserve(SMALL, wish=fdy.BASE)
memory = soft.ok(cu.cuMemCreate(SMALL, properties(), 0))
soft.ok(cu.cuMemMap(there, SMALL, 0, memory, 0))
fdy.answer([there, taken, inside, fdy.allocations()])
""",
        "capture",
    )
    assert there == 0x500000000000
    assert zone(DEFAULT) == taken < inside < zone(WEIGHTS)
    assert recorded == []


@pytest.mark.parametrize("mode", ["capture", "restore"])
def test_a_reservation_without_room_fails_by_name_in_a_capture_alone(hooked: Any, mode: str) -> None:
    code, reason, places, again = hooked.python(
        PRELUDE
        + """
soft.start()
places = []
while True:
    code, address = cu.cuMemAddressReserve(TORCH, 0, 0, 0)
    if code != soft.SUCCESS or not fdy.BASE <= int(address) < fdy.BASE + 112 * fdy.STRIDE:
        break
    places.append(int(address))
reason = fdy.last_error()
soft.ok(cu.cuMemAddressFree(places[3], TORCH))
again = cu.cuMemAddressReserve(TORCH, 0, 0, 0)
fdy.answer([code.name, reason, places, [again[0].name, int(again[1] or 0) == places[3]]])
""",
        mode,
    )
    assert len(places) == ROOM // (TORCH + GRANULE)
    assert again == ["CUDA_SUCCESS", True]
    assert code == ("CUDA_ERROR_OUT_OF_MEMORY" if mode == "capture" else "CUDA_SUCCESS")
    if mode == "capture":
        assert str(TORCH) in reason
        assert "FOUNDRYD_ARENA_STRIDE" in reason


def test_a_place_that_is_taken_stops_a_capture_with_a_reason(hooked: Any) -> None:
    code, reason, other = hooked.python(
        PRELUDE
        + """
import ctypes
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
taken = fdy.given()
assert libc.mmap(taken, 4096, 0, 0x100022, -1, 0) == taken
soft.start()
code, _ = cu.cuMemAddressReserve(SMALL, 0, 0, 0)
reason = fdy.last_error()
with fdy.arena(fdy.KV):
    fdy.answer([code.name, reason, reserve(SMALL)])
""",
        "capture",
        given=zone(DEFAULT),
    )
    assert code == "CUDA_ERROR_MAP_FAILED"
    assert hex(zone(DEFAULT)) in reason
    assert "FOUNDRYD_ARENA_BASE" in reason
    assert other == zone(KV)


def test_a_thread_without_a_context_gets_the_sessions_device_or_a_reason(hooked: Any) -> None:
    early, reason, late = hooked.python(
        PRELUDE
        + """
import threading
soft.ok(cu.cuInit(0))
early = cu.cuMemAddressReserve(SMALL, 0, 0, 0)[0].name
reason = fdy.last_error()
soft.start()
soft.malloc(64)
late = []
thread = threading.Thread(target=lambda: late.append(reserve(SMALL)))
thread.start(), thread.join()
fdy.answer([early, reason, late[0]])
""",
        "capture",
    )
    assert early == "CUDA_ERROR_INVALID_CONTEXT"
    assert "make a context current first" in reason
    assert late == zone(DEFAULT)


def test_what_a_communication_library_reserves_stays_with_the_driver(hooked: Any, compile_c: Any) -> None:
    source = """
    #include <stddef.h>
    typedef unsigned long long ptr;
    int cuMemAddressReserve(ptr *, size_t, size_t, ptr, unsigned long long);
    ptr reserve(void) {
      ptr out = 0;
      return cuMemAddressReserve(&out, 2 << 20, 0, 0, 0) ? 0 : out;
    }
    """
    libraries = [str(compile_c(name, source, cuda=True)) for name in ("libncclprobe.so", "libother.so")]
    theirs, engines = hooked.python(
        PRELUDE
        + """
import ctypes
soft.start()
out = []
for path in fdy.given():
    library = ctypes.CDLL(path)
    library.reserve.restype = ctypes.c_uint64
    out.append(library.reserve())
fdy.answer(out)
""",
        "capture",
        given=libraries,
    )
    assert theirs
    assert not BASE <= theirs < zone(BEHIND)
    assert engines == zone(DEFAULT)


def test_threads_with_arenas_of_their_own_get_what_they_would_get_alone(hooked: Any) -> None:
    """Plain memory, stream-ordered memory and mapped pieces at once, in whatever order the threads run."""
    source = (
        PRELUDE
        + """
import random, threading
context = soft.start()
together = fdy.given()

def work(arena):
    soft.ok(cu.cuCtxSetCurrent(context))
    order, kept, ordered = random.Random(arena), [], []
    stream = soft.ok(cu.cuStreamCreate(1))
    with fdy.arena(arena):
        segment, pieces = Segment(), []
        for i in range(120):
            kind = order.randrange(6)
            if kind == 0:
                kept.append(soft.malloc(order.choice((100, 5000, 3 << 20))))
            elif kind == 1 and kept:
                soft.free(kept.pop(order.randrange(len(kept))))
            elif kind == 2:
                free = next(i for i in range(len(pieces) + 1) if i not in pieces)
                pieces.append(free)
                segment.map(free)
            elif kind == 3:
                ordered.append(int(soft.ok(cu.cuMemAllocAsync(order.choice((100, 3 << 20)), stream))))
            elif kind == 4 and ordered:
                soft.ok(cu.cuMemFreeAsync(ordered.pop(order.randrange(len(ordered))), stream))
            elif pieces:
                segment.unmap(pieces.pop(order.randrange(len(pieces))))
            if i % 40 == 39:
                segment = Segment()
                pieces = []

threads = [threading.Thread(target=work, args=(a,)) for a in range(5)]
for thread in threads:
    thread.start()
    if not together:
        thread.join()
[thread.join() for thread in threads]
fdy.answer(fdy.allocations())
"""
    )
    alone = hooked.python(source, "capture", given=False)
    assert len(alone) > 200
    assert {r[0] for r in alone} == set(range(5))
    for _ in range(3):
        assert hooked.python(source, "capture", given=True) == alone
