# SPDX-License-Identifier: Apache-2.0
"""A small key-value store over a Unix socket, by which ranks find each other.

A request is a tag and two fields, a response a tag and one; a field is a little-endian uint32 length and its bytes.
``S key value`` sets, ``G key milliseconds`` waits for a key.  The answer is ``V value``, or ``T`` when time is up.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

from foundryd.errors import DeadlineExceeded, ProtocolError, UsageError

MAX_FIELD = 1 << 20
GRACE = 5.0  # seconds that the server may need beyond a deadline


class Store(Protocol):
    """What ranks need of a store; ``foundryd.session.store`` asks for the same."""

    def set(self, key: str, value: bytes) -> None:
        """Publishes a value."""

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a key for at most ``timeout`` seconds, else raises ``TimeoutError``."""

    def close(self) -> None:
        """Ends the connection."""


class StoreServer:
    """Serves one store in threads of this process for as long as the block lasts."""

    def __init__(self, path: Path) -> None:
        if len(os.fsencode(path)) > 107:
            raise UsageError(f"the socket path {path} has more than 107 bytes: use a shorter folder")
        self.path = path
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._connections: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(os.fspath(path))
        self._listener.listen(128)
        self._thread = threading.Thread(target=self._accept, name="rendezvous", daemon=True)

    def __enter__(self) -> StoreServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            connections = list(self._connections)
        for connection in (self._listener, *connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join(GRACE)
        self._listener.close()
        self.path.unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # shut down
                return
            with self._changed:
                self._connections.add(connection)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError, ProtocolError, UnicodeDecodeError):
                while True:
                    tag, key, value = _receive(connection, 2)
                    if tag == b"S":
                        with self._changed:
                            self._values[key.decode()] = value
                            self._changed.notify_all()
                        _send(connection, b"V", b"")
                    elif tag == b"G" and len(value) == 8:
                        found = self._wait(key.decode(), struct.unpack("<Q", value)[0] / 1000)
                        _send(connection, b"T" if found is None else b"V", found or b"")
                    else:
                        return  # nonsense: the client loses its connection
        finally:
            with self._changed:
                self._connections.discard(connection)

    def _wait(self, key: str, seconds: float) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._values or self._closed, seconds)
            return self._values.get(key)


class SocketStore:
    """A rank's connection to the store.  Calls of several threads follow one another.

    Raises
    ------
    DeadlineExceeded : the server does not answer.
    TimeoutError : nobody set a key in time.
    """

    def __init__(self, path: Path, *, timeout: float = 30.0) -> None:
        self._path = path
        self._timeout = timeout
        self._lock = threading.Lock()
        self._socket = self._connect()

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        self._ask(b"S", key, value, self._timeout)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for a key for at most ``timeout`` seconds."""
        tag, value = self._ask(b"G", key, struct.pack("<Q", int(timeout * 1000)), timeout + GRACE)
        if tag == b"T":
            raise TimeoutError(f"nobody set {key} in {timeout:g} s: see whether every rank started")
        return value

    def close(self) -> None:
        """Closes the connection."""
        self._socket.close()

    def _connect(self) -> socket.socket:
        end = time.monotonic() + self._timeout
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connection.connect(os.fspath(self._path))
                return connection
            except (FileNotFoundError, ConnectionRefusedError) as error:
                connection.close()
                if time.monotonic() > end:
                    raise DeadlineExceeded(
                        f"the rendezvous at {self._path} was not there in {self._timeout:g} s ({error}): start it first"
                    ) from None
                time.sleep(0.02)

    def _ask(self, tag: bytes, key: str, value: bytes, timeout: float) -> tuple[bytes, bytes]:
        with self._lock:
            self._socket.settimeout(timeout)
            try:
                _send(self._socket, tag, key.encode(), value)
                answer, content = _receive(self._socket, 1)
            except (OSError, ProtocolError) as error:
                raise DeadlineExceeded(
                    f"the rendezvous at {self._path} did not answer for {key} ({error}): see whether it still runs"
                ) from None
            return answer, content


class FakeStore:
    """The store of a rank that is captured alone: answers every question at once and keeps nothing.

    The answer has the size of an NCCL unique id, the only thing that this engine asks for.
    """

    def set(self, key: str, value: bytes) -> None:
        """Does nothing."""

    def get(self, key: str, timeout: float) -> bytes:
        """128 random bytes."""
        return os.urandom(128)

    def close(self) -> None:
        """Does nothing."""


def _send(connection: socket.socket, tag: bytes, *fields: bytes) -> None:
    connection.sendall(tag + b"".join(struct.pack("<I", len(f)) + f for f in fields))


def _receive(connection: socket.socket, fields: int) -> tuple[bytes, ...]:
    out = [_exactly(connection, 1)]
    for _ in range(fields):
        (length,) = struct.unpack("<I", _exactly(connection, 4))
        if length > MAX_FIELD:
            raise ProtocolError(f"a rendezvous field has {length} bytes, at most {MAX_FIELD} are allowed")
        out.append(_exactly(connection, length))
    return tuple(out)


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ProtocolError("the other end closed the connection")
        parts += part
    return bytes(parts)
