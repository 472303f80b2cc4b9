# SPDX-License-Identifier: Apache-2.0
"""What an engine maps itself is restored as its other memory is: at the recorded addresses, compared, held."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
GRANULE = 2 << 20
PIECE = 20 << 20
DEFAULT, WEIGHTS, KV, IO, GRAPH = range(5)


def zone(arena: int) -> int:
    return BASE + (70 + 8 * arena) * STRIDE


# Plays ["segment", arena, size of its pieces, its own if not PyTorch's], ["map", i, place], ["unmap", i, place],
# ["close", i], ["alloc", arena, bytes] and ["free", i], where i counts the segments or the allocations; answers where
# all that was made lies.
PLAYER = """
import fdyhook as fdy, soft
from vmmkit import *
cu = soft.cu

def play(steps):
    segments, plain, places = [], [], []
    for kind, *rest in steps:
        if kind == "segment":
            with fdy.arena(rest[0]):
                segments.append(Segment(*rest[1:]))
            places.append(segments[-1].base)
        elif kind == "map":
            places.append(segments[rest[0]].map(rest[1]))
        elif kind == "unmap":
            segments[rest[0]].unmap(rest[1])
        elif kind == "close":
            segments[rest[0]].close()
        elif kind == "alloc":
            with fdy.arena(rest[0]):
                plain.append(soft.malloc(rest[1]))
            places.append(plain[-1])
        else:
            soft.free(plain[rest[0]])
    return places
"""

RECORD = PLAYER + "soft.start(); made = play(fdy.given()); fdy.answer([made, fdy.allocations()])"

RESTORE = (
    PLAYER
    + """
recorded, steps = fdy.given()
fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
soft.start()
fdy.answer([play(steps), fdy.divergence()])
"""
)

SETUP: list[list[Any]] = [
    ["alloc", WEIGHTS, 1000],
    ["segment", WEIGHTS, PIECE],
    ["segment", WEIGHTS, GRANULE],
    ["map", 0, 0],
    ["map", 1, 0],
    ["map", 0, 1],
    ["alloc", WEIGHTS, 3 << 20],
    ["segment", KV, PIECE],
    ["map", 2, 0],
    ["map", 2, 1],
    ["unmap", 2, 0],
]
# Segments 3 and 4: what only the recording process did.
WARM_UP: list[list[Any]] = [
    ["segment", DEFAULT, PIECE],
    ["map", 3, 0],
    ["map", 3, 2],
    ["segment", GRAPH, GRANULE],
    ["map", 4, 0],
    ["map", 4, 1],
    ["unmap", 4, 0],
    ["alloc", DEFAULT, 7000],
]


@pytest.fixture(scope="module")
def recorded(hooked: Any) -> list[Any]:
    return hooked.python(RECORD, "capture", given=SETUP + WARM_UP)  # type: ignore[no-any-return]


def test_the_same_reservations_and_pieces_get_the_recorded_addresses(hooked: Any, recorded: list[Any]) -> None:
    places, layout = recorded
    made, divergence = hooked.python(RESTORE, "restore", given=[layout, SETUP])
    assert made == places[: len(made)]
    assert divergence[0] == "none"


def test_other_arenas_reserve_above_what_was_recorded(hooked: Any, recorded: list[Any]) -> None:
    _, layout = recorded
    steps = [["segment", DEFAULT, PIECE], ["map", 0, 0], ["segment", GRAPH, GRANULE], ["map", 1, 0]]
    made, divergence = hooked.python(RESTORE, "restore", given=[layout, steps + _shifted(SETUP, 2)])
    assert divergence[0] == "none"
    for arena, places in ((DEFAULT, made[:2]), (GRAPH, made[2:4])):
        high = max(r[2] + r[3] for r in layout if r[0] == arena)
        assert zone(arena) < high <= min(places)
        assert max(places) < zone(arena + 1)


def _shifted(steps: list[list[Any]], segments: int) -> list[list[Any]]:
    """The same steps after others that made so many segments."""
    return [[s[0], s[1] + segments, *s[2:]] if s[0] in ("map", "unmap", "close") else s for s in steps]


def _without(steps: list[list[Any]], *gone: list[Any]) -> list[list[Any]]:
    return [s for s in steps if s not in gone]


SWAPPED = [["map", 0, 0], ["map", 1, 0]]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: [["segment", WEIGHTS, GRANULE], *s[:1], *_shifted(s[1:], 1)], ["address", "weights", 1]),
        (lambda s: [*s[:5], ["map", 0, 2], *s[6:]], ["address", "weights", 3]),
        (lambda s: [*s[:3], s[4], s[3], *s[5:]], ["size", "weights", 1]),
        (lambda s: [*s[:3], ["alloc", WEIGHTS, PIECE], *s[3:]], ["address", "weights", 1]),
        (lambda s: [["segment", WEIGHTS, PIECE], ["map", 0, 0], *_shifted(s, 1)], ["size", "weights", 0]),
        (lambda s: [*s, ["map", 0, 2]], ["extra", "weights", 5]),
        (lambda s: _without(s, ["map", 2, 1]), ["missing", "kv", 1]),
        (lambda s: [*s, ["unmap", 0, 0]], ["lifetime", "weights", 1]),
        (lambda s: _without(s, ["unmap", 2, 0]), ["lifetime", "kv", 0]),
        (lambda s: [*s, ["close", 1]], ["lifetime", "weights", 2]),
    ],
    ids=[
        "another_reservation",
        "another_place",
        "another_order",
        "plain_for_mapped",
        "mapped_for_plain",
        "extra",
        "missing",
        "freed",
        "not_freed",
        "closed",
    ],
)
def test_the_first_divergence_is_named(hooked: Any, recorded: list[Any], change: Any, expected: list[Any]) -> None:
    _, divergence = hooked.python(RESTORE, "restore", given=[recorded[1], change(SETUP)])
    assert divergence[:3] == expected


HELD = (
    PLAYER
    + """
