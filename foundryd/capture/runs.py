# SPDX-License-Identifier: Apache-2.0
"""Launches of an engine as ranks of a world, one after another: what a capture is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from foundryd import _native
from foundryd.capture.journal import unended
from foundryd.capture.recording import Recording, load
from foundryd.errors import CaptureError
from foundryd.rankpatch.mesh import Mesh

Progress = Callable[[str], None]

# Each launch of the control beyond the first is for one trial that ended the one before.
_CONTROL_LAUNCHES = 24


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture.

    ``command`` is the engine's own, run once for each captured rank with ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``
    set; ``deadline`` is in seconds for one launch; in the folder ``logs`` the output of
    every launch stays.  ``allow_opaque_modules`` captures modules whose globals cannot be listed, too.
    """

    variant: str
    command: Sequence[str]
    requested: Sequence[int] | None = None
    world_size: int | None = None
    deadline: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)
    logs: Path | None = None
    allow_opaque_modules: bool = False


def preload(environment: Mapping[str, str], *libraries: Path) -> str:
    """``LD_PRELOAD`` with ``libraries`` before what was there; what is there already is not put in twice."""
    ours = [str(p) for p in libraries]
    before = [p for p in environment.get("LD_PRELOAD", "").replace(" ", ":").split(":") if p and p not in ours]
    return ":".join([*ours, *before])


class Runs:
    """Launches of the engine, one a rank; recordings stay in ``folder``."""

    def __init__(self, mesh: Mesh, spec: CaptureSpec, folder: Path, progress: Progress) -> None:
        self._mesh = mesh
        self._spec = spec
        self._folder = folder
        self.progress = progress
        self.recordings: dict[int, Recording] = {}
        self.times: list[float] = []
        self._warm: set[int] = set()
        self._repeats: dict[int, tuple[Path, Recording]] = {}

    def run(self, rank: int) -> Recording:
        """The recording of ``rank``, captured now if it was not before."""
        if rank not in self.recordings:
            self.recordings[rank] = self._capture(f"rank {rank}", rank, self._path(rank), ())
        return self.recordings[rank]

    def again(self) -> bool:
        """Captures every rank that was captured once another time; answers whether there was any.

        A first launch fills the caches of compilers and tuners, and what it allocates for that, the next one does not.
        """
        cold = [rank for rank in self.recordings if rank not in self._warm]
        for rank in cold:
            self._warm.add(rank)
            self.recordings[rank] = self._capture(f"rank {rank}, with warm caches", rank, self._path(rank), ())
        return bool(cold)

    def run_like(self, rank: int, reference: Recording) -> Recording:
        """The recording of ``rank``, captured again if it is not built like the reference."""
        recording = self.run(rank)
        if recording.structure_key() != reference.structure_key() and rank not in self._warm:
            self.again()
            recording = self.recordings[rank]
        return recording

    def repeat(self, ranks: Sequence[int]) -> bool:
        """Captures each of the ranks another time, beside its recording; answers False if that was done before."""
        if self._repeats:
            return False
        for rank in ranks:
            path = self._folder / f"repeat-{rank}.recording"
            self._repeats[rank] = (path, self._capture(f"a repeat of rank {rank}", rank, path, ()))
        return True

    def repeats(self, ranks: Sequence[int]) -> list[Recording]:
        """The second recordings of ``ranks``, where there are any."""
        return [self._repeats[rank][1] for rank in ranks if rank in self._repeats]

    def control(self, rank: int, others: Sequence[int]) -> Recording:
        """Captures ``rank`` again, with the recordings of ``others`` to compare with."""
        path = self._folder / f"control-{rank}.recording"
        journal = path.with_suffix(".journal")
        references = [self._path(r) for r in others] + [self._repeats[r][0] for r in others if r in self._repeats]
        for attempt in range(1, _CONTROL_LAUNCHES + 1):
            known = len(unended(journal))
            try:
                return self._capture(f"the control of rank {rank}", rank, path, references)
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
            FOUNDRYD_ALLOW_OPAQUE_MODULES=str(int(self._spec.allow_opaque_modules)),
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
