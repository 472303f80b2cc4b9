# SPDX-License-Identifier: Apache-2.0
"""Archives as large as those of a real decoder, made without one: kernels, words that follow batch size or rank, noise.

A layer has 17 kernels of 20 kinds, with parameter blocks of 100 to 1,000 bytes and one of 4 KB in every second layer;
36 layers are the 612 kernel nodes of a graph.  The kernels exist in the image ``decoder`` of the software driver
(``hook/testing/decoder.cpp``), so that the graphs can be built.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from foundryd import _native
from foundryd.archive.dtypes import Records, records, template_noise_dtype
from foundryd.archive.identity import MachineIdentity
from foundryd.archive.index import Block, Communicator, Content, Function, Index, Member, Module, RankClass, Symbol
from foundryd.archive.index import Variant as VariantEntry
from foundryd.archive.members import GraphParts, add_template
from foundryd.archive.writer import ArchiveWriter

BASE, STRIDE = 0x600000000000, 1 << 38
DEFAULT, WEIGHTS, IO, GRAPH = 0, 1, 3, 4
NONE = 0xFFFFFFFF
AFFINE, TABLE = 0, 1
EP = 3
LAYER = 17  # kernels


@dataclass(frozen=True)
class Kernel:
    """Parameters of a kernel: pointers, numbers of 4 bytes, and a struct by value, in this order."""

    name: str
    pointers: int
    numbers: int
    struct: int

    @property
    def fields(self) -> list[tuple[int, int]]:
        """(offset, bytes) of each."""
        first, after = 8 * self.pointers, 8 * self.pointers + 4 * self.numbers
        return [
            *((8 * i, 8) for i in range(self.pointers)),
            *((first + 4 * i, 4) for i in range(self.numbers)),
            (after + after % 8, self.struct),
        ]

    @property
    def bytes(self) -> int:
        return sum(self.fields[-1])


KERNELS = [
    Kernel(*row)
    for row in (
        ("norm_in", 4, 4, 64),
        ("qkv_gemm", 5, 8, 640),
        ("rope", 6, 6, 64),
        ("kv_write", 6, 8, 96),
        ("attention", 8, 12, 512),
        ("attention_merge", 4, 6, 64),
        ("out_gemm", 5, 8, 640),
        ("norm_post", 4, 4, 64),
        ("router", 4, 6, 128),
        ("top_k", 6, 4, 64),
        ("permute", 6, 6, 128),
        ("up_gemm", 6, 8, 832),
        ("activate", 4, 4, 64),
        ("down_gemm", 6, 8, 832),
        ("combine", 6, 6, 96),
        ("add", 4, 4, 64),
        ("exchange", 2, 2, 4096),
        ("quantize", 4, 4, 128),
        ("shared_up", 6, 8, 448),
        ("sample", 6, 6, 256),
    )
]
_ODD_LAYER = {8: 17, 10: 18, 16: 19}  # kinds that stand for others in every second layer


@dataclass(frozen=True)
class Shape:
    """How large an archive is.

    Attributes
    ----------
    graphs, templates : members in all, and how many templates they share, in turn.
    nodes : kernels of a graph.
    world : ranks of the one variant, ``ep=world``.
    affine, tables, noise : words of a graph that follow the rank, by a table of ranks, or nothing.
    relocations : words of a graph that hold the address of a global.
    programmatic : edges of a graph that let a kernel begin before the one before it ends.
    """

    graphs: int = 512
    templates: int = 4
    nodes: int = 36 * LAYER
    world: int = 64
    affine: int = 12
    tables: int = 1
    noise: int = 120
    relocations: int = 36
    programmatic: int = 0


class Decoder:
    """The graphs and rules of a shape; ``write`` makes the archive."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.dtypes: Records = records()
        random = np.random.default_rng(7)
        place = np.arange(shape.nodes)
        kinds = place % LAYER
        odd = place // LAYER % 2 == 1
        for even_kind, odd_kind in _ODD_LAYER.items():
            kinds[odd & (kinds == even_kind)] = odd_kind
        self.kinds = kinds
        sizes = np.array([kernel.bytes for kernel in KERNELS])[kinds]
        padded = (sizes + 15) // 16 * 16
        offsets = np.cumsum(padded) - padded
        params = np.zeros(int(padded.sum()) // 4, "<u4")
        # By position: what a batch of one adds, and which words each member has values of its own for.
        step = np.zeros(len(params), "<u4")
        own = []
        garbage, pointers, numbers = [], [], []
        constant = [random.integers(0, 1 << 20, k.bytes // 4 + 1, dtype=np.uint32) for k in KERNELS]
        for number, kind in enumerate(kinds.tolist()):
            kernel, first = KERNELS[kind], int(offsets[number]) // 4
            params[first : first + kernel.bytes // 4] = constant[kind][: kernel.bytes // 4]
            arena = BASE + GRAPH * STRIDE
            for i in range(kernel.pointers):
                address = arena + int(random.integers(1 << 24)) * 512
                params[first + 2 * i], params[first + 2 * i + 1] = address & 0xFFFFFFFF, address >> 32
            own.append(first + 2 * (number % kernel.pointers))
            pointers.append(first + 2 * ((number + 1) % kernel.pointers))
            counts = first + 2 * kernel.pointers
            step[counts : counts + 2] = (1, 4096 * (1 + kind % 3))
            numbers.append(counts + kernel.numbers - 1)
            struct = kernel.fields[-1][0] // 4 + first
            step[struct + 4] = kind % 2 * 128
            garbage += list(range(struct + 9, struct + kernel.struct // 4, 2))  # the upper half of each 8 bytes
        self.params, self.step, self.offsets, self.sizes = params, step, offsets, sizes
        self.own = np.array(own[::3])
        self.garbage = np.sort(random.choice(garbage, min(shape.noise, len(garbage)), replace=False))
        self.ranked = np.sort(random.choice(numbers, min(shape.affine + shape.tables, len(numbers)), replace=False))
        self.relocated = np.sort(random.choice(pointers, min(shape.relocations, len(pointers)), replace=False))
        edges = [(i, i + 1) for i in range(shape.nodes - 1)]
        edges += [(i, i + 3) for i in range(0, shape.nodes - 3, LAYER)]
        self.edges = np.zeros(len(edges), self.dtypes.edge)
        self.edges["from"], self.edges["to"] = np.array(sorted(edges), np.uint32).reshape(-1, 2).T
        early = np.flatnonzero(self.edges["to"] == self.edges["from"] + 1)
        early = early[np.arange(shape.programmatic) * len(early) // max(shape.programmatic, 1)]
        self.edges["from_port"][early], self.edges["type"][early] = 1, 1

    def batch(self, member: int) -> int:
        """The batch size of a member."""
        return member + 1 if member < 8 else 8 * (member - 6)

    def graph(self, member: int) -> GraphParts:
        """The graph of one member, as the reference rank captures it."""
        nodes = np.zeros(self.shape.nodes, self.dtypes.node)
        batch, number = self.batch(member), np.arange(self.shape.nodes)
        nodes["function"] = self.kinds
        nodes["grid"] = np.stack([np.where(number % 2, batch, 1 + self.kinds), 1 + number % 3, 1 + 0 * number], axis=1)
        nodes["block"] = (128, 1, 1)
        nodes["shared_bytes"] = 1024 * (self.kinds % 4)
        nodes["param_kind"] = 1
        nodes["param_offset"], nodes["param_bytes"] = self.offsets, self.sizes
        nodes["attribute_first"], nodes["attribute_count"] = number, 1
        nodes["comm_group"] = nodes["child"] = NONE
        attributes = np.zeros(self.shape.nodes, self.dtypes.attribute)
        attributes["id"] = 8  # the priority, by which templates differ
        attributes["value"][:, 0] = member % self.shape.templates
        random = np.random.default_rng(1000 + member)
        params = self.params + self.step * np.uint32(batch)
        # Buffers of a batch lie where the pool had room.
        params[self.own] += np.cumsum(random.integers(0, 64, len(self.own))).astype(np.uint32) * np.uint32(512)
        # What is noise has in every member the values of the template's first one.
        garbage = np.random.default_rng(2000 + member % self.shape.templates)
        params[self.garbage] = garbage.integers(0, 1 << 32, len(self.garbage), dtype=np.uint32)
        return GraphParts(nodes, self.edges, attributes, params.view(np.uint8))

    @property
    def start(self) -> int:
        """Offset of the parameters in a block."""
        return self.shape.nodes * self.dtypes.node.itemsize

    def rules(self) -> tuple[Any, Any]:
        """Rules of all members, and the tables."""
        tabled = self.ranked[: self.shape.tables]
        one = np.zeros(len(self.ranked), self.dtypes.rule)
        one["offset"], one["width"] = self.start + 4 * self.ranked, 4
        one["kind"] = np.where(np.isin(self.ranked, tabled), TABLE, AFFINE)
        affine, table = one["kind"] == AFFINE, one["kind"] == TABLE
        one["coordinate"] = np.where(affine, EP, 0)
        one["base"], one["stride"] = np.where(affine, 1000, 0), np.where(affine, 8, 0)
        rules = np.tile(one, self.shape.graphs)
        rules["block"] = np.repeat(np.arange(self.shape.graphs), len(one))
        rows = self.shape.graphs * int(table.sum())
        rules["table"][rules["kind"] == TABLE] = np.arange(rows) * self.shape.world
        tables = np.random.default_rng(3).integers(0, 1 << 32, rows * self.shape.world, dtype=np.uint64)
        return rules, tables

    def noise(self, members: list[list[int]]) -> Any:
        """The noise of templates with these members."""
        one = np.zeros(len(self.garbage), template_noise_dtype)
        one["offset"], one["width"] = self.start + 4 * self.garbage, 4
        out = np.tile(one, len(members))
        out["template"] = np.repeat(np.arange(len(members)), len(one))
        out["members"] = np.repeat([len(places) for places in members], len(one))
        return out

    def relocations(self) -> Any:
        """Those of all members."""
        one = np.zeros(len(self.relocated), self.dtypes.relocation)
        one["offset"], one["addend"] = self.start + 4 * self.relocated, 16 * (np.arange(len(one)) % 16)
        out = np.tile(one, self.shape.graphs)
        out["block"] = np.repeat(np.arange(self.shape.graphs), len(one))
        return out

    def write(self, path: Path) -> Path:
        """Writes the archive and returns its path."""
        with ArchiveWriter(path) as writer:
            variant = self._variant(writer)
            facts = {"driver": "580.159.04", "cuda": "13.0", "compute_capability": "9.0", "sm_count": 132}
            identity = MachineIdentity.of(facts).fields
            writer.finish(Index("archive", "2026-01-01T00:00:00Z", "foundryd test", identity, [variant]))
        return path

    def _variant(self, writer: ArchiveWriter) -> VariantEntry:
        shape = self.shape
        image = writer.add_image(_native.image("decoder").read_bytes())
        members = [list(range(t, shape.graphs, shape.templates)) for t in range(min(shape.templates, shape.graphs))]
        templates = [add_template(writer, [self.graph(m) for m in places], places) for places in members]
        content = writer.put("content", bytes(range(256)) * 16)
        comm_ops = writer.put("comm_ops", np.zeros(0, self.dtypes.comm_op))
        rules, tables = self.rules()
        allocations = np.array([(BASE + DEFAULT * STRIDE, 4096, DEFAULT, 0, 1, 0)], self.dtypes.allocation)
        return VariantEntry(
            name=f"ep={shape.world}",
            world=shape.world,
            rank_class=RankClass(list(range(shape.world)), sorted({0, shape.world // 2, shape.world - 1}), 0, None),
            arena_base=BASE,
            arena_stride=STRIDE,
            allocations=writer.put("allocations", allocations),
            functions=[Function(0, kernel.name, kernel.bytes, kernel.fields, []) for kernel in KERNELS],
            modules=[Module(0, [image])],
            symbols=[Symbol(0, "scales")],
            templates=templates,
            members=[
                Member(["decode", size], m % shape.templates, {"a": [BASE + GRAPH * STRIDE, [size], "<i4"]})
                for m, size in enumerate(map(self.batch, range(shape.graphs)))
            ],
            communicators=[Communicator(shape.world, ["ep"])],
            comm_ops=comm_ops,
            contents=[Content(BASE + DEFAULT * STRIDE, 4096, DEFAULT, content, shape.graphs + 1)],
            blocks=[
                *(Block("member", m) for m in range(shape.graphs)),
                Block("comm_ops", 0),
                Block("content", 0),
            ],
            rules=writer.put("rules", rules),
            tables=writer.put("tables", tables),
            relocations=writer.put("relocations", self.relocations()),
            template_noise=writer.put_rows("noise", self.noise(members)) if self.shape.noise else "",
        )
