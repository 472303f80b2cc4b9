# SPDX-License-Identifier: Apache-2.0
"""``foundryd capture``: runs an engine as the sampled ranks of a world, one after another, and writes the archive."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from foundryd import _native
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import verify
from foundryd.capture.journal import unended
from foundryd.capture.merge import Merge, merge, same_structure, write_archive
from foundryd.capture.recording import Recording, load
from foundryd.errors import CaptureError
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.sampling import sample, split_classes
from foundryd.rankpatch.verify import count_rules

Progress = Callable[[str], None]

# Each launch beyond the first is for one trial that ended the one before.
_CONTROL_LAUNCHES = 24


@dataclass
class CaptureResult:
    """Figures of a capture; times in milliseconds."""

    archive: Path
    variant: str
    captured: list[int]  # every rank that was captured, for whatever reason
    controls: list[int]  # one for each rank class
    held_out: list[int]
    rules: dict[str, int]  # words by rule, see rankpatch.verify.count_rules
    launch_ms: list[float]  # of each launch of the engine
    total_ms: float


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture.

    ``command`` is the engine's own, run once for each captured rank with ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``
    set; ``deadline`` is in seconds for one launch; in the folder ``logs`` the output of
    every launch stays.
    """

    variant: str
    command: Sequence[str]
    requested: Sequence[int] | None = None
    world_size: int | None = None
    deadline: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)
    logs: Path | None = None


def preload(environment: Mapping[str, str], *libraries: Path) -> str:
    """``LD_PRELOAD`` with ``libraries`` before what was there; what is there already is not put in twice."""
    ours = [str(p) for p in libraries]
    before = [p for p in environment.get("LD_PRELOAD", "").replace(" ", ":").split(":") if p and p not in ours]
    return ":".join([*ours, *before])


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
    with tempfile.TemporaryDirectory(prefix="foundryd-capture-") as folder:
        runs = _Runs(mesh, spec, Path(folder), progress)
        merges = [_capture_class(mesh, members, runs) for members in _classes(mesh, spec.requested, runs)]
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
        [m.held_out for m in merges if m.held_out is not None],
        dict(rules),
        runs.times,
        total,
    )


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


def _classes(mesh: Mesh, requested: Sequence[int] | None, runs: _Runs) -> Sequence[Sequence[int]]:
    """The rank classes; captures what it takes to know them."""
    for rank in sample(mesh, requested).ranks:
        runs.run(rank)
    while True:
        keys = {r: recording.structure_key() for r, recording in runs.recordings.items()}
        if len(set(keys.values())) > 1 and runs.again():
            continue
        split = split_classes(mesh, keys)
        if not split.capture:
            if len(split.classes) > 1:
                runs.progress(f"{len(split.classes)} rank classes: {_why(runs.recordings)}")
            return split.classes
        for rank in split.capture:
            runs.run(rank)


def _why(recordings: Mapping[int, Recording]) -> str:
    """What the first two ranks that differ differ in."""
    first, *others = (recordings[r] for r in sorted(recordings))
    for other in others:
        try:
            same_structure(first, other, CaptureError)
        except CaptureError as difference:
            return str(difference)
    return "ranks with templates of their own"


def _capture_class(mesh: Mesh, members: Sequence[int], runs: _Runs) -> Merge:
    sampling = sample(mesh, [r for r in members if r in runs.recordings], members)
    while True:
        recordings = [runs.run(rank) for rank in sampling.ranks]
        control = runs.control(sampling.control, [r.rank for r in recordings])
        if control.structure_key() != runs.run(sampling.control).structure_key() and runs.again():
            continue
        merged = merge(recordings, control, sampling.members)
        if not merged.undecided:
            break
        sampling = sampling.extended(merged.undecided)
    if sampling.held_out is not None:
        merged.held_out = sampling.held_out
        merged.add_images(runs.run(sampling.held_out))
    for rank in merged.image_ranks:
        merged.add_images(runs.run(rank))
    return merged


