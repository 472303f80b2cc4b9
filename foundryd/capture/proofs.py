# SPDX-License-Identifier: Apache-2.0
"""What a control run proves by replaying its own graphs.

*Dead*: the bytes of an allocation before a replay do not change what the replay computes, so they need not be
archived although they differ between ranks.  *Noise*: a parameter word differs between two captures of one rank, and
no output depends on it.  Both are proved by changing the bytes and comparing all memory that the graphs can write.
A proof that cannot be made is simply not made; nothing is taken for dead or noise without one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from foundryd.capture.canonical import Graph
from foundryd.capture.journal import FORGETFUL, Journal
from foundryd.capture.snapshots import Bytes, Memory, Mutation
from foundryd.errors import UsageError
from foundryd.rankpatch.noise import span_bytes

# Gentle ones first: an index or a pointer among the bytes stays one of those that were there, or is off by one.  Only
# what none of these disturbs, in any graph, is overwritten with patterns that would send an index astray.  The patterns
# are neither a valid index nor an address, but finite as float32 and float16; two, so that a value which happens to
# equal one of them is still seen.
_MUTATIONS = (
    (Mutation(shift=True), Mutation(flip=True)),
    (Mutation(fill=0x5A), Mutation(fill=0x2D)),
)

_BYTE = 0xFFFFFFFF  # of a place, the byte of the parameters

StateOf = Callable[[int], AbstractContextManager[None]]
"""By the number of a graph: inside, memory starts as that graph's replays need it, see ``Memory.moved``."""


def prove_dead(
    memory: Memory,
    replays: Sequence[Callable[[], None]],
    candidates: set[int],
    journal: Journal = FORGETFUL,
    state_of: StateOf | None = None,
    *,
    graphs: Sequence[int] | None = None,
    gently: bool = True,
) -> set[int]:
    """Those of ``candidates`` (addresses of ranges) whose prior bytes no replay depends on.

    ``replays`` run one graph each, the same way each time, and wait for it; ``graphs`` are their numbers.  A range
    that seems to hold addresses of memory is not tried.  Without ``gently`` all are overwritten at once, as is right
    for what was tried gently in another state of the engine.  What is found holds for memory as ``begin`` took it or,
    for each graph, as ``state_of`` puts it; memory is left as ``begin`` took it.
    """
    suspects = memory.movable(candidates)
    how = 0 if gently else len(_MUTATIONS[0])
    for mutations in _MUTATIONS if gently else _MUTATIONS[1:]:
        for graph, replay in zip(range(len(replays)) if graphs is None else graphs, replays, strict=True):
            if not suspects:
                break
            with nullcontext() if state_of is None else state_of(graph):
                if state_of is not None:
                    suspects = memory.movable(suspects)
                memory.restore()
                replay()
                # One plain replay does for all mutations, since each trial is compared with what it left.
                suspects = memory.note_plain(suspects)
                for number, mutation in enumerate(mutations, how):
                    key = journal.here("dead", number, graph)
                    suspects = _Trial(memory, replay, mutation, journal, key).survivors(suspects)
        how += len(mutations)
    memory.restore()
    return suspects


@dataclass
class _Trial:
    """One graph, one mutation: which ranges may be mutated before a replay without changing what it leaves behind."""

    memory: Memory
    replay: Callable[[], None]
    mutation: Mutation
    journal: Journal
    key: tuple[Any, ...]

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
        def trial() -> bool:
            self.memory.restore()
            self.memory.mutate(mutated, self.mutation)
            self.replay()
            return self.memory.unmoved(mutated, self.mutation)

        return self.journal.attempt((*self.key, sorted(mutated)), trial)


