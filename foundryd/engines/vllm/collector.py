# SPDX-License-Identifier: Apache-2.0
"""Python's garbage collector while a worker starts: what it costs, and what it need not look at.

vLLM collects garbage again and again while it starts, so that device memory is free before it measures and captures.
Each time the collector looks at every object of PyTorch, of its compiler and of vLLM itself, which takes some tenths of
a second and finds nothing: what was imported before the first GPU context holds no device memory.  Once an engine has
started, vLLM itself takes everything there is out of collections, until it shuts down.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_INTERPRETERS = 1000  # objects that Python itself may have frozen when it started: 375 in 3.12
_ours = False  # whether what is frozen was frozen here; a process has one heap


def freeze() -> None:
    """Leaves everything that there is now out of collections, until ``thaw``.

    Does nothing where the program froze objects itself, which are not ours to thaw.
    """
    global _ours
    if _ours or gc.get_freeze_count() < _INTERPRETERS:
        gc.freeze()
        _ours = True


def thaw() -> None:
    """Lets collections look at everything again."""
    global _ours
    if _ours:
        gc.unfreeze()
        _ours = False


def collect() -> None:
    """Collects all garbage there is."""
    thaw()
    gc.collect()


@contextmanager
def paused() -> Iterator[None]:
    """Inside, nothing is collected unless somebody asks for it: for code that makes many objects and keeps them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Watch:
    """Adds up how long collections take; ``add`` is told the milliseconds of each."""

    def __init__(self, add: Callable[[float], None]) -> None:
        self._add = add
        self._started = 0.0
        gc.callbacks.append(self._seen)

    def _seen(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.monotonic()
        else:
            self._add((time.monotonic() - self._started) * 1000)

    def close(self) -> None:
        """Looks no longer; a second call changes nothing."""
        if self._seen in gc.callbacks:
            gc.callbacks.remove(self._seen)