recorded, steps = fdy.given()
fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
soft.start()
play(steps)
before = soft.free_memory()
fdy.map_held()
mapped = soft.free_memory()
held = [r for r in recorded if r[0] in (fdy.DEFAULT, fdy.GRAPH) and r[4] and r[3] >= SMALL]
zero = [fdy.download(r[2], r[3]) == bytes(r[3]) for r in held]
for r in held:
    fdy.upload(r[2], bytes([r[1] + 1]) * r[3])
read = [fdy.download(r[2], r[3]) == bytes([r[1] + 1]) * r[3] for r in held]
refused = [call[0].name for r in held for call in
           (cu.cuMemUnmap(r[2], r[3]), cu.cuMemFree(r[2]), cu.cuMemAddressFree(r[2], r[3]))]
later = play([step for i, a in enumerate(range(5)) for step in
              (["segment", a, SMALL], ["map", i, 0], ["map", i, 1], ["unmap", i, 0], ["alloc", a, 3 << 20])])
divergence = fdy.divergence()
again = [fdy.download(r[2], 4) == bytes([r[1] + 1]) * 4 for r in held]
fdy.release_held()
gone = [cu.cuMemGetAddressRange(r[2])[0].name for r in held]
fdy.answer([zero, read, refused, later, divergence, again, [before, mapped], gone])
"""
)


def test_held_pieces_are_mapped_empty_and_belong_to_nobody(hooked: Any, recorded: list[Any]) -> None:
    _, layout = recorded
    zero, read, refused, later, divergence, again, memory, gone = hooked.python(HELD, "restore", given=[layout, SETUP])
    assert len(zero) == 3  # two of the default arena, one of the graph arena
    assert [zero, read, again] == [[True] * 3] * 3
    assert set(refused) == {"CUDA_ERROR_INVALID_VALUE"}
    assert divergence[0] == "none"
    live = [(r[2], r[2] + r[3]) for r in layout if r[4]]
    assert all(not low <= address < high for address in later for low, high in live)
    assert memory[0] - memory[1] == 2 * PIECE + GRANULE + GRANULE  # and the chunk of the 7000 bytes
    assert gone == ["CUDA_ERROR_NOT_FOUND"] * 3


def test_an_engine_that_sleeps_and_wakes_gets_its_memory_back_and_its_place_again(
    hooked: Any, recorded: list[Any]
) -> None:
    """Unmapping after a restore gives memory back at once: the addresses are safe without it."""
    asleep, back, divergence, place = hooked.python(
        PLAYER
        + """
fdy.set_layout(fdy.BASE, fdy.STRIDE, fdy.given())
soft.start()
with fdy.arena(fdy.KV):
    segment = Segment()
segment.grow(2)
segment.unmap(0)
fdy.map_held()
fdy.upload(segment.at(1), b"tired")
before = soft.free_memory()
segment.unmap(1)
asleep = soft.free_memory() - before
segment.map(1)
fdy.upload(segment.at(1), b"awake")
divergence = fdy.divergence()
place = segment.base
segment.close()
with fdy.arena(fdy.KV):
    other = reserve(TORCH)
