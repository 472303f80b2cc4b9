# SPDX-License-Identifier: Apache-2.0
"""Runs the GPU programs: captured on one GPU, restored through a daemon, or natively, one process a rank."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")
FOUNDRYD = (sys.executable, "-P", "-m", "foundryd.cli")
DRIVER = "cuda"
PROGRESS = "progress: "  # begins a line of standard error that is shown while a rank runs

# Set by whoever wants everything to end soon: what runs is ended as if its time were up.
STOP = threading.Event()

Report = dict[str, Any]
Environment = Mapping[str, str]


class RunFailed(Exception):
    """A command or a rank ended with an error, or too late; the message has the end of what it said."""


class TimeUp(RunFailed):
    """A command or a rank took longer than it was given."""


class Deadline:
    """Seconds that several steps have together."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self, most: float = float("inf")) -> float:
        """What is left, ``most`` at most; raises ``TimeUp`` if that is nothing."""
        left = self._end - time.monotonic()
        if left <= 0 or STOP.is_set():
            raise TimeUp(f"the {self._seconds:g} s for all steps were over before this one")
        return min(left, most)


@dataclass(frozen=True)
class Program:
    """A program of the folder ``programs`` with its arguments."""

    name: str
    arguments: tuple[str, ...] = ()

    @property
    def command(self) -> list[str]:
        """The command line of one rank, which finds its place in the environment."""
        return [sys.executable, "-P", str(PROGRAMS / self.name), *self.arguments]

    def with_arguments(self, *more: str) -> Program:
        """The same with more arguments."""
        return Program(self.name, (*self.arguments, *more))


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change a capture or a restore, but for how images are cut."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("FOUNDRYD_", "NCCL_")) and k != "LD_PRELOAD"}
    return ours | {k: os.environ[k] for k in ("FOUNDRYD_CUT",) if k in os.environ}


def devices() -> int:
    """GPUs of this machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("GPU ")


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port that nobody else is given meanwhile; who asks for it (with ``SO_REUSEADDR``) may listen on it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def run(
    name: str,
    command: Sequence[str],
    environment: Environment,
    *,
    timeout: float,
    log: Path | None = None,
    echo: bool = False,
    cwd: Path | None = None,
    patience: float = 20.0,
    stoppable: bool = True,
) -> str:
    """Runs a command; what it printed.  Raises ``RunFailed`` with ``name`` and the end of what it said.

    ``log`` gets what it said besides, ``echo`` shows that while it runs.  Late, it is interrupted and has ``patience``
    seconds to end what it started in other sessions; killed, it could not.
    """
    with tempfile.TemporaryDirectory(prefix="foundryd-command-") as folder:
        path = Path(folder) / "run"
        with _Process(name, command, environment, path, cwd=cwd, patience=patience) as process:
            try:
                _wait([process], timeout, "" if echo else None, stoppable)
            finally:
                if log is not None:
                    log.write_text(process.said())
        return process.printed()


def foundryd(
    *arguments: str,
    timeout: float = 120.0,
    log: Path | None = None,
    environment: Environment | None = None,
    echo: bool = False,
    stoppable: bool = True,
) -> str:
    """Runs a command of foundryd, see ``run``."""
    given = clean_environment() | dict(environment or {})
    command = [*FOUNDRYD, *arguments]
    return run(f"foundryd {arguments[0]}", command, given, timeout=timeout, log=log, echo=echo, stoppable=stoppable)


def capture(
    program: Program,
    variant: str,
    world: int,
    archive: Path,
    *,
    timeout: float = 1800.0,
    environment: Environment | None = None,
    sample: str = "",
    held_out: str = "",
    jobs: int = 1,
    controls: int = 1,
    echo: bool = False,
) -> Report:
    """Captures a program for a world of ``world`` ranks on one GPU; the command's figures."""
    options = ["-o", str(archive), "--world-size", str(world), "--variant", variant, "--driver", DRIVER, "--json"]
    # One launch may take all of the time: the control of 512 graphs needs most of it for its proofs.
    options += ["--deadline", f"{timeout:.0f}", "--jobs", str(jobs), "--controls", str(controls)]
    options += ["--sample", sample] if sample else []
    options += ["--held-out", held_out] if held_out else []
    out = foundryd(
        "capture",
        *options,
        "--",
        *program.command,
        timeout=timeout,
        log=archive.with_suffix(".log"),
        environment=environment,
        echo=echo,
    )
    report: Report = json.loads(out.splitlines()[-1])
    return report


@contextmanager
def daemon(archives: Sequence[Path]) -> Iterator[Path]:
    """A daemon that serves the archives under the stems of their names; its runtime directory."""
    with tempfile.TemporaryDirectory(prefix="foundryd-gpu-") as folder:
        runtime = Path(folder) / "run"
        foundryd("start", "--runtime-dir", str(runtime), *map(str, archives), timeout=400)
        try:
            yield runtime
        finally:
            foundryd("stop", "--runtime-dir", str(runtime), stoppable=False)


