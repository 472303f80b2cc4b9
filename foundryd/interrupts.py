# SPDX-License-Identifier: Apache-2.0
"""Signals that wait until what they are to end is known."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Python's handlers of SIGINT and SIGTERM run at the end of the block.

    For the start of a process: a handler that raises amid it would leave a process that nobody knows and nobody ends.
    And for the end of all of them, when somebody asks twice.  The block has to be short, and inside of what ends the
    process.  Threads other than the main one run no handlers, and nothing changes for them; nor do processes that are
    started inside inherit anything.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    before: dict[signal.Signals, Callable[[int, FrameType | None], Any]] = {}
    try:
        for number in _ENDING:
            handler = signal.getsignal(number)
            if callable(handler):
                before[number] = handler
                signal.signal(number, lambda *signalled: waiting.append(signalled))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for came, frame in waiting:
            before[signal.Signals(came)](came, frame)
