# SPDX-License-Identifier: Apache-2.0
"""Words that differ between two captures of one rank, and which of them are known to be harmless.

What a control run finds is only a suspicion: a stale pointer in a by-value struct, or a live one to memory that no
arena holds.  The capture perturbs each suspect and replays; if outputs stay the same the word is *proven* noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

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
    gather,
    locate,
)

noise_dtype = np.dtype([("block", "<u4"), ("offset", "<u4"), ("width", "<u4"), ("differs", "<u4")])
"""Neighbouring bytes to perturb together; ``differs`` is 1 if the control has another value there."""

Spans = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]
"""Starts and ends of address ranges, ascending."""

ProvenNoise = npt.NDArray[np.void] | Iterable[tuple[int, ...]]
"""(block, offset) or (block, offset, width) of words proven harmless, or an array of ``noise_dtype``.  Without a width
the whole field is meant, or the aligned 4 bytes of a struct."""

Strays = Sequence[tuple[int, int, int]]
"""(block, offset, bytes) of words that differ between ranks, follow no rule and may be garbage."""

HALVES = (0x0F, 0xF0)

_FAR_UP = np.uint64(1 << 44)


def noise_candidates(
    view: RankView,
    control: RankView,
    fields: Sequence[Fields] | None = None,
    *,
    others: Sequence[RankView] = (),
    mapped: Spans | None = None,
) -> npt.NDArray[np.void]:
    """The bytes to perturb, as ``noise_dtype`` ascending by (block, offset).

    Where two captures of one rank differ somewhere in four aligned bytes, those of the four that differ in any
    capture are suspects; the rest may be a flag or a small number that a kernel reads, beside garbage in padding, and
    to perturb it could send a kernel astray.  ``others`` are captures of any ranks: the more of them, the fewer
    bytes of garbage are equal by chance.  Where such bytes are part of an address of host memory that ``mapped``
    holds (of ``view``'s process), all of it is suspect: the bytes of a stale pointer are seldom all different.
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
    for number in np.unique(words.block).tolist():
        mine = words.block == number
        chosen = positions_of(words.offset[mine], suspect[mine])
        if mapped is not None:
            chosen = np.union1d(chosen, _stale_pointers(view.blocks[number], chosen, bounds[number], mapped))
        changed = np.isin(chosen, positions_of(words.offset[mine], moved[mine]))
        rows.append(_runs(number, chosen, changed))
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
        rows.append(_runs(number, free, np.zeros(len(free), dtype=bool)))
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


def _stale_pointers(block: npt.NDArray[np.uint8], suspects: Integers, fields: Integers, mapped: Spans) -> Integers:
    """Positions of all bytes of host addresses that have a suspect byte; addresses lie on multiples of 4 in a field."""
    begin, end = fields[:, 0], fields[:, 0] + fields[:, 1]
    at = np.searchsorted(begin, suspects, side="right") - 1
    # Undeclared bytes are one field.
    outside = suspects >= end[at]
    low = np.where(outside, end[at], begin[at])
    high = np.where(outside, np.append(begin[1:], len(block))[at], end[at])
    unit = low + (suspects - low) // 4 * 4
    # An address that moves does so in its lower half, too.  Where only the upper one differs it may be what is left of
    # an address, in the padding behind a number that a kernel reads.
    places = np.unique(unit[(unit >= low) & (unit + 8 <= high)])
    values = gather(block, places, np.full_like(places, 8))
    span = np.searchsorted(mapped[0], values, side="right") - 1
    inside = (span >= 0) & (values < mapped[1][np.maximum(span, 0)])
    # Far up only: low addresses are like small numbers, and to perturb a number may send a kernel astray.
    inside &= values >= _FAR_UP
    addresses: Integers = (places[inside][:, None] + np.arange(8)).ravel()
    return addresses


def _runs(number: int, positions: Integers, changed: npt.NDArray[np.bool_]) -> npt.NDArray[np.void]:
    """Neighbours inside four aligned bytes that are alike in ``changed``, of one block, as ``noise_dtype``."""
    if not len(positions):
        return _no_words(0)
    cut = (np.diff(positions) != 1) | (positions[1:] % 4 == 0) | (changed[1:] != changed[:-1])
    first = np.concatenate(([0], np.flatnonzero(cut) + 1))
    rows = _no_words(len(first))
    rows["block"], rows["offset"] = number, positions[first]
    rows["width"] = np.diff(np.append(first, len(positions)))
    rows["differs"] = changed[first]
    return rows


def _no_words(count: int) -> npt.NDArray[np.void]:
    return np.zeros(count, dtype=noise_dtype)


def process_memory() -> Spans:
    """The ranges of this process's own host memory: where its stale pointers point."""
    lines = (line.split(maxsplit=2) for line in Path("/proc/self/maps").read_text().splitlines())
    # A driver reserves terabytes, and maps devices a few gigabytes up, where two small numbers side by side look like
    # an address.
    spans = [span.split("-") for span, rights, _ in lines if rights[0] == "r" and rights[3] == "p"]
    edges = np.array([[int(low, 16), int(high, 16)] for low, high in spans], dtype=np.uint64).reshape(-1, 2)
    return edges[:, 0].copy(), edges[:, 1].copy()


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
    for number in np.unique(block).tolist():
        mine = block == number
        begin, bytes_ = offset[mine], width[mine]
        unsized = bytes_ == 0
        if unsized.any():
            start, size, kind = locate(begin[unsized], fields[number], lengths[number])
            shift = np.where(kind == Kind.STRUCT, (begin[unsized] - start) // 4 * 4, 0)
            begin[unsized] = start + shift
            bytes_[unsized] = np.where(kind == Kind.STRUCT, np.minimum(4, size - shift), size)
        covered = np.unique(span_bytes(begin, bytes_))
        inside = np.flatnonzero(words.block == number)
        for byte in range(8):
            found = np.isin(words.offset[inside] + byte, covered) & (words.size[inside] > byte)
            masks[inside[found]] |= np.uint8(1 << byte)
    return masks


def entries(proven: ProvenNoise) -> tuple[Integers, Integers, Integers]:
    """Block, offset and width of each word; a width of 0 is none."""
    if isinstance(proven, np.ndarray) and proven.dtype.names:
        table = np.stack([proven[name].astype(np.int64) for name in ("block", "offset", "width")], axis=1)
    else:
        table = np.array([(*row, 0)[:3] for row in proven], dtype=np.int64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()
