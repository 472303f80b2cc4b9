# SPDX-License-Identifier: Apache-2.0
"""Which ranges of memory bytes hold an address of."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from foundryd.archive.members import Bytes


class Mentions:
    """Ranges of memory, which may lie over one another, and whether anything seen so far has an address in them.

    Attributes
    ----------
    found : bool for each range.
    """

    def __init__(self, starts: npt.ArrayLike, sizes: npt.ArrayLike) -> None:
        self._starts = np.asarray(starts, np.uint64)
        self._ends = self._starts + np.asarray(sizes, np.uint64)
        self.found = np.zeros(len(self._starts), bool)

    def see(self, data: Iterable[Bytes], *, aligned: bool = False) -> None:
        """Looks at bytes in which an address may begin anywhere, or only a multiple of 8 from the beginning."""
        if not len(self._starts):
            return
        lowest, highest = self._starts.min(), self._ends.max()
        for part in data:
            for shift in range(1 if aligned else 8):
                words = np.ascontiguousarray(part[shift:][: max(0, len(part) - shift) // 8 * 8]).view(np.uint64)
                near = np.unique(words[(words >= lowest) & (words < highest)])
                self.found |= np.searchsorted(near, self._ends) > np.searchsorted(near, self._starts)
