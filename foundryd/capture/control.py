# SPDX-License-Identifier: Apache-2.0
"""The control run: a captured rank again, which compares itself with the other recordings and proves what it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd._native import _hook
from foundryd.capture.canonical import template_key
from foundryd.capture.journal import FORGETFUL, Journal
from foundryd.capture.proofs import prove_dead, prove_noise
from foundryd.capture.recording import Proofs, Recording
from foundryd.capture.snapshots import Bytes, Memory
from foundryd.errors import CaptureError
from foundryd.rankpatch.infer import RankView
from foundryd.rankpatch.noise import Strays, noise_candidates, stray_candidates
from foundryd.session.building import Bindings, BuiltGraph, SmallGraphs
from foundryd.session.driver import call
from foundryd.session.native import CapturedGraph

# How often an engine that can is asked to put itself into another state.
_VARIED = 2


@dataclass(frozen=True)
class Trials:
    """How the proofs are made.

    Attributes
    ----------
    journal : knows the trials that are fatal and not made.
    vary : puts the engine into another state, see ``GraphSet.finish``; every proof is made again from each.
    strays : words that differ between ranks and follow no rule, to prove harmless too; only tried with ``vary``.
    """

    journal: Journal = FORGETFUL
    vary: Callable[[int], None] | None = None
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
    noise of a member is proven to do no harm with what that one's template has in its place, too.
    Raises ``CaptureError`` if no reference is a capture of the same rank.
    """
    same = next((r for r in references if r.rank == ours.rank), None)
    if same is None:
        ranks = sorted(r.rank for r in references)
        raise CaptureError(
            f"the control run repeats rank {ours.rank}, but the recordings beside it are of ranks {ranks}"
        )
    journal, vary = trials.journal, trials.vary
    stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        windows = hook.windows()
        with (
            Memory(hook, windows=windows, rank=ours.rank) as memory,
            # Harmless in one state says too little of what the rank may decide.
            _Suspects(hook, module_ids, ours, references, trials.strays if vary is not None else (), stream) as words,
        ):
            # What this rank sees of its peers they see of this rank, and no replay here shows what theirs read.
            dead = {c.address for recording in (ours, *references) for c in recording.contents}
            dead -= {int(window["origin"]) for window in windows}
            for seed in (None, *(range(_VARIED) if vary is not None else ())):
                journal.enter_state(seed)
                if vary is not None and seed is not None:
                    vary(seed)
                    call("cuCtxSynchronize")
                dead = prove_dead(memory, [_replay(n, stream) for n in natives], dead, journal)
                words.prove(memory, journal)
            return Proofs(sorted(dead), words.proven(strays=False), words.proven(strays=True), vary is not None)
    finally:
        call("cuStreamDestroy", stream)


def _replay(native: CapturedGraph, stream: Any) -> Callable[[], None]:
    def run() -> None:
        native.rehearse(int(stream))
        call("cuStreamSynchronize", stream)

    return run


def _comparable(one: Recording, other: Recording) -> bool:
    """Whether two ranks may turn out to be of one class."""
    return [len(g.block) for g in one.graphs] == [len(g.block) for g in other.graphs]


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
        fields = ours.fields()[:members]
        view, *views = (RankView(r.rank, r.blocks()[:members]) for r in (ours, *alike))
        noise = noise_candidates(view, views[0], fields, others=views[1:])
        extra = stray_candidates(view, views, strays, noise)
        in_kernels = np.zeros(len(extra), bool)
        for block in np.unique(extra["block"]).tolist():
            mine = extra["block"] == block
            in_kernels[mine] = ours.graphs[block].in_kernels(extra["offset"][mine])
        extra = extra[in_kernels]
        self._strays = _positions(extra)
        self._words = np.sort(np.concatenate([noise, extra]), order=("block", "offset"))
        self._generator = np.random.default_rng(ours.rank)
        self._small = SmallGraphs(hook)
        if len(self._words):
            self._bindings = Bindings(hook, module_ids, ours.functions, ours.symbols)
            try:
                self._small.issue(ours.comm_ops)
            except BaseException:
                self._small.close()
                raise

    def prove(self, memory: Memory, journal: Journal) -> None:
        """Keeps the words that are noise with memory as it is."""
        kept = []
        for block in np.unique(self._words["block"]).tolist():
            graph, others = self._ours.graphs[block], [r.graphs[block].params for r in self._others]
            others += self._stored[block : block + 1]
            mine = self._words[self._words["block"] == block]
            replay = self._replay_with(block)
            kept.append(prove_noise(memory, graph, mine, others, replay, self._generator, journal))
        if kept:
            self._words = np.concatenate(kept)

    def proven(self, *, strays: bool) -> np.ndarray:
        """The words that are left and are strays or not, as rows of ``noise_dtype``."""
        return np.asarray(self._words[np.isin(_positions(self._words), self._strays) == strays])

    def __enter__(self) -> _Suspects:
        return self

    def __exit__(self, *_: object) -> None:
        self._small.close()

    def _replay_with(self, block: int) -> Callable[[np.ndarray], None]:
        graph = self._ours.graphs[block]
        relocations = self._ours.relocations[self._ours.relocations["block"] == block]

        def run(params: np.ndarray) -> None:
            changed = np.concatenate([graph.block[: graph.param_start()], params])
            self._bindings.relocate(changed, relocations)
            built = BuiltGraph(
                self._hook,
                graph.nodes,
                graph.edges,
                graph.attributes,
                changed[graph.param_start() :],
                self._bindings.functions,
                self._small.handles,
            )
            try:
                built.launch(int(self._stream))
                call("cuStreamSynchronize", self._stream)
            finally:
                built.close()

        return run
