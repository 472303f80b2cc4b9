# SPDX-License-Identifier: Apache-2.0
"""A small archive with one of everything, which tests write as it is or with one thing wrong."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from foundryd.archive.dtypes import Records, noise_dtype, records, template_noise_dtype
from foundryd.archive.identity import MachineIdentity
from foundryd.archive.index import (
    Block,
    Communicator,
    Content,
    Function,
    Global,
    Index,
    Member,
    Module,
    RankClass,
    Symbol,
    Variant,
    Windows,
)
from foundryd.archive.members import GraphParts, add_template
from foundryd.archive.writer import ArchiveWriter

BASE, STRIDE = 0x600000000000, 1 << 38
WEIGHTS, IO, GRAPH = 1, 3, 4
NONE = 0xFFFFFFFF
KERNEL, MEMCPY, MEMSET, EMPTY, CHILD, COMM = range(6)
BATCH_SIZES = (1, 2, 4, 8)
FACTS = {
    "driver": "580.159.04",
    "cuda": "13.0",
    "compute_capability": "9.0",
    "sm_count": 132,
    "nccl": "2.28.9",
    "plugins": ["a", "b"],
    "env.NCCL_ALGO": "Ring",
}

IMAGE = b"image of rank 0 " * 300
OTHER_IMAGE = b"image of rank 1 " * 300


@dataclass
class Draft:
    """What an archive is made of; tests change a part and write it."""

    dtypes: Records
    graphs: list[GraphParts] = field(default_factory=list)
    allocations: Any = None
    comm_ops: Any = None
    rules: Any = None
    tables: Any = None
    relocations: Any = None
    noise: Any = None
    template_noise: Any = None
    content: bytes = b"content!" * 40
    variable: bytes = b"global.."
    windows: Any = None  # fdy_window, and then the archive has windows
    kind: str = "archive"
    images: tuple[bytes, ...] = (IMAGE, OTHER_IMAGE)
    edit: Callable[[Variant], Variant] = lambda variant: variant
    edit_index: Callable[[Index], Index] = lambda index: index

    def __post_init__(self) -> None:
        self.graphs = [make_graph(self.dtypes, size) for size in BATCH_SIZES]
        self.allocations = np.array(
            [
                (BASE + WEIGHTS * STRIDE, 4096, WEIGHTS, 0, 1, 0),
                (BASE + IO * STRIDE, 512, IO, 0, 1, 0),
                (BASE + WEIGHTS * STRIDE + 4096, 4096, WEIGHTS, 1, 0, 0),
                (BASE + GRAPH * STRIDE, 4096, GRAPH, 0, 1, 0),
            ],
            self.dtypes.allocation,
        )
        self.comm_ops = np.array(
            [
                (BASE + IO * STRIDE, BASE + IO * STRIDE, 64, 0, 7, 0, NONE, 0, 0),
                (BASE + IO * STRIDE, BASE + IO * STRIDE, 64, 3, 7, NONE, 1, 1, 1),
            ],
            self.dtypes.comm_op,
        )
        params = self.graphs[0].nodes.nbytes
        self.rules = np.array(
            [
                (0, params + 8, 4, 0, 0, 0, 0, 0, 3),
                (1, params + 8, 4, 1, 0, 0, 1, 0, 0),
                (3, 0, 8, 2, 0, 0, 0, 0, 0),
            ],
            self.dtypes.rule,
        )
        self.tables = np.arange(9, dtype="<u8")
        self.relocations = np.array([(0, params + 16, 0, 0, 24)], self.dtypes.relocation)
        self.noise = np.array(
            [(0, params + 12, 4), (1, params + 12, 4)], noise_dtype
        )  # behind the first kernel's fields
        self.template_noise = np.array([(0, params + 12, 4, 2)], template_noise_dtype)  # of the other two

    def write(self, path: Path) -> Path:
        """Writes the archive and returns its path."""
        with ArchiveWriter(path) as writer:
            variant = self.edit(self._variant(writer))
            identity = MachineIdentity.of(FACTS).fields
            index = Index(
                kind=self.kind,
                created="2026-01-01T00:00:00Z",
                writer="foundryd test",
                identity=identity,
                variants=[variant],
                notes={"capture_ms": 12.5},
            )
            writer.finish(self.edit_index(index))
        return path

    def _variant(self, writer: ArchiveWriter) -> Variant:
        images = [writer.add_image(image) for image in self.images]
        content = writer.put("content", self.content)
        variable = writer.put("global", self.variable)
        template = add_template(writer, self.graphs, list(range(len(self.graphs))))
        windows = None if self.windows is None else Windows(writer.put("windows", self.windows), 5, False)
        return Variant(
            name="ep=8",
            world=8,
            rank_class=RankClass(ranks=list(range(8)), captured=[0, 1, 2, 4, 7], control=1, held_out=3),
            arena_base=BASE,
            arena_stride=STRIDE,
            allocations=writer.put("allocations", self.allocations),
            functions=[
                Function(0, "decode", 16, [(0, 8), (8, 4)], [(8, 65536)]),
                Function(1, "sample", 16, [(0, 8), (8, 8)], []),
            ],
            modules=[
                Module(api=0, digests=images[:1], globals=[Global("state", 3)]),
                Module(api=1, digests=images, by_rank=[0, 1, 1, -1, 1, -1, -1, 1]),
            ],
            symbols=[Symbol(0, "state")],
            templates=[template],
            members=[Member(["decode", size], 0, outputs={"tokens": [1, size]}) for size in BATCH_SIZES],
            communicators=[Communicator(8, ["ep"], None, 1), Communicator(2, None, [0, 4], 0)],
            comm_ops=writer.put("comm_ops", self.comm_ops),
            contents=[Content(BASE + GRAPH * STRIDE + 64, len(self.content), GRAPH, content, 2)],
            blocks=[
                Block("member", 0),
                Block("member", 1),
                Block("content", 0),
                Block("global", 0, variable),
                Block("comm_ops", 0),
                *([] if windows is None else [Block("windows", 0, windows.section)]),
            ],
            rules=writer.put("rules", self.rules),
            tables=writer.put("tables", self.tables),
            relocations=writer.put("relocations", self.relocations),
            windows=windows,
            noise=writer.put_rows("noise", self.noise),
            template_noise=writer.put_rows("noise", self.template_noise),
        )


def make_graph(dtypes: Records, batch_size: int) -> GraphParts:
    """Two kernels, a memset, two placeholders, a child graph with a kernel, and an empty node."""

    def kernel(function: int, offset: int, form: int = 1) -> tuple[Any, ...]:
        grid = (batch_size, 1, 1)
        return (KERNEL, function, grid, (128, 1, 1), 1024 * batch_size, form, offset, 16, 0, 1, NONE, NONE)

    def other(kind: int, form: int, offset: int, size: int, group: int = NONE, child: int = NONE) -> tuple[Any, ...]:
        return (kind, NONE, (0, 0, 0), (0, 0, 0), 0, form, offset, size, 0, 0, group, child)

    params = struct.pack("<QII", BASE + IO * STRIDE, batch_size, 0) + struct.pack("<QQ", BASE + GRAPH * STRIDE, 7)
    params += struct.pack("<QQQQ", BASE + IO * STRIDE, 4, 0, 16 * batch_size)
    nodes = [
        kernel(0, 0),
        kernel(1, 16, form=2),
        other(MEMSET, 3, 32, 32),
        other(COMM, 0, 0, 0, group=0),
        other(COMM, 0, 0, 0, group=1),
        other(CHILD, 0, 0, 0, child=0),
        other(EMPTY, 0, 0, 0),
    ]
    edges = [(0, 1, 0, 0, 0), (1, 2, 0, 0, 0), (1, 3, 1, 0, 1), (3, 4, 0, 0, 0), (4, 5, 0, 0, 0), (5, 6, 0, 0, 0)]
    child = GraphParts(
        np.array([kernel(0, 0)], dtypes.node),
        np.zeros(0, dtypes.edge),
        np.array([(2, 0, [1] * 64)], dtypes.attribute),
        np.frombuffer(struct.pack("<QII", BASE + IO * STRIDE, 3 * batch_size, 0), np.uint8).copy(),
    )
    return GraphParts(
        np.array(nodes, dtypes.node),
        np.array([(*edge, [0] * 5) for edge in edges], dtypes.edge),
        np.array([(1, 0, [2] * 64)], dtypes.attribute),
        np.frombuffer(params, np.uint8).copy(),
        (child,),
    )


@pytest.fixture(scope="session")
def dtypes() -> Records:
    return records()


@pytest.fixture
def draft(dtypes: Records) -> Draft:
    return Draft(dtypes)


@pytest.fixture(scope="session")
def make_draft(dtypes: Records) -> Callable[[], Draft]:
    return lambda: Draft(dtypes)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory, dtypes: Records) -> Path:
    """The archive as it should be; nobody writes to it."""
    return Draft(dtypes).write(tmp_path_factory.mktemp("sample") / "sample.foundry")


@pytest.fixture(scope="session")
def empty_index() -> Index:
    """An index that refers to nothing."""
    return Index(kind="archive", created="2026-01-01T00:00:00Z", writer="foundryd test", identity={}, variants=[])


replace = msgspec.structs.replace
