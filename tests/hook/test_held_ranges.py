# SPDX-License-Identifier: Apache-2.0
"""A restoring process has the recorded layout, or says where it left it; what graphs use is nobody else's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
GRANULE = 2 << 20
WEIGHTS, KV, IO, GRAPH, HOST, DEFAULT = 1, 2, 3, 4, 5, 0

# Plays [["alloc", arena, bytes], ["free", i]] where i counts the allocations of the list.
PLAYER = """
import fdyhook as fdy, soft
cu = soft.cu

def play(steps):
    made = []
    for step in steps:
        if step[0] == "alloc":
            _, arena, size = step
            if arena == fdy.HOST:
                made.append(int(soft.ok(cu.cuMemHostAlloc(size, 0))))
            else:
                with fdy.arena(arena):
                    made.append(soft.malloc(size))
        else:
            address = made[step[1]]
            soft.ok(cu.cuMemFreeHost(address)) if address >= fdy.BASE + 5 * fdy.STRIDE else soft.free(address)
    return made
"""

RECORD = PLAYER + "soft.start(); play(fdy.given()); fdy.answer(fdy.allocations())"

RESTORE = (
    PLAYER
    + """
recorded, steps = fdy.given()
fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
soft.start()
made = play(steps)
fdy.answer([made, fdy.divergence()])
"""
)

SETUP = [
    ["alloc", WEIGHTS, 1000],
    ["alloc", WEIGHTS, 5 << 20],
    ["alloc", KV, 8 << 20],
    ["alloc", IO, 300],
    ["alloc", IO, 4096],
    ["alloc", HOST, 4096],
    ["free", 3],
    ["alloc", IO, 200],
]
# What only the recording process did: warm-up and capture.
WARM_UP = [["alloc", DEFAULT, 7000], ["alloc", GRAPH, 3 << 20], ["alloc", DEFAULT, 3 << 20], ["alloc", HOST, 100]]


@pytest.fixture(scope="module")
def recorded(hooked: Any) -> list[list[int]]:
    return hooked.python(RECORD, "capture", given=SETUP + WARM_UP)  # type: ignore[no-any-return]


def _addresses(recorded: list[list[int]], steps: list[list[Any]]) -> list[int]:
    """Where the recording has the allocations of ``steps``."""
    counts: dict[int, int] = {}
    out = []
    for step in steps:
        if step[0] == "alloc":
            ordinal = counts.get(step[1], 0)
            counts[step[1]] = ordinal + 1
            out.append(next(r[2] for r in recorded if r[0] == step[1] and r[1] == ordinal))
    return out


def test_the_same_allocations_get_the_recorded_addresses(hooked: Any, recorded: list[list[int]]) -> None:
    made, divergence = hooked.python(RESTORE, "restore", given=[recorded, SETUP])
    assert made == _addresses(recorded, SETUP)
    assert divergence[0] == "none"


def test_other_arenas_stay_above_what_was_recorded(hooked: Any, recorded: list[list[int]]) -> None:
    """A workspace of some library may come at any time, in any size."""
    before = SETUP.index(["free", 3])
    workspaces = [["alloc", DEFAULT, 64], ["alloc", GRAPH, 64], ["alloc", DEFAULT, 9 << 20]]
    steps = [*SETUP[:before], *workspaces, *SETUP[before:]]
    made, divergence = hooked.python(RESTORE, "restore", given=[recorded, steps])
    assert divergence[0] == "none"
    assert made[:before] + made[before + 3 :] == _addresses(recorded, SETUP)
    for address, arena in zip(made[before:], (DEFAULT, GRAPH, DEFAULT), strict=False):
        assert address >= max(r[2] + r[3] for r in recorded if r[0] == arena)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: [["alloc", WEIGHTS, 1001], *s[1:]], ["size", "weights", 0, 1000, 1001]),
        (lambda s: [*s, ["alloc", KV, 77]], ["extra", "kv", 1, 0, 77]),
        (lambda s: [x for x in s if x[:2] != ["alloc", KV]][:4], ["missing", "kv", 0, 8 << 20, 0]),
        (lambda s: s[:5], ["lifetime", "io", 0, 300, 300]),
        (lambda s: [*s, ["free", 0]], ["lifetime", "weights", 0, 1000, 1000]),
        # The recording had given the place of io 0 to io 2; here it is still taken.
        (lambda s: s[:6] + s[7:], ["lifetime", "io", 2, 200, 200]),
    ],
    ids=["size", "extra", "missing", "not_freed", "freed", "overtaken"],
)
def test_the_first_divergence_is_named(
    hooked: Any, recorded: list[list[int]], change: Any, expected: list[Any]
) -> None:
    _, divergence = hooked.python(RESTORE, "restore", given=[recorded, change(SETUP)])
    assert divergence == expected


def test_a_diverged_arena_goes_on_above_the_recording(hooked: Any, recorded: list[list[int]]) -> None:
    steps = [["alloc", WEIGHTS, 5], ["alloc", WEIGHTS, 5 << 20], ["alloc", KV, 8 << 20]]
    made, divergence = hooked.python(RESTORE, "restore", given=[recorded, steps])
    high = max(r[2] + r[3] for r in recorded if r[0] == WEIGHTS)
    assert divergence[:3] == ["size", "weights", 0]
    assert all(address >= high for address in made[:2])
    assert made[2] == BASE + 2 * STRIDE  # other arenas are not touched by it


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
fdy.map_held()
again = soft.free_memory()
held = [r for r in recorded if r[0] in (fdy.DEFAULT, fdy.GRAPH, fdy.HOST) and r[4]]
zero = [fdy.download(r[2], r[3]) == bytes(r[3]) for r in held]
for r in held:
    fdy.upload(r[2], bytes([r[1] + 1]) * r[3])
read = [fdy.download(r[2], r[3]) == bytes([r[1] + 1]) * r[3] for r in held]
spans = [soft.ok(cu.cuMemGetAddressRange(r[2] + r[3] - 1)) for r in held]
refused = [cu.cuMemFree(r[2])[0].name for r in held if r[0] != fdy.HOST]
later = play([["alloc", a, size] for a in range(6) for size in (64, 3 << 20)])
divergence = fdy.divergence()
fdy.release_held()
gone = [cu.cuMemGetAddressRange(r[2])[0].name for r in held]
fdy.answer([zero, read, [[int(b), s] for b, s in spans], refused, later, divergence, [before, mapped, again], gone])
"""
)


