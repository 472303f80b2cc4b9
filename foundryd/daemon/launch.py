# SPDX-License-Identifier: Apache-2.0
"""Starting a daemon in the background and stopping it, for the command line and for programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from foundryd.daemon import messages
from foundryd.daemon.client import ControlClient
from foundryd.daemon.messages import Refused, Status
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.store import parse_archives
from foundryd.errors import DaemonError, DaemonNotRunning, FoundrydError
from foundryd.interrupts import uninterrupted

MAX_LOG = 8 << 20  # bytes above which a start sets the log aside

# What runs; tests put another program here.
PROGRAM = ("-m", "foundryd.daemon")

# Meant for the engine or the service that starts a daemon, not for the daemon.
NOT_INHERITED = ("FOUNDRYD_MODE", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@dataclass
class Started:
    """A daemon that answered and is ready.  ``process`` is this process's child until it is waited for."""

    process: subprocess.Popen[bytes]
    status: Status


@dataclass(frozen=True)
class Stopped:
    """A daemon that was asked to stop and is gone."""

    pid: int
    leases: int
    ms: float


def command(
    runtime_dir: Path,
    archives: Sequence[str] = (),
    *,
    group: int | None = None,
    log_level: str = "info",
    log_format: str = "json",
    http: int | None = None,
    report_fd: int | None = None,
    program: Sequence[str] = PROGRAM,
) -> list[str]:
    """The command line of a daemon's process.  ``-P``: the current folder is no place to import from."""
    line = [sys.executable, "-P", *program, "--runtime-dir", os.fspath(runtime_dir), "--log-level", log_level]
    line += ["--log-format", log_format]
    if http is not None:
        line += ["--http", str(http)]
    if group is not None:
        line += ["--group", str(group)]
    if report_fd is not None:
        line += ["--report-fd", str(report_fd)]
    return [*line, "--", *(f"{name}={path}" for name, path in parse_archives(archives))]


def start_daemon(
    runtime_dir: Path,
    archives: Sequence[str] = (),
    *,
    group: int | None = None,
    log_level: str = "info",
    log_format: str = "json",
    http: int | None = None,
    timeout: float = 300.0,
    program: Sequence[str] = PROGRAM,
) -> Started:
    """Starts a daemon in a session of its own and waits until it says that it is ready.

    Parameters
    ----------
    archives : ``FILE`` or ``NAME=FILE``.
    log_format : ``json`` or ``text``.
    http : port of health and metrics on loopback, 0 for a free one, which the status tells; None: not served.
    timeout : seconds until every archive is resident; the daemon is ended when it is late.

    Raises
    ------
    DaemonAlreadyRunning : somebody serves the directory; the message has its pid.
    FoundrydError : what the daemon failed with.
    DaemonError : it ended without a word or was not ready in time.
    """
    runtime = RuntimeDir(runtime_dir.absolute())
    runtime.prepare(group)
    deadline = time.monotonic() + timeout
    report, write_end = os.pipe2(os.O_CLOEXEC)
    process = None
    try:
        try:
            with _open_log(runtime) as log, uninterrupted():
                process = subprocess.Popen(
                    command(
                        runtime.path,
                        archives,
                        group=group,
                        log_level=log_level,
                        log_format=log_format,
                        http=http,
                        report_fd=write_end,
                        program=program,
                    ),
                    env={k: v for k, v in os.environ.items() if k not in NOT_INHERITED},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    cwd="/",
                    start_new_session=True,
                    pass_fds=(write_end,),
                )
        finally:
            os.close(write_end)
        return Started(process, _wait_ready(runtime, process, report, deadline, timeout))
    except BaseException:
        if process is not None:
            with uninterrupted():
                _end(process)
        raise
    finally:
        os.close(report)


def stop_daemon(runtime_dir: Path, timeout: float = 10.0) -> Stopped:
    """Asks the daemon to stop and waits until it let the runtime directory go.

    Raises
    ------
    DaemonNotRunning : there is none.
    DaemonError : it did not answer, or did not end in time; the message has its pid.
    """
    runtime = RuntimeDir(runtime_dir.absolute())
    begin = time.monotonic()
    with ControlClient(runtime.path, timeout) as client:
        done, instance = client.stop(), client.daemon.instance
    # Another one may take the directory at once.
    while runtime.locked() and ((info := runtime.info()) is None or info.instance == instance):
        if time.monotonic() - begin > timeout:
            raise DaemonError(
                f"the daemon in {runtime.path} (pid {done.pid}) agreed to stop but was still there after "
                f"{timeout:g} s: look at `foundryd logs`, or run kill -9 {done.pid}"
            )
        time.sleep(0.01)
    return Stopped(done.pid, done.leases, (time.monotonic() - begin) * 1000)


def _wait_ready(
    runtime: RuntimeDir, process: subprocess.Popen[bytes], report: int, deadline: float, timeout: float
) -> Status:
    """Ready is what the daemon says over its sockets, never that they exist."""
    last = "it does not answer yet"
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise _reported(report) or DaemonError(
                f"the daemon ended with status {process.returncode} before it was ready{_log_end(runtime)}"
            )
        try:
            with ControlClient(runtime.path, max(0.1, min(0.5, deadline - time.monotonic()))) as client:
                # Somebody else's daemon is not the one that was started: ours will say so.
                while client.daemon.pid == process.pid and process.poll() is None and time.monotonic() < deadline:
                    status = client.status()
                    if status.ready:
                        return status
                    waiting = ", ".join(a.name for a in status.archives if a.state == "loading")
                    last = f"it is still loading {waiting}"
                    time.sleep(0.02)
        except DaemonNotRunning:
            pass
        except FoundrydError as error:
            last = str(error)
        time.sleep(0.02)
    raise DaemonError(f"the daemon was not ready within {timeout:g} s ({last}): allow more time with --timeout")


def _reported(report: int) -> FoundrydError | None:
    data = os.read(report, 1 << 16)
    try:
        said = json.loads(data)
        return messages.error_of(Refused(reason=said["reason"], message=said["message"]))
    except (ValueError, KeyError, TypeError):
        return None


def _log_end(runtime: RuntimeDir) -> str:
    lines = runtime.log.read_text(errors="replace").splitlines()
    return f" (its last line: {lines[-1][:300]}): see {runtime.log}" if lines else f": see {runtime.log}"


def _open_log(runtime: RuntimeDir) -> BinaryIO:
    fd = os.open(runtime.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    if os.fstat(fd).st_size > MAX_LOG and not runtime.locked():
        os.replace(runtime.log, runtime.log.with_suffix(".log.1"))
        os.close(fd)
        return _open_log(runtime)
    return os.fdopen(fd, "ab")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends a daemon that is of no use: politely, then by force."""
    for ask in (process.terminate, process.kill):
        with suppress(ProcessLookupError):
            ask()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
            return
