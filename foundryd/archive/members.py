# SPDX-License-Identifier: Apache-2.0
"""Graphs in an archive: many members, one template, and the words in which they differ by column.

A graph's *block* is what a rank must reproduce of it: nodes, parameters, then the blocks of its child graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foundryd.archive.dtypes import Records, core, records
from foundryd.archive.index import Index, Template, Variant
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.errors import ArchiveFormatError, NotInArchiveError, UsageError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class GraphParts:
    """A graph as the hook reads and builds it.

    Attributes
    ----------
    nodes, edges, attributes : arrays of fdy_node, fdy_edge, fdy_attribute.
    params : uint8 [bytes], the parameter block that nodes point into; a multiple of 4 long.
    children : graphs of the child nodes.
    """

    nodes: npt.NDArray[Any]
    edges: npt.NDArray[Any]
    attributes: npt.NDArray[Any]
    params: Bytes
    children: tuple[GraphParts, ...] = ()

    def walk(self) -> Iterator[GraphParts]:
        """This graph, then every graph below it, in the order of the block."""
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass(frozen=True)
class PackedTemplate:
    """Blocks of one length as a first one and differences.

    Attributes
    ----------
    base : uint8 [bytes], the first block.
    positions : uint32 [rows], offsets of the words that differ.
    columns : uint32 [rows][blocks], what each block adds to the first one's word, modulo 2**32.
    """

    base: Bytes
    positions: Words
    columns: Words


def graph_block(graph: GraphParts) -> Bytes:
    """The graph's block, a copy: uint8 [bytes]."""
    return np.concatenate(_pieces(graph))


def split_block(block: Bytes, template: GraphParts) -> GraphParts:
    """A graph whose nodes and parameters are views of ``block``, everything else being the template's."""
    graph, end = _split(block, 0, template)
    if end != block.nbytes:
        raise UsageError(f"the block has {block.nbytes} bytes and the template {end}: pass a block of that template")
    return graph


def pack_template(blocks: Sequence[Bytes]) -> PackedTemplate:
    """Finds the words in which blocks differ.

    Parameters
    ----------
    blocks : at least one, uint8 [bytes] each, of one length, which is a multiple of 4.

    Raises
    ------
    UsageError
        There is no block, or the lengths are not as they must be.
    """
    if not blocks:
        raise UsageError("a template needs a member: pass at least one block")
    base = _bytes(blocks[0])
    if base.nbytes % 4 or any(block.nbytes != base.nbytes for block in blocks):
        raise UsageError(
            f"the members of a template have blocks of {sorted({block.nbytes for block in blocks})} bytes: they have "
            "to be "
            "equally long and a multiple of 4"
        )
    first = base.view("<u4")
    words = [_bytes(block).view("<u4") for block in blocks]
    differ = np.zeros(len(first), bool)
    for member in words[1:]:
        differ |= member != first
    places = np.flatnonzero(differ)
    columns = np.empty((len(places), len(blocks)), "<u4")
    for column, member in enumerate(words):
        columns[:, column] = member[places] - first[places]
    return PackedTemplate(base, (places * 4).astype("<u4"), columns)


def add_template(writer: ArchiveWriter, graphs: Sequence[GraphParts], members: Sequence[int]) -> Template:
    """Stores graphs that share a template and returns its entry.

    Parameters
    ----------
    graphs : one a member, equal in edges, attributes, children and block length.
    members : their places in the variant's members.

    Raises
    ------
    UsageError
        They do not share a template.
    """
    if len(graphs) != len(members) or not graphs:
        raise UsageError(
            f"{len(graphs)} graphs are not {len(members)} members: pass one graph a member, and at least one"
        )
    shape = [_fixed(graph) for graph in graphs[0].walk()]
    for member, graph in zip(members, graphs, strict=True):
        if [_fixed(part) for part in graph.walk()] != shape:
            raise UsageError(
                f"member {member} differs from member {members[0]} in edges, attributes or sizes: give it another "
                "template"
            )
    packed = pack_template([graph_block(graph) for graph in graphs])
    template = _store(writer, graphs[0])
    return Template(
        nodes=template.nodes,
        edges=template.edges,
        attributes=template.attributes,
        params=template.params,
        # Positions repeat from layer to layer, their differences more so.
        positions=writer.put_matrix("positions", packed.positions.reshape(1, -1)),
        columns=writer.put_matrix("columns", packed.columns),
        members=list(members),
        children=template.children,
    )


