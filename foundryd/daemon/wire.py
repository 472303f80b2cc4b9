# SPDX-License-Identifier: Apache-2.0
"""Packets with descriptors over a Unix SEQPACKET socket.

The kernel keeps packet boundaries, so a frame is a packet: nothing to parse, and a peer cannot announce a length.
A received descriptor is owned by its ``Packet`` until it is taken, and the packet closes what nobody took.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from types import TracebackType

from foundryd.errors import DaemonError, ProtocolError

MAX_PACKET = 64 << 10
MAX_DESCRIPTORS = 4

_INT = array.array("i").itemsize


class Packet:
    """One received packet; use it as a context manager when it may carry descriptors."""

    def __init__(self, payload: bytes, descriptors: list[int]) -> None:
        self.payload = payload
        self._descriptors = descriptors

    @property
    def count(self) -> int:
        """Descriptors that nobody took yet."""
        return len(self._descriptors)

    def take(self) -> int:
        """The next descriptor, which the caller now owns."""
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Closes what was not taken."""
        while self._descriptors:
            os.close(self._descriptors.pop())

    def __enter__(self) -> Packet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def send(sock: socket.socket, payload: bytes, descriptors: Sequence[int] = ()) -> None:
    """Sends one packet.  The descriptors are duplicated into the peer; the caller's stay its own.

    Raises
    ------
    ProtocolError : the packet is larger than ``MAX_PACKET`` or carries too many descriptors.
    OSError : as the socket says (``BlockingIOError`` when it is non-blocking and the peer does not read).
    """
    if len(payload) > MAX_PACKET or len(descriptors) > MAX_DESCRIPTORS:
        raise ProtocolError(
            f"a packet of {len(payload)} bytes and {len(descriptors)} descriptors exceeds the limits of {MAX_PACKET} "
            f"bytes and {MAX_DESCRIPTORS} descriptors: shorten what is sent"
        )
    ancillary = []
    if descriptors:
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    sock.sendmsg([payload], ancillary, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, descriptors: int = 0) -> Packet | None:
    """Receives one packet with at most ``descriptors`` descriptors, all close-on-exec; None when the peer is gone.

    An empty packet counts as gone, for the kernel shows both in the same way.  With ``descriptors`` 0 the kernel has
    no room to install any, so a peer cannot fill this process's table.

    Raises
    ------
    ProtocolError : the packet is too large or carries more descriptors; nothing of it is kept.
    DaemonError : this process has no room for the descriptors.
    OSError : as the socket says.
    """
    room = socket.CMSG_SPACE(descriptors * _INT) if descriptors else 0
    payload, ancillary, flags, _ = sock.recvmsg(MAX_PACKET, room, socket.MSG_CMSG_CLOEXEC)
    received = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            received.frombytes(data[: len(data) - len(data) % _INT])
    packet = Packet(payload, received.tolist())
    if flags & socket.MSG_CTRUNC and packet.count < descriptors:
        packet.close()
        raise DaemonError(
            f"this process has no descriptor left for the {descriptors} of a packet: raise its limit (ulimit -n)"
        )
    # CMSG_SPACE rounds up, so one descriptor more than asked for may have been installed.
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or packet.count > descriptors:
        packet.close()
        raise ProtocolError(
            f"a packet is larger than {MAX_PACKET} bytes or has more than {descriptors} descriptors: "
            "the peer does not speak this protocol"
        )
    if not payload:
        packet.close()
        return None
    return packet
