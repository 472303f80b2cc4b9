# SPDX-License-Identifier: Apache-2.0
"""Launches of an engine as ranks of a world, one after another: what a capture is made of."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from foundryd import _native
from foundryd.capture.journal import unended, write_share, write_strays
from foundryd.capture.recording import Recording, announce, deliver, load, save
from foundryd.capture.shares import joined
from foundryd.capture.structure import alike
from foundryd.errors import CaptureError, UsageError
from foundryd.interrupts import uninterrupted, when_interrupted
from foundryd.nccl import installed_nccl
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.noise import Strays

Progress = Callable[[str], None]

# Each launch of the control beyond the first is for one trial that ended the one before.
_CONTROL_LAUNCHES = 24


@dataclass(frozen=True)
class CaptureSpec:
    """What to capture.

    ``command`` is the engine's own, run once for each captured rank with ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE``
    set; ``deadline`` is in seconds for one launch; in the folder ``logs`` the output of every launch stays.  Up to
    ``jobs`` launches run side by side on the device, and ``controls`` of them share the proofs; where that leaves room,
    controls start beside the ranks that they are compared with.  ``allow_opaque_modules`` captures modules whose
    globals cannot be listed, too.  ``held_out`` are ranks that the rules must predict; without them it is one of each
    class.
    """

    variant: str
    command: Sequence[str]
    requested: Sequence[int] | None = None
    world_size: int | None = None
    deadline: float = 900.0
    environment: Mapping[str, str] = field(default_factory=dict)
    logs: Path | None = None
    jobs: int = 1
    allow_opaque_modules: bool = False
    held_out: Sequence[int] | None = None
    controls: int = 1


def preload(environment: Mapping[str, str], *libraries: Path) -> str:
    """``LD_PRELOAD`` with ``libraries`` before what was there; what is there already is not put in twice.

    Raises ``UsageError`` for a path that such a list cannot have: the loader would leave the library out.
    """
    ours = [str(p) for p in libraries]
    for path in ours:
        if " " in path or ":" in path:
            raise UsageError(
                f"the library {path!r} cannot be preloaded, since LD_PRELOAD ends a path at a space or a colon: "
                "install foundryd in a folder without them"
            )
    before = [p for p in environment.get("LD_PRELOAD", "").replace(" ", ":").split(":") if p and p not in ours]
    return ":".join([*ours, *before])


@dataclass(frozen=True)
class _Launch:
    """One launch: as which rank, where its recording goes, and for a control the recordings to compare with."""

    what: str
    rank: int
    path: Path
    references: Sequence[Path] = ()
    strays: Path | None = None
    journal: Path | None = None


@dataclass
class _Early:
    """Controls that were started beside the ranks ``others``, whose recordings they await at ``awaited``.

    ``cold``: caches may have been when they were.
    """

    rank: int
    others: Sequence[int]
    awaited: Sequence[Path]
    strays: Path
    cold: bool
    paths: list[Path] = field(default_factory=list)  # of their own recordings
    made: Sequence[Future[tuple[Path, Recording]]] = ()


@dataclass(frozen=True)
class _Control:
    """What a control left; ``cold``: it was launched when caches may still have been."""

    rank: int
    path: Path
    recording: Recording
    cold: bool


class Runs:
    """Launches of the engine, one a rank; recordings stay in ``folder``.  Leaving it ends what still runs."""

    def __init__(self, mesh: Mesh, spec: CaptureSpec, folder: Path, progress: Progress) -> None:
        self._mesh = mesh
        self._spec = spec
        self._folder = folder
        self.progress = progress
        self.recordings: dict[int, Recording] = {}
        self.times: list[float] = []
        self._warm: set[int] = set()
        self._repeats: dict[int, tuple[Path, Recording]] = {}
        self._controls: list[_Control] = []
        self._started = 0  # how often controls were launched
        self._lock = threading.RLock()  # a signal's handler takes it while its thread has it
        self._running: dict[Path, subprocess.Popen[bytes]] = {}
        self._stopped = False
        self._abandoned: set[Path] = set()  # of recordings that nobody needs any more
        self._logs = 0
        self._early: _Early | None = None
        self._workers = ThreadPoolExecutor(min(spec.jobs, spec.controls))
        self._stack = ExitStack()

    def __enter__(self) -> Runs:
        self._stack.enter_context(when_interrupted(self._stop))
        return self

    def __exit__(self, *_: object) -> None:
        with self._stack, uninterrupted():
            self._stop()
            self._workers.shutdown(cancel_futures=True)

    def run(self, rank: int) -> Recording:
        """The recording of ``rank``, captured now if it was not before."""
        self.run_all([rank])
        return self.recordings[rank]

    def run_all(self, ranks: Iterable[int]) -> None:
        """Captures those of ``ranks`` that were not captured before; twice, once a cold launch was of no use.

        So it is if one says itself that its caches were cold.
        """
        new = [rank for rank in ranks if rank not in self.recordings]
        made = self._capture_all([_Launch(f"rank {rank}", rank, self._path(rank)) for rank in new])
        self.recordings.update(zip(new, made, strict=True))
        if new and (self._warm or any(recording.notes.get("cold") for recording in made)):
            self.again()

    @property
    def cold(self) -> list[int]:
        """Ranks that were captured once, maybe with cold caches."""
        return [rank for rank in self.recordings if rank not in self._warm]

    def again(self) -> bool:
        """Captures every rank that was captured once another time; answers whether there was any.

        A first launch fills the caches of compilers and tuners, and what it allocates for that, the next one does not.
        What else was captured of these ranks and is built otherwise than they are now is forgotten.
        """
        cold = self.cold
        self._warm.update(cold)
        if cold and self._early is not None:
            # They began when these ranks did.
            early, self._early = self._early, None
            self._end_early(early)
            self.start_control(early.rank, early.others)
        made = self._capture_all([_Launch(f"rank {r}, with warm caches", r, self._path(r)) for r in cold])
        self.recordings.update(zip(cold, made, strict=True))
        if cold:
            self._controls = [c for c in self._controls if self._like_its_rank(c.rank, c.recording)]
            self._repeats = {r: found for r, found in self._repeats.items() if self._like_its_rank(r, found[1])}
        return bool(cold)

    def _like_its_rank(self, rank: int, recording: Recording) -> bool:
        return alike(recording, [self.recordings[rank]])

    def run_all_like(self, ranks: Sequence[int], reference: Recording) -> list[Recording]:
        """The recordings of ``ranks``, captured again if one is not built like the reference."""
        self.run_all(ranks)
        if not alike(reference, [self.recordings[rank] for rank in ranks if rank not in self._warm]):
            self.again()
        return [self.recordings[rank] for rank in ranks]

    def repeat(self, ranks: Sequence[int]) -> bool:
        """Captures each of the ranks another time, beside its recording; answers whether any was left to repeat."""
        new = [rank for rank in ranks if rank not in self._repeats]
        paths = [self._folder / f"repeat-{rank}.recording" for rank in new]
        launches = [_Launch(f"a repeat of rank {r}", r, p) for r, p in zip(new, paths, strict=True)]
        made = self._capture_all(launches)
        self._repeats.update({r: (p, m) for r, p, m in zip(new, paths, made, strict=True)})
        return bool(new)

    def repeats(self, ranks: Sequence[int]) -> list[Recording]:
        """Further recordings of ``ranks``, where there are any: repeats, and controls but the last."""
        return [recording for _, recording in self._further(ranks) if recording is not self._controls[-1].recording]

    def _further(self, ranks: Sequence[int]) -> list[tuple[Path, Recording]]:
        controls = [(control.path, control.recording) for control in self._controls if control.rank in ranks]
        return [self._repeats[rank] for rank in ranks if rank in self._repeats] + controls

    def start_control(self, rank: int, others: Sequence[int]) -> None:
        """Launches the control of ``rank`` to be compared with ``others``, which are captured meanwhile.

        Without room for all of them side by side, it does nothing.
        """
        if self._early is not None or self._spec.jobs < len(others) + self._spec.controls:
            return
        awaited = [self._folder / f"awaited-{other}.recording" for other in others]
        for path in awaited:
            announce(path)
        strays = self._folder / "awaited.strays"
        early = self._early = _Early(rank, list(others), awaited, strays, not self._warm)
        with uninterrupted():
            early.made = self._start_controls(rank, awaited, strays, early)

    def control(self, rank: int, others: Sequence[int], strays: Strays = ()) -> Recording:
        """Captures ``rank`` again, with the recordings of ``others`` to compare with and ``strays`` to prove."""
        cold = bool(self.cold) if self._early is None else self._early.cold
        with uninterrupted():
            made = self._controls_of(rank, others, strays)
            _wait(made)
        path, recording = self._joined([future.result() for future in made], others)
        self._controls.append(_Control(rank, path, recording, cold))
        return recording

    def warm_control(self) -> bool:
        """Forgets the last control, which is built otherwise than its rank, if another may be built alike.

        That is so if caches were cold when it was launched, or when its rank was, which is then captured again.
        """
        control = self._controls[-1]
        if not (self.again() or control.cold):
            return False
        self._controls = [other for other in self._controls if other is not control]
        return True

    def _controls_of(
        self, rank: int, others: Sequence[int], strays: Strays
    ) -> Sequence[Future[tuple[Path, Recording]]]:
        """Those that were started early, if they are of use, or others."""
        early, self._early = self._early, None
        if early is not None and (early.rank, early.others) == (rank, list(others)) and not self._further(others):
            write_strays(early.strays, strays)
            for path, other in zip(early.awaited, others, strict=True):
                deliver(path, self._path(other))
            return early.made
        if early is not None:
            self._end_early(early)
        listed = self._folder / f"control-{rank}-{self._started}.strays"
        write_strays(listed, strays)
        references = [self._path(r) for r in others] + [path for path, _ in self._further(others)]
        return self._start_controls(rank, references, listed)

    def _end_early(self, early: _Early) -> None:
        self._stop(early.paths)
        wait(early.made)

    def _start_controls(
        self, rank: int, references: Sequence[Path], strays: Path, early: _Early | None = None
    ) -> list[Future[tuple[Path, Recording]]]:
        """Launches as many controls as share the graphs."""
        count, number = self._spec.controls, self._started
        self._started += 1
        name = f"the control of rank {rank}" if count == 1 else f"one of {count} controls of rank {rank}"
        launches = []
        for place in range(count):
            own = "" if count == 1 else f"-{place}"
            path = self._folder / f"control-{rank}-{number}{own}.recording"
            if early is not None:
                early.paths.append(path)
            # What was fatal to one control is fatal to the next that has the same graphs.
            journal = self._folder / f"control-{rank}{own}.journal"
            if not journal.exists():
                write_share(journal, place, count)
            launches.append(_Launch(name, rank, path, references, strays, journal))
        return [self._workers.submit(self._control, launch) for launch in launches]

    def _control(self, launch: _Launch) -> tuple[Path, Recording]:
        """One control, launched again when a trial was fatal to it."""
        assert launch.journal is not None
        for attempt in range(1, _CONTROL_LAUNCHES + 1):
            known = len(unended(launch.journal))
            try:
                recording = self._capture(launch)
                if recording.proofs is not None:
                    took = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in recording.proofs.seconds.items())
                    self.progress(f"proofs of {len(recording.graphs)} graphs: {took}")
                    if unsteady := [recording.graphs[place].key for place in recording.proofs.unsteady]:
                        self.progress(
                            f"{len(unsteady)} of them, {unsteady[0]!r} for one, do not do the same twice from the same "
                            "memory, so that nothing can be proven of their parameters"
                        )
                return launch.path, recording
            except CaptureError:
                fatal = unended(launch.journal)
                if self._ended(launch) or len(fatal) == known or attempt == _CONTROL_LAUNCHES:
                    raise
                self.progress(f"a trial was fatal to the control, which goes on without it: {fatal[-1]}")
        raise AssertionError("the last launch returns or raises")

    def _joined(self, made: Sequence[tuple[Path, Recording]], others: Sequence[int]) -> tuple[Path, Recording]:
        """The recording of controls that shared the graphs, and where it is kept."""
        if len(made) == 1:
            return made[0]
        references = [self.recordings[r] for r in others] + [recording for _, recording in self._further(others)]
        recording = joined([one for _, one in made], references)
        path = made[0][0].with_suffix(".joined")
        save(recording, path)
        return path, recording

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.recording"

    def _capture_all(self, launches: Sequence[_Launch]) -> list[Recording]:
        """Their recordings in order; as many launches side by side as the specification allows."""
        with uninterrupted():
            if self._spec.jobs == 1 or len(launches) < 2:
                return [self._capture(launch) for launch in launches]
            with ThreadPoolExecutor(self._spec.jobs) as workers:
                futures = [workers.submit(self._capture, launch) for launch in launches]
                try:
                    for future in _wait(futures):
                        future.result()
                    return [future.result() for future in futures]
                except BaseException:
                    # Nothing that was started may outlive the failure, and nothing more may start.
                    workers.shutdown(wait=False, cancel_futures=True)
                    self._stop()
                    raise

    def _stop(self, paths: Sequence[Path] | None = None) -> None:
        """Ends the launches for the recordings ``paths``, or all; of these no other begins."""
        with self._lock:
            if paths is None:
                self._stopped = True
            else:
                self._abandoned.update(paths)
            for path, process in list(self._running.items()):
                if paths is None or path in paths:
                    _kill_group(process)

    def _ended(self, launch: _Launch) -> bool:
        return self._stopped or launch.path in self._abandoned

    def _capture(self, launch: _Launch) -> Recording:
        self.progress(f"capturing as {launch.what} of {self._mesh.world}")
        started = time.monotonic()
        try:
            self._launch(launch)
        finally:
            self.times.append((time.monotonic() - started) * 1000)
        return load(launch.path)

    def _launch(self, launch: _Launch) -> None:
        rank = launch.rank
        launch.path.unlink(missing_ok=True)
        log = self._log(launch.path.stem)
        with log.open("wb") as sink:
            process = None
            try:
                process = self._start(launch, sink)
                code: int | None = process.wait(self._spec.deadline)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # Whatever the engine started goes with it.
                if process is not None:
                    _kill_group(process)
                    process.wait()
                with self._lock:
                    self._running.pop(launch.path, None)
        tail = log.read_text(errors="replace").strip()[-2000:]
        if code is None:
            raise CaptureError(
                f"capturing rank {rank} took more than {self._spec.deadline:.0f} s: raise --deadline or look at "
                f"its output:\n{tail}"
            )
        if code != 0:
            raise CaptureError(f"capturing rank {rank} ended with exit code {code}: see its output:\n{tail}")
        if not launch.path.exists():
            raise CaptureError(
                f"capturing rank {rank} ended without a recording: call finish() on its GraphSet; its output:\n{tail}"
            )

    def _start(self, launch: _Launch, sink: IO[bytes]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended(launch):
                raise CaptureError(f"rank {launch.rank} was not captured any more, since another launch failed")
            process = subprocess.Popen(
                list(self._spec.command),
                env=self._environment(launch),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running[launch.path] = process
            if self._ended(launch):  # told so amid its start
                _kill_group(process)
            return process

    def _log(self, name: str) -> Path:
        """Where the output of the next launch goes."""
        if self._spec.logs is None:
            return self._folder / f"{name}.log"
        self._spec.logs.mkdir(parents=True, exist_ok=True)
        with self._lock:
            self._logs += 1
            return self._spec.logs / f"{self._logs:02}-{name}.log"

    def _environment(self, launch: _Launch) -> dict[str, str]:
        env = {**os.environ, **self._spec.environment}
        local = self._mesh.coordinates(launch.rank)[1]
        env.update(
            FOUNDRYD_MODE="capture",
            FOUNDRYD_VARIANT=str(self._mesh),
            FOUNDRYD_RECORDING=str(launch.path),
            FOUNDRYD_ALLOW_OPAQUE_MODULES=str(int(self._spec.allow_opaque_modules)),
            RANK=str(launch.rank),
            LOCAL_RANK=str(local),
            WORLD_SIZE=str(self._mesh.world),
            LD_PRELOAD=preload(env, _native.hook_library(), _native.fake_nccl()),
            # Both sides of a restore run with these; see docs/architecture.md.
            NCCL_GRAPH_REGISTER="0",
            NCCL_RUNTIME_CONNECT="0",
        )
        nccl = installed_nccl()
        if nccl is not None:
            env.setdefault("FOUNDRYD_NCCL_VERSION", nccl)
        for name in ("FOUNDRYD_REFERENCE", "FOUNDRYD_JOURNAL", "FOUNDRYD_STRAYS"):
            env.pop(name, None)
        if launch.references:
            env["FOUNDRYD_REFERENCE"] = ":".join(str(p) for p in launch.references)
        if launch.journal is not None:
            env["FOUNDRYD_JOURNAL"] = str(launch.journal)
        if launch.strays is not None:
            env["FOUNDRYD_STRAYS"] = str(launch.strays)
        return env


def _wait(futures: Sequence[Future[Any]]) -> set[Future[Any]]:
    """Waits until all are done, or one failed; those that are done.

    It looks up now and then: where another thread of the process took a signal, nothing else wakes this one for it.
    """
    while True:
        done, others = wait(futures, timeout=0.2, return_when=FIRST_EXCEPTION)
        if not others or any(future.cancelled() or future.exception() is not None for future in done):
            return done


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