def test_held_ranges_are_mapped_empty_and_belong_to_nobody(hooked: Any, recorded: list[list[int]]) -> None:
    zero, read, spans, refused, later, divergence, memory, gone = hooked.python(
        HELD, "restore", given=[recorded, SETUP]
    )
    held = [r for r in recorded if r[0] in (DEFAULT, GRAPH, HOST) and r[4]]
    # The engine made the first host buffer itself, and nothing was written to it.
    assert zero == [True] * len(held)
    assert read == [True] * len(held)
    assert spans == [[r[2], r[3]] for r in held]
    assert refused == ["CUDA_ERROR_INVALID_VALUE"] * 3
    assert divergence[0] == "none"
    assert all(address + size <= r[2] or address >= r[2] + r[3] for address, size in _sized(later) for r in recorded)
    before, mapped, again = memory
    assert before - mapped == GRANULE + 2 * (4 << 20)  # a chunk, and two of 3 MiB in granules of their own
    assert again == mapped
    assert gone.count("CUDA_ERROR_NOT_FOUND") == len(held) - 1


def _sized(later: list[int]) -> Iterator[tuple[int, int]]:
    for i, address in enumerate(later):
        yield address, (64, 3 << 20)[i % 2]


def test_an_engine_that_frees_what_graphs_use_is_found_out_and_cannot_hurt_them(
    hooked: Any, recorded: list[list[int]]
) -> None:
    content, divergence, twice = hooked.python(
        PLAYER
        + """
recorded, steps = fdy.given()
fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
soft.start()
made = play(steps)
fdy.upload(made[1], b"weights!")
fdy.map_held()
soft.free(made[1])
fdy.answer([fdy.download(made[1], 8).decode(), fdy.divergence(), cu.cuMemFree(made[1])[0].name])
""",
        "restore",
        given=[recorded, SETUP],
    )
    assert content == "weights!"
    assert divergence == ["lifetime", "weights", 1, 5 << 20, 5 << 20]
    assert twice == "CUDA_ERROR_INVALID_VALUE"


