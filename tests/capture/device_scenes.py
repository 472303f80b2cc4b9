# SPDX-License-Identifier: Apache-2.0
"""Proofs over device memory, in a capturing process: ``python -P device_scenes.py NAME`` prints what came out, as JSON.

A graph is played by a function that reads and writes device memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np

from foundryd._native import _hook
from foundryd.capture.canonical import Graph
from foundryd.capture.device import CHUNK, free_room
from foundryd.capture.proofs import prove_dead, prove_noise
from foundryd.capture.snapshots import Memory
from foundryd.errors import FoundrydError
from foundryd.rankpatch.noise import noise_dtype
from foundryd.session.arena import arena
from foundryd.session.driver import call

SIZE = 2 * CHUNK + 4101  # of a range: the last chunk is short and odd
BIG = 128 << 20


class Device:
    """Ranges by name."""

    def __init__(self) -> None:
        self.hook = _hook.Hook()
        self.at: dict[str, int] = {}
        self.draw = np.random.default_rng(0)

    def add(self, name: str, place: str, size: int = SIZE, *, zero: bool = False) -> int:
        with arena(place):
            self.at[name] = int(call("cuMemAlloc", size))
        if zero:
            call("cuMemsetD8", self.at[name], 0, size)
        else:
            self.write(name, self.draw.integers(0, 256, size, np.uint8))
        return self.at[name]

    def read(self, name: str, size: int = SIZE, at: int = 0) -> np.ndarray:
        return self.hook.download(self.at[name] + at, size)

    def write(self, name: str, data: np.ndarray, at: int = 0) -> None:
        self.hook.upload(self.at[name] + at, np.ascontiguousarray(data).view(np.uint8))

    def names(self, found: set[int]) -> list[str]:
        return sorted(name for name, address in self.at.items() if address in found)

    def used(self) -> int:
        return int(call("cuMemGetInfo")[1]) - int(call("cuMemGetInfo")[0])


def found_dead(memory: Memory, replays: Sequence[Callable[[], None]], candidates: set[int]) -> set[int]:
    """What is dead with memory as it is now."""
    memory.begin(replays)
    return prove_dead(memory, replays, candidates)


def written_before_read(d: Device) -> Any:
    a, b, c = (d.add(name, "graph") for name in "abc")
    d.add("out", "io")

    def graph() -> None:
        d.write("a", np.full(SIZE, 7, np.uint8))
        d.write("out", d.read("a") + d.read("b"))

    with Memory(d.hook) as memory:
        return d.names(found_dead(memory, [graph], {a, b, c}))


def partly_written(d: Device) -> Any:
    """Of both the first part is overwritten; of one the rest is read too, of the other only that part."""
    a, b = d.add("a", "graph"), d.add("b", "default")
    d.add("out", "io")
    part = CHUNK + 77

    def graph() -> None:
        for name in "ab":
            d.write(name, np.full(part, 7, np.uint8))
        d.write("out", d.read("a", part))
        d.write("out", d.read("b", 1, SIZE - 1), at=SIZE - 1)

    with Memory(d.hook) as memory:
        return d.names(found_dead(memory, [graph], {a, b}))


def only_alone(d: Device) -> Any:
    a, b = d.add("a", "graph"), d.add("b", "graph")
    d.add("out", "io")
    before = {name: d.read(name) for name in "ab"}

    def graph() -> None:
        moved = [bool((d.read(name) != before[name]).any()) for name in "ab"]
        d.write("out", np.full(SIZE, all(moved), np.uint8))

    with Memory(d.hook) as memory:
        return len(found_dead(memory, [graph], {a, b}))


def any_order_of_graphs(d: Device) -> Any:
    a, b = d.add("a", "graph"), d.add("b", "graph")
    d.add("out", "io")

    def writes_a() -> None:
        d.write("a", np.full(SIZE, 1, np.uint8))

    def reads_a_writes_b() -> None:
        d.write("out", d.read("a"))
        d.write("b", np.full(SIZE, 2, np.uint8))

    graphs: list[Callable[[], None]] = [writes_a, reads_a_writes_b]
    with Memory(d.hook) as memory:
        return [d.names(found_dead(memory, order, {a, b})) for order in (graphs, graphs[::-1])]


def an_index_is_never_nonsense(d: Device) -> Any:
    """A live index among the bytes is only ever one of those that were there, or off by one."""
    a = d.add("a", "graph")
    d.add("out", "io")
    d.write("a", np.arange(SIZE // 4, dtype=np.uint32))
    seen = [0, 0]

    def graph() -> None:
        index = int(d.read("a", 4).view(np.uint32)[0])
        seen[:] = min(seen[0], index), max(seen[1], index)
        d.write("out", d.read("out", 4), at=4 * (index % 100))

    with Memory(d.hook) as memory:
        return [d.names(found_dead(memory, [graph], {a})), seen[1] <= SIZE // 4]


def addresses_are_not_tried(d: Device) -> Any:
    a, b, c = (d.add(name, "graph") for name in "abc")
    assert a + SIZE + 100 < b
    d.write("a", np.array([b + 5], np.uint64), at=CHUNK + 8)
    d.write("b", np.array([a + SIZE + 100], np.uint64), at=8)  # between allocations
    with Memory(d.hook) as memory:
        return d.names(found_dead(memory, [lambda: None], {a, b, c}))


def everything_is_put_back(d: Device) -> Any:
    a, b = d.add("a", "graph"), d.add("b", "default")
    d.add("kv", "kv", BIG, zero=True)
    with arena("host"):
        host = int(call("cuMemHostAlloc", 5000, 0))
    d.at["pinned"] = host
    d.write("pinned", np.arange(5000) % 251)
    before = {name: d.read(name, size) for name, size in (("a", SIZE), ("b", SIZE), ("kv", BIG), ("pinned", 5000))}
    count = [0]

    def graph() -> None:
        count[0] += 1
        d.write("a", np.full(SIZE, 3, np.uint8))
        d.write("kv", d.read("b"), at=BIG // 3)
        d.write("pinned", np.full(9, count[0], np.uint8), at=10)

    with Memory(d.hook) as memory:
        found_dead(memory, [graph, graph], {a, b})
    return [bool((d.read(name, len(data)) == data).all()) for name, data in before.items()]


def big_and_sparse(d: Device) -> Any:
    """What is alike throughout costs nothing, so the snapshot is of what has content."""
    a = d.add("a", "graph")
    d.add("kv", "kv", BIG, zero=True)
    d.write("kv", np.full(1000, 9, np.uint8), at=BIG - 5000)
    before = d.used()

    def graph() -> None:
        d.write("a", np.full(SIZE, 3, np.uint8))
        d.write("kv", d.read("a"), at=BIG // 2)

    with Memory(d.hook) as memory:
        dead = d.names(found_dead(memory, [graph], {a}))
        taken = d.used() - before
    whole = d.read("kv", BIG)
    return [dead, taken < BIG // 8, int((whole != 0).sum()), d.used() - before]


def _wild(d: Device, content: np.ndarray | None) -> tuple[Callable[[], None], int]:
    """A graph that stores where the first word of ``a`` says, which is the first chunk of the cache unless changed."""
    a = d.add("a", "graph", CHUNK)
    d.write("a", np.array([0, 5], np.uint32))
    d.write("a", np.array([5], np.uint32), at=CHUNK - 4)
    d.add("kv", "kv", 8 * CHUNK, zero=True)
    for chunk in range(1, 8) if content is not None else ():
        d.write("kv", content, at=chunk * CHUNK)

    def graph() -> None:
        d.write("kv", np.full(100, 1, np.uint8), at=int(d.read("a", 4).view(np.uint32)[0]) % 8 * CHUNK)

    return graph, a


def wild_write_into_sameness(d: Device) -> Any:
    """The mutated replay writes a chunk that no plain one wrote: the range is alive and the chunk is put back."""
    graph, a = _wild(d, None)
    with Memory(d.hook) as memory:
        dead = d.names(found_dead(memory, [graph], {a}))
    return [dead, int(d.read("kv", 8 * CHUNK).any())]


def wild_write_into_content(d: Device) -> Any:
    """The same where chunks have content and there is room to keep them."""
    content = d.draw.integers(0, 256, CHUNK, np.uint8)
    graph, a = _wild(d, content)
    before = d.read("kv", 8 * CHUNK)
    with Memory(d.hook, room=lambda: (0, 1 << 24)) as memory:
        dead = d.names(found_dead(memory, [graph], {a}))
    return [dead, bool((d.read("kv", 8 * CHUNK) == before).all())]


def wild_write_without_room(d: Device) -> Any:
    """The same where there is room for half of them only: the control run must not go on."""
    graph, a = _wild(d, d.draw.integers(0, 256, CHUNK, np.uint8))
    with Memory(d.hook, room=_scarce(4)) as memory:
        try:
            return d.names(found_dead(memory, [graph], {a}))
        except FoundrydError as error:
            return [error.reason, str(error)]


def _scarce(chunks: int) -> Callable[[], tuple[int, int]]:
    """Room for so many chunks when a state is taken, one at a time; what is asked for later is there."""
    asked = [0]

    def room() -> tuple[int, int]:
        asked[0] += 1
        return (0 if asked[0] == chunks + 1 else CHUNK, 0)

    return room


def room_goes_to_what_replays_write(d: Device) -> Any:
    """Sixteen chunks of cache with content, room for eight, and the replay writes the last two: they are kept."""
    a = d.add("a", "graph", CHUNK)
    d.add("kv", "kv", 16 * CHUNK)
    before = d.read("kv", 16 * CHUNK)

    def graph() -> None:
        d.write("a", np.full(CHUNK, 3, np.uint8))
        d.write("kv", np.full(CHUNK, 4, np.uint8), at=14 * CHUNK + CHUNK // 2)

    with Memory(d.hook, room=_scarce(8)) as memory:
        dead = d.names(found_dead(memory, [graph], {a}))
    after = d.read("kv", 16 * CHUNK)
    return [dead, bool((after[: 14 * CHUNK] == before[: 14 * CHUNK]).all())]


def noise_in_one_state_only(d: Device) -> Any:
    """A scale matters once there is something to scale."""
    d.add("kv", "kv", zero=True)
    d.add("out", "io")
    words = np.array([3, 4, 5, 6], np.uint32)
    nodes = np.zeros(1, _hook.node_dtype)
    nodes["param_bytes"] = words.nbytes
    empty = (np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype))
    graph = Graph(("g",), nodes, *empty, words.view(np.uint8))

    def replay_with(params: np.ndarray) -> None:
        d.write("out", d.read("kv").astype(np.uint32) * params.view(np.uint32)[0])

    d.at["out"] = d.add("wide", "io", 4 * SIZE)
    rows = np.zeros(2, noise_dtype)
    rows["offset"], rows["width"] = graph.param_start() + np.array([0, 8]), 4
    found = []
    with Memory(d.hook) as memory:
        for state in (0, 1):
            d.write("kv", np.full(SIZE, state, np.uint8))
            memory.begin([])
            proven = prove_noise(memory, graph, rows, [graph.params ^ 1], replay_with, np.random.default_rng(0))
            found.append((proven["offset"] - graph.param_start()).tolist())
    return found


def each_graph_in_its_own_state(d: Device) -> Any:
    """A schedule in one buffer is for one graph; without one a graph does nothing, with another's it goes astray."""
    a, b = d.add("a", "graph"), d.add("b", "graph")
    d.add("schedule", "io", zero=True)
    d.add("out", "io")
    with arena("host"):
        d.at["pinned"] = int(call("cuMemHostAlloc", 4096, 0))
    d.write("pinned", np.zeros(4096, np.uint8))
    before = {name: d.read(name, 4096) for name in d.at}
    seen: set[tuple[int, int, int]] = set()

    def graph(i: int) -> None:
        plan, pinned = (int(d.read(name, 4).view(np.uint32)[0]) for name in ("schedule", "pinned"))
        seen.add((i, plan, pinned))
        d.write("b", np.full(SIZE, 3, np.uint8))
        if plan:
            d.write("out", d.read("a" if i == 1 else "b"))

    def schedule(i: int) -> None:
        d.write("schedule", np.full(SIZE // 4, i + 1, np.uint32))
        d.write("pinned", np.full(4, i + 1, np.uint32))

    replays = [partial(graph, i) for i in range(3)]
    with Memory(d.hook) as memory:
        memory.begin(replays)
        resting = d.names(prove_dead(memory, replays, {a, b}))
        rested, _ = set(seen), seen.clear()
        working = d.names(prove_dead(memory, replays, {a, b}, state_of=lambda i: memory.moved(partial(schedule, i))))
    left = all((d.read(name, 4096) == data).all() for name, data in before.items())
    return [resting, working, sorted(rested), sorted(seen), bool(left)]


def a_state_without_room(d: Device) -> Any:
    """What a state of one graph writes must find room, too."""
    d.add("a", "graph", CHUNK)
    d.add("kv", "kv", 8 * CHUNK, zero=True)
    with Memory(d.hook, room=_scarce(1)) as memory:
        memory.begin([])
        try:
            with memory.moved(lambda: d.write("kv", d.draw.integers(0, 256, 8 * CHUNK, np.uint8))):
                return None
        except FoundrydError as error:
            return [error.reason, str(error)]


def snapshots_are_given_back(d: Device) -> Any:
    a = d.add("a", "graph")
    before = d.used()
    for _ in range(3):
        with Memory(d.hook, room=free_room) as memory:
            found_dead(memory, [lambda: d.write("a", np.full(SIZE, 1, np.uint8))], {a})
    return d.used() - before


def seconds_for_gigabytes(d: Device) -> Any:
    """64 graphs over 2 GiB, half of which is content that may be dead: how many ranges are, and how long that took."""
    size = 64 << 20
    for i in range(16):
        d.add(f"a{i}", "graph", size)
    d.add("kv", "kv", 1 << 30, zero=True)

    def graph(i: int) -> None:
        call("cuMemsetD8", d.at[f"a{i % 16}"], i, size)
        call("cuMemsetD8", d.at["kv"] + i * size // 4, i + 1, 1 << 20)
        call("cuCtxSynchronize")

    begin = perf_counter()
    with Memory(d.hook) as memory:
        dead = found_dead(memory, [partial(graph, i) for i in range(64)], set(d.at.values()) - {d.at["kv"]})
    return [len(dead), perf_counter() - begin]


SCENES = {
    scene.__name__: scene
    for scene in (
        written_before_read, partly_written, only_alone, any_order_of_graphs, an_index_is_never_nonsense,
        addresses_are_not_tried, everything_is_put_back, big_and_sparse, wild_write_into_sameness,
        wild_write_into_content, wild_write_without_room, room_goes_to_what_replays_write, noise_in_one_state_only,
        each_graph_in_its_own_state, a_state_without_room, snapshots_are_given_back, seconds_for_gigabytes,
    )
}  # fmt: skip


def main() -> None:
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    print(json.dumps(SCENES[sys.argv[1]](Device())))


if __name__ == "__main__":
    main()
