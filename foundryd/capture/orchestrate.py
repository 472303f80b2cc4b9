# SPDX-License-Identifier: Apache-2.0
"""``foundryd capture``: runs an engine as the sampled ranks of a world, one after another, and writes the archive."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foundryd import _native
from foundryd.capture.merge import Merge, merge, same_structure, write_archive
from foundryd.capture.recording import Recording, load
from foundryd.errors import CaptureError
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.sampling import Sampling, sample

Progress = Callable[[str], None]


@dataclass
class CaptureResult:
    """Figures of a capture; times in milliseconds."""

    archive: Path
    variant: str
    captured: list[int]
    control: int | None
    held_out: int | None
    capture_ms: dict[int, float] = field(default_factory=dict)  # by rank; the control is -1
    total_ms: float = 0.0


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture.

    ``command`` is the engine's own, run once for each captured rank with ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``
    set; ``deadline`` is in seconds for one launch.
    """

    variant: str
    command: Sequence[str]
    requested: Sequence[int] | None = None
    world_size: int | None = None
    deadline: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)


def preload(environment: Mapping[str, str], *libraries: Path) -> str:
    """``LD_PRELOAD`` with ``libraries`` before what was there; what is there already is not put in twice."""
    ours = [str(p) for p in libraries]
    before = [p for p in environment.get("LD_PRELOAD", "").replace(" ", ":").split(":") if p and p not in ours]
    return ":".join([*ours, *before])


def capture(output: Path, spec: CaptureSpec, *, append: bool = False, progress: Progress = lambda _: None) -> CaptureResult:
    """Captures a variant into ``output``.

    Raises ``CaptureError`` and its kinds; an archive appears only when everything held.
    """
    started = time.monotonic()
    mesh = Mesh.parse(spec.variant)
    if spec.world_size not in (None, mesh.world):
        raise CaptureError(f"the variant {mesh} has {mesh.world} ranks and --world-size is {spec.world_size}: correct one of them")
    plan = sample(mesh, spec.requested)
    with tempfile.TemporaryDirectory(prefix="foundryd-capture-") as folder:
        runs = _Runs(mesh, spec, Path(folder), progress)
        merged, held_out = _capture_variant(mesh, plan, runs)
        write_archive(output, [(merged, plan.control, held_out)], output if append and output.exists() else None)
    captured = sorted(set(runs.paths) - {-1})
    total = (time.monotonic() - started) * 1000
    return CaptureResult(output, str(mesh), captured, plan.control, held_out, runs.times, total)


def _capture_variant(mesh: Mesh, plan: Sampling, runs: _Runs) -> tuple[Merge, int | None]:
    recordings = [runs.run(rank) for rank in plan.ranks]
    for other in recordings[1:]:
        same_structure(recordings[0], other, CaptureError)
    control = runs.run(plan.control, references=[runs.paths[r.rank] for r in recordings])
    while True:
        complete = len(recordings) == mesh.world
        merged = merge(recordings, control, complete=complete)
        missing = [r for r in merged.undecided if r not in {x.rank for x in recordings}]
        if not missing:
            break
        recordings += [runs.run(rank) for rank in missing]
    seen = {r.rank for r in recordings}
    # The rank planned for holding out may have been needed to decide; any rank that inference did not see will do.
    unseen = [r for r in [plan.held_out, *range(mesh.world)] if r is not None and r not in seen]
    held_out = unseen[0] if unseen else None
    if held_out is not None:
        merged.add_images(runs.run(held_out))
    for rank in merged.image_ranks:
        merged.add_images(runs.run(rank))
    return merged, held_out


class _Runs:
    """Launches of the engine, one a rank; recordings stay in ``folder``."""

    def __init__(self, mesh: Mesh, spec: CaptureSpec, folder: Path, progress: Progress) -> None:
        self._mesh = mesh
        self._spec = spec
        self._folder = folder
        self._progress = progress
        self.paths: dict[int, Path] = {}
        self.times: dict[int, float] = {}

    def run(self, rank: int | None, references: Sequence[Path] = ()) -> Recording:
        """Captures as ``rank``; with ``references`` this is the control run, kept under -1."""
        if rank is None:
            raise CaptureError("this world has no rank to capture: give the variant at least one")
        control = bool(references)
        name = f"control-{rank}" if control else f"rank-{rank}"
        self._progress(f"capturing {'rank ' if not control else 'the control of rank '}{rank} of {self._mesh.world}")
        path = self._folder / f"{name}.recording"
        started = time.monotonic()
        self._launch(rank, path, references)
        key = -1 if control else rank
        self.paths[key] = path
        self.times[key] = (time.monotonic() - started) * 1000
        return load(path)

    def _launch(self, rank: int, path: Path, references: Sequence[Path]) -> None:
        log = path.with_suffix(".log")
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
                f"capturing rank {rank} took more than {self._spec.deadline:.0f} s: raise --deadline or look at its output:\n{tail}"
            )
        if code != 0:
            raise CaptureError(f"capturing rank {rank} ended with exit code {code}: see its output:\n{tail}")
        if not path.exists():
            raise CaptureError(
                f"capturing rank {rank} ended without a recording: call finish() on its GraphSet; its output:\n{tail}"
            )

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
        env.pop("FOUNDRYD_REFERENCE", None)
        if references:
            env["FOUNDRYD_REFERENCE"] = ":".join(str(p) for p in references)
        return env


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
