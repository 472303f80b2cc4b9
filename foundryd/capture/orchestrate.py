# SPDX-License-Identifier: Apache-2.0
"""``foundryd capture``: runs an engine as the sampled ranks of a world, one after another, and writes the archive."""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import verify
from foundryd.capture.merge import Merge, merge, unruled, write_archive
from foundryd.capture.recording import Recording
from foundryd.capture.runs import CaptureSpec, Progress, Runs
from foundryd.capture.structure import alike, class_keys, same_structure
from foundryd.errors import CaptureError, HeldOutMismatch, UnexplainedWord
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.noise import Strays
from foundryd.rankpatch.sampling import Sampling, sample, split_classes
from foundryd.rankpatch.verify import Report, count_rules

# How often a held-out rank that was not as predicted may join the samples.
_REFITS = 2


@dataclass
class CaptureResult:
    """Figures of a capture; times in milliseconds."""

    archive: Path
    variant: str
    captured: list[int]  # every rank that was captured, for whatever reason
    controls: list[int]  # one for each rank class
    confirmed: list[Report]  # of ranks that inference did not see: what was compared with their captures
    rules: dict[str, int]  # words by rule, see rankpatch.verify.count_rules
    image_bytes: int  # of the images of a rank's modules, as the program loads them; of one rank for each class
    pruned_image_bytes: int  # of the same as a restore loads them
    launch_ms: list[float]  # of each launch of the engine
    total_ms: float


def capture(
    output: Path, spec: CaptureSpec, *, append: bool = False, progress: Progress = lambda _: None
) -> CaptureResult:
    """Captures a variant into ``output``.

    Raises ``CaptureError`` and its kinds; an archive appears only when everything held.
    """
    started = time.monotonic()
    mesh = Mesh.parse(spec.variant)
    if spec.world_size not in (None, mesh.world):
        raise CaptureError(
            f"the variant {mesh} has {mesh.world} ranks and --world-size is {spec.world_size}: correct one of them"
        )
    seen = set(spec.requested or ()) & set(spec.held_out or ())
    if seen:
        raise CaptureError(f"ranks {sorted(seen)} are to be sampled and held out: inference must not see them")
    for rank in spec.held_out or ():
        mesh.check(rank)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="foundryd-capture-"))
        runs = stack.enter_context(Runs(mesh, spec, Path(folder), progress))
        classes = _classes(mesh, spec.requested, runs)
        merges = [_capture_class(mesh, members, runs, spec.held_out or ()) for members in classes]
        for merged in merges:
            _warn_of_outside(merged.reference, progress)
            _tell_whole_images(merged.reference, progress)
        _publish(output, merges, append)
    total = (time.monotonic() - started) * 1000
    rules = Counter[str]()
    for merged in merges:
        rules.update(count_rules(merged.inference.rules))
    return CaptureResult(
        output,
        str(mesh),
        sorted(runs.recordings),
        [m.control for m in merges],
        [report for m in merges for report in m.confirmed],
        dict(rules),
        sum(whole for merged in merges for _, whole, _ in _images(merged.reference)),
        sum(kept for merged in merges for kept, _, _ in _images(merged.reference)),
        runs.times,
        total,
    )


def _warn_of_outside(recording: Recording, progress: Progress) -> None:
    outside = recording.notes.get("outside", [])
    if outside:
        progress(
            f"warning: graphs refer to {len(outside)} tensors ({sum(n for _, n in outside):,} bytes, the first at "
            f"{outside[0][0]:#x}) that were made before them and in no arena.  A restore brings them back as they were "
            "captured, for the graphs alone: if the engine updates one, make it in an arena and bind it"
        )


def _images(recording: Recording) -> list[tuple[int, int, str]]:
    """Of each module: bytes of its archived image, bytes of the program's, why nothing was left out (or empty)."""
    notes = recording.notes.get("images") or [[len(m.image), ""] for m in recording.modules]
    return [(len(m.image), int(whole), why) for m, (whole, why, *_) in zip(recording.modules, notes, strict=True)]


