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
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).with_name("programs")
FOUNDRYD = (sys.executable, "-P", "-m", "foundryd.cli")
DRIVER = "cuda"

Report = dict[str, Any]


class RunFailed(Exception):
    """A command or a rank ended with an error, or too late; the message has the end of what it said."""


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
    """This process's environment without what would change a capture or a restore."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("FOUNDRYD_", "NCCL_")) and k != "LD_PRELOAD"}


def devices() -> int:
    """GPUs of this machine."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        return 0
    return listed.stdout.count("GPU ")


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def foundryd(*arguments: str, timeout: float = 120.0, log: Path | None = None) -> str:
    """Runs a command of foundryd; what it printed.  ``log`` gets what it said besides."""
    process = subprocess.Popen(
        [*FOUNDRYD, *arguments],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Interrupted, it ends the engine that it started; killed, it could not.
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        err = f"it took more than {timeout:g} s: {err}"
    if log is not None:
        log.write_text(err)
    if process.returncode != 0:
        raise RunFailed(f"foundryd {arguments[0]} ended with {process.returncode}: {err.strip()[-3000:]}")
    return out


def capture(program: Program, variant: str, world: int, archive: Path, *, timeout: float = 1800.0) -> Report:
    """Captures a program for a world of ``world`` ranks on one GPU; the command's figures."""
    options = ["-o", str(archive), "--world-size", str(world), "--variant", variant, "--driver", DRIVER, "--json"]
    out = foundryd("capture", *options, "--", *program.command, timeout=timeout, log=archive.with_suffix(".log"))
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
            foundryd("stop", "--runtime-dir", str(runtime))


def restore(
    archive: Path, program: Program, variant: str, world: int, runtime: Path, *, timeout: float = 600.0
) -> list[Report]:
    """Runs a program's ranks, each on a GPU of its own, with what the daemon of ``runtime`` serves; their reports."""
    options = ["--archive", archive.stem, "--group", f"{archive.stem}-{time.monotonic_ns()}", "--variant", variant]
    command = [*FOUNDRYD, "run", *options, "--driver", DRIVER, "--", *program.command]
    return run_ranks(command, world, {"FOUNDRYD_RUNTIME_DIR": str(runtime)}, timeout=timeout)


def native(program: Program, world: int, *, timeout: float = 900.0) -> list[Report]:
    """Runs a program's ranks without foundryd; their reports."""
    # What a restore sets too, so that NCCL chooses alike.
    same = {"NCCL_GRAPH_REGISTER": "0", "NCCL_RUNTIME_CONNECT": "0"}
    return run_ranks(program.command, world, same, timeout=timeout)


def run_ranks(command: Sequence[str], world: int, environment: dict[str, str], *, timeout: float) -> list[Report]:
    """Starts a world's ranks side by side; the JSON object that each printed last, in the order of ranks.

    Raises ``RunFailed`` when a rank fails or all are late; the others are ended then.
    """
    shared = clean_environment() | environment
    shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="foundryd-ranks-")))
        ranks = [
            stack.enter_context(_Rank(command, shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, folder / str(r)))
            for r in range(world)
        ]
        end = time.monotonic() + timeout
        # All are asked each time: a failed one must be seen while others run.
        while late := [r for r, rank in enumerate(ranks) if rank.running()]:
            if time.monotonic() > end:
                raise RunFailed(f"ranks {late} did not end in {timeout:g} s: {ranks[late[0]].tail()}")
            time.sleep(0.02)
        return [rank.report() for rank in ranks]


class _Rank:
    """One process with its output in files, ended with its children when the block ends."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], path: Path) -> None:
        self._out, self._err = path.with_suffix(".out"), path.with_suffix(".err")
        self._name = f"rank {environment['RANK']}"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def __enter__(self) -> _Rank:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def running(self) -> bool:
        """Whether it still runs; raises if it has failed."""
        status = self._process.poll()
        if status:
            raise RunFailed(f"{self._name} ended with {status}: {self.tail()}")
        return status is None

    def report(self) -> Report:
        """What it printed last."""
        lines = self._out.read_text(errors="replace").splitlines()
        try:
            report: Report = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise RunFailed(f"{self._name} ended without a report: {self.tail()}") from None
        return report

    def tail(self) -> str:
        """The end of its standard error."""
        return self._err.read_text(errors="replace").strip()[-3000:] or "it said nothing"
