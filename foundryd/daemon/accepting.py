# SPDX-License-Identifier: Apache-2.0
"""Accepting connections in the daemon's loop, in bounded rounds, and pausing while there is no descriptor for one."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Callable

from foundryd.daemon.loop import Loop

log = logging.getLogger(__name__)

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)
_PAUSE = 0.1  # seconds


class Acceptor:
    """Owns a listener that does not block; ``admit`` gets each socket that it accepts.

    Parameters
    ----------
    a_round : connections at a time, so that a flood leaves the loop time for others.
    what : what a connection is called in the log.
    """

    def __init__(
        self, loop: Loop, listener: socket.socket, admit: Callable[[socket.socket], None], *, a_round: int, what: str
    ) -> None:
        self._loop = loop
        self._listener = listener
        self._admit = admit
        self._round = a_round
        self._what = what
        self._paused = False
        loop.watch(listener.fileno(), self._accept)

    def resume(self) -> None:
        """Ends a pause before its time: a descriptor was closed."""
        if self._paused and self._listener.fileno() >= 0:
            self._paused = False
            self._loop.watch(self._listener.fileno(), self._accept)

    def close(self) -> None:
        """Accepts nobody any more and closes the listener."""
        if not self._paused:
            self._loop.unwatch(self._listener.fileno())
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(self._round):
            try:
                sock, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _NO_ROOM:
                    # The backlog stays readable: without a pause the loop would spin.
                    log.warning("no %s can be accepted: %s", self._what, error.strerror)
                    self._paused = True
                    self._loop.unwatch(self._listener.fileno())
                    self._loop.later(_PAUSE, self.resume)
                return
            self._admit(sock)
