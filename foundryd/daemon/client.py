# SPDX-License-Identifier: Apache-2.0
"""Asking a daemon: the greeting at the door, and requests and events over control."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import zmq

from foundryd.daemon import messages, wire
from foundryd.daemon.messages import (
    BUILD,
    NEWEST,
    OLDEST,
    ArchiveState,
    Done,
    Event,
    GetStatus,
    Hello,
    ListArchives,
    LoadArchive,
    Message,
    Refused,
    Request,
    Status,
    Stop,
    Subscribe,
    Tick,
    UnloadArchive,
    Welcome,
)
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonError, PermissionRefused, ProtocolError

_M = TypeVar("_M", bound=Message)


def open_door(runtime: RuntimeDir, deadline: float) -> tuple[socket.socket, Welcome]:
    """A greeted connection to the door; ``deadline`` is on ``time.monotonic()``.

    Raises
    ------
    DaemonNotRunning : nobody listens.
    PermissionRefused : the daemon does not serve this user, or is not run by whom it should be.
    ProtocolError : no version of the protocol is common to both.
    DaemonError : no answer until the deadline.
    """
    sock = knock(runtime, deadline)
    try:
        return sock, welcomed(sock, runtime, deadline)
    except BaseException:
        sock.close()
        raise


def knock(runtime: RuntimeDir, deadline: float, request: Message | None = None) -> socket.socket:
    """A connection to the door whose greeting is under way; raises as ``open_door``.

    ``request`` goes behind the greeting, which saves waiting for an answer: one that all versions of the protocol have.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
    try:
        _connect(sock, runtime, deadline)
        _check_server(sock, runtime)
        with suppress(BrokenPipeError, ConnectionResetError):  # refused already: the reason can still be read
            for message in (Hello(OLDEST, NEWEST, BUILD), request):
                if message is not None:
                    wire.send(sock, messages.encode(message))
    except BaseException:
        sock.close()
        raise
    return sock


def welcomed(sock: socket.socket, runtime: RuntimeDir, deadline: float) -> Welcome:
    """The answer to the greeting; raises as ``open_door``."""
    welcome = receive(sock, runtime, deadline, Welcome)
    if not OLDEST <= welcome.protocol <= NEWEST:
        raise ProtocolError(
            f"the daemon ({welcome.build}) chose protocol version {welcome.protocol} and this process ({BUILD}) "
            f"speaks {OLDEST} to {NEWEST}: install the same foundryd on both sides"
        )
    return welcome


def receive(sock: socket.socket, runtime: RuntimeDir, deadline: float, kind: type[_M]) -> _M:
    """The next packet at the door, which must be a ``kind`` without descriptors."""
    with receive_packet(sock, runtime, deadline) as packet:
        return expect(messages.decode_answer(packet.payload), kind)


def receive_packet(sock: socket.socket, runtime: RuntimeDir, deadline: float, descriptors: int = 0) -> wire.Packet:
    """The next packet at the door with at most so many descriptors."""
    for last in (False, True):
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            packet = wire.receive(sock, descriptors)
        except TimeoutError:
            info = runtime.info()
            who = f"pid {info.pid}" if info else "pid unknown"
            raise DaemonError(
                f"the daemon in {runtime.path} ({who}) did not answer in time: look at `foundryd status` and "
                "`foundryd logs`, or allow more time"
            ) from None
        except ConnectionResetError:
            # The kernel says this first when the daemon closed without reading everything; its last word comes after.
            if last:
                break
            continue
        if packet is not None:
            return packet
        break
    raise DaemonError(f"the daemon in {runtime.path} closed the connection without an answer: look at `foundryd logs`")


def expect(message: messages.FromDaemon, kind: type[_M]) -> _M:
    """The daemon's answer as a ``kind``; raises the error that it carries instead."""
    if isinstance(message, kind):
        return message
    if isinstance(message, Refused):
        if message.newest < OLDEST or message.oldest > NEWEST:
            raise ProtocolError(
                f"the daemon ({message.build}) speaks protocol versions {message.oldest} to {message.newest} and this "
                f"process ({BUILD}) speaks {OLDEST} to {NEWEST}: install the same foundryd on both sides"
            )
        raise messages.error_of(message)
    if isinstance(message, messages.Ended):
        raise DaemonError(f"the daemon closed the connection ({message.message}): try again when it is up")
    raise ProtocolError(f"the daemon sent {type(message).__name__} and not {kind.__name__}: report it")