class _Runs:
    """Launches of the engine, one a rank; recordings stay in ``folder``."""

    def __init__(self, mesh: Mesh, spec: CaptureSpec, folder: Path, progress: Progress) -> None:
        self._mesh = mesh
        self._spec = spec
        self._folder = folder
        self.progress = progress
        self.recordings: dict[int, Recording] = {}
        self.times: list[float] = []
        self._warm = False

    def run(self, rank: int) -> Recording:
        """The recording of ``rank``, captured now if it was not before."""
        if rank not in self.recordings:
            self.recordings[rank] = self._capture(f"rank {rank}", rank, self._path(rank), ())
        return self.recordings[rank]

    def again(self) -> bool:
        """Captures the rank that came first once more; answers whether that was left to do.

        The first launch fills the caches of compilers and tuners, and what it allocates for that, the others do not.
        """
        if self._warm or not self.recordings:
            return False
        self._warm = True
        first = next(iter(self.recordings))
        self.recordings[first] = self._capture(f"rank {first}, with warm caches", first, self._path(first), ())
        return True

    def control(self, rank: int, others: Sequence[int]) -> Recording:
        """Captures ``rank`` again, with the recordings of ``others`` to compare with."""
        path = self._folder / f"control-{rank}.recording"
        journal = path.with_suffix(".journal")
        for attempt in range(1, _CONTROL_LAUNCHES + 1):
            known = len(unended(journal))
            try:
                return self._capture(f"the control of rank {rank}", rank, path, [self._path(r) for r in others])
            except CaptureError:
                fatal = unended(journal)
                if len(fatal) == known or attempt == _CONTROL_LAUNCHES:
                    raise
                self.progress(f"a trial was fatal to the control, which goes on without it: {fatal[-1]}")
        raise AssertionError("the last launch returns or raises")

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.recording"

    def _capture(self, what: str, rank: int, path: Path, references: Sequence[Path]) -> Recording:
        self.progress(f"capturing as {what} of {self._mesh.world}")
        started = time.monotonic()
        try:
            self._launch(rank, path, references)
        finally:
            self.times.append((time.monotonic() - started) * 1000)
        return load(path)

    def _launch(self, rank: int, path: Path, references: Sequence[Path]) -> None:
        log = self._log(path.stem)
        with log.open("wb") as sink:
            process = subprocess.Popen(
                list(self._spec.command),
                env=self._environment(rank, path, references),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code: int | None = process.wait(self._spec.deadline)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Whatever the engine started goes with it.
                _kill_group(process)
        tail = log.read_text(errors="replace").strip()[-2000:]
        if code is None:
            raise CaptureError(
                f"capturing rank {rank} took more than {self._spec.deadline:.0f} s: raise --deadline or look at "
                f"its output:\n{tail}"
            )
        if code != 0:
            raise CaptureError(f"capturing rank {rank} ended with exit code {code}: see its output:\n{tail}")
        if not path.exists():
            raise CaptureError(
                f"capturing rank {rank} ended without a recording: call finish() on its GraphSet; its output:\n{tail}"
            )

    def _log(self, name: str) -> Path:
        """Where the output of the next launch goes."""
        if self._spec.logs is None:
            return self._folder / f"{name}.log"
        self._spec.logs.mkdir(parents=True, exist_ok=True)
        return self._spec.logs / f"{len(self.times):02}-{name}.log"

    def _environment(self, rank: int, path: Path, references: Sequence[Path]) -> dict[str, str]:
        env = {**os.environ, **self._spec.environment}
        local = self._mesh.coordinates(rank)[1]
        env.update(
            FOUNDRYD_MODE="capture",
            FOUNDRYD_VARIANT=str(self._mesh),
            FOUNDRYD_RECORDING=str(path),
            RANK=str(rank),
            LOCAL_RANK=str(local),
            WORLD_SIZE=str(self._mesh.world),
            LD_PRELOAD=preload(env, _native.hook_library(), _native.fake_nccl()),
            # Both sides of a restore run with these; see docs/architecture.md.
            NCCL_GRAPH_REGISTER="0",
            NCCL_RUNTIME_CONNECT="0",
        )
        for name in ("FOUNDRYD_REFERENCE", "FOUNDRYD_JOURNAL"):
            env.pop(name, None)
        if references:
            env["FOUNDRYD_REFERENCE"] = ":".join(str(p) for p in references)
            env["FOUNDRYD_JOURNAL"] = str(path.with_suffix(".journal"))
        return env


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
