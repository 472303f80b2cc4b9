# SPDX-License-Identifier: Apache-2.0
"""The control run: a captured rank again, which compares itself with the other recordings and proves what it can."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd._native import _hook
from foundryd.archive.dtypes import noise_dtype
from foundryd.capture.canonical import field_table, template_key
from foundryd.capture.journal import FORGETFUL, Journal
from foundryd.capture.proofs import StateOf, prove_dead, prove_noise
from foundryd.capture.recording import Proofs, Recording
from foundryd.capture.rehearsal import Rehearsal
from foundryd.capture.snapshots import Bytes, Memory
from foundryd.errors import CaptureError
from foundryd.rankpatch.infer import RankView
from foundryd.rankpatch.noise import Strays, address_candidates, noise_candidates, stray_candidates
from foundryd.session.building import Bindings, SmallGraphs
from foundryd.session.driver import call
from foundryd.session.native import CapturedGraph
from foundryd.session.vary import Vary

# How often an engine that can is asked to put itself into another state.
_VARIED = 2


@dataclass(frozen=True)
class Trials:
    """How the proofs are made.

    Attributes
    ----------
    journal : knows the trials that are fatal and not made.
    vary : puts the engine into other states; every proof is made again from each.
    strays : words that differ between ranks and follow no rule, to prove harmless too; only tried in other states.
    """

    journal: Journal = FORGETFUL
    vary: Vary = field(default_factory=Vary)
    strays: Strays = ()


def prove(
    hook: _hook.Hook,
    ours: Recording,
    references: Sequence[Recording],
    natives: Sequence[CapturedGraph],
    module_ids: Sequence[int],
    trials: Trials,
) -> Proofs:
    """What the control run proves.

    ``references`` are the recordings to compare with; the first is the one that other ranks will be described by, and
    noise of a member is proven to do no harm with what that one's template has in its place, too.  Where several
    controls share the graphs (``Journal.graphs``), it is what this one proves of its own.
    Raises ``CaptureError`` if no reference is a capture of the same rank.
    """
    same = next((r for r in references if r.rank == ours.rank), None)
    if same is None:
        ranks = sorted(r.rank for r in references)
        raise CaptureError(
            f"the control run repeats rank {ours.rank}, but the recordings beside it are of ranks {ranks}"
        )
    journal = trials.journal
    seconds: dict[str, float] = {}
    stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        windows = hook.windows()
        mine = journal.graphs(len(natives))
        replays = [_replay(natives[graph], stream) for graph in mine]
        keys = [graph.key for graph in ours.graphs]
        # Harmless in one state says too little of what the rank may decide.
        strays = trials.strays if trials.vary else ()
        with (
            Memory(hook, windows=windows, rank=ours.rank) as memory,
            _Suspects(hook, module_ids, ours, references, mine, strays, stream) as words,
        ):
            # What this rank sees of its peers they see of this rank, and no replay here shows what theirs read.
            dead = {c.address for recording in (ours, *references) for c in recording.contents}
            dead -= {int(window["origin"]) for window in windows}
            for seed in (None, *(range(_VARIED) if trials.vary else ())):
                journal.enter_state(seed)
                state = _State(memory, keys, seed, trials.vary)
                state.enter()
                began = time.monotonic()
                memory.begin([state.prepared(graph, replay) for graph, replay in zip(mine, replays, strict=True)])
                state_of = state.of if state.by_graph else None
                kept = time.monotonic()
                dead = prove_dead(memory, replays, dead, journal, state_of, graphs=mine, gently=seed is None)
                tried = time.monotonic()
                words.prove(memory, journal, state_of)
                spent = {"memory": kept - began, "dead": tried - kept, "noise": time.monotonic() - tried}
                seconds |= {f"{part}, state {seed}": took for part, took in spent.items()}
            noise, proven_strays = words.proven(strays=False), words.proven(strays=True)
            unsteady = [place for place, key in enumerate(keys) if key in words.unsteady]
            return Proofs(sorted(dead), noise, proven_strays, bool(trials.vary), seconds, unsteady)
    finally:
        call("cuStreamDestroy", stream)


@dataclass(frozen=True)
class _State:
    """The engine in the state of a seed, or as the capture left it."""

    memory: Memory
    keys: Sequence[Any]
    seed: int | None
    vary: Vary

    @property
    def by_graph(self) -> bool:
        """Whether each graph has one of its own."""
        return self.seed is not None and self.vary.graph is not None

    def enter(self) -> None:
        """Makes what all graphs have in common."""
        if self.seed is not None and self.vary.engine is not None:
            self.vary.engine(self.seed)
        call("cuCtxSynchronize")

    def of(self, graph: int) -> AbstractContextManager[None]:
        """Inside, memory is as that graph needs it."""
        return self.memory.moved(partial(self._enter_for, graph))

    def prepared(self, graph: int, replay: Callable[[], None]) -> Callable[[], None]:
        """The replay of a graph from what all have in common."""

        def run() -> None:
            self._enter_for(graph)
            replay()

        return run

    def _enter_for(self, graph: int) -> None:
        if self.seed is not None and self.vary.graph is not None:
            self.vary.graph(self.keys[graph], self.seed)
            call("cuCtxSynchronize")


def _replay(native: CapturedGraph, stream: Any) -> Callable[[], None]:
    def run() -> None:
        native.rehearse(int(stream))
        call("cuStreamSynchronize", stream)

    return run


def _comparable(one: Recording, other: Recording) -> bool:
    """Whether two ranks may turn out to be of one class."""
    sizes, others = ([(len(g.nodes), len(g.params)) for g in r.graphs] for r in (one, other))
    return sizes == others


def _positions(words: np.ndarray) -> np.ndarray:
    """A number for each word's place, uint64."""
    return np.asarray(words["block"].astype(np.uint64) << np.uint64(32) | words["offset"])


