# SPDX-License-Identifier: Apache-2.0
"""Control: requests, answers and pushed events over a ZeroMQ ROUTER.

Who is asking comes from the kernel, through libzmq's ``Peer-Address`` of the connection (``localhost:UID:GID:PID``).
"""

from __future__ import annotations

import logging
import os
from typing import Protocol

import zmq

from foundryd.daemon import messages
from foundryd.daemon.door import share
from foundryd.daemon.loop import Loop
from foundryd.daemon.messages import (
    Event,
    GetStatus,
    ListArchives,
    LoadArchive,
    Message,
    Request,
    Stop,
    Subscribe,
    Tick,
    UnloadArchive,
)
from foundryd.errors import FoundrydError, PermissionRefused, ProtocolError

log = logging.getLogger(__name__)

REQUESTS_A_ROUND = 64
MAX_SUBSCRIBERS = 256
SEND_QUEUE = 1024  # messages that may wait for one peer; an event above is lost to it, and it re-reads the state
OWNERS_ONLY = (LoadArchive, UnloadArchive, Stop)


class Service(Protocol):
    """What control asks the daemon."""

    @property
    def tick(self) -> Tick:
        """The number of the last event."""

    def status(self, id: int) -> messages.Status:
        """Everything."""

    def archives(self, id: int) -> messages.Archives:
        """The archives."""

    def load(self, request: LoadArchive, answer: Reply) -> None:
        """Loads, then answers."""

    def unload(self, request: UnloadArchive) -> messages.Done:
        """Unloads."""

    def stop(self, request: Stop) -> messages.Done:
        """Ends the daemon after the answer."""


class Reply:
    """Where an answer that comes later goes."""

    def __init__(self, control: Control, peer: bytes, id: int) -> None:
        self._control = control
        self._peer = peer
        self.id = id

    def __call__(self, message: Message | FoundrydError) -> None:
        """Sends the answer or the error."""
        if isinstance(message, FoundrydError):
            message = messages.refusal(message, self.id)
        self._control.send(self._peer, message)


class Control:
    """The ROUTER.  A peer gets an answer or nothing; it cannot disturb another."""

    def __init__(
        self, loop: Loop, context: zmq.Context[zmq.Socket[bytes]], path: str, service: Service, group: int | None = None
    ) -> None:
        self._loop = loop
        self._service = service
        self._group = group
        self._subscribers: dict[bytes, None] = {}
        self._socket = context.socket(zmq.ROUTER)
        try:
            self._socket.linger = 0
            self._socket.setsockopt(zmq.MAXMSGSIZE, messages.MAX_REQUEST)
            self._socket.setsockopt(zmq.HANDSHAKE_IVL, 5000)
            self._socket.setsockopt(zmq.RCVHWM, 256)
            self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
            # Sending to a peer that is gone or does not read is an error, not a silent drop: so we learn of it.
            self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._socket.bind(f"ipc://{path}")
            share(path, group)
        except BaseException:
            self._socket.close()
            raise
        loop.watch(self._socket, self._read)

    @property
    def subscribers(self) -> int:
        """How many peers get events."""
        return len(self._subscribers)

    def send(self, peer: bytes, message: Message) -> bool:
        """Sends without waiting; False when the peer is gone or its queue is full."""
        try:
            self._socket.send_multipart([peer, messages.encode(message)], zmq.NOBLOCK)
        except zmq.Again:
            log.warning("a message to a peer that does not read is dropped")
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._subscribers.pop(peer, None)
            return False
        except ProtocolError as error:
            log.error("an answer cannot be sent: %s", error)
            return False
        return True

    def push(self, event: Event | Tick) -> None:
        """Sends to all subscribers; forgets those that are gone."""
        for peer in list(self._subscribers):
            self.send(peer, event)

    def close(self) -> None:
        """Closes the socket; what was sent goes out for a moment longer."""
        self._loop.unwatch(self._socket)
        self._socket.close(linger=500)

    def _read(self) -> None:
        for _ in range(REQUESTS_A_ROUND):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = frames[0].bytes
            payload = frames[-1].bytes
            try:
                if len(frames) != 2:
                    raise ProtocolError(f"a message has {len(frames) - 1} frames instead of one: correct the client")
                self._serve(peer, _user(frames[1]), payload)
            except FoundrydError as error:
                log.info("a request is refused: %s", error)
                self.send(peer, messages.refusal(error, messages.request_id(payload)))
            except Exception:  # a fault of ours, which must not take the others' leases
                log.exception("serving a request failed")

    def _serve(self, peer: bytes, user: int, payload: bytes) -> None:
        request = messages.decode_request(payload)
        if not isinstance(request, Request):
            raise ProtocolError(f"{type(request).__name__} belongs to the door, not to control: correct the client")
        if not messages.OLDEST <= request.protocol <= messages.NEWEST:
            messages.agree(request.protocol, request.protocol, "the client")
        owner = user in (0, os.geteuid())
        # A member of the group got here through the modes of directory and socket, which the kernel checks.
        if not owner and (self._group is None or isinstance(request, OWNERS_ONLY)):
            raise PermissionRefused(
                f"user {user} may not ask for {type(request).__name__} of a daemon of user {os.geteuid()}: "
                "run as that user"
            )
        reply = Reply(self, peer, request.id)
        match request:
            case GetStatus():
                reply(self._service.status(request.id))
            case ListArchives():
                reply(self._service.archives(request.id))
            case Subscribe():
                self._subscribe(peer)
                reply(self._service.status(request.id))
            case LoadArchive():
                self._service.load(request, reply)
            case UnloadArchive():
                reply(self._service.unload(request))
            case Stop():
                reply(self._service.stop(request))

    def _subscribe(self, peer: bytes) -> None:
        if len(self._subscribers) >= MAX_SUBSCRIBERS:
            self.push(self._service.tick)  # finds those that are gone
        if peer not in self._subscribers and len(self._subscribers) >= MAX_SUBSCRIBERS:
            raise ProtocolError(f"there are {MAX_SUBSCRIBERS} subscribers already: end one of them")
        self._subscribers[peer] = None


def _user(frame: zmq.Frame) -> int:
    """User of the peer; raises ``PermissionRefused`` when libzmq does not say."""
    try:
        text = frame.get("Peer-Address")
        return int(str(text).split(":")[-3])
    except (zmq.ZMQError, ValueError, IndexError) as error:
        raise PermissionRefused(
            "the user of a control connection cannot be told: use a libzmq that reports Peer-Address for ipc"
        ) from error
