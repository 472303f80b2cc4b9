# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a world make sure that they are about to do the same thing."""

from __future__ import annotations

import os
import time
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
_FIRST_LOOK, _LONGEST_LOOK = 0.05, 0.5  # seconds for one look while others are to come, doubled after each
_LAST_LOOK = 0.5  # seconds, before it is believed that something is not there

PHASES = ("ops", "done")  # in which ranks of a life wait for one another
_JOIN = "join"

# Ranks of each communicator, then the ops: [place in those, kind, type, reduction, count, root].  A world of 64 with an
# all-to-all of sends and receives has hundreds of ops, and every rank gets every rank's list.
OpList = list[list[list[int]]]

_Word = tuple[str, str]  # what a rank says when it joins: its name, and why it gave up if it did


class Agreement:
    """Exchanges small messages in named phases; every rank of the world takes part in every phase.

    A store may outlive the ranks: they are started again on it, or restore a second time in the same processes, and
    what they said before is still there.  So all is said in a *life*, which ``join`` begins:

    - Rank 0 publishes the name of a new life.  Every other key has that name in it.
    - Each other rank says a new name of its own in the life that it finds published.
    - When rank 0 has heard all of them it closes the life with the list of their names.
    - A rank whose name is in the list is in this life.  One that finds a list without it has found an earlier life, and
      one that finds no list may have; until its deadline it looks for a list with its name, in this life and the next.

    A name is new, so a list with it was made after its rank had come, by a rank 0 that was there, of ranks that had all
    come to this life.  Only those write under its name, so what is exchanged later is of this life.  A rank that is
    started again has another name and is not taken for the one before, which the others miss at their deadline.

    A rank that cannot restore joins all the same, to say why: whatever it left without hearing of the others might be
    of an earlier life.  In a life a rank says it at once, with ``fail``.

    A store has to set keys and to wait for them.  Of a life some keys for each rank stay in it.

    Parameters
    ----------
    group : whose ranks these are; groups do not hear of one another.
    deadline : seconds for each thing that another rank owes.
    """

    def __init__(self, store: Store, rank: int, world: int, *, group: str, deadline: float) -> None:
        self._store = store
        self._rank = rank
        self._world = world
        self._group = group
        self._deadline = deadline
        self._name = os.urandom(16).hex()
        self._life = ""  # where this rank said something
        self._heard: dict[int, _Word] = {}  # by rank 0

    def join(self, gave_up: str = "") -> None:
        """Begins a life together with every other rank; ``gave_up`` says why this one cannot restore in it.

        Raises ``PeerFailed`` if another rank gave up, ``DeadlineExceeded`` if one does not come.  Once only.
        """
        try:
            words = self._lead(gave_up) if self._rank == 0 else self._follow(gave_up)
        except BaseException as error:
            self.fail(PHASES, why(error))
            raise
        for rank, (_, reason) in enumerate(words):
            if reason and rank != self._rank:
                raise self._peer_failed(rank, _JOIN, reason)

    def exchange(self, phase: str, value: Any) -> list[Any]:
        """Publishes ``value`` and returns every rank's, by rank.

        Raises ``PeerFailed`` if a rank gave up instead, ``DeadlineExceeded`` if one stays silent.
        """
        return list(self.each(phase, value))

    def each(self, phase: str, value: Any) -> Iterator[Any]:
        """The same, with every rank's value only when it is asked for: a rank need not hold all of them at a time."""
        self._set(self._key(phase, self._rank), {"value": value})
        return (self._read(phase, rank, self._deadline) for rank in range(self._world))

    def fail(self, phases: Sequence[str], reason: str) -> None:
        """Tells the others, in every phase that they may be waiting in, that this rank gave up.

        Nobody hears it before this rank has found a life to join.
        """
        if not self._life:
            return
        for phase in phases:
            self._set(self._key(phase, self._rank), {"failed": reason})
        if self._rank != 0:
            self._set(self._key(_JOIN, self._rank), (self._name, reason))
        else:
            self._heard[0] = (self._name, reason)
            self._close()

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

    # --- joining -----------------------------------------------------------------------------------------------------

    def _lead(self, gave_up: str) -> list[_Word]:
        """Rank 0's part: what every rank said, by rank."""
        self._heard[0] = (self._name, gave_up)
        self._life = self._name
        self._set(self._key_of_life(), self._life)
        end, look = time.monotonic() + self._deadline, _FIRST_LOOK
        while missing := [rank for rank in range(self._world) if rank not in self._heard]:
            if self._hear(missing[0], min(look, end - time.monotonic())):
                continue
            for rank in missing[1:]:
                self._hear(rank, _GLANCE)
            missing = [rank for rank in missing if rank not in self._heard]
            if missing and time.monotonic() >= end:
                raise self._overdue(missing, _JOIN)
            # Who waits for this life to be closed sees that it is one, and for whom it waits.
            self._set(self._key("heard"), self._words())
            look = min(2 * look, _LONGEST_LOOK)
        self._close()
        return self._words()

    def _follow(self, gave_up: str) -> list[_Word]:
        """Every other rank's part."""
        end, look = time.monotonic() + self._deadline, _FIRST_LOOK
        while True:
            life = self._look(self._key_of_life(), end - time.monotonic())
            if not isinstance(life, str | None):
                raise self._unreadable(0, _JOIN)
            if life is not None and life != self._life:
                # Rank 0 closes a life before it begins another; that it gave up in this one is for this rank, too.
                if self._life and self._named(words := self._list("closed", _LAST_LOOK)):
                    return words
                self._life, look = life, _FIRST_LOOK
                self._set(self._key(_JOIN, self._rank), (self._name, gave_up))
            began = time.monotonic()
            words = self._list("closed", min(look, end - began)) if self._life else []
            if self._named(words):
                return words
            if time.monotonic() >= end:
                heard = self._list("heard", _LAST_LOOK) if self._life else []
                missing = [rank for rank, (name, _) in enumerate(heard) if not name] if self._named(heard) else [0]
                raise self._overdue(missing, _JOIN)
            _rest(began, min(look, end - began))
            look = min(2 * look, _LONGEST_LOOK)

    def _hear(self, rank: int, seconds: float) -> bool:
        word = self._look(self._key(_JOIN, rank), seconds)
        if word is not None:
            self._heard[rank] = self._word(rank, word)
        return word is not None

    def _close(self) -> None:
        self._set(self._key("closed"), self._words())

    def _words(self) -> list[_Word]:
        return [self._heard.get(rank, ("", "")) for rank in range(self._world)]

    def _list(self, key: str, seconds: float) -> list[_Word]:
        """What rank 0 published in this life, which may be an earlier one and of a world of another size."""
        words = self._look(self._key(key), seconds)
        if words is not None and not isinstance(words, list):
            raise self._unreadable(0, _JOIN)
        return [self._word(0, word) for word in words or ()]

    def _named(self, words: list[_Word]) -> bool:
        """Whether this rank's name is in the list."""
        return len(words) == self._world and words[self._rank][0] == self._name

    def _word(self, rank: int, word: Any) -> _Word:
        match word:
            case [str(name), str(reason)]:
                return name, reason
        raise self._unreadable(rank, _JOIN)

    def _look(self, key: str, seconds: float) -> Any:
        """What is there within ``seconds``, or None."""
        began = time.monotonic()
        try:
            raw = self._store.get(key, max(seconds, _GLANCE))
        except TimeoutError:
            _rest(began, seconds)  # a store that is gone says so at once
            return None
        return _unpacked(raw)

    # --- keys and messages -------------------------------------------------------------------------------------------

    def _key_of_life(self) -> str:
        return f"foundryd/{self._group}/life"

    def _key(self, *parts: object) -> str:
        return "/".join(("foundryd", self._group, self._life, *map(str, parts)))

    def _set(self, key: str, message: Any) -> None:
        self._store.set(key, msgpack.packb(message))

    def _read(self, phase: str, rank: int, deadline: float) -> Any:
        try:
            raw = self._store.get(self._key(phase, rank), deadline)
        except TimeoutError:
            raise self._overdue([rank], phase) from None
        match _unpacked(raw):
            case {"value": value}:
                return value
            case {"failed": str(reason)}:
                raise self._peer_failed(rank, phase, reason)
        raise self._unreadable(rank, phase)

    def _overdue(self, ranks: Sequence[int], phase: str) -> DeadlineExceeded:
        names = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return DeadlineExceeded(
            f"{names} did not reach phase {phase!r} within {self._deadline:.0f} s of rank {self._rank}: "
            f"look at {'its log' if len(ranks) == 1 else 'their logs'}"
        )

    def _peer_failed(self, rank: int, phase: str, reason: str) -> PeerFailed:
        return PeerFailed(
            f"rank {rank} gave up in or before phase {phase!r}, so rank {self._rank} captures too: {reason}"
        )

    def _unreadable(self, rank: int, phase: str) -> ProtocolError:
        return ProtocolError(
            f"rank {rank} published something that is not a message of phase {phase!r}: use one foundryd on all ranks"
        )


def why(error: BaseException) -> str:
    """What the other ranks are told of an error that ended a restore."""
    return str(error) if isinstance(error, FoundrydError) else f"its restore ended with {error!r}"


def _rest(began: float, seconds: float) -> None:
    """Sleeps until ``seconds`` after ``began``."""
    time.sleep(max(0.0, began + seconds - time.monotonic()))


def _unpacked(raw: bytes) -> Any:
    """The message; something that is none of any phase if it cannot be read."""
    try:
        return msgpack.unpackb(raw)
    except ValueError:
        return ()


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