def prove_noise(
    memory: Memory,
    graph: Graph,
    words: np.ndarray,
    others: Sequence[Bytes],
    replay_with: Callable[[np.ndarray], None],
    generator: np.random.Generator,
    journal: Journal = FORGETFUL,
    live: set[int] | None = None,
    unsteady: set[Any] | None = None,
) -> np.ndarray:
    """Those of ``words`` that outputs do not depend on, ascending; ``words`` are rows of ``noise_dtype``.

    ``others`` are the parameters in other captures, of this rank first; in each byte of the words one of them differs.
    ``replay_with(params)`` runs the graph with changed ones and waits.  A trial that was fatal to a word is not made
    with the same byte of the same function's parameters in other nodes.  Words outside the parameters (functions,
    launch dimensions) are never noise.  What is found holds for memory as it was taken (``Memory.begin``, ``moved``),
    and memory is left like that.

    ``live`` are places of words that were not harmless in other graphs.  They are tried apart from the rest, which
    takes fewer trials where graphs are alike, and proves as much; this graph's are added.

    A graph of which two plain replays differ is not tried, and its key is added to ``unsteady``.
    """
    words = words[words["offset"] >= graph.param_start()]
    if not len(words):
        return words
    plain = partial(replay_with, graph.params)
    memory.adopt([plain])
    memory.restore()
    plain()
    memory.note_plain(set())
    memory.restore()
    plain()
    if not memory.unmoved(set(), None):
        if unsteady is not None:
            unsteady.add(graph.key)
        memory.restore()
        return words[:0]
    live = set() if live is None else live

    # Gently first: the values that the engine itself gave the words at other times.  Only what none of these disturbs
    # is overwritten with bits that would send an index or a pointer astray.
    def survivors(chosen: np.ndarray, how: str, values: Bytes) -> np.ndarray:
        return _Perturbation(memory, graph, values, replay_with, journal, how, live).survivors(chosen)

    places = span_bytes(words["offset"], words["width"]) - graph.param_start()
    given = [other[places] for other in others]
    if not np.any([values != graph.params[places] for values in given], axis=0).all():
        raise UsageError("a byte to perturb is equal in all captures: a kernel may read it, so do not suspect it")
    for number, (other, values) in enumerate(zip(others, given, strict=True)):
        # A capture that has what another has in all the words says nothing new.
        if not any(np.array_equal(values, earlier) for earlier in given[:number]):
            words = survivors(words, f"as in capture {number}", other)
    wild = graph.params ^ generator.integers(1, 256, len(graph.params), np.uint8)
    words = survivors(words, "at random", wild)
    words = words[np.argsort(words["offset"], kind="stable")]
    memory.restore()
    return words


@dataclass
class _Perturbation:
    """Other values for some words of a graph: which of them may take these without changing what a replay leaves."""

    memory: Memory
    graph: Graph
    values: Bytes
    replay_with: Callable[[np.ndarray], None]
    journal: Journal
    how: str
    live: set[int]

    def survivors(self, words: np.ndarray) -> np.ndarray:
        """Tries all at once, then halves; place by place where several at once were fatal before."""
        together = self.journal.here("noise", repr(self.graph.key), self.how, "several")
        left = self.journal.here("noise", repr(self.graph.key), self.how, "left")
        if self.journal.fatal:
            words = np.concatenate([words[:0], *(g for key, g in self._by_place(words) if key not in self.journal)])
        if not len(words):
            return words
        if together not in self.journal:
            if self._harmless(together, words):
                return words
            kept = self._apart(together, words)
        else:
            tried = [g if self._harmless(key, g) else self._halved(key, g) for key, g in self._by_place(words)]
            kept = np.concatenate(tried)
        return kept if len(kept) == 0 or self._harmless(left, kept) else kept[:0]

    def _apart(self, key: tuple[Any, ...], words: np.ndarray) -> np.ndarray:
        """What survives of words that are not harmless together: those where others were live, and the rest."""
        places = self._places(words)
        known = np.isin(places, list(self.live))
        parts = [p for p in (words[~known], words[known]) if len(p)]
        if len(parts) == 1:
            kept = self._halved(key, words)
        else:
            kept = np.concatenate([p if self._harmless(key, p) else self._halved(key, p) for p in parts])
        self.live.update(places[~np.isin(words["offset"], kept["offset"])].tolist())
        return kept

    def _by_place(self, words: np.ndarray) -> list[tuple[tuple[Any, ...], np.ndarray]]:
        """Words of one meaning, the same bytes of one function's parameters, and the key of their trial.

        Launches find other words, so that those of one place are what the journal can know.
        """
        if not len(words):
            return []
        distinct, group = np.unique(self._places(words), return_inverse=True)
        order = np.argsort(group, kind="stable")
        parts = np.split(words[order], np.flatnonzero(np.diff(group[order])) + 1)
        keys = [("noise", self.how, f"byte {place & _BYTE} of function {place >> 32}") for place in distinct.tolist()]
        return list(zip(keys, parts, strict=True))

    def _places(self, words: np.ndarray) -> np.ndarray:
        """A number for the function and the byte of its parameters, int64 [words]."""
        nodes, within = self.graph.nodes_at(words["offset"])
        return np.asarray(self.graph.nodes["function"][nodes].astype(np.int64) << 32 | within)

    def _halved(self, key: tuple[Any, ...], words: np.ndarray) -> np.ndarray:
        """What survives of words that are not harmless together."""
        if len(words) == 1:
            return words[:0]
        half = len(words) // 2
        parts = (words[:half], words[half:])
        return np.concatenate([p if self._harmless(key, p) else self._halved(key, p) for p in parts])

    def _harmless(self, key: tuple[Any, ...], words: np.ndarray) -> bool:
        def trial() -> bool:
            params = self.graph.params.copy()
            changed = span_bytes(words["offset"], words["width"]) - self.graph.param_start()
            params[changed] = self.values[changed]
            self.memory.restore()
            self.replay_with(params)
            return self.memory.unmoved(set(), None)

        return self.journal.attempt(key, trial)
