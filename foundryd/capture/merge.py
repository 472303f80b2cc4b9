# SPDX-License-Identifier: Apache-2.0
"""Recordings of sampled ranks in, one variant for every rank out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from foundryd.archive import index as ix
from foundryd.archive.dtypes import noise_dtype
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.capture.recording import (
    ContentRecord,
    Proofs,
    Ranked,
    Recording,
    arena_name,
    make_index,
    pack,
    unpack,
    unpack_ranked,
)
from foundryd.errors import CaptureError, HeldOutMismatch, UnexplainedContent, UnexplainedWord
from foundryd.rankpatch.infer import Inference, RankView, infer
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.rules import RuleKind
from foundryd.rankpatch.verify import Report, check_held_out


@dataclass
class Merge:
    """The state of one variant's merge; ``undecided`` and ``image_ranks`` name ranks to capture before it can end."""

    mesh: Mesh
    members: tuple[int, ...]  # ranks of the class
    recordings: list[Recording]  # the first is the reference; the first `inferred` of them made the rules
    inferred: int
    inference: Inference
    dead: set[int]
    control: int
    varied: bool  # whether the control can prove strays, see capture.control
    strays: int  # bytes of these that it proved
    confirmed: list[Report] = field(default_factory=list)  # of ranks that inference did not see, as they came

    @property
    def reference(self) -> Recording:
        """The rank that others are described by."""
        return self.recordings[0]

    @property
    def undecided(self) -> list[int]:
        """Ranks whose capture would decide between rules that fit so far."""
        return list(self.inference.undecided)

    @property
    def image_ranks(self) -> list[int]:
        """Ranks whose images are needed and were not captured: some function's code differs between ranks."""
        if not any(len(d) > 1 for d in self._digests()):
            return []
        have = {r.rank for r in self.recordings}
        return [r for r in self.members if r not in have]

    def _digests(self) -> list[set[str]]:
        return [{r.modules[i].digest for r in self.recordings} for i in range(len(self.reference.modules))]

    def check(self, held_out: Recording) -> Report:
        """Raises ``HeldOutMismatch`` unless the rules reproduce a rank that inference did not see."""
        self._same_structure(held_out, HeldOutMismatch)
        ours = without(held_out, self.dead)
        known = {c.address for c in self.reference.contents}
        extra = [c for c in ours.contents if c.address not in known]
        ranges = [c.address for c in extra]
        ours = align_contents([self.reference, without(ours, set(ranges))])[1]
        try:
            report = check_held_out(
                self.inference.rules,
                self.inference.tables,
                RankView(self.reference.rank, self.reference.blocks()),
                self.mesh,
                RankView(ours.rank, ours.blocks()),
                self.reference.describe,
                fields=self.reference.fields(),
            )
        except HeldOutMismatch as mismatch:
            # A control proves words of graphs; content that samples have was tried, and nothing else can be.
            if any(block >= len(self.reference.graphs) for block, _, _ in mismatch.strays):
                mismatch.strays = []
            mismatch.ranges = ranges if mismatch.strays else []
            raise
        if extra:
            raise HeldOutMismatch(_only_held_out(extra, held_out.rank), ranges=ranges)
        return report

    def add_images(self, recording: Recording) -> None:
        """Takes a further rank in for its images only; its words must be what the rules say."""
        self.confirmed.append(self.check(recording))
        self.recordings.append(align_contents([self.reference, without(recording, self.dead)])[1])

    def _same_structure(self, other: Recording, error: type[CaptureError]) -> None:
        same_structure(self.reference, other, error)

    def ranked(self) -> Ranked:
        """What ``pack`` adds to the reference."""
        images, by_rank = [], []
        for i, digests in enumerate(self._digests()):
            images.append({r.modules[i].digest: r.modules[i].image for r in self.recordings})
            owners: list[str | None] = [None] * self.mesh.world
            for recording in self.recordings:
                owners[recording.rank] = recording.modules[i].digest
            by_rank.append(owners if len(digests) > 1 else None)
        captured = [r.rank for r in self.recordings[: self.inferred]]
        held_out = self.confirmed[0].rank if self.confirmed else None
        rank_class = ix.RankClass(list(self.members), captured, self.control, held_out)
        rules, noise = split_noise(self.inference.rules)
        return Ranked(rules, self.inference.tables, noise, rank_class, images, by_rank)


