# SPDX-License-Identifier: Apache-2.0
"""The door: leases and descriptors over Unix SEQPACKET connections.

A connection says ``Hello``, then ``Attach``, then at most how its restore ended: as long as it is open the rank has its
lease.  Or it says ``Hello`` and ``Report`` only, and is closed.  A rank that had its lease from an earlier daemon says
``Reattach`` instead of ``Attach``, and ``Offer`` when it is asked to.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from foundryd.daemon import messages, wire
from foundryd.daemon.accepting import Acceptor
from foundryd.daemon.loop import Loop, Timer
from foundryd.daemon.messages import (
    REPORTS,
    Attach,
    Ended,
    Granted,
    Hello,
    LeaseState,
    Message,
    Offer,
    Reattach,
    Report,
    Resumed,
    Wanted,
    Welcome,
)
from foundryd.daemon.sealed import Sealed
from foundryd.errors import FoundrydError, PermissionRefused, ProtocolError
from foundryd.logs import attach_field

log = logging.getLogger(__name__)

HELLO_DEADLINE = 5.0  # seconds until a connection must have asked for its lease
MAX_WAITING = 256  # connections without a lease; a further one pushes out another
MAX_CONNECTIONS = 4096
MAX_REPORTS = 64  # of one connection; further ones are not looked at
ACCEPTS_A_ROUND = 64
SO_PEERGROUPS = 59  # missing from the socket module


@dataclass(frozen=True)
class Peer:
    """Who is at the other end, as the kernel says."""

    pid: int
    uid: int
    groups: frozenset[int]

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        """Credentials at the time of ``connect``."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid, uid, gid = struct.unpack("3i", raw)
        groups = {gid & 0xFFFFFFFF}
        with suppress(OSError):
            more = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4096)
            groups.update(struct.unpack(f"{len(more) // 4}I", more))
        return cls(pid, uid & 0xFFFFFFFF, frozenset(groups))

    def check(self, group: int | None) -> None:
        """Raises ``PermissionRefused`` unless this is the daemon's user, root, or a member of ``group``."""
        if self.uid in (0, os.geteuid()) or (group is not None and group in self.groups):
            return
        wanted = f"user {os.geteuid()}" if group is None else f"user {os.geteuid()} and group {group}"
        raise PermissionRefused(
            f"this daemon serves {wanted} and user {self.uid} (pid {self.pid}) asks: run as that user, or start the "
            "daemon with --group"
        )


class State(Enum):
    """Where a connection is; each message is good in one state only."""

    NEW = "hello"
    GREETED = "attach"
    INVITED = "offer"
    WAITING = "nothing until the lease is granted"
    LEASED = "nothing"
    CLOSED = "closed"


class Service(Protocol):
    """What the door asks the daemon."""

    @property
    def welcome(self) -> Welcome:
        """The greeting, for the newest version."""

    def attach(self, connection: Connection, request: Attach) -> None:
        """Grants now or later, or raises a ``FoundrydError``."""

    def reattach(self, connection: Connection, request: Reattach) -> None:
        """Resumes or invites, now or later, or raises a ``FoundrydError``."""

    def offer(self, connection: Connection, fd: int) -> None:
        """Takes over the descriptor that an invited connection sent."""

    def detach(self, lease: LeaseState, why: str) -> None:
        """A lease ended."""

    def left(self, connection: Connection) -> None:
        """A connection without a lease ended."""

    def refused(self, connection: Connection, reason: str) -> None:
        """A connection that asked for a lease will not get it."""

    def report(self, connection: Connection, report: Report) -> None:
        """A rank says how its restore ended."""


class Connection:
    """One client at the door."""

    def __init__(self, sock: socket.socket, peer: Peer, timer: Timer) -> None:
        self.sock = sock
        self.peer = peer
        self.state = State.NEW
        self.lease: LeaseState | None = None
        self.timer = timer
        self.version = 0  # of the protocol, once greeted
        self.attach_id = ""
        self.reports = 0

    @property
    def closed(self) -> bool:
        """Whether it ended meanwhile."""
        return self.state is State.CLOSED


