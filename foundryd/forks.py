# SPDX-License-Identifier: Apache-2.0
"""Objects that hear of it when they are in a process that was forked from theirs."""

from __future__ import annotations

import os
import weakref
from contextlib import ExitStack
from typing import Protocol


class Forked(Protocol):
    """What has threads, locks, descriptors or handles that are no use in a forked process."""

    def forked(self) -> None:
        """Lets go of them, in the child: no thread is there but this one, and any lock may be taken for ever."""


_alive: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell_of_forks(one: Forked) -> None:
    """From now on calls ``one.forked()`` in every child, as long as somebody else has ``one``."""
    _alive.add(one)


def _tell() -> None:
    # One that raises keeps nobody else from hearing of it.
    with ExitStack() as all_of_them:
        for one in list(_alive):
            all_of_them.callback(one.forked)


os.register_at_fork(after_in_child=_tell)
