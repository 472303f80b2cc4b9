# SPDX-License-Identifier: Apache-2.0
"""Which arena the calling thread allocates from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from foundryd._native import _hook
from foundryd.errors import UsageError

# fdy_arena of hook/include/foundryd/records.h, by number.
ARENAS = ("default", "weights", "kv", "io", "graph", "host")


@contextmanager
def arena(name: str) -> Iterator[None]:
    """Device (and, for ``host``, pinned host) memory allocated inside comes from that arena.

    ``weights``, ``kv`` and ``io`` are what the engine fills itself: a restoring engine must make the same allocations
    there, in the same order.  ``graph`` is what graphs use among themselves.  Without the hook this does nothing.
    """
    if name not in ARENAS:
        raise UsageError(f"there is no arena {name!r}: use one of {', '.join(ARENAS)}")
    if not _hook.available():
        yield
        return
    hook = _hook.Hook()
    hook.arena_push(ARENAS.index(name))
    try:
        yield
    finally:
        hook.arena_pop()
