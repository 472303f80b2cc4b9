# SPDX-License-Identifier: Apache-2.0
"""Proof of rules: what they predict for a rank that inference never saw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foundryd._native import _rankpatch
from foundryd.errors import HeldOutMismatch
from foundryd.rankpatch.mesh import Coordinate, Mesh
from foundryd.rankpatch.noise import places_by_block
from foundryd.rankpatch.rules import RuleKind
from foundryd.rankpatch.words import (
    Block,
    Fields,
    Kind,
    RankView,
    Words64,
    check_fields,
    check_views,
    gather,
    locate,
    may_be_garbage,
)

Rules = npt.NDArray[np.void]


@dataclass(frozen=True)
class Report:
    """What was compared.

    Attributes
    ----------
    rank : the held-out rank.
    bytes : of all blocks together.
    noise_bytes : of these, what rules call noise and was not compared.
    patched_words : words that rules gave.
    words : words by rule, see ``count_rules``.
    """

    rank: int
    bytes: int
    noise_bytes: int
    patched_words: int
    words: dict[str, int] = field(default_factory=dict)


def count_rules(rules: Rules) -> dict[str, int]:
    """Number of rules by kind and coordinate: ``affine tp``, ``table``, ``noise``, ``world``; most frequent first."""
    counts: dict[str, int] = {}
    for kind in RuleKind:
        chosen = rules["kind"] == kind
        if kind is not RuleKind.AFFINE:
            counts[kind.name.lower()] = int(chosen.sum())
            continue
        for coordinate in Coordinate:
            name = f"affine {coordinate.name.lower()}"
            counts[name] = int((chosen & (rules["coordinate"] == coordinate)).sum())
    return {name: n for name, n in sorted(counts.items(), key=lambda item: -item[1]) if n}


def predict(rules: Rules, tables: Words64, reference: Sequence[Block], mesh: Mesh, rank: int) -> list[Block]:
    """Blocks of ``rank`` by the rules; noise keeps the reference's bytes.

    Raises
    ------
    UsageError : the mesh has no such rank.
    ValueError : the rules do not fit together or the blocks (``_rankpatch.InvalidRules`` is one).
    """
    writes = _rankpatch.plan(rules, tables, mesh.coordinates(rank), mesh.world)
    bounds = np.searchsorted(writes["block"], np.arange(len(reference) + 1))
    if bounds[-1] != len(writes):
        raise ValueError(f"a rule names block {writes['block'][-1]}, but there are {len(reference)} blocks")
    blocks = []
    for number, block in enumerate(reference):
        copy = block.copy()
        _rankpatch.apply(copy, writes[bounds[number] : bounds[number + 1]])
        blocks.append(copy)
    return blocks


def check_held_out(
    rules: Rules,
    tables: Words64,
    reference: RankView,
    mesh: Mesh,
    held_out: RankView,
    describe: Callable[[int, int], str] | None = None,
    *,
    fields: Sequence[Fields] | None = None,
) -> Report:
    """Compares what the rules predict for a rank with its capture, in every byte that is not noise.

    Bytes between two fields are noise wherever they differ, whether the samples showed it or not.

    Parameters
    ----------
    rules, tables : from ``infer``.
    reference : the first of the views that they were inferred from.
    mesh : the variant's mesh.
    held_out : the capture of a rank that was not among the views.
    describe : what to call the word at (block, offset) in the message.
    fields : field boundaries of each block, as for ``infer``.

    Raises
    ------
    HeldOutMismatch : names the first differing word and both values.
    UsageError : the captures have different blocks.
    """
    check_views([reference, held_out])
    predicted = predict(rules, tables, reference.blocks, mesh, held_out.rank)
    boundaries = check_fields(fields, held_out.blocks)
    is_noise = rules["kind"] == RuleKind.NOISE
    noise, needed = rules[is_noise], rules[~is_noise]
    first: tuple[int, int] | None = None
    wrong = 0
    strays: list[tuple[int, int, int]] = []
    garbage = beside = True
    noise_of, needed_of = (places_by_block(rows["block"], len(predicted)) for rows in (noise, needed))
    for number, (block, found) in enumerate(zip(predicted, held_out.blocks, strict=True)):
        positions = _rankpatch.differing(block, [found], 1).astype(np.int64)
        if not positions.size:
            continue
        padding = locate(positions, boundaries[number], len(found))[2] == Kind.PADDING
        mine = noise[noise_of[number]]
        positions = positions[~padding & ~_covered(positions, mine)]
        if positions.size:
            offset, size, kind = locate(positions, boundaries[number], len(found))
            garbage &= bool(may_be_garbage(kind, size).all())
            beside &= bool(_beside(positions, offset, size, mine).all())
            strays += sorted({(number, *word) for word in zip(offset.tolist(), size.tolist(), strict=True)})
            words = np.unique(_words_of(positions, needed[needed_of[number]]))
            wrong += words.size
            first = first or (number, int(words[0]))
    if first is not None:
        message = _difference(first, wrong, rules, reference.rank, predicted, held_out, describe)
        raise HeldOutMismatch(message, strays=strays if garbage else [], beside_noise=beside)
    return Report(
        held_out.rank,
        sum(len(block) for block in predicted),
        int(noise["width"].sum(dtype=np.int64)),
        len(needed),
        count_rules(rules),
    )


def _difference(
    at: tuple[int, int],
    wrong: int,
    rules: Rules,
    reference: int,
    predicted: Sequence[Block],
    held_out: RankView,
    describe: Callable[[int, int], str] | None,
) -> str:
    number, offset = at
    here = rules[rules["block"] == number]
    is_noise = here["kind"] == RuleKind.NOISE
    mine = here[~is_noise & (here["offset"] == offset)]
    width = int(mine["width"][0]) if len(mine) else min(4, len(predicted[number]) - offset)
    start, size = np.array([offset]), np.array([width])
    expected = int(gather(predicted[number], start, size)[0])
    found = int(gather(held_out.blocks[number], start, size)[0])
    name = describe(number, offset) if describe else f"block {number}"
    noisy = _covered(np.arange(offset, offset + width), here[is_noise]).any()
    source = f"no rule {'but noise ' if noisy else ''}changes rank {reference}'s"
    if len(mine):
        source = f"the rule {next(iter(count_rules(mine)))} gives"
    others = f" (and {wrong - 1} more words)" if wrong > 1 else ""
    return (
        f"{name}, block {number}, offset {offset} ({width} bytes) was captured as 0x{found:0{2 * width}x} on the "
        f"held-out rank {held_out.rank}, where {source} 0x{expected:0{2 * width}x}{others}: sample rank "
        f"{held_out.rank} as well, or make the word follow one coordinate of the mesh"
    )


def _covered(positions: npt.NDArray[np.int64], rules: Rules) -> npt.NDArray[np.bool_]:
    """Which byte positions lie within the words of these rules of one block."""
    if not len(rules):
        return np.zeros(len(positions), dtype=bool)
    offset = rules["offset"].astype(np.int64)
    at = np.searchsorted(offset, positions, side="right") - 1
    covered: npt.NDArray[np.bool_] = (at >= 0) & (positions < (offset + rules["width"])[at])
    return covered


def _beside(
    positions: npt.NDArray[np.int64], offset: npt.NDArray[np.int64], size: npt.NDArray[np.int64], noise: Rules
) -> npt.NDArray[np.bool_]:
    """Which byte positions, in words of these offsets and sizes, have noise in the same four bytes of their word."""
    half = offset + (positions - offset) // 4 * 4
    found = np.zeros(len(positions), dtype=bool)
    for byte in range(4):
        found |= _covered(half + byte, noise) & (half + byte < offset + size)
    return found


def _words_of(positions: npt.NDArray[np.int64], rules: Rules) -> npt.NDArray[np.int64]:
    """Where the word around each position begins: its rule's, or else the aligned 4 bytes."""
    aligned = positions // 4 * 4
    if not len(rules):
        return aligned
    offset = rules["offset"].astype(np.int64)
    at = np.searchsorted(offset, positions, side="right") - 1
    return np.where(_covered(positions, rules), offset[at], aligned)
