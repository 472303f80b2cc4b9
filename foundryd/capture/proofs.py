# SPDX-License-Identifier: Apache-2.0
"""What a control run proves by replaying its own graphs.

*Dead*: the bytes of an allocation before a replay do not change what the replay computes, so they need not be
archived although they differ between ranks.  *Noise*: a parameter word differs between two captures of one rank, and
no output depends on it.  Both are proved by changing the bytes and comparing all memory that the graphs can write.
A proof that cannot be made is simply not made; nothing is taken for dead or noise without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from foundryd._native import _hook
from foundryd.capture.canonical import Graph
from foundryd.session.arena import ARENAS

# Weights are what no graph writes; they are left out of the snapshots.
_WATCHED = tuple(ARENAS.index(a) for a in ("default", "kv", "io", "graph", "host"))
# Bytes that are neither a valid index nor an address, but finite as float32 and float16; two, so that a value which
# happens to equal one of them is still seen.
_PATTERNS = (0x5A, 0x2D)

Bytes = npt.NDArray[np.uint8]
Mutation = Callable[[Bytes], Bytes]


def _rotated(data: Bytes) -> Bytes:
    """The same 4-byte words, each one place on."""
    out = data.copy()
    words = out[: len(out) // 4 * 4].view(np.uint32)
    words[:] = np.roll(words, 1)
    return out


def _flipped(data: Bytes) -> Bytes:
    """Every 4-byte word with its lowest bit flipped."""
    out = data.copy()
    out[::4] ^= 1
    return out


def _filled(pattern: int, data: Bytes) -> Bytes:
    """As many bytes of one value."""
    return np.full(len(data), pattern, np.uint8)


# Gentle ones first: an index or a pointer among the bytes stays one of those that were there, or is off by one.  Only
# what none of these disturbs, in any graph, is overwritten with patterns that would send an index astray.
_MUTATIONS: tuple[Mutation, ...] = (
    _rotated,
    _flipped,
    *(partial(_filled, pattern) for pattern in _PATTERNS),
)


class Memory:
    """Snapshots of every watched live allocation."""

    def __init__(self, hook: _hook.Hook) -> None:
        self._hook = hook
        allocations = hook.allocations()
        watched = np.isin(allocations["arena"], _WATCHED) & (allocations["live"] == 1)
        self.ranges: list[tuple[int, int]] = [(int(a["address"]), int(a["bytes"])) for a in allocations[watched]]
        live = np.sort(allocations[allocations["live"] == 1], order="address")
        self._starts, self._ends = live["address"].copy(), live["address"] + live["bytes"]

    def read(self) -> dict[int, np.ndarray]:
        """Bytes of each range by address."""
        return {a: self._hook.download(a, n) for a, n in self.ranges}

    def holds_addresses(self, data: Bytes) -> bool:
        """Whether an aligned 8-byte word of ``data`` is an address in a live allocation."""
        words = data[: len(data) // 8 * 8].view(np.uint64)
        places = np.searchsorted(self._starts, words, side="right") - 1
        return bool(((places >= 0) & (words < self._ends[np.maximum(places, 0)])).any()) if len(self._starts) else False

    def write(self, bytes_of: dict[int, np.ndarray]) -> None:
        """Puts a snapshot, or part of one, back."""
        for address, data in bytes_of.items():
            self._hook.upload(address, data)


def prove_dead(memory: Memory, replays: Sequence[Callable[[], None]], candidates: set[int]) -> set[int]:
    """Those of ``candidates`` (addresses of ranges) whose prior bytes no replay depends on.

    ``replays`` run one graph each and wait for it.  A range that seems to hold addresses of memory is not tried.
    """
    start = memory.read()
    suspects = {a for a in candidates if a in start and not memory.holds_addresses(start[a])}
    for mutation in _MUTATIONS:
        for replay in replays:
            if suspects:
                memory.write(start)
                replay()
                suspects = _Trial(memory, replay, start, memory.read(), mutation).survivors(suspects)
    memory.write(start)
    return suspects


@dataclass
class _Trial:
    """One graph, one mutation: which ranges may be mutated before a replay without changing what it leaves behind."""

    memory: Memory
    replay: Callable[[], None]
    start: dict[int, Bytes]
    plain: dict[int, Bytes]
    mutation: Mutation

    def survivors(self, suspects: set[int]) -> set[int]:
        """Halves the suspects until every group either leaves the replay alone or is a single live range."""
        if not suspects or self._unmoved(suspects):
            return suspects
        if len(suspects) == 1:
            return set()
        ordered = sorted(suspects)
        half = len(ordered) // 2
        kept = self.survivors(set(ordered[:half])) | self.survivors(set(ordered[half:]))
        # Ranges that are harmless alone may not be harmless together.
        return kept if self._unmoved(kept) else set()

    def _unmoved(self, mutated: set[int]) -> bool:
        changed = {a: self.mutation(self.start[a]) for a in mutated}
        self.memory.write(self.start)
        self.memory.write(changed)
        self.replay()
        for address, after in self.memory.read().items():
            same = after == self.plain[address]
            if address in changed:
                # A byte that no replay writes keeps the mutation, as it kept its old value before.
                same |= (self.plain[address] == self.start[address]) & (after == changed[address])
            if not same.all():
                return False
        return True


def prove_noise(
    memory: Memory,
    graph: Graph,
    words: np.ndarray,
    other: Bytes,
    replay_with: Callable[[np.ndarray], None],
    generator: np.random.Generator,
) -> list[tuple[int, int]]:
    """Those of ``words`` that outputs do not depend on, as (offset, width); ``words`` are rows of ``noise_dtype``.

    ``other`` are the parameters in the other capture of the rank; ``replay_with(params)`` runs the graph with changed
    ones and waits.  Words outside the parameters (functions, launch dimensions) are never noise.
    """
    words = words[words["offset"] >= graph.param_start()]
    start = memory.read()
    replay_with(graph.params)
    plain = memory.read()

    def harmless(rows: np.ndarray, values: Bytes) -> bool:
        params = graph.params.copy()
        for row in rows:
            at, width = int(row["offset"]) - graph.param_start(), int(row["width"])
            params[at : at + width] = values[at : at + width]
        memory.write(start)
        replay_with(params)
        return all((after == plain[address]).all() for address, after in memory.read().items())

    def survivors(rows: np.ndarray, values: Bytes) -> np.ndarray:
        if not len(rows) or harmless(rows, values):
            return rows
        return rows[[harmless(rows[i : i + 1], values) for i in range(len(rows))]]

    # Gently first: the value that the engine itself gave the word the other time, or a flipped bit where both are alike
    # (a size beside a struct's padding, say).  Only what that does not disturb is overwritten with bits that would send
    # an index or a pointer astray.
    gentle = other.copy()
    gentle[words["offset"][words["differs"] == 0] - graph.param_start()] ^= 1
    words = survivors(words, gentle)
    words = survivors(words, graph.params ^ generator.integers(1, 256, len(graph.params), np.uint8))
    memory.write(start)
    return [(int(w["offset"]), int(w["width"])) for w in words]
