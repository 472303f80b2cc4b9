# SPDX-License-Identifier: Apache-2.0
"""Words that differ between two captures of one rank, and which of them are known to be harmless.

What a control run finds is only a suspicion: a stale pointer in a by-value struct, or a live one to memory that no
arena holds.  The capture perturbs each suspect and replays; if outputs stay the same the word is *proven* noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from foundryd.archive.dtypes import noise_dtype
from foundryd.errors import UsageError
from foundryd.rankpatch.words import (
    Bits,
    Fields,
    Integers,
    Kind,
    RankView,
    Words,
    check_fields,
    check_views,
    differing_words,
    locate,
)

ProvenNoise = npt.NDArray[np.void] | Iterable[tuple[int, ...]]
"""(block, offset) or (block, offset, width) of words proven harmless, or an array of ``noise_dtype``.  Without a width
the whole field is meant, or the aligned 4 bytes of a struct."""

Strays = Sequence[tuple[int, int, int]]
"""(block, offset, bytes) of words that differ between ranks, follow no rule and may be garbage."""

HALVES = (0x0F, 0xF0)

ADDRESSES = (0x5500_0000_0000, 1 << 48)
"""Where the heaps, stacks and libraries of a 64-bit Linux process lie."""


def noise_candidates(
    view: RankView,
    control: RankView,
    fields: Sequence[Fields] | None = None,
    *,
    others: Sequence[RankView] = (),
) -> npt.NDArray[np.void]:
    """The bytes to perturb, as ``noise_dtype`` ascending by (block, offset).

    Where two captures of one rank differ somewhere in four aligned bytes, those of the four that differ in any
    capture are suspects; the rest may be a flag or a small number that a kernel reads, beside garbage in padding, and
    to perturb it could send a kernel astray.  ``others`` are captures of any ranks: the more of them, the fewer
    bytes of garbage are equal by chance.
    What lies between fields cannot be read by a kernel and needs no proof.

    Raises
    ------
    UsageError : the two captures are not of one rank or have different blocks.
    """
    if view.rank != control.rank:
        raise UsageError(f"the control is of rank {control.rank}, not of rank {view.rank}: capture that rank again")
    captures = [view, control, *others]
    check_views(captures)
    bounds = check_fields(fields, view.blocks)
    words = differing_words([c.blocks for c in captures], bounds)
    words = words.chosen(words.kind != Kind.PADDING)
    first = {capture.rank: place for place, capture in reversed(list(enumerate(captures)))}
    moved = np.bitwise_or.reduce(
        [byte_mask(words.values[:, k] ^ words.values[:, first[c.rank]]) for k, c in enumerate(captures)]
    )
    differs = np.bitwise_or.reduce(
        [byte_mask(words.values[:, 0] ^ words.values[:, k]) for k in range(1, len(captures))]
    )
    suspect = np.zeros_like(moved)
    for half in HALVES:
        suspect |= np.where(moved & half != 0, differs & half, 0).astype(np.uint8)
    rows = [_no_words(0)]
    places = np.searchsorted(words.block, np.arange(len(view.blocks) + 1)).tolist()  # words ascend by block
    for number, (begin, end) in enumerate(pairwise(places)):
        mine = slice(begin, end)
        chosen = positions_of(words.offset[mine], suspect[mine])
        rows.append(_runs(number, chosen))
    return np.concatenate(rows)


def address_candidates(captures: Sequence[RankView], noise: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Bytes beside ``noise`` in which ranks differ, in what looks like one stale address, as ``noise_dtype``.

    Two processes put their heaps within the same 4 GiB once in a few hundred times, so two captures of one rank may
    differ in the low half of an address alone.  Whatever else is beside noise may be a number that a kernel reads.
    The first capture is the one whose bytes would be perturbed.
    """
    rows = [_no_words(0)]
    for number in np.unique(noise["block"]).tolist():
        known = noise[noise["block"] == number]
        positions = np.unique(span_bytes(known["offset"], known["width"]))
        starts = np.unique(positions // 8 * 8)
        blocks = [capture.blocks[number] for capture in captures]
        starts = starts[starts + 8 <= min(map(len, blocks))]
        bytes_ = np.stack([block[starts[:, None] + np.arange(8)] for block in blocks])
        values = np.ascontiguousarray(bytes_).view("<u8")[..., 0]
        outside = np.any((values < ADDRESSES[0]) | (values >= ADDRESSES[1]), axis=0)
        differs = np.any(bytes_ != bytes_[0], axis=0)
        differs[outside] = False
        place, byte = np.nonzero(differs)
        rows.append(_runs(number, np.setdiff1d(starts[place] + byte, positions)))
    return np.concatenate(rows)


def stray_candidates(
    view: RankView,
    others: Sequence[RankView],
    strays: Strays,
    but: npt.NDArray[np.void],
) -> npt.NDArray[np.void]:
    """The bytes of ``strays`` in which any of ``others`` is not as ``view``, to perturb: ``noise_dtype``.

    ``but`` are candidates already; strays of blocks that ``view`` does not have are left out.
    """
    wanted = np.array(sorted(strays), dtype=np.int64).reshape(-1, 3)
    rows = [_no_words(0)]
    for number in np.unique(wanted[wanted[:, 0] < len(view.blocks), 0]).tolist():
        mine = wanted[wanted[:, 0] == number]
        positions = np.unique(span_bytes(mine[:, 1], mine[:, 2]))
        block = view.blocks[number]
        differs = np.any([other.blocks[number][positions] != block[positions] for other in others], axis=0)
        known = but[but["block"] == number]
        free = np.setdiff1d(positions[differs], span_bytes(known["offset"], known["width"]))
        rows.append(_runs(number, free))
    return np.concatenate(rows)


def span_bytes(offset: npt.NDArray[np.integer], width: npt.NDArray[np.integer]) -> Integers:
    """Every byte position of spans, one span after another."""
    ends = np.cumsum(width, dtype=np.int64)
    first = offset.astype(np.int64) - (ends - width)
    positions: Integers = np.repeat(first, width) + np.arange(ends[-1] if len(ends) else 0)
    return positions


def positions_of(offset: Integers, mask: Bits) -> Integers:
    """Every byte position that the masks of words at these offsets have, ascending."""
    bits = np.unpackbits(mask[:, None], axis=1, bitorder="little").astype(bool)
    positions: Integers = (offset[:, None] + np.arange(8))[bits]
    return positions


def _runs(number: int, positions: Integers) -> npt.NDArray[np.void]:
    """Neighbours inside four aligned bytes of one block, as ``noise_dtype``."""
    if not len(positions):
        return _no_words(0)
    cut = (np.diff(positions) != 1) | (positions[1:] % 4 == 0)
    first = np.concatenate(([0], np.flatnonzero(cut) + 1))
    rows = _no_words(len(first))
    rows["block"], rows["offset"] = number, positions[first]
    rows["width"] = np.diff(np.append(first, len(positions)))
    return rows


def _no_words(count: int) -> npt.NDArray[np.void]:
    return np.zeros(count, dtype=noise_dtype)


def byte_mask(difference: npt.NDArray[np.uint64]) -> Bits:
    """One bit for each byte of a word that is not zero."""
    raw = np.ascontiguousarray(difference).view(np.uint8).reshape(-1, 8)
    return np.packbits(raw != 0, axis=1, bitorder="little")[:, 0]


def proven_bytes(proven: ProvenNoise, words: Words, fields: Sequence[Integers], lengths: Sequence[int]) -> Bits:
    """Mask of the bytes of each word that are proven noise; raises ``UsageError`` for words that no block has."""
    block, offset, width = entries(proven)
    masks = np.zeros(len(words), dtype=np.uint8)
    if not len(block):
        return masks
    unknown = (block < 0) | (block >= len(lengths)) | (offset < 0) | (width < 0)
    if not unknown.any():
        unknown = offset + np.maximum(width, 1) > np.asarray(lengths, dtype=np.int64)[block]
    if unknown.any():
        at = int(np.flatnonzero(unknown)[0])
        raise UsageError(f"block {block[at]}, offset {offset[at]} is proven noise but no word of the captures: drop it")
    mine, own = places_by_block(block, len(lengths)), places_by_block(words.block, len(lengths))
    for number, (chosen, inside) in enumerate(zip(mine, own, strict=True)):
        if not len(chosen) or not len(inside):
            continue
        begin, bytes_ = offset[chosen], width[chosen]
        unsized = bytes_ == 0
        if unsized.any():
            start, size, kind = locate(begin[unsized], fields[number], lengths[number])
            shift = np.where(kind == Kind.STRUCT, (begin[unsized] - start) // 4 * 4, 0)
            begin[unsized] = start + shift
            bytes_[unsized] = np.where(kind == Kind.STRUCT, np.minimum(4, size - shift), size)
        # One truth value for each byte of the block: words are many, and to search them takes far longer.
        covered = np.zeros(lengths[number] + 8, np.bool_)
        covered[span_bytes(begin, bytes_)] = True
        for byte in range(8):
            found = covered[words.offset[inside] + byte] & (words.size[inside] > byte)
            masks[inside[found]] |= np.uint8(1 << byte)
    return masks


def places_by_block(block: npt.NDArray[np.integer], count: int) -> list[Integers]:
    """For each of ``count`` blocks the places in ``block`` where its number is, ascending."""
    order = np.argsort(block, kind="stable")
    bounds = np.searchsorted(block[order], np.arange(count + 1)).tolist()
    return [order[begin:end] for begin, end in pairwise(bounds)]


def entries(proven: ProvenNoise) -> tuple[Integers, Integers, Integers]:
    """Block, offset and width of each word; a width of 0 is none."""
    if isinstance(proven, np.ndarray) and proven.dtype.names:
        table = np.stack([proven[name].astype(np.int64) for name in ("block", "offset", "width")], axis=1)
    else:
        table = np.array([(*row, 0)[:3] for row in proven], dtype=np.int64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()
