# SPDX-License-Identifier: Apache-2.0
"""Which ranks to capture, and which of them share templates."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from foundryd.errors import UsageError
from foundryd.rankpatch.mesh import Coordinate, Mesh, coordinate_table

# Up to so many ranks every one is captured, and nothing has to be inferred.
WHOLE = 4

# Rules follow the first of these that explains a word: an axis says more than the rank that it happens to equal.
PREFERENCE = (
    Coordinate.TP,
    Coordinate.EP,
    Coordinate.DP,
    Coordinate.PP,
    Coordinate.RANK,
    Coordinate.LOCAL_RANK,
)


@dataclass(frozen=True)
class Sampling:
    """The captures of one rank class.

    Attributes
    ----------
    members : every rank of the class, ascending.
    ranks : those to capture, ascending; the first is the reference.
    control : the one of them to capture a second time.
    held_out : a rank that inference must not see and the rules must reproduce; None where all are captured.
    """

    members: tuple[int, ...]
    ranks: tuple[int, ...]
    control: int
    held_out: int | None

    @property
    def complete(self) -> bool:
        """Whether every rank of the class is captured."""
        return len(self.ranks) == len(self.members)

    def extended(self, more: Iterable[int]) -> Sampling:
        """The same with additional captures (``Inference.undecided``); the held-out rank moves if it became one."""
        return _sampling(self.members, {*self.ranks, *more}, self.control)


def sample(mesh: Mesh, requested: Iterable[int] | None = None, members: Sequence[int] | None = None) -> Sampling:
    """Picks the ranks to capture.

    The default is the first three, the middle and the last rank of the class, and all of a class of up to four.  To
    these, or to the requested ones, come the lowest ranks that make every coordinate observable (``missing_ranks``).

    Parameters
    ----------
    mesh : the variant's mesh.
    requested : ranks to capture instead of the default ones.
    members : the rank class, by default the whole world.

    Raises
    ------
    UsageError : a rank is not in the mesh or the class.
    """
    ranks = tuple(range(mesh.world)) if members is None else tuple(sorted({mesh.check(r) for r in members}))
    if not ranks:
        raise UsageError("a rank class without ranks cannot be sampled: name at least one rank")
    last = len(ranks) - 1
    if len(ranks) <= WHOLE:
        chosen = set(ranks)
    elif requested is None:
        chosen = {ranks[i] for i in (0, 1, 2, last // 2, last)}
    else:
        chosen = {mesh.check(r) for r in requested}
        outside = sorted(chosen - set(ranks))
        if outside:
            raise UsageError(f"the requested ranks {outside} are not in the rank class {list(ranks)}: drop them")
        chosen |= {ranks[0], ranks[last]}
    chosen.update(missing_ranks(mesh, ranks, chosen))
    ordered = sorted(chosen)
    second = ranks[min(1, last)]
    return _sampling(ranks, chosen, second if second in chosen else ordered[min(1, len(ordered) - 1)])


def _sampling(members: tuple[int, ...], chosen: set[int], control: int) -> Sampling:
    unseen = [r for r in members if r not in chosen]
    return Sampling(members, tuple(r for r in members if r in chosen), control, unseen[0] if unseen else None)


def missing_ranks(mesh: Mesh, members: Sequence[int], sampled: Iterable[int]) -> list[int]:
    """The lowest ranks to capture in addition so that every coordinate of the class is observable.

    A coordinate is observable if the samples hold its smallest and its largest value, three different values if it has
    as many, and two values whose difference has as few factors of two as any in the class.  With less, a word could
    follow it unseen, any word would fit it, or its stride would be known only up to high bits.
    """
    table = coordinate_table(mesh)
    sampled = set(sampled)
    added: list[int] = []

    def capture(values: npt.NDArray[np.int64], wanted: Iterable[int]) -> None:
        for value in wanted:
            if value not in values[[r in sampled for r in members]]:
                rank = members[int(np.flatnonzero(values == value)[0])]
                sampled.add(rank)
                added.append(rank)

    if not sampled:
        sampled.add(members[0])
        added.append(members[0])
    # The rank first: its extremes are those of the axes, too.
    for coordinate in (Coordinate.RANK, *PREFERENCE):
        values = table[list(members), coordinate]
        distinct = np.unique(values).tolist()
        capture(values, (distinct[0], distinct[-1]))
        seen = np.unique(table[sorted(sampled), coordinate]).tolist()
        if len(seen) < min(3, len(distinct)):
            capture(values, [next(v for v in distinct if v not in seen)])
        seen = np.unique(table[sorted(sampled), coordinate]).tolist()
        best = twos(distinct)
        if twos(seen) > best:
            capture(values, [next(v for v in distinct if v not in seen and twos([*seen, v]) == best)])
    return sorted(added)


def twos(values: Sequence[int]) -> int:
    """Factors of two that all differences between ``values`` share; 64 if there are no differences."""
    together = 0
    for value in values:
        together |= value ^ values[0]
    # The lowest bit in which any two values differ is that of their difference.
    return (together & -together).bit_length() - 1 if together else 64


@dataclass(frozen=True)
class Split:
    """Rank classes as far as known.

    Attributes
    ----------
    classes : the classes, each ascending, ordered by their first rank; empty while ``capture`` is not.
    capture : ranks whose templates must be known before the classes are.
    """

    classes: tuple[tuple[int, ...], ...]
    capture: tuple[int, ...]


def split_classes(mesh: Mesh, structure_keys: Mapping[int, Hashable]) -> Split:
    """Finds the ranks that share templates from what the captured ranks' templates look like.

    Classes are runs of values of one coordinate (the last tp shard, the first pipeline stage, the last rank): between
    two captured values with equal keys everything has that key, between different ones the boundary is bisected until
    both sides are neighbours.  Several coordinates may explain the captured keys; where they disagree about a rank,
    that rank is to be captured.

    Parameters
    ----------
    mesh : the variant's mesh.
    structure_keys : for each captured rank something that is equal exactly if the templates are.

    Raises
    ------
    UsageError : no rank was captured, or one outside the mesh.
    """
    if not structure_keys:
        raise UsageError("rank classes need the templates of at least one captured rank")
    keys = {mesh.check(rank): structure_keys[rank] for rank in sorted(structure_keys)}
    numbers: dict[Hashable, int] = {}
    found = {rank: numbers.setdefault(key, len(numbers)) for rank, key in keys.items()}
    if len(numbers) == 1:
        return Split((tuple(range(mesh.world)),), ())
    explanations = []
    for coordinate in PREFERENCE:
        explanation = _explain(coordinate_table(mesh)[:, coordinate], found)
        if explanation is not None:
            explanations.append(explanation)
    predictions = np.array([p for p, _ in explanations])
    known = predictions >= 0
    highest = np.where(known, predictions, -1).max(axis=0)
    lowest = np.where(known, predictions, len(numbers)).min(axis=0)
    disagree = np.flatnonzero((highest >= 0) & (highest != lowest))
    if disagree.size:
        return Split((), (int(disagree[0]),))
    for prediction, between in explanations:
        if not between:
            classes = (tuple(np.flatnonzero(prediction == number).tolist()) for number in range(len(numbers)))
            return Split(tuple(sorted(classes)), ())
    return Split((), min((between for _, between in explanations), key=len))


def _explain(
    values: npt.NDArray[np.int64], found: Mapping[int, int]
) -> tuple[npt.NDArray[np.int64], tuple[int, ...]] | None:
    """Key of each rank if keys follow the coordinate (-1 where unknown), and the ranks that bisect its boundaries."""
    at: dict[int, int] = {}
    for rank, key in found.items():
        if at.setdefault(int(values[rank]), key) != key:
            return None
    prediction = np.full(len(values), -1, dtype=np.int64)
    seen = sorted(at)
    prediction[values <= seen[0]] = at[seen[0]]
    prediction[values >= seen[-1]] = at[seen[-1]]
    between: list[int] = []
    for low, high in pairwise(seen):
        prediction[values == low] = at[low]
        inside = np.unique(values[(values > low) & (values < high)])
        if at[low] == at[high]:
            prediction[(values > low) & (values < high)] = at[low]
        elif inside.size:
            middle = inside[(inside.size - 1) // 2]
            between.append(int(np.flatnonzero(values == middle)[0]))
    return prediction, tuple(sorted(set(between)))