fdy.answer([asleep, before - soft.free_memory(), divergence, [place, other]])
""",
        "restore",
        given=[r for r in recorded[1] if r[0] == KV],
    )
    assert asleep == PIECE
    assert back == -PIECE  # closed at the end
    assert divergence[:3] == ["lifetime", "kv", 1]
    # The graphs still have the addresses: nobody else gets them.
    assert place[0] == zone(KV)
    assert place[1] > max(r[2] + r[3] for r in recorded[1] if r[0] == KV)


def test_a_layout_is_checked_before_it_is_believed(hooked: Any) -> None:
    def damaged(*pieces: tuple[int, int]) -> list[list[int]]:
        return [[WEIGHTS, i, zone(WEIGHTS) + at, size, 1] for i, (at, size) in enumerate(pieces)]

    good = damaged((0, PIECE), (PIECE, GRANULE), (100 << 30, PIECE))
    bad = [
        damaged((0, PIECE), (PIECE - GRANULE, PIECE)),
        damaged((PIECE, PIECE), (0, PIECE + GRANULE)),
        damaged((4096, GRANULE)),
        damaged((0, 4096)),
        damaged((8 * STRIDE - GRANULE, PIECE)),
        damaged((0, 2**64 - GRANULE)),
        [[KV, 0, zone(WEIGHTS), PIECE, 1]],
        [[5, 0, zone(5), PIECE, 1]],
    ]
    statuses = hooked.python(
        """
        import fdyhook as fdy
        out = []
        for one in fdy.given():
            try:
                fdy.set_layout(fdy.BASE, fdy.STRIDE, one)
                out.append("ok")
            except fdy.HookError as error:
                out.append(error.status)
        fdy.answer(out)
        """,
        "restore",
        given=[*bad, good],
    )
    assert statuses == ["invalid"] * len(bad) + ["ok"]


def test_a_layout_whose_reservations_are_taken_is_refused_and_the_engine_runs(hooked: Any, recorded: list[Any]) -> None:
    statuses, place = hooked.python(
        """
        import ctypes, fdyhook as fdy, soft
        from vmmkit import *
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        recorded, taken = fdy.given()
        assert libc.mmap(taken, 4096, 0, 0x100022, -1, 0) == taken
        fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
        soft.start()
        segment = Segment()
        segment.grow(2)
        fdy.upload(segment.at(1) - 4, b"borders")
        statuses = []
        for call in (fdy.divergence, fdy.map_held):
            try:
                call()
            except fdy.HookError as error:
                statuses.append([error.status, str(error)])
        fdy.answer([statuses, segment.base])
        """,
        "restore",
        given=[recorded[1], zone(GRAPH)],
    )
    assert [status for status, _ in statuses] == ["memory"] * 2
    assert all(hex(zone(GRAPH)) in text for _, text in statuses)
    assert not BASE <= place < zone(GRAPH + 1)


# --- graphs -----------------------------------------------------------------------------------------------------------

GRAPHS = """
    from vmmkit import *
    import fdyhook as fdy

    def engine():
        # What captures and restores have in common.
        with fdy.arena(fdy.WEIGHTS):
            weights = Segment(piece=SMALL)
        weights.grow(3)
        with fdy.arena(fdy.IO):
            inputs = Segment(piece=SMALL)
        inputs.grow()
        write_words(weights.at(2) - 8, [5, 7])  # over the border of two pieces
        return weights.at(2) - 8, inputs.base
"""

CAPTURED = (
    GRAPHS
    + """
    start()
    weight, given_in = engine()
    module = Module()
    workspace = Segment()  # of the default arena: a restoring process has none
    workspace.grow(2)
    scratch = workspace.at(1) + 512
    write_words(scratch, [3] * 4)
    def body(s):
        launch(module.function("join"), s, u64(weight, weight + 8, scratch))
        launch(module.function("join"), s, u64(scratch, given_in, scratch + 8))
        ok(cu.cuMemcpyDtoDAsync(given_in + 8, scratch + 8, 16, s))
        ok(cu.cuMemsetD8Async(scratch + 8, 1, 8, s))
    graph = capture(body)
    read = hook.read_graph(int(graph))
    content = [[r.address, base64.b64encode(fdy.download(r.address, r.bytes)).decode()]
               for r in fdy.allocations() if r.live and r.arena == fdy.DEFAULT]
    write_words(given_in, [11, 0, 0])
    replay(graph)
    answer([plain(read), recorded(hook), fdy.allocations(), content, words(given_in, 3), words(scratch, 4)])