class ControlClient:
    """Requests over control; one thread at a time.

    Parameters
    ----------
    runtime_dir : where the daemon is.
    timeout : seconds for each answer.
    """

    def __init__(self, runtime_dir: Path, timeout: float = 5.0) -> None:
        self.runtime = RuntimeDir(runtime_dir)
        self.timeout = timeout
        # ZeroMQ connects to nobody without complaint, so the door says first whether and who somebody is.
        sock, self.daemon = open_door(self.runtime, time.monotonic() + timeout)
        sock.close()
        self._number = 0
        self._pushed: deque[Event | Tick] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._socket = self._context.socket(zmq.DEALER)
            self._socket.linger = 0
            self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_ANSWER)
            self._socket.connect(f"ipc://{self.runtime.control}")
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def status(self) -> Status:
        """Everything that the daemon knows."""
        return self._ask(GetStatus(self._next(), self.daemon.protocol), Status)

    def archives(self) -> list[ArchiveState]:
        """The archives that it holds or loads."""
        return self._ask(ListArchives(self._next(), self.daemon.protocol), messages.Archives).archives

    def load(self, path: Path, name: str = "", timeout: float | None = None) -> Done:
        """Loads a file; returns when it is verified and resident."""
        request = LoadArchive(self._next(), self.daemon.protocol, os.fspath(path.absolute()), name)
        return self._ask(request, Done, timeout)

    def unload(self, name: str) -> Done:
        """Forgets an archive."""
        return self._ask(UnloadArchive(self._next(), self.daemon.protocol, name), Done)

    def stop(self) -> Done:
        """Asks the daemon to end; it does so after the answer."""
        return self._ask(Stop(self._next(), self.daemon.protocol), Done)

    def subscribe(self) -> Status:
        """Asks for events; the state from which they go on."""
        return self._ask(Subscribe(self._next(), self.daemon.protocol), Status)

    def pushed(self, timeout: float) -> Event | Tick | None:
        """The next pushed message, None when none comes in time."""
        deadline = time.monotonic() + timeout
        while not self._pushed:
            message = self._receive(deadline)
            if message is None:
                return None
            if isinstance(message, Event | Tick):
                self._pushed.append(message)
        return self._pushed.popleft()

    def close(self) -> None:
        """Frees the socket."""
        self._socket.close()
        self._context.term()

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _next(self) -> int:
        self._number += 1
        return self._number

    def _ask(self, request: Request, kind: type[_M], timeout: float | None = None) -> _M:
        timeout = self.timeout if timeout is None else timeout
        deadline = time.monotonic() + timeout
        self._socket.send(messages.encode(request), zmq.NOBLOCK)
        while (message := self._receive(deadline)) is not None:
            if isinstance(message, Event | Tick):
                self._pushed.append(message)
            elif getattr(message, "id", None) == request.id:
                return expect(message, kind)
        if not self.runtime.answering():
            raise self.runtime.not_running()
        raise DaemonError(
            f"the daemon in {self.runtime.path} (pid {self.daemon.pid}) did not answer {type(request).__name__} within "
            f"{timeout:g} s: look at `foundryd logs`, or allow more time"
        )

    def _receive(self, deadline: float) -> messages.FromDaemon | None:
        if not self._socket.poll(max(0, int((deadline - time.monotonic()) * 1000))):
            return None
        return messages.decode_answer(self._socket.recv(zmq.NOBLOCK))


class Watcher:
    """The daemon's state, kept current from events and read again where some are missing.

    Attributes
    ----------
    state : the last whole state that was read.
    rereads : how often events were missing.
    """

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self.state = client.subscribe()
        self.rereads = 0
        self._last = self.state.event

    def next(self, timeout: float) -> Event | Status | None:
        """The next event; a whole new state when events were missed; None when nothing happens in time."""
        deadline = time.monotonic() + timeout
        while True:
            pushed = self._client.pushed(deadline - time.monotonic())
            if pushed is None:
                return None
            same = pushed.instance == self.state.instance
            if same and isinstance(pushed, Event) and pushed.number == self._last + 1:
                self._last = pushed.number
                return pushed
            if same and pushed.number <= self._last:
                continue  # a tick, or an event that the state contains already
            self.rereads += 1
            self.state = self._client.subscribe()
            self._last = self.state.event
            return self.state


def _connect(sock: socket.socket, runtime: RuntimeDir, deadline: float) -> None:
    while True:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            sock.connect(os.fspath(runtime.door))
            return
        except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
            raise runtime.not_running() from None
        except PermissionError as error:
            raise PermissionRefused(
                f"user {os.geteuid()} may not connect to {runtime.door}: run as the daemon's user, or start the daemon "
                "with --group"
            ) from error
        except (BlockingIOError, TimeoutError) as error:  # the backlog is full
            if time.monotonic() > deadline:
                raise DaemonError(
                    f"the daemon in {runtime.path} accepts no connection: it hangs or is flooded, "
                    "look at `foundryd logs`"
                ) from error
            time.sleep(0.01)
        except OSError as error:
            raise DaemonError(
                f"{runtime.door} cannot be connected to ({error.strerror}): remove what lies there"
            ) from error


def _check_server(sock: socket.socket, runtime: RuntimeDir) -> None:
    """Memory from the daemon becomes code that runs here, so it must be who made the directory, root or this user."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid not in (0, os.geteuid(), runtime.path.stat().st_uid):
        raise PermissionRefused(
            f"the process at {runtime.door} runs as user {uid}, not as {os.geteuid()} or root: choose another runtime "
            "directory"
        )
