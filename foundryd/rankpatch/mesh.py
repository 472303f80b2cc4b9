# SPDX-License-Identifier: Apache-2.0
"""The variant's mesh: where a rank sits on each parallel axis."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from itertools import combinations
from math import prod

import numpy as np
import numpy.typing as npt

from foundryd.errors import UsageError

# Slowest first: tp neighbours are adjacent ranks.
AXES = ("pp", "dp", "ep", "tp")

# Meshes are also read out of archives: a world beyond this is nonsense, and tables are as long as the world.
MAX_WORLD = 1 << 16


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
    """Sizes of the four axes, written ``tp=2,ep=4``; with ``ep_spans`` the ep axis is dp × tp, not one of its own.

    Raises ``UsageError`` for sizes that cannot be.
    """

    pp: int = 1
    dp: int = 1
    ep: int = 1
    tp: int = 1
    ep_spans: bool = False
    local_size: int = 0  # ranks of one node; 0 means all

    def __post_init__(self) -> None:
        sizes = (self.pp, self.dp, self.ep, self.tp)
        if min(sizes) < 1 or self.local_size < 0:
            raise UsageError(
                f"a mesh of {dict(zip(AXES, sizes, strict=True))} with {self.local_size} ranks a node "
                "cannot be: the size of an axis is a number from 1"
            )
        if self.ep_spans and self.ep != 1:
            raise UsageError(f"the mesh has ep={self.ep} and ep=dp*tp: give one of them")
        if prod(sizes) > MAX_WORLD:
            raise UsageError(f"the mesh has {prod(sizes)} ranks, more than {MAX_WORLD}: use smaller axes")

    @classmethod
    def parse(cls, text: str, *, local_size: int = 0) -> Mesh:
        """Reads ``ep=8``, ``dp=2,tp=4`` or ``dp=2,tp=4,ep=dp*tp``; raises ``UsageError``."""
        sizes: dict[str, int] = {}
        spans = False
        for part in filter(None, (p.strip() for p in text.split(","))):
            axis, _, value = part.partition("=")
            if axis not in AXES or axis in sizes or (axis == "ep" and spans):
                raise UsageError(
                    f"the variant {text!r} has {part!r}: use each of {', '.join(AXES)} once, as in tp=2,ep=4"
                )
            if axis == "ep" and value == "dp*tp":
                spans = True
                continue
            if not (value.isascii() and value.isdigit() and len(value) <= 9 and int(value) >= 1):
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

    def check(self, rank: int) -> int:
        """Returns ``rank``; raises ``UsageError`` if the mesh has no such rank."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not in the mesh {self}, which has ranks 0 to {self.world - 1}")
        return rank

    def place(self, rank: int) -> dict[str, int]:
        """Place of ``rank`` on each axis."""
        row = self.coordinates(rank)
        return {axis: row[Coordinate[axis.upper()]] for axis in AXES}

    def coordinates(self, rank: int) -> tuple[int, ...]:
        """Values of ``Coordinate``, in its order."""
        return tuple(coordinate_table(self)[self.check(rank)].tolist())

    def group(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Ranks that share every place with ``rank`` but those on ``axes``, in ascending order."""
        unknown = set(axes) - set(AXES)
        if unknown:
            raise UsageError(f"{', '.join(sorted(unknown))} is not an axis of a mesh: use {', '.join(AXES)}")
        return _group(self, self.check(rank), frozenset(axes))

    def axes_of(self, rank: int, ranks: tuple[int, ...]) -> tuple[str, ...] | None:
        """The axes whose group around ``rank`` is exactly ``ranks``; fewest axes first, None if there are none."""
        sized = [a for a in AXES if getattr(self, a) > 1]
        wanted = tuple(sorted(ranks))
        for count in range(len(sized) + 1):
            for axes in combinations(sized, count):
                size = prod(getattr(self, a) for a in axes)
                if size == len(wanted) and self.group(rank, axes) == wanted:
                    return axes
        return None


@lru_cache(maxsize=64)
def coordinate_table(mesh: Mesh) -> npt.NDArray[np.int64]:
    """Coordinates of every rank, read only: [world][6], columns in the order of ``Coordinate``."""
    ranks = np.arange(mesh.world, dtype=np.int64)
    table = np.empty((mesh.world, len(Coordinate)), dtype=np.int64)
    rest = ranks
    for axis in reversed(AXES):
        size = getattr(mesh, axis)
        table[:, Coordinate[axis.upper()]] = rest % size
        rest = rest // size
    if mesh.ep_spans:
        table[:, Coordinate.EP] = table[:, Coordinate.DP] * mesh.tp + table[:, Coordinate.TP]
    table[:, Coordinate.RANK] = ranks
    table[:, Coordinate.LOCAL_RANK] = ranks % mesh.local_size if mesh.local_size else ranks
    table.flags.writeable = False
    return table


@lru_cache(maxsize=4096)
def _group(mesh: Mesh, rank: int, axes: frozenset[str]) -> tuple[int, ...]:
    free = axes | ({"dp", "tp"} if mesh.ep_spans and "ep" in axes else frozenset())
    # An ep axis that spans dp and tp holds no place of its own: whoever shares dp and tp shares ep.
    fixed = [Coordinate[a.upper()] for a in AXES if a not in free and not (a == "ep" and mesh.ep_spans)]
    table = coordinate_table(mesh)
    same = (table[:, fixed] == table[rank, fixed]).all(axis=1)
    return tuple(np.flatnonzero(same).tolist())
