# SPDX-License-Identifier: Apache-2.0
"""One thread for what takes long: verifying, inflating, computing plans."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from foundryd.daemon.loop import Loop

_T = TypeVar("_T")


class Worker:
    """Runs jobs in order, off the loop's thread, and reports to the loop.

    The thread is a daemon thread: a job that runs when the process ends is dropped with it, which is safe since a job
    has no effect outside the process.
    """

    def __init__(self, loop: Loop, name: str = "foundryd-worker") -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, job: Callable[[], _T], done: Callable[[_T | BaseException], None]) -> None:
        """Runs ``job`` in the thread, then ``done(result or exception)`` in the loop."""

        def work() -> None:
            try:
                result: _T | BaseException = job()
            except BaseException as error:  # handed to the loop, which decides
                result = error
            self._loop.post(lambda: done(result))

        self._jobs.put(work)

    def _run(self) -> None:
        while True:
            self._jobs.get()()
