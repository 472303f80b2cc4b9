# SPDX-License-Identifier: Apache-2.0
"""Where peers' memory lies: the addresses behind the arenas, one stretch a rank, alike on every rank."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

ARENAS = 6  # before the first window
WINDOWS = 64  # ranks from 0 that have one


class Layout(Protocol):
    """Where the arenas lie."""

    @property
    def arena_base(self) -> int:
        """Where the first one starts."""

    @property
    def arena_stride(self) -> int:
        """Bytes of addresses of each, and of each window."""


def window_base(layout: Layout, rank: int) -> int:
    """Where the window of a rank starts."""
    return layout.arena_base + (ARENAS + rank) * layout.arena_stride


def with_own(windows: npt.NDArray[Any], layout: Layout, rank: int) -> npt.NDArray[Any]:
    """What is open on ``rank``, and the same of its own memory if nothing of that is; by address.

    So every rank of a group that opens its peers' memory has a list of the same shape.
    """
    if (windows["rank"] == rank).any():
        return np.sort(windows, order="address")
    own = windows.copy()
    own["rank"] = rank
    first, stride = np.uint64(window_base(layout, 0)), np.uint64(layout.arena_stride)
    own["address"] = np.uint64(window_base(layout, rank)) + (windows["address"] - first) % stride
    return np.unique(np.concatenate([windows, own]))
