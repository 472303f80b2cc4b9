# SPDX-License-Identifier: Apache-2.0
"""Which pinned host memory of a capture a restore has to have at the same addresses.

Libraries stage copies in pinned buffers that they take again as soon as the device has read them, so how many they
make, and of which sizes, differs from one launch to the next.  Only the sequence of allocations up to the last one that
a graph reaches has to be the same.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def needed(host: np.ndarray, exact: Iterable[Bytes], aligned: Iterable[Bytes], named: Iterable[int]) -> np.ndarray:
    """Those of ``host`` (rows of the host arena, by ordinal) up to the last that something refers to.

    ``exact`` are bytes in which an address may begin anywhere, ``aligned`` those in which it is a multiple of 8 away
    from the beginning, ``named`` addresses that the engine compares.
    """
    found = _Owners(host)
    for address in named:
        found.see(np.array([address], np.uint64))
    for data in exact:
        for shift in range(8):
            found.see(_words(data, shift))
    for data in aligned:
        found.see(_words(data, 0))
    return host[: found.last + 1]


def _words(data: Bytes, shift: int) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(data[shift:][: max(0, len(data) - shift) // 8 * 8]).view(np.uint64)


class _Owners:
    """Finds the allocations that addresses lie in; ``last`` is the highest place among these so far, or -1."""

    def __init__(self, host: np.ndarray) -> None:
        self.last = -1
        self._starts, self._ends = host["address"], host["address"] + host["bytes"]

    def see(self, values: npt.NDArray[np.uint64]) -> None:
        if not len(self._starts):
            return
        near = values[(values >= self._starts.min()) & (values < self._ends.max())]
        for value in np.unique(near).tolist():
            # Where memory was given back and taken again, the last to have it counts.
            covers = np.flatnonzero((self._starts <= value) & (self._ends > value))
            self.last = max([self.last, *covers[-1:].tolist()])
