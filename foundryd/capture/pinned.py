# SPDX-License-Identifier: Apache-2.0
"""Which pinned host memory of a capture a restore has to have at the same addresses.

Libraries stage copies in pinned buffers that they take again as soon as the device has read them, so how many they
make, and of which sizes, differs from one launch to the next.  Only the sequence of allocations up to the last one that
a graph reaches has to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from foundryd.archive.members import Bytes
from foundryd.capture.mentions import Mentions
from foundryd.session.arena import ARENAS

HOST = ARENAS.index("host")


def on_host(allocations: np.ndarray) -> np.ndarray:
    """Which rows are of pinned host memory, bool."""
    return np.asarray(allocations["arena"] == HOST)


def needed(
    host: np.ndarray,
    exact: Iterable[Bytes],
    aligned: Iterable[Bytes],
    named: Iterable[int],
    held: Sequence[tuple[int, Bytes]] = (),
) -> np.ndarray:
    """Those of ``host`` (rows of the host arena, by ordinal) up to the last that something refers to.

    ``exact`` are bytes in which an address may begin anywhere, ``aligned`` those in which it is a multiple of 8 away
    from the beginning, ``named`` addresses that the engine compares, ``held`` what rows of ``host`` hold, each
    beside its ordinal: those that are needed may refer to more.  Where memory was given back and taken again, the last
    to have it counts.
    """
    mentions = Mentions(host["address"], host["bytes"])
    mentions.see([np.array(list(named), np.uint64).view(np.uint8)], aligned=True)
    mentions.see(exact)
    mentions.see(aligned, aligned=True)
    count, more = 0, _reach(mentions)
    while more > count:
        mentions.see([data for ordinal, data in held if count <= ordinal < more], aligned=True)
        count, more = more, _reach(mentions)
    return host[:count]


def _reach(mentions: Mentions) -> int:
    places = np.flatnonzero(mentions.found)
    return int(places[-1]) + 1 if len(places) else 0