def merge(
    recordings: Sequence[Recording], control: Recording, members: Sequence[int], repeats: Sequence[Recording] = ()
) -> Merge:
    """Infers the rules of a rank class from its sampled ranks, the control, and further captures of sampled ranks.

    Raises ``CaptureError`` if ranks differ in structure, ``UnexplainedWord`` and ``UnexplainedContent``.  All content
    of all these recordings was offered to the control, so what it did not prove dead no further capture changes.
    """
    reference = recordings[0]
    mesh = Mesh.parse(reference.variant)
    for other in [*recordings[1:], control, *repeats]:
        same_structure(reference, other, CaptureError)
    proofs = control.proofs or Proofs()
    dead = set(proofs.dead)
    for recording in (*recordings, control, *repeats):
        _refuse_addresses(recording, dead)
    every = align_contents([without(r, dead) for r in [*recordings, control, *repeats]])
    living, control, repeats = every[: len(recordings)], every[len(recordings)], every[len(recordings) + 1 :]
    try:
        inference = infer(
            [RankView(r.rank, r.blocks()) for r in living],
            mesh=mesh,
            control=RankView(control.rank, control.blocks()),
            repeats=[RankView(r.rank, r.blocks()) for r in repeats],
            proven_noise=proofs.noise,
            proven_strays=proofs.strays,
            fields=living[0].fields(),
            describe=living[0].describe,
            complete=len(living) == len(members),
            members=members,
        )
    except UnexplainedWord as error:
        if error.block in proofs.unsteady:
            raise UnexplainedWord(
                f"{error}.  Nothing can be proven of this graph, since two replays of it from the same memory differ: "
                "have its kernels do the same each time, for one without atomic additions of floating-point numbers",
                block=error.block,
                proof_failed=True,
            ) from error
        if not living[0].is_content(error.block):
            raise
        raise UnexplainedContent(
            f"{error}; or write the allocation before anything reads it, since the control did not prove it dead"
        ) from error
    return Merge(
        mesh,
        tuple(members),
        living,
        len(living),
        inference,
        dead,
        control.rank,
        proofs.varied,
        int(proofs.strays["width"].sum()),
    )


def _refuse_addresses(recording: Recording, dead: set[int]) -> None:
    """Raises ``UnexplainedContent`` if content that a restore brings has the address of a module's global."""
    ordinals = {c.address: (c.ordinal, c.arena) for c in recording.contents}
    for address, offset, name in recording.notes.get("global_addresses", []):
        if address in dead or address not in ordinals:
            continue
        ordinal, arena = ordinals[address]
        raise UnexplainedContent(
            f"byte {offset} of allocation {ordinal} of arena {arena_name(arena)} holds the address of global {name} on "
            f"rank {recording.rank}, which a restore has elsewhere: give the address to kernels as a parameter, or "
            "write the allocation before anything reads it"
        )


