# SPDX-License-Identifier: Apache-2.0
"""From captures of a few ranks to the rules that give every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from foundryd._native import _rankpatch
from foundryd.errors import UnexplainedWord, UsageError
from foundryd.rankpatch.affine import Frame, Truth, explain
from foundryd.rankpatch.mesh import Coordinate, Mesh
from foundryd.rankpatch.noise import (
    HALVES,
    ProvenNoise,
    byte_mask,
    entries,
    places_by_block,
    positions_of,
    proven_bytes,
    span_bytes,
)
from foundryd.rankpatch.rules import RuleKind
from foundryd.rankpatch.sampling import WHOLE, missing_ranks
from foundryd.rankpatch.words import (
    BYTES_OF_MASK,
    Bits,
    Fields,
    Kind,
    RankView,
    Words,
    Words64,
    check_fields,
    check_views,
    differing_words,
    pieces_of,
    unique_rows,
)

__all__ = ["Inference", "RankView", "infer"]

Rules = npt.NDArray[np.void]
Describe = Callable[[int, int], str]


@dataclass(frozen=True)
class Inference:
    """What was inferred.

    Attributes
    ----------
    rules : ``rule_dtype``, ascending by (block, offset); absolute, so that they hold on any rank's bytes.
    tables : uint64; a rule of kind table has one entry for each world rank, 0 for ranks outside the class.
    undecided : ranks to capture in addition before anything can be said; there are no rules then.
    """

    rules: Rules
    tables: Words64
    undecided: list[int]


def infer(
    views: Sequence[RankView],
    mesh: Mesh,
    *,
    control: RankView | None = None,
    repeats: Sequence[RankView] = (),
    proven_noise: ProvenNoise = (),
    proven_strays: ProvenNoise = (),
    fields: Sequence[Fields] | None = None,
    describe: Describe | None = None,
    complete: bool = False,
    members: Iterable[int] | None = None,
) -> Inference:
    """Finds a rule for each word in which captures of one rank class differ.

    A word that differs between two captures of one rank is noise and must be proven; what lies between two fields is
    noise that needs no proof.  Any other differing word is affine in one coordinate: of the readings that fit and agree
    on every rank the widest, in the first coordinate of ``sampling.PREFERENCE``.  Where every rank was captured, a word
    that no coordinate explains becomes a table; in a class of up to four ranks all of them do.

    Parameters
    ----------
    views : captures of different ranks, symbolised; the first is the reference.
    mesh : the variant's mesh.
    control : one of the ranks again, with everything outside the arenas at other addresses.
    repeats : more captures of any of the ranks: garbage of few values is often equal in two.
    proven_noise : words whose perturbation left all outputs equal, see ``noise.noise_candidates``.
    proven_strays : likewise words that follow no rule, whether captures of one rank differ in them or not: noise, too.
    fields : for each block its ascending (offset, bytes) field boundaries, or None where nothing is known about it.
        A field of 1, 2 or 4 bytes is one word; one of 8 bytes is one word or two halves; a larger one is read like a
        struct of unknown members, aligned to its start.
    describe : what to call the word at (block, offset) in messages.
    complete : every rank of the class is among the views.
    members : the ranks of the class, by default all.

    Raises
    ------
    UnexplainedWord : a word differs that no rule explains, or noise is not proven.
    UsageError : views do not go together, or ``complete`` is not true.
    """
    ranks = _check_ranks(views, mesh, members, complete)
    again = [*([control] if control else []), *repeats]
    for repeat in again:
        if repeat.rank not in [view.rank for view in views]:
            raise UsageError(
                f"the control is of rank {repeat.rank}, which is not among the captures: capture it as well"
            )
    check_views([*views, *again])
    if not complete:
        missing = missing_ranks(mesh, ranks, [view.rank for view in views])
        if missing:
            return Inference(_no_rules(0), np.empty(0, dtype=np.uint64), missing)
    work = _Work(views, mesh, ranks, again, describe or _describe, complete)
    return work.run(check_fields(fields, views[0].blocks), proven_noise, proven_strays)


def _check_ranks(
    views: Sequence[RankView], mesh: Mesh, members: Iterable[int] | None, complete: bool
) -> tuple[int, ...]:
    if not views:
        raise UsageError("rules need the capture of at least one rank")
    ranks = tuple(range(mesh.world)) if members is None else tuple(sorted({mesh.check(r) for r in members}))
    seen = [view.rank for view in views]
    if len(set(seen)) != len(seen) or not set(seen) <= set(ranks):
        raise UsageError(f"captures of ranks {seen} are not different ranks of the class {list(ranks)}: drop some")
    if complete and set(seen) != set(ranks):
        raise UsageError(f"captures of ranks {seen} are not all of the class {list(ranks)}: capture the others too")
    return ranks


def _describe(block: int, offset: int) -> str:
    return f"block {block}"


def _no_rules(count: int) -> Rules:
    return np.zeros(count, dtype=_rankpatch.rule_dtype)


class _Work:
    """One inference: rules are collected, what cannot be explained is kept for the one error that names the first."""

    def __init__(
        self,
        views: Sequence[RankView],
        mesh: Mesh,
        members: tuple[int, ...],
        again: Sequence[RankView],
        describe: Describe,
        complete: bool,
    ) -> None:
        self.views = views
        self.mesh = mesh
        self.members = members
        self.again = again
        self.describe = describe
        self.complete = complete
        self.rules: list[Rules] = []
        self.tables: list[tuple[Rules, Words64]] = []  # rules and their values [rules][views]
        self.conflicts: set[frozenset[int]] = set()

    def run(
        self, fields: list[npt.NDArray[np.int64]], proven_noise: ProvenNoise, proven_strays: ProvenNoise
    ) -> Inference:
        lengths = [len(b) for b in self.views[0].blocks]
        words = differing_words([view.blocks for view in (*self.views, *self.again)], fields)
        values = words.values[:, : len(self.views)]
        noisy = np.zeros(len(words), dtype=np.uint8)
        for place, repeat in enumerate(self.again, start=len(self.views)):
            first = [view.rank for view in self.views].index(repeat.rank)
            noisy |= byte_mask(words.values[:, first] ^ words.values[:, place])
        strays = proven_bytes(proven_strays, words, fields, lengths)
        noisy |= strays
        proven = proven_bytes(proven_noise, words, fields, lengths) | strays

        settled, unproven = _settle_noise(words, noisy, proven)
        changed = values ^ values[:, :1]
        open_ = (changed & BYTES_OF_MASK[settled ^ 0xFF][:, None]).any(axis=1) & ~unproven
        self._add_noise(words, settled)
        self._add_unseen(words, proven_strays)

        unread = np.flatnonzero(open_)
        if not (self.complete and len(self.members) <= WHOLE):
            unread = unread[~self._add_affine(words, values, settled, unread)]
        # Halves of one stale pointer: the low one is noise, the high one was equal in the control by chance.
        remains = byte_mask(np.bitwise_or.reduce(changed[unread], axis=1)) & ~settled[unread]
        shared = (noisy[unread] != 0) & (remains & ~proven[unread] == 0)
        rest = np.zeros(len(words), dtype=np.uint8)
        rest[unread[shared]] = proven[unread[shared]] & ~settled[unread[shared]]
        self._add_noise(words, rest)
        unread = unread[~shared]
        if self.complete:
            self._add_tables(words, values, settled, unread)
            unread = unread[:0]
        failed = np.union1d(unread, np.flatnonzero(unproven))
        if failed.size:
            garbage = words.chosen(np.isin(np.arange(len(words)), unread) & words.may_be_garbage & ~unproven)
            self._refuse(words, int(failed[0]), bool(unproven[failed[0]]), bool(noisy[failed[0]]), failed.size, garbage)
        return self._result()

    def _add_noise(self, words: Words, masks: Bits) -> None:
        for mask in np.unique(masks[masks != 0]).tolist():
            chosen = np.flatnonzero(masks == mask)
            for start, width in pieces_of(mask):
                self.rules.append(_rules(words, chosen, start, width, RuleKind.NOISE))

    def _add_unseen(self, words: Words, proven_strays: ProvenNoise) -> None:
        """Adds noise for strays in which these captures do not differ, but another did."""
        block, offset, width = entries(proven_strays)
        if not len(block):
            return
        count = int(block.max()) + 1
        mine, own = places_by_block(block, count), places_by_block(words.block, count)
        for number, (stray, seen) in enumerate(zip(mine, own, strict=True)):
            free = np.setdiff1d(
                span_bytes(offset[stray], width[stray]), positions_of(words.offset[seen], words.inside[seen])
            )
            rules = _no_rules(len(free))
            rules["block"], rules["offset"], rules["width"], rules["kind"] = number, free, 1, RuleKind.NOISE
            self.rules.append(rules)

    def _add_affine(self, words: Words, values: Words64, settled: Bits, open_: npt.NDArray[np.int64]) -> Truth:
        """Adds affine rules for the words that have them and says which do."""
        frame = Frame.of(self.mesh, self.members, [view.rank for view in self.views])
        explained = np.zeros(len(open_), dtype=bool)
        excluded = settled | ~words.inside
        # A declared field is one number; an 8-byte one may also be a struct of two, as only sizes are declared.
        narrowest = np.where(words.kind == Kind.FIELD, np.minimum(words.size, 4), 1)
        sort = excluded[open_].astype(np.int64) << 8 | narrowest[open_]
        for one in np.unique(sort).tolist():
            mine = np.flatnonzero(sort == one)
            mask = one >> 8
            distinct, place = unique_rows(values[open_[mine]] & BYTES_OF_MASK[mask ^ 0xFF])
            found = explain(frame, distinct, mask, one & 0xFF)
            self.conflicts |= found.conflicts
            explained[mine] = found.readable[place]
            for piece in found.pieces:
                used = np.flatnonzero(piece.used[place])
                rules = _rules(words, open_[mine[used]], piece.start, piece.width, RuleKind.AFFINE)
                rules["coordinate"] = piece.coordinate[place[used]]
                rules["base"] = piece.base[place[used]]
                rules["stride"] = piece.stride[place[used]]
                self.rules.append(rules)
        return explained

    def _add_tables(self, words: Words, values: Words64, settled: Bits, open_: npt.NDArray[np.int64]) -> None:
        free = words.inside[open_] & ~settled[open_]
        for mask in np.unique(free).tolist():
            chosen = open_[free == mask]
            for start, width in pieces_of(mask):
                piece = (values[chosen] >> np.uint64(8 * start)) & BYTES_OF_MASK[(1 << width) - 1]
                differs = (piece != piece[:, :1]).any(axis=1)
                rules = _rules(words, chosen[differs], start, width, RuleKind.TABLE)
                rules["coordinate"] = Coordinate.RANK
                self.tables.append((rules, piece[differs]))

    def _refuse(self, words: Words, at: int, unproven: bool, noisy: bool, count: int, strays: Words) -> NoReturn:
        block, offset, size = int(words.block[at]), int(words.offset[at]), int(words.size[at])
        names = [f"rank {view.rank}" for view in self.views]
        names += [f"the control of rank {repeat.rank}" for repeat in self.again]
        seen = ", ".join(f"{n} has 0x{int(v):0{2 * size}x}" for n, v in zip(names, words.values[at], strict=True))
        if unproven:
            why = "is noise that was not proven harmless"
            remedy = "perturb it, or keep what it points to in an arena"
        elif noisy:
            why = "differs between ranks where no rule explains it, next to noise"
            remedy = "prove the whole of it harmless by perturbing it, or make it follow one coordinate of the mesh"
        else:
            why = f"differs between ranks and follows no coordinate of the mesh {self.mesh}"
            remedy = "make it follow one, or capture every rank"
            if not self.again:
                remedy = "capture a control to see if it is noise"
        others = f" (and {count - 1} more words)" if count > 1 else ""
        raise UnexplainedWord(
            f"{self.describe(block, offset)}, offset {offset} ({size} bytes) {why}{others}: {seen}; {remedy}",
            block=block,
            proof_failed=unproven,
            strays=list(zip(strays.block.tolist(), strays.offset.tolist(), strays.size.tolist(), strict=True)),
        )

    def _result(self) -> Inference:
        if self.conflicts:
            return Inference(_no_rules(0), np.empty(0, dtype=np.uint64), _hitting(self.conflicts))
        tables = np.empty(0, dtype=np.uint64)
        if self.tables:
            rules = np.concatenate([r for r, _ in self.tables])
            distinct, place = unique_rows(np.concatenate([v for _, v in self.tables]))
            entries = np.zeros((len(distinct), self.mesh.world), dtype=np.uint64)
            entries[:, [view.rank for view in self.views]] = distinct
            if entries.size >= 1 << 32:
                raise UsageError(f"{len(distinct)} tables of {self.mesh.world} entries are too many: sample less")
            rules["table"] = place * self.mesh.world
            tables = entries.reshape(-1)
            self.rules.append(rules)
        every = np.concatenate([_no_rules(0), *self.rules])
        # What was added together ascends already, which a stable sort of one number makes use of.
        place = every["block"].astype(np.uint64) << np.uint64(32) | every["offset"]
        return Inference(every[np.argsort(place, kind="stable")], tables, [])


def _settle_noise(words: Words, noisy: Bits, proven: Bits) -> tuple[Bits, Truth]:
    """Masks of the bytes of each word that are noise and may be, and which words have noise that is not proven."""
    inside = words.inside
    settled = np.zeros(len(words), dtype=np.uint8)
    padding = words.kind == Kind.PADDING
    settled[padding] = inside[padding]
    # A declared field may be a struct as well, a truth value with garbage in the padding behind it: only sizes are
    # declared.
    unproven = np.zeros(len(words), dtype=np.bool_)
    for half in HALVES:
        bytes_ = inside & half
        suspect = ~padding & (noisy & bytes_ != 0)
        covered = suspect & (noisy & bytes_ & ~proven == 0)
        settled[covered] |= (bytes_ & proven)[covered]
        unproven |= suspect & ~covered
    return settled, unproven


def _rules(words: Words, chosen: npt.NDArray[np.int64], start: int, width: int, kind: RuleKind) -> Rules:
    rules = _no_rules(len(chosen))
    rules["block"] = words.block[chosen]
    rules["offset"] = words.offset[chosen] + start
    rules["width"] = width
    rules["kind"] = kind
    return rules


def _hitting(conflicts: set[frozenset[int]]) -> list[int]:
    """Few ranks of which every set has one: again and again the rank in most of the sets, the lowest of equals."""
    open_ = set(conflicts)
    chosen: list[int] = []
    while open_:
        counts: dict[int, int] = {}
        for ranks in open_:
            for rank in ranks:
                counts[rank] = counts.get(rank, 0) + 1
        best = min(counts, key=lambda rank: (-counts[rank], rank))
        chosen.append(best)
        open_ = {ranks for ranks in open_ if best not in ranks}
    return sorted(chosen)
