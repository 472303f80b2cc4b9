# SPDX-License-Identifier: Apache-2.0
"""Health and metrics over HTTP on loopback, on the daemon's own loop: an answer is proof that the loop runs.

One request a connection, without a body.  A client has one deadline for everything, little room, and one of few places;
whatever it does ends its own connection.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus

from foundryd.daemon.accepting import Acceptor
from foundryd.daemon.loop import Loop, Timer
from foundryd.errors import UsageError

log = logging.getLogger(__name__)

ADDRESS = "127.0.0.1"
DEADLINE = 5.0  # seconds from accepting to closing
MAX_HEAD = 8 << 10  # bytes of a request
MAX_DRAIN = 64 << 10  # bytes that may come after it, unread
MAX_CONNECTIONS = 32  # a further one pushes out the oldest
ACCEPTS_A_ROUND = 32
CHUNK = 16 << 10


@dataclass(frozen=True)
class Answer:
    """What a path gives."""

    status: HTTPStatus
    body: bytes
    kind: str = "text/plain; charset=utf-8"


Routes = Mapping[str, Callable[[], Answer]]


class _State(Enum):
    READING = "the request"
    WRITING = "the answer"
    DRAINING = "until the client has read it"
    CLOSED = "nothing"


class _Exchange:
    """One connection."""

    def __init__(self, sock: socket.socket, timer: Timer) -> None:
        self.sock = sock
        self.timer = timer
        self.state = _State.READING
        self.buffer = b""
        self.out = memoryview(b"")
        self.drained = 0


class Http:
    """The listener and its connections; raises ``UsageError`` when the port cannot be had."""

    def __init__(self, loop: Loop, port: int, routes: Routes) -> None:
        self._loop = loop
        self._routes = routes
        self._exchanges: dict[int, _Exchange] = {}  # in the order of accepting
        listener = _listen(port)
        self.port: int = listener.getsockname()[1]
        self._acceptor = Acceptor(loop, listener, self._admit, a_round=ACCEPTS_A_ROUND, what="HTTP connection")

    def close(self) -> None:
        """Stops listening and closes every connection."""
        self._acceptor.close()
        for exchange in list(self._exchanges.values()):
            self._drop(exchange)

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if len(self._exchanges) >= MAX_CONNECTIONS:
            self._drop(next(iter(self._exchanges.values())))
        exchange = _Exchange(sock, self._loop.later(DEADLINE, lambda: self._drop(exchange)))
        self._exchanges[sock.fileno()] = exchange
        self._loop.watch(sock.fileno(), lambda: self._step(exchange))
        # Most requests came with the connection: a flood of silent ones must not push them out unread.
        self._step(exchange)

    def _step(self, exchange: _Exchange) -> None:
        try:
            match exchange.state:
                case _State.READING:
                    self._read(exchange)
                case _State.WRITING:
                    self._write(exchange)
                case _State.DRAINING:
                    self._drain(exchange)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(exchange)
        except Exception:  # a fault of ours, which must not take anybody's lease
            log.exception("serving an HTTP request failed")
            self._drop(exchange)

    def _read(self, exchange: _Exchange) -> None:
        data = exchange.sock.recv(CHUNK)
        if not data:
            self._drop(exchange)
            return
        exchange.buffer += data
        head, end, _ = exchange.buffer.partition(b"\r\n\r\n")
        if len(head) > MAX_HEAD:
            self._answer(exchange, _plain(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE), body=True)
        elif end:
            self._serve(exchange, head.split(b"\r\n", 1)[0])

    def _serve(self, exchange: _Exchange, line: bytes) -> None:
        method, target, version = parts if len(parts := line.split(b" ")) == 3 else (b"", b"", b"")
        path = target.partition(b"?")[0].decode("latin-1")
        if not version.startswith(b"HTTP/1."):
            answer = _plain(HTTPStatus.BAD_REQUEST)
        elif method not in (b"GET", b"HEAD"):
            answer = _plain(HTTPStatus.METHOD_NOT_ALLOWED)
        elif path not in self._routes:
            answer = _plain(HTTPStatus.NOT_FOUND, f"not found: {', '.join(self._routes)} are here\n")
        else:
            try:
                answer = self._routes[path]()
            except Exception:  # the same
                log.exception("answering %s failed", path)
                answer = _plain(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._answer(exchange, answer, body=method != b"HEAD")

    def _answer(self, exchange: _Exchange, answer: Answer, *, body: bool) -> None:
        """Begins to send; ``body`` False: the head alone, for HEAD."""
        lines = [
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}",
            f"Content-Type: {answer.kind}",
            f"Content-Length: {len(answer.body)}",
            "Cache-Control: no-store",
            "X-Content-Type-Options: nosniff",
            "Connection: close",
        ]
        if answer.status is HTTPStatus.METHOD_NOT_ALLOWED:
            lines.append("Allow: GET, HEAD")
        exchange.buffer = b""
        exchange.out = memoryview("\r\n".join([*lines, "", ""]).encode() + (answer.body if body else b""))
        exchange.state = _State.WRITING
        self._loop.watch(exchange.sock.fileno(), lambda: self._step(exchange), writable=True)
        self._write(exchange)

    def _write(self, exchange: _Exchange) -> None:
        while exchange.out:
            exchange.out = exchange.out[exchange.sock.send(exchange.out, socket.MSG_NOSIGNAL) :]
        # Closing with unread bytes would reset the connection, and the client could lose the answer.
        exchange.sock.shutdown(socket.SHUT_WR)
        exchange.state = _State.DRAINING
        self._loop.watch(exchange.sock.fileno(), lambda: self._step(exchange))

    def _drain(self, exchange: _Exchange) -> None:
        data = exchange.sock.recv(CHUNK)
        exchange.drained += len(data)
        if not data or exchange.drained > MAX_DRAIN:
            self._drop(exchange)

    def _drop(self, exchange: _Exchange) -> None:
        if exchange.state is _State.CLOSED:
            return
        exchange.state = _State.CLOSED
        exchange.timer.cancel()
        fd = exchange.sock.fileno()
        self._loop.unwatch(fd)
        del self._exchanges[fd]
        exchange.sock.close()


def _listen(port: int) -> socket.socket:
    try:
        # A service's sandbox may allow no such socket at all.
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((ADDRESS, port))
            listener.listen(128)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise UsageError(
            f"port {port} of {ADDRESS} cannot be had ({error.strerror}): give --http another, or 0 for a free one"
        ) from error
    return listener


def _plain(status: HTTPStatus, text: str = "") -> Answer:
    return Answer(status, (text or f"{status.phrase.lower()}\n").encode())
