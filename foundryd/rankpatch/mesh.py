# SPDX-License-Identifier: Apache-2.0
"""The variant's mesh: where a rank sits on each parallel axis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from math import prod

from foundryd.errors import UsageError

# Slowest first: tp neighbours are adjacent ranks.
AXES = ("pp", "dp", "ep", "tp")


class Coordinate(IntEnum):
    """What a rule may follow; the numbers are ``fp_coordinate`` of ``rankpatch/rule.h``."""

    RANK = 0
    LOCAL_RANK = 1
    TP = 2
    EP = 3
    DP = 4
    PP = 5


@dataclass(frozen=True)
class Mesh:
    """Sizes of the four axes, written ``tp=2,ep=4``; with ``ep_spans`` the ep axis is dp × tp, not one of its own."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    ep_spans: bool = False
    local_size: int = 0  # ranks of one node; 0 means all

    @classmethod
    def parse(cls, text: str, *, local_size: int = 0) -> Mesh:
        """Reads ``ep=8``, ``dp=2,tp=4`` or ``dp=2,tp=4,ep=dp*tp``; raises ``UsageError``."""
        sizes: dict[str, int] = {}
        spans = False
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, _, value = part.partition("=")
            if axis not in AXES or axis in sizes:
                raise UsageError(f"the variant {text!r} has {part!r}: use each of {', '.join(AXES)} once, as in tp=2,ep=4")
            if axis == "ep" and value == "dp*tp":
                spans = True
                continue
            if not value.isdigit() or int(value) < 1:
                raise UsageError(f"the variant {text!r} has {part!r}: the size of an axis is a number from 1")
            sizes[axis] = int(value)
        return cls(**sizes, ep_spans=spans, local_size=local_size)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.ep * self.tp

    def __str__(self) -> str:
        parts = [f"{a}={getattr(self, a)}" for a in AXES if getattr(self, a) > 1]
        if self.ep_spans:
            parts.append("ep=dp*tp")
        return ",".join(parts) or "tp=1"

    def place(self, rank: int) -> dict[str, int]:
        """Place of ``rank`` on each axis."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not in the mesh {self}, which has ranks 0 to {self.world - 1}")
        place = {}
        rest = rank
        for axis in reversed(AXES):
            size = getattr(self, axis)
            place[axis] = rest % size
            rest //= size
        if self.ep_spans:
            place["ep"] = place["dp"] * self.tp + place["tp"]
        return place

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Values of ``Coordinate``, in its order."""
        place = self.place(rank)
        local = rank % self.local_size if self.local_size else rank
        return (rank, local, place["tp"], place["ep"], place["dp"], place["pp"])

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that share every place with ``rank`` but those on ``axes``, in ascending order."""
        mine = self.place(rank)
        spans = self.ep_spans and "ep" in axes
        free = set(axes) | ({"dp", "tp"} if spans else set())
        fixed = [a for a in AXES if a not in free and not (a == "ep" and self.ep_spans)]
        return tuple(
            other for other in range(self.world) if all(self.place(other)[a] == mine[a] for a in fixed)
        )

    def axes_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
        """The axes whose group around ``rank`` is exactly ``ranks``; fewest axes first, None if there are none."""
        sized = [a for a in AXES if getattr(self, a) > 1]
        subsets = sorted(
            (tuple(a for i, a in enumerate(sized) if mask >> i & 1) for mask in range(1 << len(sized))), key=len
        )
        wanted = tuple(sorted(ranks))
        return next(
            (axes for axes in subsets if prod([1, *(getattr(self, a) for a in axes)]) == len(wanted)
             and self.group(rank, axes) == wanted),
            None,
        )