def split_noise(rules: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rules that a rank needs, and what is noise, neighbours joined, as ``noise_dtype``."""
    noise = rules[rules["kind"] == RuleKind.NOISE]
    end = noise["offset"] + noise["width"]
    cut = np.ones(len(noise), bool)
    cut[1:] = (noise["block"][1:] != noise["block"][:-1]) | (noise["offset"][1:] != end[:-1])
    first = np.flatnonzero(cut)
    runs = np.zeros(len(first), noise_dtype)
    runs["block"], runs["offset"] = noise["block"][first], noise["offset"][first]
    runs["width"] = end[np.append(first[1:], len(noise)) - 1] - runs["offset"] if len(first) else 0
    return rules[rules["kind"] != RuleKind.NOISE], runs


def unruled(recordings: Sequence[Recording], members: Sequence[int]) -> Sequence[tuple[int, int, int]]:
    """The words of graphs that differ between ranks without a rule and may be garbage.

    Raises ``CaptureError`` if ranks differ in structure.
    """
    reference = recordings[0]
    for other in recordings[1:]:
        same_structure(reference, other, CaptureError)
    count = len(reference.graphs)
    try:
        infer(
            [RankView(r.rank, r.blocks()[:count]) for r in recordings],
            mesh=Mesh.parse(reference.variant),
            fields=reference.fields()[:count],
            complete=len(recordings) == len(members),
            members=members,
        )
    except UnexplainedWord as error:
        return error.strays
    return []


def _only_held_out(contents: Sequence[ContentRecord], rank: int) -> str:
    first = contents[0]
    more = f" (and {len(contents) - 1} more allocations)" if len(contents) > 1 else ""
    return (
        f"allocation {first.ordinal} of arena {arena_name(first.arena)} ({len(first.data)} bytes at "
        f"{first.address:#x}) is not zero on the held-out rank {rank} and zero on every sampled one, and no control "
        f"proved it dead{more}: have the engine fill it alike, or write it before anything reads it"
    )


def without(recording: Recording, dead: set[int]) -> Recording:
    """The recording without the content that was proven dead."""
    return replace(recording, contents=[c for c in recording.contents if c.address not in dead])


def same_structure(reference: Recording, other: Recording, error: type[CaptureError]) -> None:
    """Raises ``error`` naming the first part in which two ranks are not built alike."""
    theirs = other.structure()
    for part, ours in reference.structure().items():
        if ours != theirs[part]:
            detail = _first_difference(ours, theirs[part])
            raise error(
                f"rank {other.rank} differs from rank {reference.rank} in its {part}{detail}: ranks of one class "
                "must be built alike, so declare the boundary or make the engine deterministic"
            )
    if not np.array_equal(reference.allocations, other.allocations):
        raise error(_allocation_difference(reference, other))


def _first_difference(ours: object, theirs: object) -> str:
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f" ({len(ours)} against {len(theirs)})"
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        if isinstance(ours[place], bytes):
            return f" (number {place})"
        return f" (number {place}: {ours[place]} against {theirs[place]})"
    return "" if isinstance(ours, bytes) else f" ({ours} against {theirs})"


def _allocation_difference(reference: Recording, other: Recording) -> str:
    ours, theirs = reference.allocations, other.allocations
    for a, b in zip(ours, theirs, strict=False):
        if a != b:
            return (
                f"allocation {a['ordinal']} of arena {arena_name(int(a['arena']))} is {a['bytes']} bytes at "
                f"{a['address']:#x} on "
                f"rank {reference.rank} and allocation {b['ordinal']} of arena {arena_name(int(b['arena']))} is "
                f"{b['bytes']} bytes at "
                f"{b['address']:#x} on rank {other.rank}: make the engine allocate alike on every rank"
            )
    return (
        f"rank {reference.rank} made {len(ours)} allocations and rank {other.rank} made {len(theirs)}: make the engine "
        "allocate alike on every rank"
    )


def align_contents(recordings: Sequence[Recording]) -> list[Recording]:
    """Gives every recording the same content ranges: a range that is all zero on one rank is zeros there."""
    ranges = {c.address: c for r in recordings for c in r.contents}
    out = []
    for recording in recordings:
        own = {c.address: c for c in recording.contents}
        contents = [
            own.get(a) or ContentRecord(a, c.arena, c.ordinal, np.zeros(len(c.data), np.uint8))
            for a, c in sorted(ranges.items())
        ]
        out.append(replace(recording, contents=contents))
    return out


def write_archive(path: Path, merges: Sequence[Merge], append_to: Path | None = None) -> None:
    """Writes the archive of a variant, one merge for each of its rank classes.

    With ``append_to`` the variants of that archive are kept, but for those that are given again.
    """
    reference = merges[0].reference
    notes: dict[str, Any] = {reference.variant: reference.notes}
    with ArchiveWriter(path) as writer:
        variants = []
        if append_to is not None:
            with ArchiveReader.open(append_to) as old:
                old.verify()
                _same_identity(old.index.identity, reference.identity, append_to)
                kept = [v for v in old.index.variants if v.name != reference.variant]
                variants = [pack(writer, unpack(old, v), unpack_ranked(old, v)) for v in kept]
                notes = {v.name: old.index.notes.get(v.name, {}) for v in kept} | notes
        variants += [pack(writer, m.reference, m.ranked()) for m in merges]
        writer.finish(make_index("archive", reference.identity, variants, notes))


def _same_identity(old: dict[str, ix.IdentityField], new: dict[str, ix.IdentityField], path: Path) -> None:
    for name in sorted(old.keys() | new.keys()):
        if old.get(name) != new.get(name):
            before = old[name].value if name in old else "absent"
            now = new[name].value if name in new else "absent"
            raise CaptureError(
                f"{path} was captured with {name} {before} and this capture has {now}: write a new archive"
            )