class TemplateReader:
    """A template, ready to give members.

    Attributes
    ----------
    first : the first member's graph, read-only.
    base : uint8 [bytes] each, the first member's block in pieces, read-only; copied nowhere before a member is made.
    nbytes : length of a block.
    positions : uint32 [rows].
    columns : uint32 [rows][members], what each member adds to the block's word.

    Raises
    ------
    ArchiveFormatError
        Its sections do not fit one another; and what reading sections raises.
    """

    def __init__(self, reader: ArchiveReader, template: Template, dtypes: Records | None = None) -> None:
        self.template = template
        self.first = read_graph(reader, template, dtypes or records())
        self.base = _pieces(self.first)
        self.nbytes = sum(piece.nbytes for piece in self.base)
        self.positions: Words = reader.array(template.positions, "<u4")
        rows, cols = len(self.positions), len(template.members)
        flat = reader.array(template.columns, "<u4")
        if flat.size != rows * cols:
            raise ArchiveFormatError(
                f"section {template.columns} of {reader.name} has {flat.size} words, not those of {rows} positions in "
                f"{cols} members: capture again"
            )
        if self.nbytes % 4 or (rows and (int(self.positions.max()) >= self.nbytes or np.any(self.positions & 3))):
            raise ArchiveFormatError(
                f"section {template.positions} of {reader.name} points outside the words of a block of "
                f"{self.nbytes} bytes: capture again"
            )
        self.columns: Words = flat.reshape(rows, cols)
        self._column_of = {member: column for column, member in enumerate(template.members)}
        self._near = _Near(self.columns)

    def column_of(self, member: int) -> int:
        """The column of a member, by its place in the variant; raises ``ArchiveFormatError`` if it is not one of it."""
        column = self._column_of.get(member)
        if column is None:
            raise ArchiveFormatError(f"member {member} is not one of the template that it names: capture again")
        return column

    def fill(self, column: int, block: Bytes) -> None:
        """Makes the block of the member in that column in ``block``, of ``nbytes``, whatever was in it."""
        core().expand(block, self.base, self.positions, *self._near.where(column))

    def give_back(self) -> None:
        """Lets go of what making members needed; the next one gets it anew."""
        self._near.give_back()

    def block(self, column: int) -> Bytes:
        """The block of the member in that column, a writable copy: uint8 [bytes]."""
        block = np.empty(self.nbytes, np.uint8)
        self.fill(column, block)
        return block

    def graph(self, column: int) -> GraphParts:
        """The graph of the member in that column; its nodes and parameters may be written."""
        return split_block(self.block(column), self.first)


class _Near:
    """Columns of a matrix, in one piece each where their neighbours are wanted as well.

    Each word of a column among many lies in a cache line of its own, with words of neighbours that nobody wants yet. So
    who wants a second of these gets them all turned once, until each was wanted: a restore comes to every member,
    mostly in order, and then uses none of them again. Their memory stays for the next ones until it is given back.
    """

    _COUNT = 16  # words of a cache line

    def __init__(self, columns: Words) -> None:
        self._columns = columns
        self._first = -1  # of the neighbours that were asked for last
        self._wanted: set[int] = set()
        self._memory: Words = np.empty((0, len(columns)), "<u4")
        self._turned: Words | None = None

    def give_back(self) -> None:
        """Lets go of memory; the next columns get it anew."""
        self._memory, self._turned, self._first = self._memory[:0].copy(), None, -1

    def where(self, column: int) -> tuple[Words, int]:
        """A matrix with as many rows, and which of its columns is the one asked for."""
        count = self._columns.shape[1]
        first = column - column % self._COUNT
        if first != self._first:
            self._first, self._turned = first, None
            self._wanted.clear()
        self._wanted.add(column)
        neighbours = min(self._COUNT, count - first)
        if self._turned is None and count > self._COUNT and 1 < len(self._wanted) < neighbours:
            if len(self._memory) < neighbours:
                self._memory = np.empty((neighbours, len(self._columns)), "<u4")
            self._turned = self._memory[:neighbours]
            core().turn(self._turned, self._columns, first)
        if self._turned is None:
            return self._columns, column
        found = self._turned[column - first].reshape(-1, 1)
        if len(self._wanted) == neighbours:
            self._turned = None
            self._wanted.clear()
        return found, 0


def read_graph(reader: ArchiveReader, template: Template, dtypes: Records) -> GraphParts:
    """The first member's graph of a template, or a child graph; zero-copy where sections are raw."""
    return GraphParts(
        nodes=reader.array(template.nodes, dtypes.node),
        edges=reader.array(template.edges, dtypes.edge),
        attributes=reader.array(template.attributes, dtypes.attribute),
        params=reader.array(template.params, np.uint8),
        children=tuple(read_graph(reader, child, dtypes) for child in template.children),
    )


def member_block(reader: ArchiveReader, variant: Variant, member: int, dtypes: Records | None = None) -> Bytes:
    """The block of one member, a writable copy: uint8 [bytes].  For many members keep a ``TemplateReader``.

    Raises
    ------
    NotInArchiveError
        The variant has no such member.
    ArchiveFormatError
        Its template is damaged.
    """
    if not 0 <= member < len(variant.members):
        raise NotInArchiveError(
            f"variant {variant.name} of {reader.name} has {len(variant.members)} graphs, not number {member}: capture "
            "again"
        )
    number = variant.members[member].template
    if not 0 <= number < len(variant.templates) or member not in variant.templates[number].members:
        raise ArchiveFormatError(
            f"member {member} of variant {variant.name} says template {number}, which does not have it: capture again"
        )
    template = variant.templates[number]
    return TemplateReader(reader, template, dtypes).block(template.members.index(member))


