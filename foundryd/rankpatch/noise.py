# SPDX-License-Identifier: Apache-2.0
"""Words that differ between two captures of one rank, and which of them are known to be harmless.

What a control run finds is only a suspicion: a stale pointer in a by-value struct, or a live one to memory that no
arena holds.  The capture perturbs each suspect and replays; if outputs stay the same the word is *proven* noise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
    locate,
)

noise_dtype = np.dtype([("block", "<u4"), ("offset", "<u4"), ("width", "<u4"), ("differs", "<u4")])
"""A word of ``width`` bytes to perturb; ``differs`` is 1 if the control has another value there."""

ProvenNoise = npt.NDArray[np.void] | Iterable[tuple[int, ...]]
"""(block, offset) or (block, offset, width) of words proven harmless, or an array of ``noise_dtype``.  Without a width
the whole field is meant, or the aligned 4 bytes of a struct."""

HALVES = (0x0F, 0xF0)


def noise_candidates(view: RankView, control: RankView, fields: Sequence[Fields] | None = None) -> npt.NDArray[np.void]:
    """The words to perturb, as ``noise_dtype`` ascending by (block, offset).

    A field counts as a whole.  In a struct each aligned 4 bytes count by themselves, and with a half that differs its
    other half is listed too, as ``differs`` 0: it may be the high half of the same stale pointer, equal by chance.
    What lies between fields cannot be read by a kernel and needs no proof.

    Raises
    ------
    UsageError : the two captures are not of one rank or have different blocks.
    """
    if view.rank != control.rank:
        raise UsageError(f"the control is of rank {control.rank}, not of rank {view.rank}: capture that rank again")
    check_views([view, control])
    words = differing_words([view.blocks, control.blocks], check_fields(fields, view.blocks))
    differs = byte_mask(words.values[:, 0] ^ words.values[:, 1])
    rows = []
    whole = words.kind == Kind.FIELD
    rows.append(_candidates(words, whole, np.zeros_like(words.size), words.size, np.ones(len(words), dtype=bool)))
    for half in HALVES:
        start = 0 if half == HALVES[0] else 4
        present = (words.kind == Kind.STRUCT) & (words.size > start)
        width = np.minimum(words.size - start, 4)
        rows.append(_candidates(words, present, np.full_like(words.size, start), width, differs & half != 0))
    found = np.concatenate(rows)
    ordered: npt.NDArray[np.void] = found[np.lexsort((found["offset"], found["block"]))]
    return ordered


def _candidates(
    words: Words, chosen: npt.NDArray[np.bool_], start: Integers, width: Integers, differs: npt.NDArray[np.bool_]
) -> npt.NDArray[np.void]:
    found = np.zeros(int(chosen.sum()), dtype=noise_dtype)
    found["block"] = words.block[chosen]
    found["offset"] = (words.offset + start)[chosen]
    found["width"] = width[chosen]
    found["differs"] = differs[chosen]
    return found


def byte_mask(difference: npt.NDArray[np.uint64]) -> Bits:
    """One bit for each byte of a word that is not zero."""
    raw = np.ascontiguousarray(difference).view(np.uint8).reshape(-1, 8)
    return np.packbits(raw != 0, axis=1, bitorder="little")[:, 0]


def proven_bytes(proven: ProvenNoise, words: Words, fields: Sequence[Integers], lengths: Sequence[int]) -> Bits:
    """Mask of the bytes of each word that are proven noise; raises ``UsageError`` for words that no block has."""
    block, offset, width = _entries(proven)
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
        covered = np.unique(np.concatenate([(b + np.arange(w)).ravel() for b, w in _by_width(begin, bytes_)]))
        inside = np.flatnonzero(words.block == number)
        for byte in range(8):
            found = np.isin(words.offset[inside] + byte, covered) & (words.size[inside] > byte)
            masks[inside[found]] |= np.uint8(1 << byte)
    return masks


def _entries(proven: ProvenNoise) -> tuple[Integers, Integers, Integers]:
    if isinstance(proven, np.ndarray) and proven.dtype.names:
        table = np.stack([proven[name].astype(np.int64) for name in ("block", "offset", "width")], axis=1)
    else:
        table = np.array([(*row, 0)[:3] for row in proven], dtype=np.int64).reshape(-1, 3)
    return table[:, 0].copy(), table[:, 1].copy(), table[:, 2].copy()


def _by_width(begin: Integers, width: Integers) -> list[tuple[Integers, int]]:
    """Entries of one width each, as columns to add byte numbers to; widths are few."""
    return [(begin[width == one][:, None], one) for one in np.unique(width).tolist()]
