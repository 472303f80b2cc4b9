# SPDX-License-Identifier: Apache-2.0
"""What a control run proves by replaying its own graphs.

*Dead*: the bytes of an allocation before a replay do not change what the replay computes, so they need not be
archived although they differ between ranks.  *Noise*: a parameter word differs between two captures of one rank, and
no output depends on it.  Both are proved by changing the bytes and comparing all memory that the graphs can write.
A proof that cannot be made is simply not made; nothing is taken for dead or noise without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from foundryd.capture.canonical import Graph
from foundryd.session.arena import ARENAS

# Weights are what no graph writes; they are left out of the snapshots.
_WATCHED = tuple(ARENAS.index(a) for a in ("default", "kv", "io", "graph", "host"))
# Two patterns, so that a value which happens to equal one of them is still seen; neither is a valid index, both are
# finite as float32 and float16.
_PATTERNS = (0x5A, 0x2D)


class Memory:
    """Snapshots of every watched live allocation."""

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        allocations = hook.allocations()
        watched = np.isin(allocations["arena"], _WATCHED) & (allocations["live"] == 1)
        self.ranges: list[tuple[int, int]] = [(int(a["address"]), int(a["bytes"])) for a in allocations[watched]]

    def read(self) -> dict[int, np.ndarray]:
        """Bytes of each range by address."""
        return {a: self._hook.download(a, n) for a, n in self.ranges}

    def write(self, bytes_of: dict[int, np.ndarray]) -> None:
        """Puts a snapshot, or part of one, back."""
        for address, data in bytes_of.items():
            self._hook.upload(address, data)


def prove_dead(memory: Memory, replays: Iterable[Callable[[], None]], candidates: set[int]) -> set[int]:
    """Those of ``candidates`` (addresses of ranges) whose prior bytes no replay depends on.

    ``replays`` run one graph each and wait for it.
    """
    start = memory.read()
    suspects = {a for a in candidates if a in start}
    for replay in replays:
        memory.write(start)
        replay()
        plain = memory.read()
        suspects = _dead_for(memory, replay, start, plain, suspects)
        if not suspects:
            break
    memory.write(start)
    return suspects


def _dead_for(
    memory: Memory,
    replay: Callable[[], None],
    start: dict[int, np.ndarray],
    plain: dict[int, np.ndarray],
    suspects: set[int],
) -> set[int]:
    """Halves the suspects until every group either leaves the replay alone or is a single live range."""
    if not suspects or _unmoved(memory, replay, start, plain, suspects):
        return suspects
    if len(suspects) == 1:
        return set()
    ordered = sorted(suspects)
    half = len(ordered) // 2
    low, high = set(ordered[:half]), set(ordered[half:])
    kept = _dead_for(memory, replay, start, plain, low) | _dead_for(memory, replay, start, plain, high)
    # Ranges that are harmless alone may not be harmless together.
    return kept if _unmoved(memory, replay, start, plain, kept) else set()


def _unmoved(
    memory: Memory,
    replay: Callable[[], None],
    start: dict[int, np.ndarray],
    plain: dict[int, np.ndarray],
    poisoned: set[int],
) -> bool:
    for pattern in _PATTERNS:
        memory.write(start)
        memory.write({a: np.full(len(start[a]), pattern, np.uint8) for a in poisoned})
        replay()
        for address, after in memory.read().items():
            same = after == plain[address]
            if address in poisoned:
                # A byte that no replay writes keeps the poison, as it kept its old value before.
                same |= (plain[address] == start[address]) & (after == pattern)
            if not same.all():
                return False
    return True


def prove_noise(
    memory: Memory,
    graph: Graph,
    words: np.ndarray,
    replay_with: Callable[[np.ndarray], None],
    generator: np.random.Generator,
) -> list[tuple[int, int]]:
    """Those of ``words`` that outputs do not depend on, as (offset, width); ``words`` are rows of ``noise_dtype``.

    ``replay_with(params)`` runs the graph with other parameters and waits.  Words outside the parameters (functions,
    launch dimensions) are never noise.
    """
    words = words[words["offset"] >= graph.param_start()]
    start = memory.read()
    replay_with(graph.params)
    plain = memory.read()

    def harmless(rows: np.ndarray) -> bool:
        params = graph.params.copy()
        for row in rows:
            at, width = int(row["offset"]) - graph.param_start(), int(row["width"])
            params[at : at + width] ^= generator.integers(1, 256, width, np.uint8)
        memory.write(start)
        replay_with(params)
        return all((after == plain[address]).all() for address, after in memory.read().items())

    if len(words) and not harmless(words):
        words = words[[harmless(words[i : i + 1]) for i in range(len(words))]]
    memory.write(start)
    return [(int(w["offset"]), int(w["width"])) for w in words]