def _tell_whole_images(recording: Recording, progress: Progress) -> None:
    for number, (_, size, why) in enumerate(_images(recording)):
        if why:
            kernel = next((f"with the kernel {f.name}" for f in recording.functions if f.module == number), "no kernel")
            progress(f"the image of module {number} ({size:,} bytes, {kernel}) stays whole: {why}")
    cuts = [(number, *note[2:4]) for number, note in enumerate(recording.notes.get("images", []))]
    uncut = [(number, why) for number, _, why in cuts if why]
    if uncut and not any(size for _, size, _ in cuts):
        progress(f"no image was cut to the kernels that are used, that of module {uncut[0][0]} since {uncut[0][1]}")


def _publish(output: Path, merges: Sequence[Merge], append: bool) -> None:
    """Writes the archive beside its place, verifies it, and only then puts it there."""
    aside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        write_archive(aside, merges, output if append and output.exists() else None)
        with ArchiveReader.open(aside) as reader:
            verify(reader)
        aside.replace(output)
    finally:
        aside.unlink(missing_ok=True)


def _classes(mesh: Mesh, requested: Sequence[int] | None, runs: Runs) -> Sequence[Sequence[int]]:
    """The rank classes; captures what it takes to know them."""
    first = sample(mesh, requested)
    runs.start_control(first.control, first.ranks)
    runs.run_all(first.ranks)
    while True:
        keys = class_keys(runs.recordings)
        if len(set(keys.values())) > 1 and runs.again():
            continue
        split = split_classes(mesh, keys)
        if not split.capture:
            if len(split.classes) > 1:
                runs.progress(f"{len(split.classes)} rank classes: {_why(runs.recordings)}")
            return split.classes
        runs.run_all(split.capture)


def _why(recordings: Mapping[int, Recording]) -> str:
    """What the first two ranks that differ differ in."""
    for one, other in combinations((recordings[r] for r in sorted(recordings)), 2):
        try:
            same_structure(one, other, CaptureError)
        except CaptureError as difference:
            return str(difference)
    return "ranks with templates of their own"


@dataclass
class _Suspects:
    """What differs between ranks and follows no rule, which controls are to prove harmless.

    ``words`` are of graphs.  ``witnesses`` are ranks beside the samples: a control compares itself with their
    recordings, too, and tries all content that these have.  ``ranges`` are allocations of which only they have some.
    """

    words: set[tuple[int, int, int]] = field(default_factory=set)
    ranges: set[int] = field(default_factory=set)
    witnesses: list[int] = field(default_factory=list)

    def add(self, words: Strays, recording: Recording) -> bool:
        """Takes words in, only of graphs; answers whether any was new."""
        new = {word for word in words if word[0] < len(recording.graphs)} - self.words
        self.words |= new
        return bool(new)

    def add_unseen(self, mismatches: Mapping[int, HeldOutMismatch], varied: bool) -> dict[int, HeldOutMismatch]:
        """Takes in what held-out ranks show; answers with those of the mismatches that another control cannot solve.

        ``varied``: whether a control can prove strays; words beside noise it can prove without.  What was tried before
        is not tried again, but of a word that is known another byte may differ on a new witness.
        """
        stuck: dict[int, HeldOutMismatch] = {}
        known, words, ranges = set(self.witnesses), set(self.words), set(self.ranges)
        for rank, mismatch in mismatches.items():
            new = set(mismatch.ranges) - self.ranges
            unknown = bool(mismatch.strays) and (rank not in known or not self.words.issuperset(mismatch.strays))
            hopeless = bool(mismatch.strays) and not (varied or mismatch.beside_noise)
            if hopeless or not (new or unknown):
                stuck[rank] = mismatch
                continue
            if rank not in known and (unknown or new - ranges):
                self.witnesses.append(rank)
            words.update(mismatch.strays)
            ranges |= new
        self.words, self.ranges = words, ranges
        return stuck