def attach_of(connection: Connection) -> dict[str, str]:
    """What a line of the log says about whose attach it is."""
    return attach_field(connection.attach_id)


class Door:
    """Accepts, greets, and keeps connections apart: what one does wrong closes that one."""

    def __init__(self, loop: Loop, path: str, service: Service, group: int | None = None) -> None:
        self._loop = loop
        self._service = service
        self._group = group
        self._connections: dict[int, Connection] = {}
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            listener.bind(path)
            share(path, group)
            listener.listen(1024)
        except BaseException:
            listener.close()
            raise
        self._acceptor = Acceptor(loop, listener, self._accepted, a_round=ACCEPTS_A_ROUND, what="connection")

    def grant(self, connection: Connection, lease: LeaseState, archive: Sealed, plan: Sealed) -> None:
        """Sends the lease with both descriptors; the connection is the lease from here on."""
        granted = Granted(
            lease=lease.number,
            archive=lease.archive,
            digest=lease.digest,
            archive_bytes=archive.size,
            plan_bytes=plan.size,
            group=lease.group,
            rank=lease.rank,
            variant=lease.variant,
            generation=lease.generation,
        )
        connection.state = State.LEASED
        self._send(connection, granted, (archive.fd, plan.fd))

    def resume(self, connection: Connection, lease: LeaseState) -> None:
        """Tells a rank that came back that it has its lease again."""
        connection.state = State.LEASED
        self._send(connection, Resumed(lease.number, lease.generation, lease.own_memory))

    def invite(self, connection: Connection) -> None:
        """Asks for the rank's memory; from here on a packet may bring one descriptor."""
        connection.state = State.INVITED
        connection.timer = self._loop.later(HELLO_DEADLINE, lambda: self.drop(connection, "offered nothing in time"))
        self._send(connection, Wanted())

    def refuse(self, connection: Connection, error: FoundrydError) -> None:
        """Tells the client why and closes."""
        if not connection.closed:
            self._send(connection, messages.refusal(error))
            self.drop(connection, error.reason, reason=error.reason)

    def drop(self, connection: Connection, why: str, *, reason: str = "gone") -> None:
        """Closes a connection, which ends its lease; ``reason`` is why a lease that it waits for is not granted."""
        if connection.closed:
            return
        if connection.state is State.WAITING:
            self._service.refused(connection, reason)
        connection.state = State.CLOSED
        connection.timer.cancel()
        fd = connection.sock.fileno()
        self._loop.unwatch(fd)
        del self._connections[fd]
        connection.sock.close()
        try:
            if connection.lease is not None:
                self._service.detach(connection.lease, why)
            else:
                self._service.left(connection)
        except Exception:  # a fault of ours, which must not take the others' leases
            log.exception("the end of pid %d's connection failed", connection.peer.pid)
        self._acceptor.resume()  # there is a descriptor again

    def close(self, message: str) -> None:
        """Stops listening and ends every connection with a last word."""
        self._acceptor.close()
        for connection in list(self._connections.values()):
            self._send(connection, Ended(reason="stopped", message=message))
            self.drop(connection, "stopped", reason="daemon")

    def _accepted(self, sock: socket.socket) -> None:
        try:
            self._admit(sock)
        except OSError:  # gone before it was looked at
            sock.close()

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        waiting = [c for c in self._connections.values() if c.state in (State.NEW, State.GREETED)]
        if len(waiting) >= MAX_WAITING:
            # Of the process that has most of them, so that a flood pushes out itself.
            greediest = Counter(c.peer.pid for c in waiting).most_common(1)[0][0]
            victim = next(c for c in waiting if c.peer.pid == greediest)
            self.drop(victim, "too many connections without a lease")
        if len(self._connections) >= MAX_CONNECTIONS:
            log.warning("a connection is refused: there are %d", len(self._connections))
            sock.close()
            return
        peer = Peer.of(sock)
        timer = self._loop.later(HELLO_DEADLINE, lambda: self.drop(connection, "said nothing in time"))
        connection = Connection(sock, peer, timer)
        self._connections[sock.fileno()] = connection
        self._loop.watch(sock.fileno(), lambda: self._guard(connection, lambda: self._read(connection)))
        self._guard(connection, lambda: peer.check(self._group))

    def _guard(self, connection: Connection, step: Callable[[], None]) -> None:
        """Runs a step that the client caused: whatever goes wrong ends this connection only."""
        try:
            step()
        except FoundrydError as error:
            if not isinstance(error, ProtocolError) or connection.state is not State.LEASED:
                log.info("pid %d is refused: %s", connection.peer.pid, error, extra=attach_of(connection))
                self.refuse(connection, error)
                return
            log.warning("pid %d loses its lease: %s", connection.peer.pid, error, extra=attach_of(connection))
            self._send(connection, Ended(reason=error.reason, message=messages.printable(error)))
            self.drop(connection, error.reason)
        except OSError as error:
            self.drop(connection, error.strerror or "socket error")
        except Exception:  # a fault of ours, which must not take the others' leases
            log.exception("serving pid %d failed", connection.peer.pid, extra=attach_of(connection))
            self.drop(connection, "internal error")

    def _read(self, connection: Connection) -> None:
        try:
            packet = wire.receive(connection.sock, 1 if connection.state is State.INVITED else 0)
        except BlockingIOError:
            return
        if packet is None:
            self.drop(connection, "closed by the client")
            return
        with packet:
            self._serve(connection, packet)

    def _serve(self, connection: Connection, packet: wire.Packet) -> None:
        message = messages.decode_request(packet.payload)
        if isinstance(message, Hello) and connection.state is State.NEW:
            version = messages.agree(message.oldest, message.newest, message.build)
            connection.state = State.GREETED
            connection.version = version
            welcome = self._service.welcome
            self._send(connection, Welcome(version, welcome.build, welcome.pid, welcome.instance))
        elif isinstance(message, Attach) and connection.state is State.GREETED:
            connection.state = State.WAITING
            connection.timer.cancel()
            connection.attach_id = message.attach_id or secrets.token_hex(8)
            self._service.attach(connection, message)
        elif isinstance(message, Reattach) and connection.state is State.GREETED and connection.version >= 2:
            connection.state = State.WAITING
            connection.timer.cancel()
            self._service.reattach(connection, message)
        elif isinstance(message, Offer) and connection.state is State.INVITED and packet.count == 1:
            connection.state = State.WAITING
            connection.timer.cancel()
            self._service.offer(connection, packet.take())
        elif isinstance(message, Report) and connection.version >= REPORTS and connection.state is State.LEASED:
            connection.reports += 1
            if connection.reports <= MAX_REPORTS:
                self._service.report(connection, message)
        elif isinstance(message, Report) and connection.version >= REPORTS and connection.state is State.GREETED:
            self._service.report(connection, message)
            self.drop(connection, "reported")
        else:
            raise ProtocolError(
                f"the door got {type(message).__name__} where it expects {connection.state.value}: correct the client"
            )

    def _send(self, connection: Connection, message: Message, descriptors: tuple[int, ...] = ()) -> None:
        """Sends, or drops a client that does not read: it is owed a few packets at most, which always fit."""
        if connection.closed:
            return
        try:
            wire.send(connection.sock, messages.encode(message), descriptors)
        except OSError as error:
            self.drop(connection, f"cannot be answered: {error.strerror}")


def share(path: str, group: int | None) -> None:
    """Opens a socket to a group; without one it stays as the umask made it, for this user only."""
    if group is not None:
        os.chown(path, -1, group)
    os.chmod(path, 0o600 if group is None else 0o660)
