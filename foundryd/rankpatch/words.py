# SPDX-License-Identifier: Apache-2.0
"""The words of blocks: what a field boundary says about the bytes that differ between captures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from foundryd._native import _rankpatch
from foundryd.errors import UsageError

Block = npt.NDArray[np.uint8]
"""The bytes of one block, contiguous and of one dimension."""
Fields = npt.NDArray[np.integer] | None
"""(offset, bytes) of the fields of one block, ascending; None if nothing is known about it."""
Words64 = npt.NDArray[np.uint64]
Integers = npt.NDArray[np.int64]
Bits = npt.NDArray[np.uint8]

# Bytes between two fields are alignment only if they are this few; a longer run is something nobody declared.
PADDING_LIMIT = 16

# For a mask with one bit a byte, the mask of the bits of these bytes.
BYTES_OF_MASK: Words64 = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little").astype(
    np.uint8
).repeat(8, axis=1).reshape(256, 64) @ (np.uint64(1) << np.arange(64, dtype=np.uint64))


@dataclass(frozen=True)
class RankView:
    """What one capture of one rank recorded, after symbolising: the same blocks as every other capture."""

    rank: int
    blocks: Sequence[Block]


class Kind(IntEnum):
    """What a word is part of."""

    FIELD = 0  # a field of 1, 2, 4 or 8 bytes, the whole of it
    STRUCT = 1  # 8 bytes, or what is left at the end, of a larger field or of undeclared bytes
    PADDING = 2  # between fields: no kernel can read it


@dataclass(frozen=True)
class Words:
    """Words in which captures differ, ascending by (block, offset).

    Attributes
    ----------
    block, offset, size, kind : [words]; a word has 1 to 8 bytes.
    values : [words][captures]; bytes past ``size`` are zero.
    """

    block: Integers
    offset: Integers
    size: Integers
    kind: Integers
    values: Words64

    def __len__(self) -> int:
        return len(self.block)

    def chosen(self, which: npt.NDArray[np.bool_]) -> Words:
        """The words that ``which`` says, [words] of truth values."""
        return Words(self.block[which], self.offset[which], self.size[which], self.kind[which], self.values[which])

    @property
    def may_be_garbage(self) -> npt.NDArray[np.bool_]:
        """Which words, [words], may be left from before, because nobody gave them a value; see the function."""
        return may_be_garbage(self.kind, self.size)

    @property
    def inside(self) -> Bits:
        """Mask of the bytes that a word has, one bit a byte."""
        return ((1 << self.size) - 1).astype(np.uint8)


def may_be_garbage(kind: Integers, size: Integers) -> npt.NDArray[np.bool_]:
    """Which words of these kinds and sizes a caller may leave without a value.

    What is inside a struct may be padding or unused.  A parameter of one byte may be an empty struct, and one of eight
    bytes an empty struct and a number; every caller gives other numbers a value.
    """
    found: npt.NDArray[np.bool_] = (kind == Kind.STRUCT) | ((kind == Kind.FIELD) & np.isin(size, (1, 8)))
    return found


def check_views(views: Sequence[RankView]) -> None:
    """Checks that captures have the same blocks; raises ``UsageError``."""
    first = views[0]
    for view in views:
        if len(view.blocks) != len(first.blocks):
            raise UsageError(
                f"rank {view.rank} has {len(view.blocks)} blocks and rank {first.rank} has {len(first.blocks)}: "
                "compare ranks of one class only"
            )
        for number, (block, other) in enumerate(zip(view.blocks, first.blocks, strict=True)):
            if block.dtype != np.uint8 or block.ndim != 1 or not block.flags.c_contiguous:
                raise UsageError(f"block {number} of rank {view.rank} is no contiguous row of bytes: convert it first")
            if len(block) != len(other):
                raise UsageError(
                    f"block {number} has {len(block)} bytes on rank {view.rank} and {len(other)} on rank {first.rank}: "
                    "compare ranks of one class only"
                )


def check_fields(fields: Sequence[Fields] | None, blocks: Sequence[Block]) -> list[Integers]:
    """Field boundaries of every block as int64 [fields][2], led by an empty field; raises ``UsageError``."""
    if fields is not None and len(fields) != len(blocks):
        raise UsageError(f"there are field boundaries for {len(fields)} blocks, but {len(blocks)} blocks")
    checked = []
    lead = np.zeros((1, 2), dtype=np.int64)
    for number, block in enumerate(blocks):
        given = None if fields is None else fields[number]
        if given is None:
            # Long undeclared bytes are read like a struct; the empty field only gives `locate` something to find.
            checked.append(lead)
            continue
        table = np.asarray(given, dtype=np.int64).reshape(-1, 2)
        ends = table[:, 0] + table[:, 1]
        if table.size and (table.min() < 0 or ends.max() > len(block) or (table[1:, 0] < ends[:-1]).any()):
            raise UsageError(
                f"the field boundaries of block {number} do not ascend within its {len(block)} bytes: correct them"
            )
        checked.append(np.concatenate((lead, table)))
    return checked


def locate(positions: Integers, fields: Integers, length: int) -> tuple[Integers, Integers, Integers]:
    """Offset, size and ``Kind`` of the word around each byte position of a block of ``length`` bytes."""
    begin, size = fields[:, 0], fields[:, 1]
    # Of fields that begin at one offset all but the last are empty.
    at = np.searchsorted(begin, positions, side="right") - 1
    end = begin + size
    inside = positions < end[at]
    # In a field, words are aligned to its start, not to the block: a struct is aligned as its largest member, so this
    # finds its 8-byte members wherever the block puts it.
    chunk = begin[at] + (positions - begin[at]) // 8 * 8
    gap_begin = end[at]
    gap_end = np.append(begin[1:], length)[at]
    aligned = positions // 8 * 8
    simple = inside & np.isin(size[at], (1, 2, 4, 8))
    offset = np.where(inside, chunk, np.maximum(aligned, gap_begin))
    stop = np.where(inside, np.minimum(chunk + 8, end[at]), np.minimum(aligned + 8, gap_end))
    padding = ~inside & (gap_end - gap_begin < PADDING_LIMIT) & (at > 0) & (at + 1 < len(fields))
    kind = np.select([simple, padding], [Kind.FIELD, Kind.PADDING], Kind.STRUCT).astype(np.int64)
    return offset, stop - offset, kind


def gather(block: Block, offset: Integers, size: Integers) -> Words64:
    """Values of words, little-endian, of 1 to 8 bytes each."""
    index = offset[:, None] + np.arange(8)
    raw = block[np.minimum(index, len(block) - 1)]
    values: Words64 = np.ascontiguousarray(raw).view("<u8")[:, 0]
    masked: Words64 = values & BYTES_OF_MASK[(1 << size) - 1]
    return masked


def differing_words(captures: Sequence[Sequence[Block]], fields: Sequence[Integers]) -> Words:
    """The words in which any capture differs from the first; every word once, with its value in each capture."""
    columns: list[list[Integers]] = [[], [], [], []]
    values = []
    for number, first in enumerate(captures[0]):
        blocks = [capture[number] for capture in captures]
        positions = _rankpatch.differing(first, blocks[1:], 1).astype(np.int64)
        if not positions.size:
            continue
        offset, size, kind = locate(positions, fields[number], len(first))
        keep = np.ones(len(offset), dtype=bool)
        keep[1:] = offset[1:] != offset[:-1]
        offset, size, kind = offset[keep], size[keep], kind[keep]
        for column, part in zip(columns, (np.full_like(offset, number), offset, size, kind), strict=True):
            column.append(part)
        values.append(np.stack([gather(block, offset, size) for block in blocks], axis=1))
    if not values:
        empty = np.empty(0, dtype=np.int64)
        return Words(empty, empty, empty, empty, np.empty((0, len(captures)), dtype=np.uint64))
    block, offset, size, kind = (np.concatenate(column) for column in columns)
    return Words(block, offset, size, kind, np.concatenate(values))


def pieces_of(mask: int, start: int = 0, width: int = 8) -> list[tuple[int, int]]:
    """The largest aligned (start, width) that cover exactly the bytes of ``mask`` within a word."""
    own = ((1 << width) - 1) << start
    if not mask & own:
        return []
    if mask & own == own:
        return [(start, width)]
    half = width // 2
    return [*pieces_of(mask, start, half), *pieces_of(mask, start + half, half)]


def unique_rows(rows: Words64) -> tuple[Words64, Integers]:
    """Distinct rows, and for each row its place among them."""
    if not len(rows):
        return rows, np.empty(0, dtype=np.int64)
    # Sorting one hash a row is several times faster than sorting rows; a collision is seen and costs only time.
    odd = np.random.default_rng(1).integers(1 << 62, size=rows.shape[1], dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    mixed = rows * np.uint64(0x9E3779B97F4A7C15)
    hashed = ((mixed ^ (mixed >> np.uint64(29))) * odd).sum(axis=1, dtype=np.uint64)
    _, first, place = np.unique(hashed, return_index=True, return_inverse=True)
    distinct = rows[first]
    if not (distinct[place] == rows).all():
        distinct, place = np.unique(rows, axis=0, return_inverse=True)
    return distinct, place.reshape(-1).astype(np.int64)