def block_bytes(reader: ArchiveReader, variant: Variant, number: int, dtypes: Records | None = None) -> Bytes:
    """The reference bytes of any block of the variant, a writable copy: uint8 [bytes].

    Raises
    ------
    NotInArchiveError
        The variant has no such block.
    """
    if not 0 <= number < len(variant.blocks):
        raise NotInArchiveError(
            f"variant {variant.name} of {reader.name} has {len(variant.blocks)} blocks, not number {number}: capture "
            "again"
        )
    block = variant.blocks[number]
    if block.kind == "member":
        return member_block(reader, variant, block.index, dtypes)
    return reader.array(block_section(variant, number), np.uint8).copy()


def block_section(variant: Variant, number: int) -> str:
    """Name of the section with the bytes of a block that is not a member's; raises ``ArchiveFormatError``."""
    block = variant.blocks[number]
    if block.kind == "comm_ops":
        return variant.comm_ops
    if block.kind == "content" and 0 <= block.index < len(variant.contents):
        return variant.contents[block.index].section
    if block.kind == "windows" and variant.windows is not None:
        return variant.windows.section
    if block.kind == "global" and block.section:
        return block.section
    raise ArchiveFormatError(
        f"block {number} of variant {variant.name} is {block.kind} {block.index}, which has no bytes: capture again"
    )


def find_variant(index: Index, name: str, rank: int) -> Variant:
    """The variant of that name whose rank class has the rank; an empty name means the only one there is.

    Raises
    ------
    NotInArchiveError
        There is none.
    """
    names = sorted({variant.name for variant in index.variants})
    if not name and len(names) == 1:
        name = names[0]
    if name not in names:
        raise NotInArchiveError(
            f"the archive has no variant {name!r}, it has {', '.join(names) or 'none'}: choose one of these or capture "
            "it"
        )
    variants = [variant for variant in index.variants if variant.name == name]
    for variant in variants:
        if rank in variant.rank_class.ranks:
            return variant
    raise NotInArchiveError(
        f"variant {name} of the archive has a world of {variants[0].world} and nothing for rank {rank}: start ranks "
        "that it "
        "has, or capture again"
    )


def find_member(variant: Variant, key: Any) -> int:
    """Place of the member that the engine called ``key``; tuples and lists are the same.

    Raises
    ------
    NotInArchiveError
        There is none.
    """
    wanted = plain_key(key)
    for place, member in enumerate(variant.members):
        if plain_key(member.key) == wanted:
            return place
    raise NotInArchiveError(
        f"variant {variant.name} has no graph {key!r} among its {len(variant.members)}: capture it, or use a key that "
        "it has"
    )


def plain_key(key: Any) -> Any:
    """A key in the hashable form in which keys are compared; ``1`` and ``True`` stay apart."""
    if isinstance(key, list | tuple):
        return tuple(plain_key(part) for part in key)
    if key is None or isinstance(key, bool | int | float | str | bytes):
        return (type(key).__name__, key)
    raise UsageError(f"{key!r} cannot name a graph: use text, numbers, or tuples of them")


def _store(writer: ArchiveWriter, graph: GraphParts) -> Template:
    return Template(
        nodes=writer.put("nodes", graph.nodes),
        edges=writer.put("edges", graph.edges),
        attributes=writer.put("attributes", graph.attributes),
        params=writer.put("params", graph.params),
        positions="",
        columns="",
        members=[],
        children=[_store(writer, child) for child in graph.children],
    )


def _fixed(graph: GraphParts) -> tuple[int, bytes, bytes, int, int]:
    edges, attributes = graph.edges.tobytes(), graph.attributes.tobytes()
    return graph.nodes.nbytes, edges, attributes, graph.params.nbytes, len(graph.children)


def _split(block: Bytes, offset: int, template: GraphParts) -> tuple[GraphParts, int]:
    nodes_end = offset + template.nodes.nbytes
    params_end = nodes_end + template.params.nbytes
    children = []
    end = params_end
    for child in template.children:
        part, end = _split(block, end, child)
        children.append(part)
    nodes = block[offset:nodes_end].view(template.nodes.dtype)
    return GraphParts(nodes, template.edges, template.attributes, block[nodes_end:params_end], tuple(children)), end


def _pieces(graph: GraphParts) -> list[Bytes]:
    return [piece for g in graph.walk() for piece in (_bytes(g.nodes), _bytes(g.params))]


def _bytes(array: npt.NDArray[Any]) -> Bytes:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8) if array.nbytes else np.empty(0, np.uint8)