def test_a_layout_is_checked_before_it_is_believed(hooked: Any, recorded: list[list[int]]) -> None:
    overlapping = [[WEIGHTS, 0, BASE + STRIDE, 4096, 1], [WEIGHTS, 1, BASE + STRIDE + 512, 4096, 1]]
    outside = [[WEIGHTS, 0, BASE + 2 * STRIDE - 512, 4096, 1]]
    crooked = [[WEIGHTS, 0, BASE + STRIDE + 100, 4096, 1]]
    gap = [[WEIGHTS, 1, BASE + STRIDE, 4096, 1]]
    unknown = [[9, 0, BASE, 4096, 1]]
    huge = [[WEIGHTS, 0, BASE + STRIDE, 2**64 - 1, 1]]
    empty = [[WEIGHTS, 0, BASE + STRIDE, 0, 1]]
    bad = [overlapping, outside, crooked, gap, unknown, huge, empty]
    statuses = hooked.python(
        """
        import fdyhook as fdy, soft
        bad, good = fdy.given()
        out = []
        def attempt(*layout):
            try:
                fdy.set_layout(*layout)
                out.append("ok")
            except fdy.HookError as error:
                out.append(error.status)
        for one in bad:
            attempt(fdy.BASE, fdy.STRIDE, one)
        attempt(12345, fdy.STRIDE, [])
        attempt(fdy.BASE, 1 << 60, [])
        attempt(fdy.BASE, fdy.STRIDE, good)
        soft.start()
        attempt(fdy.BASE, fdy.STRIDE, good)
        fdy.answer(out)
        """,
        "restore",
        given=[bad, recorded],
    )
    assert statuses == ["invalid"] * (len(bad) + 2) + ["ok", "state"]


@pytest.mark.parametrize("mode", ["capture", None])
def test_only_a_restoring_process_takes_a_layout(hooked: Any, mode: str | None) -> None:
    status = hooked.python(
        """
        import fdyhook as fdy
        try:
            fdy.set_layout(fdy.BASE, fdy.STRIDE, [])
        except fdy.HookError as error:
            fdy.answer(error.status)
        """,
        mode,
    )
    assert status == "state"


def test_a_layout_whose_place_is_taken_is_refused_and_the_engine_runs(hooked: Any, recorded: list[list[int]]) -> None:
    addresses, errors, stderr_free = hooked.python(
        """
        import ctypes, fdyhook as fdy, soft
        libc = ctypes.CDLL(None)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
        assert libc.mmap(fdy.BASE, 4096, 0, 0x100022, -1, 0) == fdy.BASE
        fdy.set_layout(fdy.BASE, fdy.STRIDE, fdy.given())
        soft.start()
        with fdy.arena(fdy.WEIGHTS):
            address = soft.malloc(1000)
        host = int(soft.ok(soft.cu.cuMemHostAlloc(64, 0)))
        soft.free(address), soft.ok(soft.cu.cuMemFreeHost(host))
        errors = []
        for call in (fdy.divergence, fdy.map_held, fdy.release_held):
            try:
                call()
            except fdy.HookError as error:
                errors.append([error.status, str(error)])
        fdy.answer([[address, host], errors, True])
        """,
        "restore",
        given=recorded,
    )
    assert stderr_free
    assert all(not BASE <= a < BASE + 6 * STRIDE for a in addresses)
    assert [e[0] for e in errors] == ["memory"] * 3
    assert all(hex(BASE) in e[1] for e in errors)


