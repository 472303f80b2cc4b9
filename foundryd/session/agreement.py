# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a world make sure that they are about to do the same thing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgpack
import numpy as np

from foundryd.errors import DeadlineExceeded, DriverCallFailed, FoundrydError, OpListMismatch, PeerFailed, ProtocolError
from foundryd.session.store import Store

# fdy_comm_op_kind.
_KINDS = (
    "all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce",
    "all-to-all", "gather", "scatter", "send", "recv",
)  # fmt: skip
_NONE = 0xFFFFFFFF
_GLANCE = 0.01  # seconds to look for what is there already

# Ranks of each communicator, then the ops: [place in those, kind, type, reduction, count, root].  A world of 64 with an
# all-to-all of sends and receives has hundreds of ops, and every rank gets every rank's list.
OpList = list[list[list[int]]]


class Agreement:
    """Exchanges small messages in named phases; every rank of the world takes part in every phase."""

    def __init__(self, store: Store, rank: int, world: int, *, scope: str, deadline: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._scope = scope
        self._deadline = deadline

    def exchange(self, phase: str, value: Any) -> list[Any]:
        """Publishes ``value`` and returns every rank's, by rank.

        Raises ``PeerFailed`` if a rank gave up instead, ``DeadlineExceeded`` if one stays silent.
        """
        return list(self.each(phase, value))

    def each(self, phase: str, value: Any) -> Iterator[Any]:
        """The same, with every rank's value only when it is asked for: a rank need not hold all of them at a time."""
        self._store.set(self._key(phase, self._rank), msgpack.packb({"value": value}))
        return (self._read(phase, rank, self._deadline) for rank in range(self._world))

    def fail(self, phases: Sequence[str], reason: str) -> None:
        """Tells the others, in every phase that they may be waiting in, that this rank gave up."""
        for phase in phases:
            self._store.set(self._key(phase, self._rank), msgpack.packb({"failed": reason}))

    def blame(self, phases: Sequence[str], error: FoundrydError) -> FoundrydError:
        """``error``, or the ``PeerFailed`` behind a failed driver call: a rank that gives up takes its memory with it.

        It says so before it lets go of anything.
        """
        if not isinstance(error, DriverCallFailed):
            return error
        for rank in range(self._world):
            for phase in phases if rank != self._rank else ():
                try:
                    self._read(phase, rank, _GLANCE)
                except PeerFailed as cause:
                    return cause
                except FoundrydError:
                    continue
        return error

    def _key(self, phase: str, rank: int) -> str:
        return f"foundryd/{self._scope}/{phase}/{rank}"

    def _read(self, phase: str, rank: int, deadline: float) -> Any:
        try:
            raw = self._store.get(self._key(phase, rank), deadline)
        except TimeoutError:
            raise DeadlineExceeded(
                f"rank {rank} did not reach phase {phase!r} within {deadline:.0f} s of rank {self._rank}: "
                "look at its log"
            ) from None
        try:
            message = msgpack.unpackb(raw)
        except ValueError:
            message = None
        match message:
            case {"value": value}:
                return value
            case {"failed": str(reason)}:
                raise PeerFailed(
                    f"rank {rank} gave up in or before phase {phase!r}, so rank {self._rank} captures too: {reason}"
                )
        raise ProtocolError(
            f"rank {rank} published something that is not a message of phase {phase!r}: use one foundryd on all ranks"
        )


def describe_ops(ops: np.ndarray, members: Callable[[int], Sequence[int]]) -> OpList:
    """What a rank will issue, for peers to compare.

    Peers of sends and receives differ by nature and are left out, like addresses.
    """
    slots = sorted(set(ops["communicator"].tolist()))
    out = []
    for op in ops:
        kind = int(op["kind"])
        root = int(op["peer"]) if kind < len(_KINDS) and _KINDS[kind] not in ("send", "recv") else _NONE
        place = slots.index(int(op["communicator"]))
        out.append([place, kind, int(op["datatype"]), int(op["reduction"]), int(op["count"]), root])
    return [[list(members(slot)) for slot in slots], out]


def check_op_lists(mine: OpList, rank: int, all_lists: Iterable[OpList]) -> None:
    """Raises ``OpListMismatch`` naming the first op in which two ranks of a communicator differ.

    ``all_lists`` has every rank's, by rank; each is looked at before the next one is taken.
    """
    groups, ops = mine
    members = [frozenset(group) for group in groups]
    for peer, published in enumerate(all_lists):
        if peer == rank:
            continue
        try:
            their_groups, their_ops = published
            readable = all(len(op) == 6 and 0 <= op[0] < len(their_groups) for op in their_ops)
            # Groups of the peer by their place in this rank's list: ops are many and groups are few.
            places = _places(their_groups, groups)
            shared = [rank in group for group in their_groups]
        except (TypeError, ValueError):
            readable = False
        if not readable:
            raise ProtocolError(
                f"rank {peer} published a list of collectives that rank {rank} cannot read: use one foundryd on all "
                "ranks"
            )
        ours = [op for op in ops if peer in members[op[0]]]
        theirs = [op for op in their_ops if shared[op[0]]]
        for place in range(max(len(ours), len(theirs))):
            a = ours[place] if place < len(ours) else None
            b = theirs[place] if place < len(theirs) else None
            if a is None or b is None or places[b[0]] != a[0] or not _match(a, b):
                raise OpListMismatch(
                    f"collective {place} that ranks {rank} and {peer} share is {_say(a, groups)} on rank {rank} and "
                    f"{_say(b, their_groups)} on rank {peer}: start every rank of the group from the same archive and "
                    "variant"
                )


def _places(theirs: Sequence[Sequence[int]], ours: Sequence[Sequence[int]]) -> list[int]:
    """The place among ``ours`` of each of a peer's groups, -1 where there is none.

    Several communicators may join the same ranks: the peer's second one is the second one here.
    """
    free = {tuple(group): [place for place, own in enumerate(ours) if own == group] for group in theirs}
    return [free[tuple(group)].pop(0) if free[tuple(group)] else -1 for group in theirs]


def _match(a: list[int], b: list[int]) -> bool:
    pair = {_KINDS[op[1]] if op[1] < len(_KINDS) else "" for op in (a, b)}
    point_to_point = bool(pair & {"send", "recv"})
    return a[2:] == b[2:] and (point_to_point or a[1] == b[1])


def _say(op: list[int] | None, groups: Sequence[Sequence[int]]) -> str:
    if op is None:
        return "missing"
    kind = _KINDS[op[1]] if op[1] < len(_KINDS) else f"kind {op[1]}"
    return f"{kind} of {op[4]} elements of type {op[2]} over ranks {list(groups[op[0]])}"
