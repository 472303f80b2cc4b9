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
from foundryd.capture.demands import demanded_host, with_host
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
from foundryd.capture.structure import describe_allocation, host_rows, same_structure
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
    noise: np.ndarray  # rows of ``noise_dtype`` by block: what it proved harmless, strays among them
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
        same_structure(self.reference, held_out, HeldOutMismatch)
        ours = self._as_merged(held_out)
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
        self._refuse_more_host(held_out)
        return report

    def add_images(self, recording: Recording) -> None:
        """Takes a further rank in for its images only; its words must be what the rules say."""
        self.confirmed.append(self.check(recording))
        self.recordings.append(align_contents([self.reference, self._as_merged(recording)])[1])

    def _as_merged(self, recording: Recording) -> Recording:
        return with_host(without(recording, self.dead), host_rows(self.reference))

    def _refuse_more_host(self, held_out: Recording) -> None:
        """Raises ``HeldOutMismatch`` if the rank needs pinned memory that the archive does not have."""
        kept, own = host_rows(self.reference), demanded_host([without(held_out, self.dead)], self.noise)
        if len(own) > len(kept):
            raise HeldOutMismatch(
                f"the held-out rank {held_out.rank} refers to {describe_allocation(own[-1])}, and what the sampled "
                f"ranks refer to ends after {len(kept)} allocations of that arena: sample rank {held_out.rank} as well"
            )

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
    mesh = Mesh.parse(recordings[0].variant)
    every = [*recordings, control, *repeats]
    _same_structures(every, len(recordings))
    proofs = control.proofs or Proofs()
    noise = np.concatenate([proofs.noise, proofs.strays])
    noise = noise[np.argsort(noise["block"], kind="stable")]
    dead = set(proofs.dead)
    every = [without(recording, dead) for recording in every]
    host = demanded_host(every, noise)
    every = [with_host(recording, host) for recording in every]
    for recording in every:
        _refuse_addresses(recording)
    every = align_contents(every)
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
        noise,
    )


def _same_structures(every: Sequence[Recording], sampled: int) -> None:
    """Raises ``CaptureError`` if any two differ; the first ``sampled`` are of samples, the next is of the control."""
    names = [f"rank {recording.rank}" for recording in every[:sampled]]
    names.append(f"the control of rank {every[sampled].rank}")
    names += [f"another capture of rank {recording.rank}" for recording in every[sampled + 1 :]]
    # Lists of pinned memory that begin the same one need not begin one another.
    base = max(range(len(every)), key=lambda place: len(host_rows(every[place])))
    for place, other in enumerate(every):
        if place != base:
            same_structure(every[base], other, CaptureError, names=(names[base], names[place]))


def _refuse_addresses(recording: Recording) -> None:
    """Raises ``UnexplainedContent`` if content that a restore brings has the address of a module's global."""
    ordinals = {c.address: (c.ordinal, c.arena) for c in recording.contents}
    for address, offset, name in recording.notes.get("global_addresses", []):
        if address not in ordinals:
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
