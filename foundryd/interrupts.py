# SPDX-License-Identifier: Apache-2.0
"""Handlers of signals that may raise: they wait until what was made is known, and end it whatever else happens."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)
ANY = tuple(sorted(signal.valid_signals()))

_Handler = Callable[[int, FrameType | None], Any]


@contextmanager
def uninterrupted(numbers: Sequence[int] = _ENDING) -> Iterator[None]:
    """Python's handlers of these signals, SIGINT and SIGTERM by default, run at the end of the block.

    For the start of a process: a handler that raises amid it would leave a process that nobody knows and nobody ends.
    And for the end of all of them, when somebody asks twice.  The block has to end soon after a signal, by itself or by
    what ``when_interrupted`` does, and inside of what ends the process.  One that ends by itself, such as a call that
    makes something of the driver's and whoever takes it in, may hold back ``ANY``.  Threads other than the main one run
    no handlers, and nothing changes for them; nor do processes that are started inside inherit anything.
    """
    waiting: list[tuple[_Handler, int, FrameType | None]] = []
    ended = False

    def wait(handler: _Handler, number: int, frame: FrameType | None) -> None:
        if ended:  # another handler raised while handlers were put back, and left this one
            handler(number, frame)
            return
        if isinstance(handler, _Acting):
            handler.act()
            handler = handler.handler
        waiting.append((handler, number, frame))

    try:
        with _instead(numbers, lambda handler: partial(wait, handler)):
            yield
    finally:
        ended = True
        for handler, number, frame in waiting:
            handler(number, frame)


@contextmanager
def when_interrupted(act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs at once when SIGINT or SIGTERM comes, and Python's handler after it.

    For the end of processes that threads wait for: a handler that raises may do so anywhere, amid the code that would
    end them, too, when somebody asks twice.  ``act`` runs in the main thread, between any two of its instructions: it
    must not raise, and not wait for a lock that this thread may hold.
    """
    with _instead(_ENDING, lambda handler: _Acting(act, handler)):
        yield


@dataclass(frozen=True)
class _Acting:
    """A handler of ``when_interrupted``."""

    act: Callable[[], None]
    handler: _Handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.act()
        self.handler(number, frame)


@contextmanager
def _instead(numbers: Sequence[int], handler_for: Callable[[_Handler], _Handler]) -> Iterator[None]:
    """Has other handlers in place of Python's in the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, _Handler] = {}
    try:
        for number in numbers:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, handler_for(handler))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