def _capture_class(mesh: Mesh, members: Sequence[int], runs: Runs, asked: Sequence[int]) -> Merge:
    sampling = sample(mesh, [r for r in members if r in runs.recordings], members)
    suspects = _Suspects()
    refits = 0
    while True:
        merged, sampling = _merge(sampling, runs, suspects)
        unseen = [rank for rank in asked if rank in members and rank not in sampling.ranks]
        mismatches = _confirm(merged, unseen or [r for r in [sampling.held_out] if r is not None], runs)
        if not mismatches:
            if merged.strays:
                runs.progress(
                    f"{merged.strays} bytes follow no rule and are noise: no output depends on them, whatever is put "
                    "there and in whatever state the engine is"
                )
            return merged
        stuck = suspects.add_unseen(mismatches, merged.varied)
        offered = [rank for rank in mismatches if rank not in stuck]
        if offered:
            words = {word for rank in offered for word in mismatches[rank].strays}
            ranges = {address for rank in offered for address in mismatches[rank].ranges}
            runs.progress(
                f"{len(words)} words and {len(ranges)} allocations are not as predicted on ranks {offered} and may be "
                "garbage"
            )
        if stuck:
            rank, mismatch = next(iter(stuck.items()))
            if refits == _REFITS:
                raise mismatch
            refits += 1
            runs.progress(f"rank {rank} is not as predicted and joins the samples; another is held out: {mismatch}")
            sampling = sampling.extended([rank])


def _confirm(merged: Merge, held_out: Sequence[int], runs: Runs) -> dict[int, HeldOutMismatch]:
    """Checks the rules with ranks that inference did not see, and takes in their images; mismatches by rank."""
    mismatches: dict[int, HeldOutMismatch] = {}

    def check(ranks: Sequence[int]) -> None:
        for rank, recording in zip(ranks, runs.run_all_like(ranks, merged.reference), strict=True):
            try:
                merged.add_images(recording)
            except HeldOutMismatch as mismatch:
                mismatches[rank] = mismatch

    check(held_out)
    if not mismatches:
        check(merged.image_ranks)
    return mismatches


def _code_differs(recordings: Sequence[Recording]) -> bool:
    return len({tuple(module.digest for module in recording.modules) for recording in recordings}) > 1


def _merge(sampling: Sampling, runs: Runs, suspects: _Suspects) -> tuple[Merge, Sampling]:
    """Rules from the sampled ranks, with more samples or repeats where these are needed to tell."""
    while True:
        # One that came late may still have had cold caches.
        runs.run_all(sampling.ranks)
        recordings = runs.run_all_like(sampling.ranks, runs.recordings[sampling.ranks[0]])
        witnesses = [rank for rank in suspects.witnesses if rank not in sampling.ranks]
        suspects.add(unruled(recordings, sampling.members), recordings[0])
        control = runs.control(sampling.control, [*sampling.ranks, *witnesses], sorted(suspects.words))
        if not alike(control, [runs.run(sampling.control)]) and runs.warm_control():
            continue
        try:
            merged = merge(recordings, control, sampling.members, runs.repeats(sampling.ranks))
        except UnexplainedWord as error:
            if control.proofs is not None and control.proofs.varied and suspects.add(error.strays, recordings[0]):
                runs.progress(f"{len(error.strays)} words follow no rule and may be garbage: {error}")
                continue
            if _code_differs(recordings) and len(sampling.ranks) < len(sampling.members):
                # Their images are needed anyhow, and a compiler that tunes for each rank may choose other launches.
                runs.progress(f"all {len(sampling.members)} ranks are sampled, for their code differs: {error}")
                sampling = sampling.extended(sampling.members)
                continue
            steady = control.proofs is None or error.block not in control.proofs.unsteady
            if error.proof_failed and runs.cold and steady:
                # Beside what its compilers needed, a first launch may have had its tensors elsewhere.
                runs.progress(f"two captures of one rank differ, and one may have had cold caches: {error}")
                runs.again()
                continue
            if error.proof_failed or not runs.repeat(sampling.ranks):
                raise
            continue
        if not merged.undecided:
            return merged, sampling
        sampling = sampling.extended(merged.undecided)