class _Suspects:
    """The words that differ between two captures of one rank, and strays; fewer with each proof that they fail."""

    def __init__(
        self,
        hook: _hook.Hook,
        module_ids: Sequence[int],
        ours: Recording,
        references: Sequence[Recording],
        mine: Sequence[int],
        strays: Strays,
        stream: Any,
    ) -> None:
        same = next(r for r in references if r.rank == ours.rank)
        alike = [same, *(r for r in references if _comparable(r, ours) and r is not same)]
        self._hook, self._ours, self._others, self._stream = hook, ours, alike, stream
        self._stored: list[Bytes] = []  # for each graph the parameters of its template's first, as they will be stored
        if _comparable(references[0], ours):
            firsts: dict[bytes, Bytes] = {}
            for graph, described in zip(ours.graphs, references[0].graphs, strict=True):
                self._stored.append(firsts.setdefault(template_key(graph), described.params))
        members = len(ours.graphs)
        numbers = np.array(mine, np.uint32)
        layouts = [f.fields for f in ours.functions]
        fields = [field_table(ours.graphs[graph].nodes, layouts) for graph in mine]
        view, *views = (RankView(r.rank, [r.graphs[graph].block for graph in mine]) for r in (ours, *alike))
        noise = noise_candidates(view, views[0], fields, others=views[1:])
        places = {graph: place for place, graph in enumerate(mine)}
        own = [(places[block], offset, width) for block, offset, width in strays if block in places]
        beside = address_candidates([view, *views], noise)
        extra = np.concatenate([beside, stray_candidates(view, views, own, np.concatenate([noise, beside]))])
        for rows in (noise, extra):
            rows["block"] = numbers[rows["block"]]
        in_kernels = np.zeros(len(extra), bool)
        for block in np.unique(extra["block"]).tolist():
            at = extra["block"] == block
            in_kernels[at] = ours.graphs[block].in_kernels(extra["offset"][at])
        extra = extra[in_kernels]
        words = noise
        if len(extra):
            words = np.concatenate([noise, extra])
            words = words[np.argsort(_positions(words), kind="stable")]
        self._strays = _positions(extra)
        bounds = np.searchsorted(words["block"], np.arange(members + 1))
        self._words = [words[first:last] for first, last in pairwise(bounds.tolist())]  # by block
        self._live: set[int] = set()  # places of words that some graph needs
        self.unsteady: set[Any] = set()  # keys of graphs that do not do the same twice
        self._generator = np.random.default_rng(ours.rank)
        self._small = SmallGraphs(hook)
        if len(words):
            self._bindings = Bindings(hook, module_ids.__getitem__, ours.functions, ours.symbols)
            self._bindings.need_all()
            try:
                self._small.issue(ours.comm_ops)
            except BaseException:
                self._small.close()
                raise

    def prove(self, memory: Memory, journal: Journal, state_of: StateOf | None = None) -> None:
        """Keeps the words that are noise with memory as it was taken, or as ``state_of`` puts it for each graph."""
        for block, mine in enumerate(self._words):
            if not len(mine):
                continue
            graph, others = self._ours.graphs[block], [r.graphs[block].params for r in self._others]
            others += self._stored[block : block + 1]
            with nullcontext() if state_of is None else state_of(block), self._rehearsal(block) as rehearsal:
                self._words[block] = prove_noise(
                    memory, graph, mine, others, rehearsal.replay, self._generator, journal, self._live, self.unsteady
                )

    def proven(self, *, strays: bool) -> np.ndarray:
        """The words that are left and are strays or not, as rows of ``noise_dtype``."""
        words = np.concatenate([np.zeros(0, noise_dtype), *self._words])
        return np.asarray(words[np.isin(_positions(words), self._strays) == strays])

    def __enter__(self) -> _Suspects:
        return self

    def __exit__(self, *_: object) -> None:
        self._small.close()

    def _rehearsal(self, block: int) -> Rehearsal:
        relocations = self._ours.relocations[self._ours.relocations["block"] == block]
        graph = self._ours.graphs[block]
        return Rehearsal(self._hook, graph, relocations, self._bindings, self._small, int(self._stream))
