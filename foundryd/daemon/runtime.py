# SPDX-License-Identifier: Apache-2.0
"""The runtime directory: who is the daemon, and where its sockets, lock and log are.

``flock`` on ``lock`` says who is the daemon, never the presence of a file: sockets and the text in ``lock`` outlive a
killed one.  ``lock`` is never removed, for a lock on a removed file protects nothing.
"""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from foundryd.errors import DaemonAlreadyRunning, DaemonError, DaemonNotRunning, UsageError

MAX_SOCKET_PATH = 107  # bytes of sun_path without its final zero

# How long a starting daemon waits for one that holds the lock and answers nobody: it is starting or ending.
LOCK_PATIENCE = 3.0


class Info(msgspec.Struct, frozen=True):
    """What the daemon writes into ``lock``."""

    pid: int
    started: float  # seconds since the epoch
    build: str
    instance: str
    holding: list[str] = []  # digests of the archives that ranks had leases on


@dataclass(frozen=True)
class RuntimeDir:
    """Names of the files in a runtime directory, which need not exist."""

    path: Path

    def __post_init__(self) -> None:
        longest = len(os.fsencode(self.control))
        if longest > MAX_SOCKET_PATH:
            raise UsageError(
                f"the socket {self.control} has a path of {longest} bytes and the system allows {MAX_SOCKET_PATH}: "
                "choose a shorter runtime directory with --runtime-dir or FOUNDRYD_RUNTIME_DIR"
            )

    @property
    def door(self) -> Path:
        """Socket of leases and descriptors."""
        return self.path / "door"

    @property
    def control(self) -> Path:
        """Socket of requests and events, ZeroMQ."""
        return self.path / "control"

    @property
    def lock(self) -> Path:
        """Held by the daemon; contains ``Info``."""
        return self.path / "lock"

    @property
    def log(self) -> Path:
        """The daemon's log, one JSON object a line."""
        return self.path / "daemon.log"

    def prepare(self, group: int | None = None) -> None:
        """Makes the directory with mode 0700, or 0750 and ``group``; raises ``UsageError`` if it cannot be safe."""
        mode = 0o700 if group is None else 0o750
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"the runtime directory {self.path} cannot be used ({error.strerror}): choose another with "
                "--runtime-dir or FOUNDRYD_RUNTIME_DIR"
            ) from error
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                raise UsageError(
                    f"the runtime directory {self.path} belongs to user {found.st_uid} and this is user "
                    f"{os.geteuid()}: choose another with --runtime-dir or FOUNDRYD_RUNTIME_DIR"
                )
            if group is not None and found.st_gid != group:
                os.fchown(fd, -1, group)
            if stat.S_IMODE(found.st_mode) != mode:
                # A directory with other things in it is somebody's, and its mode not ours to change.
                others = set(os.listdir(fd)) - {"door", "control", "lock", "daemon.log", "daemon.log.1"}
                if others:
                    raise UsageError(
                        f"the runtime directory {self.path} has mode {stat.S_IMODE(found.st_mode):04o}, not "
                        f"{mode:04o}, and holds other files, {sorted(others)[0]!r} for one: choose an own directory, "
                        f"or run chmod {mode:04o} on it"
                    )
                os.fchmod(fd, mode)
        except OSError as error:
            raise UsageError(
                f"the runtime directory {self.path} cannot be given mode {mode:04o} and group {group} "
                f"({error.strerror}): use a group of which this user is a member"
            ) from error
        finally:
            os.close(fd)

    def info(self) -> Info | None:
        """What the last daemon wrote about itself, be it alive or not."""
        try:
            return msgspec.json.decode(self.lock.read_bytes(), type=Info)
        except (OSError, msgspec.MsgspecError):
            return None

    def locked(self) -> bool:
        """Whether some daemon holds the lock now."""
        try:
            fd = os.open(self.lock, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            # Shared and for an instant; ``Lock.acquire`` outwaits it.
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(fd)
        return False

    def answering(self) -> bool:
        """Whether somebody accepts connections at the door."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.setblocking(False)
            try:
                probe.connect(os.fspath(self.door))
            except BlockingIOError:  # a full backlog: somebody listens
                return True
            except OSError:
                return False
        return True

    def not_running(self) -> DaemonNotRunning:
        """The error for a directory in which nobody answers."""
        info = self.info()
        last = f"; the last one, pid {info.pid}, is gone" if info and not self.locked() else ""
        return DaemonNotRunning(
            f"no foundryd daemon answers in {self.path}{last}: start one with "
            f"`foundryd start --runtime-dir {self.path} ARCHIVE`"
        )


class Lock:
    """The held lock of a runtime directory."""

    def __init__(self, runtime: RuntimeDir, fd: int) -> None:
        self._runtime = runtime
        self._fd = fd

    @classmethod
    def acquire(cls, runtime: RuntimeDir, patience: float = LOCK_PATIENCE) -> Lock:
        """Becomes the daemon of this directory and removes the sockets of a dead one.

        Raises
        ------
        DaemonAlreadyRunning : somebody holds the lock, or answers at the door; nothing of it is touched.
        """
        deadline = time.monotonic() + patience
        while True:
            fd = os.open(runtime.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            lock = cls(runtime, fd)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if lock.ours:
                    # A live daemon whose lock file was removed still has its sockets: they are not replaced.
                    if runtime.answering():
                        raise _already(runtime)
                    for name in (runtime.door, runtime.control):
                        name.unlink(missing_ok=True)
                    return lock
            except BlockingIOError:
                if runtime.answering() or time.monotonic() > deadline:
                    os.close(fd)
                    raise _already(runtime) from None
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)
            time.sleep(0.02)

    @property
    def ours(self) -> bool:
        """Whether the directory still has the file that is locked; without it the daemon cannot be reached."""
        try:
            there = os.stat(self._runtime.lock, follow_symlinks=False)
        except OSError:
            return False
        return os.path.samestat(there, os.fstat(self._fd))

    def write(self, info: Info) -> None:
        """Says who holds the lock."""
        data = msgspec.json.encode(info) + b"\n"
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, data, 0)
        except OSError as error:
            raise DaemonError(
                f"{self._runtime.lock} cannot be written ({error.strerror}): make room in its file system"
            ) from error

    def release(self, keep: bool = False) -> None:
        """Removes the sockets, if the directory is still this daemon's, and lets the lock go.

        ``keep``: what ``write`` wrote stays for the next daemon.
        """
        if self._fd < 0:
            return
        if self.ours:
            for name in (self._runtime.door, self._runtime.control):
                with suppress(OSError):
                    name.unlink(missing_ok=True)
            if not keep:
                os.ftruncate(self._fd, 0)
        os.close(self._fd)
        self._fd = -1


def _already(runtime: RuntimeDir) -> DaemonAlreadyRunning:
    info = runtime.info()
    who = f"pid {info.pid}" if info else "pid unknown"
    return DaemonAlreadyRunning(
        f"a foundryd daemon ({who}) already serves {runtime.path}: stop it with "
        f"`foundryd stop --runtime-dir {runtime.path}` or use another runtime directory"
    )
