# SPDX-License-Identifier: Apache-2.0
"""The control run: a captured rank again, which compares itself with the other recordings and proves what it can."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd._native import _hook
from foundryd.capture.canonical import Graph
from foundryd.capture.proofs import Memory, prove_dead, prove_noise
from foundryd.capture.recording import Recording
from foundryd.errors import CaptureError
from foundryd.rankpatch.infer import RankView
from foundryd.rankpatch.noise import noise_candidates
from foundryd.session.building import Bindings, BuiltGraph, SmallGraphs
from foundryd.session.driver import call
from foundryd.session.native import CapturedGraph


def prove(
    hook: _hook.Hook,
    ours: Recording,
    references: Sequence[Recording],
    natives: Sequence[CapturedGraph],
    module_ids: Sequence[int],
) -> dict[str, Any]:
    """What the control run proves: ``proven_dead`` [[address, bytes]], ``proven_noise`` [[block, offset, width]].

    Raises ``CaptureError`` if no reference is a capture of the same rank.
    """
    same = next((r for r in references if r.rank == ours.rank), None)
    if same is None:
        ranks = sorted(r.rank for r in references)
        raise CaptureError(
            f"the control run repeats rank {ours.rank}, but the recordings beside it are of ranks {ranks}"
        )
    stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    try:
        memory = Memory(hook)
        contents = {c.address for recording in (ours, *references) for c in recording.contents}
        dead = prove_dead(memory, [_replay(n, stream) for n in natives], contents)
        noise = _prove_noise(hook, module_ids, ours, same, memory, stream)
    finally:
        call("cuStreamDestroy", stream)
    sizes = dict(memory.ranges)
    return {"proven_dead": [[a, sizes[a]] for a in sorted(dead)], "proven_noise": noise}


def _replay(native: CapturedGraph, stream: Any) -> Callable[[], None]:
    def run() -> None:
        native.replay(int(stream))
        call("cuStreamSynchronize", stream)

    return run


def _prove_noise(
    hook: _hook.Hook, module_ids: Sequence[int], ours: Recording, same: Recording, memory: Memory, stream: Any
) -> list[list[int]]:
    members = len(ours.graphs)
    words = noise_candidates(
        RankView(ours.rank, ours.blocks()[:members]),
        RankView(ours.rank, same.blocks()[:members]),
        ours.fields()[:members],
    )
    if not len(words):
        return []
    generator = np.random.default_rng(ours.rank)
    bindings = Bindings(hook, module_ids, ours.functions, ours.symbols)
    small = SmallGraphs(hook)
    proven: list[list[int]] = []
    try:
        small.issue(ours.comm_ops)
        for block in np.unique(words["block"]).tolist():
            graph = ours.graphs[block]
            relocations = ours.relocations[ours.relocations["block"] == block]

            def replay_with(params: np.ndarray, graph: Graph = graph, relocations: np.ndarray = relocations) -> None:
                changed = np.concatenate([graph.block[: graph.param_start()], params])
                bindings.relocate(changed, relocations)
                built = BuiltGraph(
                    hook,
                    graph.nodes,
                    graph.edges,
                    graph.attributes,
                    changed[graph.param_start() :],
                    bindings.functions,
                    small.handles,
                )
                try:
                    built.launch(int(stream))
                    call("cuStreamSynchronize", stream)
                finally:
                    built.close()

            candidates = words[words["block"] == block]
            other = same.graphs[block].params
            found = prove_noise(memory, graph, candidates, other, replay_with, generator)
            proven += [[block, *word] for word in found]
    finally:
        small.close()
    return proven
