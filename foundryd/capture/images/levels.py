# SPDX-License-Identifier: Apache-2.0
"""What can be left out of a cubin with the kernels that are not used."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from foundryd.capture.images.cut import without_unused
from foundryd.capture.images.strip import stripped


@dataclass(frozen=True)
class Cut:
    """One way to leave something out; ``apply`` gives a cubin and the names of its kernels that are used.

    It returns the cubin itself where nothing can go, and raises ``UnreadableImage`` where it is not known what can.
    """

    name: str
    left_out: str
    apply: Callable[[bytes, Collection[str]], bytes]


CUTS = (
    Cut("stripped", "its other kernels", stripped),
    Cut("cut", "the code of its other kernels", without_unused),
)
"""From the one that leaves the least on."""


def cuts(deepest: str) -> Sequence[Cut]:
    """The ways to try, in their order, where ``deepest`` (``Settings.cut``) may leave the least."""
    names = [cut.name for cut in CUTS]
    return CUTS[names.index(deepest) :] if deepest in names else ()
