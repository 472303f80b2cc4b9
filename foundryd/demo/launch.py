# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a world as processes of this machine and collects what they say."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from foundryd import _native
from foundryd.demo.config import DemoConfig
from foundryd.demo.reference import Expected
from foundryd.demo.rendezvous import StoreServer
from foundryd.errors import DeadlineExceeded, FoundrydError, UsageError
from foundryd.interrupts import uninterrupted, when_interrupted
from foundryd.nccl import nccl_folder

DRIVERS = ("soft", "cuda", "auto")
_PROBE = "from cuda.bindings import driver as d; d.cuInit(0); raise SystemExit(0 if d.cuDeviceGetCount()[1] else 1)"


class WorkerFailed(FoundrydError):
    """A rank ended with an error."""

    reason = "worker"


def worker_command(config: DemoConfig, *, store: Path | None = None, flags: Sequence[str] = ()) -> list[str]:
    """The command that runs one rank; the rank itself comes from the environment.

    Parameters
    ----------
    store : socket of the rendezvous; a captured rank and a world of one need none.
    flags : more flags of the worker.
    """
    command = [sys.executable, "-P", "-m", "foundryd.demo.worker", *config.to_args(), *flags]
    return command if store is None else [*command, "--store", os.fspath(store)]


def choose_driver(driver: str, *, timeout: float = 60.0) -> str:
    """Turns ``auto`` into ``cuda`` if a device answers, else ``soft``."""
    if driver not in DRIVERS:
        raise UsageError(f"the driver is {driver!r}: use {', '.join(DRIVERS)}")
    if driver != "auto":
        return driver
    try:
        probe = subprocess.run([sys.executable, "-P", "-c", _PROBE], capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        raise DeadlineExceeded(f"the CUDA driver did not start in {timeout:g} s: use --driver soft") from None
    return "cuda" if probe.returncode == 0 else "soft"


def driver_environment(driver: str, env: Mapping[str, str]) -> dict[str, str]:
    """``env`` with what a process needs to load that driver and its NCCL; ``driver`` is ``soft`` or ``cuda``."""
    out = dict(env)
    # A capture says the version of the package's NCCL, and the system may have another one.
    first = _native.soft_folder() if driver == "soft" else nccl_folder()
    if first is not None:
        paths = [os.fspath(first), *filter(None, [out.get("LD_LIBRARY_PATH", "")])]
        out["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    # One thread is plenty for a rank that shares its machine with all the others.
    out.setdefault("OPENBLAS_NUM_THREADS", "1")
    return out


def rank_environment(env: Mapping[str, str], rank: int, world: int) -> dict[str, str]:
    """``env`` for one rank of one node."""
    return {**env, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}


def launch_ranks(
    config: DemoConfig,
    env: Mapping[str, str],
    *,
    command: Callable[[Path], Sequence[str]] | None = None,
    ranks: Sequence[int] | None = None,
    flags: Sequence[str] = (),
    timeout: float = 300.0,
) -> list[dict[str, Any]]:
    """Runs the world's ranks side by side until each has ended.

    Parameters
    ----------
    env : environment of every rank, from ``driver_environment``; RANK, LOCAL_RANK and WORLD_SIZE are added.
    command : makes the command from the rendezvous socket; by default ``worker_command(config, store=…)``.
    ranks : which ranks to start, all by default.
    flags : more flags of the worker, where ``command`` is not given.
    timeout : seconds for all of it.

    Returns
    -------
    What each rank printed, in the order of ``ranks``.

    Raises
    ------
    WorkerFailed : a rank ended with an error; the others are killed.
    DeadlineExceeded : not all ended in time; those that run are killed.
    """
    world = config.mesh.world
    ranks = range(world) if ranks is None else ranks
    end = time.monotonic() + timeout
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foundryd-demo-")))
        stack.enter_context(StoreServer(folder / "store"))
        line = command(folder / "store") if command else worker_command(config, store=folder / "store", flags=flags)
        running: list[_Rank] = []
        stack.enter_context(when_interrupted(lambda: _kill(running)))
        for rank in ranks:
            with uninterrupted():
                started = _Rank(rank, line, rank_environment(env, rank, world), folder)
                running.append(stack.enter_context(started))
        _wait_for(running, end, timeout)
        return [rank.result() for rank in running]


def _kill(running: Sequence[_Rank]) -> None:
    for rank in running:
        rank.kill()


def _wait_for(running: Sequence[_Rank], end: float, timeout: float) -> None:
    waiting = list(running)
    while waiting:
        for rank in list(waiting):
            status = rank.process.poll()
            if status is None:
                continue
            if status != 0:
                raise rank.failure(status)
            waiting.remove(rank)
        if waiting and time.monotonic() > end:
            names = ", ".join(str(rank.rank) for rank in waiting)
            raise DeadlineExceeded(f"ranks {names} did not end in {timeout:g} s: {waiting[0].tail()}")
        if waiting:
            time.sleep(0.01)


class _Rank:
    """One process, killed when the block ends before it does."""

    def __init__(self, rank: int, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.rank = rank
        self._out = folder / f"rank{rank}.out"
        self._err = folder / f"rank{rank}.err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = self._start(command, env, out, err)

    @staticmethod
    def _start(
        command: Sequence[str], env: Mapping[str, str], out: IO[bytes], err: IO[bytes]
    ) -> subprocess.Popen[bytes]:
        # A session of its own, so that what the rank started ends with it.
        return subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
        )

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self.process.wait()

    def kill(self) -> None:
        """Ends it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> dict[str, Any]:
        """What the rank printed last."""
        lines = self._out.read_text(errors="replace").splitlines()
        try:
            result = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise WorkerFailed(f"rank {self.rank} ended without a result: {self.tail()}") from None
        if not isinstance(result, dict):
            raise WorkerFailed(f"rank {self.rank} printed {lines[-1][:80]!r} instead of a result: see its output")
        return result

    def failure(self, status: int) -> WorkerFailed:
        try:
            error = self.result().get("error") or {}
        except WorkerFailed:
            error = {}
        return WorkerFailed(f"rank {self.rank} ended with status {status}: {error.get('message') or self.tail()}")

    def tail(self) -> str:
        """The last lines of its standard error."""
        lines = self._err.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-5:]) or "it said nothing"


def mismatches(config: DemoConfig, results: Sequence[Mapping[str, Any]], expected: Expected) -> list[str]:
    """Where the ranks' tokens are not the reference's; empty if all are right."""
    wrong = []
    for result in results:
        for batch in config.batch_sizes:
            want = expected.tokens[config.cell(result["rank"]), batch].tolist()
            got = result["tokens"].get(str(batch))
            if got != want:
                wrong.append(f"rank {result['rank']}, batch size {batch}: {got} instead of {want}")
    return wrong
