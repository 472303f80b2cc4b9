# SPDX-License-Identifier: Apache-2.0
"""Explaining words as affine in one coordinate, and finding out where explanations disagree.

A word of a by-value struct may be one 8-byte member, two of 4 bytes, and so on.  The widest reading that fits is taken,
and this is why it cannot be wrong unnoticed:

Let a coordinate be sampled at its smallest and its largest value and at two adjacent ones.  Say the truth is two 4-byte
members, low(c) = a + s·c and high(c), and a reading as one 8-byte word fits all samples.  Two adjacent samples fix the
stride modulo 2^64, hence that of the low half modulo 2^32: the low half is right everywhere.  The high half of the
8-byte reading is its own line plus k(c), the number of times that the low half has wrapped, counted with the sign of
s in [-2^31, 2^31].  k is monotone in c and moves by at most one a step.  The readings agree in the adjacent pair, so
what separates the two lines is 0 or ±1 a step, as k moves there.  If 0, then k is equal at both extremes, as a world is
smaller than 2^32, and, being monotone, constant: no carry hides between the samples.  If ±1, then k moves by its
maximum from one extreme to the other, so at every step, and the readings agree again.  The other direction, a true
8-byte member read as halves, does not come up: the 8-byte reading would have fitted.  The same holds for signed
members, which are the same numbers modulo 2^32, and for narrower ones as long as the world is smaller than what they
can count.

That argument needs one coordinate for both halves and samples that lie well (``Frame.reach``).  Wherever it does not
apply, every reading that fits the samples, of every width and in every coordinate, is worked out for every rank of the
class that was not sampled, and a rank where two of them differ is captured too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from foundryd.rankpatch.mesh import Coordinate, Mesh, coordinate_table
from foundryd.rankpatch.sampling import PREFERENCE, twos
from foundryd.rankpatch.words import BYTES_OF_MASK, Integers, Words64

Truth = npt.NDArray[np.bool_]

# Words, and predictions, worked out at once; bounds memory, not results.
_CHUNK_WORDS = 1 << 16
_CHUNK_PREDICTIONS = 1 << 20


@dataclass(frozen=True)
class Frame:
    """Where samples and the other ranks of a class sit on the coordinates worth looking at.

    Attributes
    ----------
    coordinates : those that vary within the class; of several that are equal on all of it only the preferred one.
    sampled : int64 [coordinates][samples].
    unseen : int64 [coordinates][ranks not sampled].
    unseen_ranks : these ranks.
    reach : [coordinates]; the distance of the extremes within the class if both of them and two adjacent values were
        sampled, else the largest number.
    """

    coordinates: tuple[Coordinate, ...]
    sampled: Integers
    unseen: Integers
    unseen_ranks: tuple[int, ...]
    reach: Words64

    @classmethod
    def of(cls, mesh: Mesh, members: Sequence[int], sampled: Sequence[int]) -> Frame:
        """The frame of a rank class of ``mesh``."""
        table = coordinate_table(mesh)
        chosen: dict[bytes, Coordinate] = {}
        for coordinate in PREFERENCE:
            values = table[list(members), coordinate]
            if (values != values[0]).any():
                chosen.setdefault(values.tobytes(), coordinate)
        coordinates = tuple(chosen.values())
        unseen = [rank for rank in members if rank not in set(sampled)]
        reach = [_reach(table[list(members), c], table[list(sampled), c]) for c in coordinates]
        return cls(
            coordinates,
            table[np.ix_(list(sampled), coordinates)].T.copy(),
            table[np.ix_(unseen, coordinates)].T.copy(),
            tuple(unseen),
            np.array(reach, dtype=np.uint64),
        )


def _reach(every: Integers, sampled: Integers) -> int:
    extremes = every.min() == sampled.min() and every.max() == sampled.max()
    adjacent = (np.diff(np.unique(sampled)) == 1).any()
    return int(every.max() - every.min()) if extremes and adjacent else (1 << 64) - 1


@dataclass(frozen=True)
class Piece:
    """An affine rule for ``width`` bytes at ``start`` of the words where ``used`` holds; all arrays are [words]."""

    start: int
    width: int
    used: Truth
    coordinate: npt.NDArray[np.int64]  # Coordinate
    base: npt.NDArray[np.int64]
    stride: npt.NDArray[np.int64]


@dataclass
class Explanation:
    """What was found out about words.

    Attributes
    ----------
    readable : [words]; whether some reading fits the samples.
    pieces : affine rules of the readable words; bytes that never differ get none.
    conflicts : sets of unseen ranks, in each of which two readings of some word differ.
    """

    readable: Truth
    pieces: list[Piece]
    conflicts: set[frozenset[int]] = field(default_factory=set)


def explain(frame: Frame, values: Words64, excluded: int, narrowest: int) -> Explanation:
    """Reads words as affine.

    Parameters
    ----------
    frame : samples and class.
    values : uint64 [words][samples].
    excluded : mask of the bytes of each word that are not to be read, one bit a byte.
    narrowest : a word may be cut into aligned pieces no smaller than this.
    """
    done = []
    conflicts: set[frozenset[int]] = set()
    for begin in range(0, len(values), _CHUNK_WORDS):
        root = _read(frame, values[begin : begin + _CHUNK_WORDS], 0, 8, excluded, narrowest)
        done.append(root)
        for _, differ in root.conflicts:
            for row in np.unique(differ, axis=0):
                conflicts.add(frozenset(frame.unseen_ranks[i] for i in np.flatnonzero(row)))
    readable = np.concatenate([root.readable for root in done])
    pieces = [_joined(parts) for parts in zip(*(_pieces(frame, root, root.readable) for root in done), strict=True)]
    return Explanation(readable, [p for p in pieces if p.used.any()], conflicts)


@dataclass
class _Reading:
    """Readings of the bytes [start, start + width) of words.

    Attributes
    ----------
    readable : whether there is one.
    own, which, stride, base : whether these bytes fit as one number, and then the place in ``Frame.coordinates`` and
        the line.
    differs : whether samples differ in these bytes.
    halves : readings of the two halves, if they may be cut.
    conflicts : a pair of readings each, as the words for which they differ and where, [words][unseen].
    """

    start: int
    width: int
    readable: Truth
    own: Truth
    which: Integers
    stride: Words64
    base: Words64
    differs: Truth
    halves: tuple[_Reading, _Reading] | None = None
    conflicts: list[tuple[Integers, Truth]] = field(default_factory=list)

    def predicted(self, frame: Frame, rows: Integers) -> Words64:
        """Values on the unseen ranks, [rows][unseen]; rows must be readable."""
        result = self.line(frame, rows, self.which[rows], self.stride[rows], self.base[rows])
        rest = np.flatnonzero(~self.own[rows])
        if self.halves and rest.size:
            low, high = (half.predicted(frame, rows[rest]) for half in self.halves)
            result[rest] = low | (high << np.uint64(4 * self.width))
        return result

    def line(self, frame: Frame, rows: Integers, which: Integers, stride: Words64, base: Words64) -> Words64:
        """Values of these lines on the unseen ranks, [rows][unseen]."""
        mask = BYTES_OF_MASK[(1 << self.width) - 1]
        if not frame.coordinates:
            return np.zeros((len(rows), len(frame.unseen_ranks)), dtype=np.uint64)
        result: Words64 = (base[:, None] + stride[:, None] * frame.unseen[which].astype(np.uint64)) & mask
        return result

    def compare(self, frame: Frame, rows: Integers, other: Callable[[Integers], Words64]) -> None:
        """Keeps the conflicts between these bytes as one number and another reading of the same rows."""
        step = max(1, _CHUNK_PREDICTIONS // max(1, len(frame.unseen_ranks)))
        for begin in range(0, len(rows), step):
            some = rows[begin : begin + step]
            ours = self.line(frame, some, self.which[some], self.stride[some], self.base[some])
            differ = ours != other(some)
            found = differ.any(axis=1)
            if found.any():
                self.conflicts.append((some[found], differ[found]))


def _read(frame: Frame, values: Words64, start: int, width: int, excluded: int, narrowest: int) -> _Reading:
    count = len(values)
    mask = (1 << width) - 1
    free = ~(excluded >> start) & mask
    number = (values >> np.uint64(8 * start)) & BYTES_OF_MASK[mask]
    reading = _Reading(
        start,
        width,
        np.full(count, not free),
        np.zeros(count, dtype=bool),
        np.zeros(count, dtype=np.int64),
        np.zeros(count, dtype=np.uint64),
        np.zeros(count, dtype=np.uint64),
        (number != number[:, :1]).any(axis=1) & (free != 0),
    )
    if not free:
        return reading
    if free == mask and width >= narrowest:
        for place in range(len(frame.coordinates)):
            _try_coordinate(frame, reading, number, place)
    if width > 1 and (width > narrowest or free != mask):
        half = width // 2
        low = _read(frame, values, start, half, excluded, narrowest)
        high = _read(frame, values, start + half, half, excluded, narrowest)
        reading.halves = (low, high)
        both = low.readable & high.readable
        for rows, differ in (*low.conflicts, *high.conflicts):
            kept = both[rows]
            if kept.any():
                reading.conflicts.append((rows[kept], differ[kept]))
        doubtful = np.flatnonzero(both & reading.own & ~_cannot_carry(frame, reading, low, high))

        def halves(some: Integers) -> Words64:
            return low.predicted(frame, some) | (high.predicted(frame, some) << np.uint64(8 * half))

        reading.compare(frame, doubtful, halves)
        reading.readable |= both
    return reading


def _cannot_carry(frame: Frame, reading: _Reading, low: _Reading, high: _Reading) -> Truth:
    """Where the argument at the top proves that one number and two halves agree on all ranks."""
    if not frame.coordinates:
        return np.ones(len(reading.own), dtype=bool)
    along = low.own & high.own
    for half in (low, high):
        along &= (half.which == reading.which) | (half.stride == 0)
    return along & (frame.reach[reading.which] < np.uint64(1 << 8 * low.width))


def _try_coordinate(frame: Frame, reading: _Reading, number: Words64, place: int) -> None:
    """Adds the fit in one coordinate where there is one; the first fit of a word stays its reading."""
    at = frame.sampled[place]
    bits = 8 * reading.width
    mask = BYTES_OF_MASK[(1 << reading.width) - 1]
    first, second, shared = _closest(at)
    if second == first:
        # Samples that do not vary in it explain only what does not vary.
        stride = np.zeros(len(number), dtype=np.uint64)
        fits = ~reading.differs
    else:
        # stride · distance = rise (mod 2^bits), where distance = odd · 2^shared: the odd part has an inverse, the rest
        # must divide the rise and leaves the stride's top bits open, which are taken as those of the smallest stride.
        distance = int(at[second] - at[first])
        inverse = np.uint64(pow(distance >> shared, -1, 1 << 64))
        rise = (number[:, second] - number[:, first]) & mask
        stride = _signed((rise >> np.uint64(shared)) * inverse, bits - shared)
        offsets = (at - at[first]).astype(np.uint64)
        fits = (number == (number[:, first, None] + stride[:, None] * offsets) & mask).all(axis=1)
        fits &= rise & np.uint64((1 << shared) - 1) == 0
    base = (number[:, first] - stride * np.uint64(at[first])) & mask
    # What does not vary fits in every coordinate, as the same.
    again = np.flatnonzero(fits & reading.own & ((stride != 0) | (reading.stride != 0)))

    def others(some: Integers) -> Words64:
        return reading.line(frame, some, np.full(len(some), place), stride[some], base[some])

    reading.compare(frame, again, others)
    new = fits & ~reading.own
    reading.which[new] = place
    reading.stride[new] = stride[new]
    reading.base[new] = base[new]
    reading.own |= new
    reading.readable |= new


def _closest(at: Integers) -> tuple[int, int, int]:
    """Two samples whose distance has the fewest factors of two, and that number; twice the same if all are equal."""
    shared = twos(at.tolist())
    if shared == 64:
        return 0, 0, 0
    second = next(i for i in range(len(at)) if (int(at[i]) ^ int(at[0])) >> shared & 1)
    return 0, second, shared


def _signed(values: Words64, bits: int) -> Words64:
    """Numbers of ``bits`` bits as two's complement of 64; all zero for no bits."""
    if bits <= 0:
        return np.zeros_like(values)
    shift = np.uint64(64 - bits)
    return ((values << shift).view(np.int64) >> shift.astype(np.int64)).view(np.uint64)


def _pieces(frame: Frame, reading: _Reading, active: Truth) -> list[Piece]:
    """Rules of the chosen readings, always in the same order of (start, width)."""
    coordinates = np.array([*frame.coordinates, 0], dtype=np.int64)
    own = Piece(
        reading.start,
        reading.width,
        active & reading.own & reading.differs,
        coordinates[reading.which],
        reading.base.view(np.int64),
        reading.stride.view(np.int64),
    )
    pieces = [own]
    for half in reading.halves or ():
        pieces.extend(_pieces(frame, half, active & ~reading.own))
    return pieces


def _joined(parts: Sequence[Piece]) -> Piece:
    return Piece(
        parts[0].start,
        parts[0].width,
        np.concatenate([p.used for p in parts]),
        np.concatenate([p.coordinate for p in parts]),
        np.concatenate([p.base for p in parts]),
        np.concatenate([p.stride for p in parts]),
    )
