# SPDX-License-Identifier: Apache-2.0
"""Which communicator of this process stands for which of the archive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from foundryd._native import _hook
from foundryd.archive import index as ix
from foundryd.errors import CommunicatorMismatch
from foundryd.rankpatch.plan import Plan


@dataclass(frozen=True)
class Here:
    """A communicator of this process.

    Attributes
    ----------
    slot : its place among those that this process made.
    size : how many ranks it joins, 0 if the library cannot say.
    ranks : their world ranks as declared, in the communicator's order; empty if nobody declared them.
    declared : its place in the order of declarations, or None.
    """

    slot: int
    size: int
    ranks: tuple[int, ...]
    declared: int | None


def communicators(hook: _hook.Hook) -> list[Here]:
    """This process's communicators in creation order."""
    table, ranks = hook.communicators()
    return [
        Here(
            int(c["slot"]),
            int(c["size"]),
            tuple(ranks[c["member_first"] : c["member_first"] + c["member_count"]].tolist()),
            None if c["declared"] == _hook.NONE else int(c["declared"]),
        )
        for c in table
    ]


def used_declarations(variant: ix.Variant, comm_ops: np.ndarray) -> set[int]:
    """Places in the order of declarations of the communicators that graphs use."""
    places = (variant.communicators[number].declared for number in set(comm_ops["communicator"].tolist()))
    return {place for place in places if place is not None}


def match(hook: _hook.Hook, plan: Plan, known: Sequence[ix.Communicator], comm_ops: np.ndarray) -> np.ndarray:
    """The slot in this process of each of the archive's communicators: uint32 [communicators], ``NONE`` where none is.

    Declared ones are found by the order of their declarations, so that it does not matter when and whether a library
    makes others; the rest by the order of creation.  Raises ``CommunicatorMismatch`` unless those that graphs use are
    here, and for one that joins other ranks than at the capture.
    """
    used = set(comm_ops["communicator"].tolist())
    # Before declarations were counted, an archive had all in the order of creation.
    counted = any(c.declared is not None for c in known)
    here = communicators(hook)
    by_declaration = {c.declared: c for c in here if c.declared is not None} if counted else {}
    others = iter([c for c in here if c.declared is None or not counted])
    slots = np.full(len(known), _hook.NONE, np.uint32)
    for number, (wanted, members) in enumerate(zip(known, plan.communicators, strict=True)):
        declared = wanted.declared
        found = next(others, None) if declared is None else by_declaration.get(declared)
        if found is None:
            if number in used:
                raise CommunicatorMismatch(_missing(number, members, declared, len(here)))
            continue
        if number in used or declared is not None:
            _compare(number, members, found)
        slots[number] = found.slot
    return slots


def _missing(number: int, members: Sequence[int], declared: int | None, made: int) -> str:
    was = "created" if declared is None else "declared"
    return (
        f"communicator {number} of the archive, over ranks {list(members)}, was not {was} here ({made} were created): "
        "create and declare communicators before restoring, in the order of the capture"
    )


def _compare(number: int, members: Sequence[int], found: Here) -> None:
    if found.size != len(members) or (found.ranks and found.ranks != tuple(members)):
        raise CommunicatorMismatch(
            f"communicator {number} joins ranks {list(found.ranks) or found.size} here and {list(members)} in the "
            "archive: create and declare communicators in the order of the capture"
        )