"""
)

RESTORED = (
    GRAPHS
    + """
    graph, record, layout, content, scratch = given()
    fdy.set_layout(fdy.BASE, fdy.STRIDE, layout)
    start()
    own = Segment()  # a library's, in the arena that only the recording process had used
    own.grow()
    weight, given_in = engine()
    assert fdy.divergence()[0] == "none", fdy.divergence()
    fdy.map_held()
    for address, data in content:
        fdy.upload(address, base64.b64decode(data))
    built = hook.build_graph(arrays(graph), load(hook, record))
    write_words(given_in, [11, 0, 0])
    replay(built)
    answer([words(given_in, 3), words(scratch, 4), words(own.base, 4)])
"""
)


def test_a_graph_over_memory_that_the_engine_mapped_is_restored(hooked: Any) -> None:
    graph, record, layout, content, outputs, scratch = hooked.graphs(CAPTURED)
    assert outputs[1:] == [(5 * 31 + 7) * 31 + 11, 3]
    place = next(r[2] for r in layout if r[0] == DEFAULT and r[1] == 1) + 512
    restored = hooked.graphs(RESTORED, "restore", given=[graph, record, layout, content, place])
    assert restored[:2] == [outputs, scratch]


# --- random sequences -------------------------------------------------------------------------------------------------


@st.composite
def sequences(draw: st.DrawFn, arenas: tuple[int, ...]) -> list[list[Any]]:
    steps: list[list[Any]] = []
    segments: list[set[int] | None] = []
    plain: list[int] = []
    made = 0
    for _ in range(draw(st.integers(0, 25))):
        usable = [i for i, places in enumerate(segments) if places is not None]
        kind = draw(st.sampled_from(["segment", "map", "map", "map", "unmap", "close", "alloc", "free"]))
        if kind == "segment" or (kind in ("map", "unmap", "close") and not usable):
            sizes = st.sampled_from([64 << 20, 1 << 30, 40 << 30])
            steps.append(["segment", draw(st.sampled_from(arenas)), GRANULE, draw(sizes)])
            segments.append(set())
        elif kind == "alloc" or (kind == "free" and not plain):
            steps.append(["alloc", draw(st.sampled_from(arenas)), draw(st.sampled_from([100, 1 << 20, 3 << 20]))])
            plain.append(made)
            made += 1
        elif kind == "free":
            steps.append(["free", plain.pop(draw(st.integers(0, len(plain) - 1)))])
        else:
            which = draw(st.sampled_from(usable))
            places = segments[which]
            assert places is not None
            if kind == "close":
                steps.append(["close", which])
                segments[which] = None
            elif kind == "unmap" and places:
                place = draw(st.sampled_from(sorted(places)))
                places.remove(place)
                steps.append(["unmap", which, place])
            else:
                place = draw(st.sampled_from([p for p in range(len(places) + 1) if p not in places]))
                places.add(place)
                steps.append(["map", which, place])
    return steps


def _behind(steps: list[list[Any]], before: list[list[Any]]) -> list[list[Any]]:
    """``steps`` as they are numbered when ``before`` came first."""
    segments, plain = (sum(s[0] == kind for s in before) for kind in ("segment", "alloc"))
    return [["free", s[1] + plain] if s[0] == "free" else s for s in _shifted(steps, segments)]


Ask = Callable[[str, str, object], Any]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    program=sequences((WEIGHTS, KV, IO)),
    warm_up=sequences((DEFAULT, GRAPH)),
    noise=sequences((DEFAULT, GRAPH)),
    after=sequences((DEFAULT, WEIGHTS, KV, IO, GRAPH)),
)
def test_nothing_is_ever_given_out_inside_a_held_range(
    hooked: Any, program: Any, warm_up: Any, noise: Any, after: Any
) -> None:
    places, layout = hooked.python(RECORD, "capture", given=program + _behind(warm_up, program))
    made, divergence, later = hooked.python(
        PLAYER
        + """
recorded, steps, after = fdy.given()
fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
soft.start()
made = play(steps)
divergence = fdy.divergence()[0]
fdy.map_held()
fdy.answer([made, divergence, play(after)])
""",
        "restore",
        given=[layout, program + _behind(noise, program), after],
    )
    own = sum(s[0] in ("segment", "map", "alloc") for s in program)
    assert made[:own] == places[:own]
    assert divergence == "none"
    held = [(r[2], r[2] + r[3]) for r in layout if r[4]]
    assert all(not low <= address < high for address in made[own:] + later for low, high in held)
