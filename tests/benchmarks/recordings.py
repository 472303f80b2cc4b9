# SPDX-License-Identifier: Apache-2.0
"""Recordings of a synthetic decoder: what two captures of its one rank would leave, garbage included."""

from __future__ import annotations

import numpy as np
from synthetic import BASE, KERNELS, STRIDE, Decoder, Shape

from foundryd import _native
from foundryd._native import _hook, _rankpatch
from foundryd.archive.dtypes import noise_dtype
from foundryd.archive.identity import MachineIdentity
from foundryd.archive.index import Function
from foundryd.capture.canonical import Graph
from foundryd.capture.recording import ModuleRecord, Proofs, Recording
from foundryd.rankpatch.infer import RankView
from foundryd.rankpatch.noise import noise_candidates


def recording(decoder: Decoder, seed: int) -> Recording:
    """One capture; garbage is of few values, so that some of it is equal in two."""
    random = np.random.default_rng(seed)
    values = random.integers(0, 1 << 32, 300, dtype=np.uint32)
    graphs = []
    for number in range(decoder.shape.graphs):
        parts = decoder.graph(number)
        params = parts.params.copy()
        params.view("<u4")[decoder.garbage] = random.choice(values, len(decoder.garbage))
        graphs.append(Graph(("decode", number), parts.nodes, parts.edges, parts.attributes, params))
    facts = {"driver": "580.159.04", "cuda": "13.0", "compute_capability": "9.0", "sm_count": 132}
    allocations = np.zeros(1, _hook.allocation_dtype)
    allocations["address"], allocations["bytes"], allocations["live"] = BASE, 4096, 1
    return Recording(
        variant="tp=1",
        world=1,
        rank=0,
        identity=MachineIdentity.of(facts).fields,
        arena_base=BASE,
        arena_stride=STRIDE,
        allocations=allocations,
        graphs=graphs,
        functions=[Function(0, kernel.name, kernel.bytes, kernel.fields, []) for kernel in KERNELS],
        modules=[ModuleRecord(0, _native.image("decoder").read_bytes())],
        symbols=[],
        relocations=np.zeros(0, _rankpatch.relocation_dtype),
        communicators=[],
        comm_ops=np.zeros(0, _hook.comm_op_dtype),
        contents=[],
    )


def captured(**shape: int) -> tuple[Recording, Recording]:
    """A rank and its control, which has proven all that differs between them to be noise."""
    decoder = Decoder(Shape(world=1, affine=0, tables=0, relocations=0, **shape))
    rank, control = recording(decoder, 1), recording(decoder, 2)
    views = [RankView(0, [graph.block for graph in one.graphs]) for one in (control, rank)]
    words = noise_candidates(*views, rank.fields()[: len(rank.graphs)])
    control.proofs = Proofs([], words, np.zeros(0, noise_dtype), True)
    return rank, control
