# SPDX-License-Identifier: Apache-2.0
"""Which recordings can share a class, and in what others differ.

Two can if all that they are made of is alike, pinned host memory as far as both recorded it: a recording ends with the
last such allocation that anything in it mentions, and garbage mentions buffers of which a launch makes more or fewer.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from foundryd.capture.pinned import HOST, on_host
from foundryd.capture.recording import Recording, arena_name
from foundryd.errors import CaptureError


def host_rows(recording: Recording) -> np.ndarray:
    """The recording's allocations of pinned host memory, by ordinal."""
    return np.asarray(recording.allocations[on_host(recording.allocations)])


def alike(recording: Recording, others: Iterable[Recording]) -> bool:
    """Whether each of ``others`` can share a class with ``recording``."""
    key, host = recording.structure_key(), host_rows(recording).tobytes()
    return all(other.structure_key() == key and _agree(host, host_rows(other).tobytes()) for other in others)


def class_keys(recordings: Mapping[int, Recording]) -> dict[int, Hashable]:
    """For each rank something that is equal exactly for those that share a class.

    A list of pinned memory that begins two different ones could belong to either, and is of neither's class.
    """
    built = {rank: (r.structure_key(), host_rows(r).tobytes()) for rank, r in recordings.items()}

    def begun(key: bytes, host: bytes) -> set[tuple[bytes, bytes]]:
        return {other for other in built.values() if other[0] == key and other[1].startswith(host)}

    whole = {own for own in built.values() if begun(*own) == {own}}
    return {rank: frozenset(begun(*own) & whole) for rank, own in built.items()}


def same_structure(
    reference: Recording, other: Recording, error: type[CaptureError], *, names: tuple[str, str] | None = None
) -> None:
    """Raises ``error`` naming the first part in which two recordings are not built alike; ``names`` are of the two."""
    one, two = names or (f"rank {reference.rank}", f"rank {other.rank}")
    theirs = other.structure()
    for part, ours in reference.structure().items():
        if ours != theirs[part]:
            detail = _first_difference(ours, theirs[part])
            raise error(
                f"{two} differs from {one} in its {part}{detail}: ranks of one class must be built alike, so declare "
                "the boundary or make the engine deterministic"
            )
    difference = _allocation_difference(reference.allocations, other.allocations, one, two)
    if difference:
        raise error(f"{difference}: make the engine allocate alike on every rank")


def describe_allocation(row: np.void) -> str:
    """Names a row of ``allocation_dtype`` for an error message."""
    return f"allocation {row['ordinal']} of arena {arena_name(int(row['arena']))} ({_size(row)})"


def _agree(host: bytes, other: bytes) -> bool:
    return host.startswith(other) or other.startswith(host)


def _first_difference(ours: object, theirs: object) -> str:
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return f" ({len(ours)} against {len(theirs)})"
        place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
        if isinstance(ours[place], bytes):
            return f" (number {place})"
        return f" (number {place}: {ours[place]} against {theirs[place]})"
    return "" if isinstance(ours, bytes) else f" ({ours} against {theirs})"


def _allocation_difference(ours: np.ndarray, theirs: np.ndarray, one: str, two: str) -> str:
    """What differs first in the first arena that is not alike; empty if none is."""
    for arena in np.union1d(ours["arena"], theirs["arena"]).tolist():
        mine, others = (rows[rows["arena"] == arena] for rows in (ours, theirs))
        for a, b in zip(mine, others, strict=False):
            if a != b:
                where = f"allocation {a['ordinal']} of arena {arena_name(arena)}"
                return f"{where} is {_size(a)} on {one} and {_size(b)} on {two}"
        if len(mine) != len(others) and arena != HOST:
            more, longer, shorter = (mine, one, two) if len(mine) > len(others) else (others, two, one)
            count = min(len(mine), len(others))
            return f"{longer} made {describe_allocation(more[count])} and {shorter} only {count} allocations there"
    return ""


def _size(row: np.void) -> str:
    return f"{row['bytes']} bytes at {row['address']:#x}{'' if row['live'] else ', given back'}"
