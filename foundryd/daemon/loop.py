# SPDX-License-Identifier: Apache-2.0
"""The daemon's one event loop: sockets, descriptors, timers and callbacks from other threads."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq

Callback = Callable[[], None]
Source = zmq.Socket[bytes] | int


@dataclass(order=True)
class Timer:
    """A callback with a deadline; see ``Loop.later``."""

    deadline: float
    order: int
    callback: Callback | None = field(compare=False)

    def cancel(self) -> None:
        """The callback will not run."""
        self.callback = None


class Loop:
    """Runs callbacks in the thread that calls ``run``; only ``post`` and ``stop`` may be called from elsewhere."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[Source, Callback] = {}
        self._timers: list[Timer] = []
        self._sweep_at = 64  # timers; most are cancelled long before they are due
        self._order = itertools.count()
        self._posted: deque[Callback] = deque()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._stopped = False
        self.watch(self._wake, self._drain)

    def watch(self, source: Source, callback: Callback, *, writable: bool = False) -> None:
        """Calls ``callback`` whenever ``source`` is readable or hung up; ``writable``: when it is writable instead."""
        self._poller.register(source, zmq.POLLOUT if writable else zmq.POLLIN)
        self._callbacks[source] = callback

    def unwatch(self, source: Source) -> None:
        """Forgets a source; must precede its closing."""
        self._poller.unregister(source)
        del self._callbacks[source]

    def later(self, seconds: float, callback: Callback) -> Timer:
        """Calls ``callback`` once, ``seconds`` from now."""
        if len(self._timers) >= self._sweep_at:
            self._timers = [timer for timer in self._timers if timer.callback is not None]
            heapq.heapify(self._timers)
            self._sweep_at = max(64, 2 * len(self._timers))
        timer = Timer(time.monotonic() + seconds, next(self._order), callback)
        heapq.heappush(self._timers, timer)
        return timer

    def post(self, callback: Callback) -> None:
        """Calls ``callback`` in the loop's thread; safe from any thread and from a signal handler."""
        self._posted.append(callback)
        os.eventfd_write(self._wake, 1)

    def stop(self) -> None:
        """Makes ``run`` return after the callbacks of this round."""
        self._stopped = True
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Runs until ``stop``.  An exception of a callback ends it: what a peer can cause is caught where it occurs."""
        while not self._stopped:
            self.turn()

    def turn(self) -> None:
        """Waits until something is due and runs what is, once."""
        for source, _ in self._poller.poll(self._timeout()):
            callback = self._callbacks.get(source)
            if callback is not None:  # an earlier callback of this round may have removed it
                callback()
        now = time.monotonic()
        while self._timers and self._timers[0].deadline <= now:
            timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                timer.callback()

    def close(self) -> None:
        """Frees the loop's descriptor."""
        self.unwatch(self._wake)
        os.close(self._wake)

    def _timeout(self) -> int | None:
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        if not self._timers:
            return None
        return max(0, int((self._timers[0].deadline - time.monotonic()) * 1000) + 1)

    def _drain(self) -> None:
        os.eventfd_read(self._wake)
        for _ in range(len(self._posted)):
            self._posted.popleft()()