# --- random sequences -------------------------------------------------------------------------------------------------

FORKING = """
import json, os, sys
import fdyhook as fdy, soft  # no context before the fork
for line in sys.stdin:
    request = json.loads(line)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            exec(request["source"])
            os.write(write, json.dumps(run(request["given"])).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as answer:
        print(answer.read(), flush=True)
    assert os.waitpid(child, 0)[1] == 0
"""

RANDOM_RECORD = PLAYER + "def run(steps): soft.start(); play(steps); return fdy.allocations()"

RANDOM_RESTORE = (
    PLAYER
    + """
def run(given):
    recorded, before, after = given
    fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
    soft.start()
    play(before)
    divergence = fdy.divergence()[0]
    try:
        fdy.map_held()
    except fdy.HookError as error:
        return [error.status, divergence]
    made = play(after)
    return [[[a, s[2]] for a, s in zip(made, [s for s in after if s[0] == "alloc"])], divergence]
"""
)


class Server:
    """A process that forks a fresh child for each request: a thousand times faster than starting Python anew."""

    def __init__(self, hooked: Any, mode: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", FORKING],
            env=hooked.environment(mode),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, source: str, what: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"source": source, "given": what}) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            assert self._process.wait(30) == 0
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def recorder(hooked: Any) -> Iterator[Server]:
    server = Server(hooked, "capture")
    yield server
    server.close()


@pytest.fixture(scope="module")
def restorer(hooked: Any) -> Iterator[Server]:
    server = Server(hooked, "restore")
    yield server
    server.close()


SIZES = st.one_of(st.integers(1, 5000), st.integers(1 << 19, 3 << 20), st.sampled_from([512, 1 << 20, (1 << 20) + 1]))


@st.composite
def sequences(draw: st.DrawFn, arenas: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> list[list[Any]]:
    steps: list[list[Any]] = []
    live: list[int] = []
    made = 0
    for _ in range(draw(st.integers(0, 25))):
        if live and draw(st.booleans()):
            steps.append(["free", live.pop(draw(st.integers(0, len(live) - 1)))])
        else:
            steps.append(["alloc", draw(st.sampled_from(arenas)), draw(SIZES)])
            live.append(made)
            made += 1
    return steps


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(program=sequences(), warm_up=sequences(arenas=(0, 4)), noise=sequences(arenas=(0, 4)), after=sequences())
def test_nothing_is_ever_given_out_inside_a_held_range(
    recorder: Server, restorer: Server, program: Any, warm_up: Any, noise: Any, after: Any
) -> None:
    """Whatever the recording did, whatever its warm-up left behind, whatever the restored engine does."""
    offset = sum(s[0] == "alloc" for s in program)
    shifted = [["free", s[1] + offset] if s[0] == "free" else s for s in warm_up]
    recorded = recorder.ask(RANDOM_RECORD, program + shifted)
    held = [(r[2], r[2] + r[3]) for r in recorded if r[4]]
    assert all(a[1] <= b[0] for a, b in pairwise(sorted(held)))

    # The engine repeats its own steps in the arenas that go by ordinal, and something else in the others.
    counts, kept, steps = 0, {}, []
    for index, step in enumerate(s for s in program if s[0] == "alloc"):
        if step[1] not in (0, 4):
            kept[index] = counts
            counts += 1
    index = 0
    for step in program:
        if step[0] == "alloc":
            if index in kept:
                steps.append(step)
            index += 1
        elif step[1] in kept:
            steps.append(["free", kept[step[1]]])
    steps += [["free", s[1] + counts] if s[0] == "free" else s for s in noise]

    given_out, divergence = restorer.ask(RANDOM_RESTORE, [recorded, steps, after])
    assert divergence == "none"
    for address, size in given_out:
        assert all(address + size <= low or address >= high for low, high in held)