def restore(
    archive: Path,
    program: Program,
    variant: str,
    world: int,
    runtime: Path,
    *,
    timeout: float = 600.0,
    environment: Environment | None = None,
) -> list[Report]:
    """Runs a program's ranks, each on a GPU of its own, with what the daemon of ``runtime`` serves; their reports."""
    options = ["--archive", archive.stem, "--group", f"{archive.stem}-{time.monotonic_ns()}", "--variant", variant]
    command = [*FOUNDRYD, "run", *options, "--driver", DRIVER, "--", *program.command]
    given = {"FOUNDRYD_RUNTIME_DIR": str(runtime)} | dict(environment or {})
    return run_ranks(command, world, given, timeout=timeout)


def native(
    program: Program, world: int, *, timeout: float = 900.0, environment: Environment | None = None
) -> list[Report]:
    """Runs a program's ranks without foundryd; their reports."""
    # What a restore sets too, so that NCCL chooses alike.
    same = {"NCCL_GRAPH_REGISTER": "0", "NCCL_RUNTIME_CONNECT": "0"}
    return run_ranks(program.command, world, same | dict(environment or {}), timeout=timeout)


def run_ranks(command: Sequence[str], world: int, environment: Environment, *, timeout: float) -> list[Report]:
    """Starts a world's ranks side by side; the JSON object that each printed last, in the order of ranks.

    Where there are fewer GPUs than ranks, these share them: NCCL, which refuses two ranks of a host on one GPU, takes
    each for one of another host, and connects them by sockets.

    Raises ``RunFailed`` when a rank fails or all are late; the others are ended then.
    """
    shared = clean_environment() | dict(environment)
    with ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foundryd-ranks-")))
        own = [{"RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]
        if world > 1 and devices() < world:
            own = [given | {"NCCL_HOSTID": f"host-of-rank-{r}"} for r, given in enumerate(own)]
        ranks = [
            stack.enter_context(_Process(f"rank {r}", command, shared | given, folder / str(r)))
            for r, given in enumerate(own)
        ]
        _wait(ranks, timeout, PROGRESS, True)
        return [rank.report() for rank in ranks]


def _wait(processes: Sequence[_Process], timeout: float, shown: str | None, stoppable: bool) -> None:
    """Waits for all; raises when one fails or they are late.

    Lines of the first one's standard error that begin with ``shown`` are shown.
    """
    end = time.monotonic() + timeout
    while True:
        # All are asked each time: a failed one must be seen while others run.
        late = [p for p in processes if p.running()]
        if shown is not None:
            processes[0].show(shown)
        if not late:
            return
        if time.monotonic() > end or (stoppable and STOP.is_set()):
            names = ", ".join(p.name for p in late)
            raise TimeUp(f"{names} did not end in {timeout:g} s: {late[0].tail()}")
        time.sleep(0.02)


class _Process:
    """One process with its output in files, ended with its children when the block ends.

    ``patience`` is how many seconds it has to end itself when it is interrupted, before it is killed.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Environment,
        path: Path,
        *,
        cwd: Path | None = None,
        patience: float = 0.0,
    ) -> None:
        self.name = name
        self._patience = patience
        self._out, self._err = path.with_suffix(".out"), path.with_suffix(".err")
        self._shown = 0
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None and self._patience:
            self._process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=self._patience)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def running(self) -> bool:
        """Whether it still runs; raises if it has failed."""
        status = self._process.poll()
        if status:
            raise RunFailed(f"{self.name} ended with {status}: {self.tail()}")
        return status is None

    def report(self) -> Report:
        """What it printed last."""
        lines = self.printed().splitlines()
        try:
            report: Report = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise RunFailed(f"{self.name} ended without a report: {self.tail()}") from None
        return report

    def printed(self) -> str:
        """All of its standard output."""
        return self._out.read_text(errors="replace")

    def said(self) -> str:
        """All of its standard error."""
        return self._err.read_text(errors="replace")

    def show(self, prefix: str) -> None:
        """Shows whole lines of standard error that are new and begin with ``prefix``."""
        with self._err.open("rb") as err:
            err.seek(self._shown)
            new = err.read()
        new = new[: new.rfind(b"\n") + 1]
        self._shown += len(new)
        for line in new.decode(errors="replace").splitlines():
            if line.startswith(prefix):
                print(line.removeprefix(prefix), file=sys.stderr, flush=True)

    def tail(self) -> str:
        """The end of its standard error."""
        return self.said().strip()[-3000:] or "it said nothing"
