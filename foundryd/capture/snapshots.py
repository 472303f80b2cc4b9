# SPDX-License-Identifier: Apache-2.0
"""The memory that graphs can write: how it was, whether a replay left it otherwise, and putting it back.

Device memory stays on the device.  A digest of each chunk says what a replay changed; a chunk whose words are all alike
is known by one of them, so only chunks with content are kept, in free device memory and then in pinned host memory.
What does not fit there is *bare*: a replay must not write it, since nothing could put it back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from foundryd._native import _hook
from foundryd.capture.device import CHUNK, MemoryKernels, Pool, chunks_of, free_room, judge_dtype, put_dtype
from foundryd.errors import StateLost
from foundryd.session.arena import ARENAS

# Weights are what no graph writes; they are left out.  What is least likely to fit comes last.
_WATCHED = tuple(ARENAS.index(a) for a in ("default", "graph", "io", "kv", "host"))

NO_WINDOWS = np.zeros(0, _hook.window_dtype)

Bytes = npt.NDArray[np.uint8]
Index = npt.NDArray[np.intp]
Room = Callable[[], tuple[int, int]]


@dataclass(frozen=True)
class Mutation:
    """A change of bytes: 4-byte words one place on, the lowest bit of each flipped, or all bytes one value."""

    shift: bool = False
    flip: bool = False
    fill: int | None = None

    def of(self, data: Bytes) -> Bytes:
        """``data`` changed."""
        if self.fill is not None:
            return np.full(len(data), self.fill, np.uint8)
        out = data.copy()
        words = out[: len(out) // 4 * 4].view(np.uint32)
        if self.shift:
            words[:] = np.roll(words, 1)
        if self.flip:
            out[::4] ^= 1
        return out

    def of_words(self, words: npt.NDArray[np.uint64], sizes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """The word to fill with instead, for memory of these ``sizes`` that is filled with ``words``."""
        if self.fill is not None:
            return np.full_like(words, int.from_bytes(bytes([self.fill]) * 8, "little"))
        half = np.uint64(32)
        if self.shift:
            words = np.where(sizes < 8, words, words >> half | words << half)
        return words ^ np.uint64(0x1_0000_0001) if self.flip else words


def _as_allocations(windows: np.ndarray) -> np.ndarray:
    out = np.zeros(len(windows), _hook.allocation_dtype)
    out["address"], out["bytes"], out["live"] = windows["address"], windows["bytes"], 1
    return out


class Addressed:
    """Says whether bytes hold addresses of live allocations."""

    def __init__(self, allocations: np.ndarray) -> None:
        live = np.sort(allocations[allocations["live"] == 1], order="address")
        self._starts, self._ends = live["address"].copy(), live["address"] + live["bytes"]

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest address, and the first above all."""
        return (int(self._starts[0]), int(self._ends.max())) if len(self._starts) else (0, 0)

    def any_in(self, data: Bytes) -> bool:
        """Whether an aligned 8-byte word of ``data`` is one."""
        if not len(self._starts):
            return False
        words = data[: len(data) // 8 * 8].view(np.uint64)
        places = np.searchsorted(self._starts, words, side="right") - 1
        return bool(((places >= 0) & (words < self._ends[np.maximum(places, 0)])).any())


class Side(Protocol):
    """Host or device memory; ranges are named by address, and calls come in the order of ``Memory``'s."""

    def owns(self, address: int) -> bool: ...
    def take(self) -> bool: ...
    def adopt(self) -> None: ...
    def move(self) -> None: ...
    def move_back(self) -> None: ...
    def movable(self, address: int) -> bool: ...
    def restore(self) -> None: ...
    def mutate(self, addresses: Iterable[int], mutation: Mutation) -> None: ...
    def note_plain(self, suspects: Iterable[int]) -> set[int]: ...
    def unmoved(self, mutated: Iterable[int], mutation: Mutation | None) -> bool: ...
    def close(self) -> None: ...


class HostSide:
    """Pinned host memory: little, so it is copied and compared whole."""

    def __init__(self, hook: _hook.Hook, ranges: Sequence[tuple[int, int]], addressed: Addressed) -> None:
        self._hook, self._ranges, self._addressed = hook, dict(ranges), addressed
        self._start: dict[int, Bytes] = {}
        self._taken: dict[int, Bytes] = {}
        self._plain: dict[int, Bytes] = {}

    def owns(self, address: int) -> bool:
        return address in self._ranges

    def take(self) -> bool:
        self._start = self._read()
        return True

    def adopt(self) -> None:
        pass  # everything is kept

    def move(self) -> None:
        self._taken, self._start = self._start, self._read()

    def move_back(self) -> None:
        self._start, self._taken = self._taken, {}

    def movable(self, address: int) -> bool:
        return not self._addressed.any_in(self._start[address])

    def restore(self) -> None:
        for address, data in self._start.items():
            self._hook.upload(address, data)

    def mutate(self, addresses: Iterable[int], mutation: Mutation) -> None:
        for address in addresses:
            self._hook.upload(address, mutation.of(self._start[address]))

    def note_plain(self, suspects: Iterable[int]) -> set[int]:
        self._plain = self._read()
        return set(suspects)

    def unmoved(self, mutated: Iterable[int], mutation: Mutation | None) -> bool:
        changed = {a: mutation.of(self._start[a]) for a in mutated} if mutation else {}
        for address, after in self._read().items():
            plain = self._plain[address]
            same = after == plain
            if address in changed:
                same |= (plain == self._start[address]) & (after == changed[address])
            if not same.all():
                return False
        return True

    def close(self) -> None:
        pass

    def _read(self) -> dict[int, Bytes]:
        return {a: self._hook.download(a, n) for a, n in self._ranges.items()}


@dataclass(frozen=True)
class _Taken:
    """How chunks start that start otherwise for the time being."""

    chunks: Index
    start: npt.NDArray[np.uint64]
    kept: npt.NDArray[np.uint64]
    word: npt.NDArray[np.uint64]
    pointers: npt.NDArray[np.bool_]


class DeviceSide:
    """Device memory, by chunks."""

    def __init__(
        self, hook: _hook.Hook, ranges: Sequence[tuple[int, int]], addressed: Addressed, room: Room = free_room
    ) -> None:
        self._hook, self._addressed = hook, addressed
        self._chunks = chunks_of(ranges)
        ends = np.cumsum([-(-size // CHUNK) for _, size in ranges]).tolist()
        self._of = {a: slice(e - -(-n // CHUNK), e) for (a, n), e in zip(ranges, ends, strict=True)}
        count = len(self._chunks)
        self._start = self._now = self._plain = self._word = np.zeros(count, np.uint64)
        self._kept = np.zeros(count, np.uint64)  # address of the copy, 0 if there is none
        self._plain_kept = np.zeros(count, np.uint64)
        self._bare = self._pointers = np.zeros(count, bool)
        self._taken: _Taken | None = None
        self._kernels = MemoryKernels()
        self._starts, self._plains = Pool(room), Pool(room)
        self._kernels.watch(self._chunks)

    def owns(self, address: int) -> bool:
        return address in self._of

    def take(self) -> bool:
        survey = self._kernels.survey(*self._addressed.bounds)
        self._start, self._now = survey.digest, survey.digest.copy()
        self._word, self._pointers = survey.first, survey.pointers.copy()
        self._starts.give(self._kept[self._kept != 0])
        self._kept = np.zeros(len(self._chunks), np.uint64)
        mixed = np.flatnonzero(survey.mixed)
        slots = self._starts.take(len(mixed))
        if len(slots) < len(mixed):
            # Some are for what the replays turn out to write.
            most = len(slots) * 3 // 4
            self._starts.give(slots[most:])
            slots = slots[:most]
        self._keep(mixed[: len(slots)], slots)
        self._bare = survey.mixed & (self._kept == 0)
        return not self._bare.any()

    def adopt(self) -> None:
        """Bare chunks that a plain replay wrote count from now on as it left them, and are kept."""
        self._now = self._kernels.digests()
        written = np.flatnonzero(self._bare & (self._now != self._start))
        slots = self._starts.take(len(written))
        if len(slots) < len(written):
            self._refuse(written)
        self._keep(written, slots)
        self._bare[written] = False
        self._start[written] = self._now[written]
        self._pointers[written] = True  # they may be there: only their bytes can tell

    def move(self) -> None:
        survey = self._kernels.survey(*self._addressed.bounds)
        self._now = survey.digest.copy()
        moved = np.flatnonzero(survey.digest != self._start)
        if self._bare[moved].any():
            self._refuse(moved[self._bare[moved]], "another state")
        columns = (self._start[moved], self._kept[moved], self._word[moved], self._pointers[moved])
        self._taken = _Taken(moved, *columns)
        self._start[moved], self._word[moved] = survey.digest[moved], survey.first[moved]
        self._kept[moved], self._pointers[moved] = 0, survey.pointers[moved]
        mixed = moved[survey.mixed[moved]]
        slots = self._starts.take(len(mixed))
        if len(slots) < len(mixed):
            self._refuse(mixed[len(slots) :], "another state")
        self._keep(mixed, slots)

    def move_back(self) -> None:
        taken = self._taken
        if taken is None:
            return
        kept = self._kept[taken.chunks]
        self._starts.give(kept[kept != 0])
        self._start[taken.chunks], self._kept[taken.chunks] = taken.start, taken.kept
        self._word[taken.chunks], self._pointers[taken.chunks] = taken.word, taken.pointers
        self._taken = None

    def movable(self, address: int) -> bool:
        mine = self._of[address]
        return not self._bare[mine].any() and not any(
            self._addressed.any_in(self._hook.download(int(chunk["address"]), int(chunk["bytes"])))
            for chunk in self._chunks[mine][self._pointers[mine]]
        )

    def restore(self) -> None:
        dirty = np.flatnonzero(self._now != self._start)
        lost = dirty[self._bare[dirty]]
        if len(lost):
            self._refuse(lost)
        self._kernels.put(self._rows(dirty, self._kept[dirty], self._word[dirty]))
        self._now = self._start.copy()

    def mutate(self, addresses: Iterable[int], mutation: Mutation) -> None:
        chosen = self._places(addresses)
        rows = self._rows(chosen, *self._changed(chosen, mutation))
        self._kernels.put(rows, shift=mutation.shift, flip=int(mutation.flip))
        self._now[chosen] = ~self._start[chosen]

    def note_plain(self, suspects: Iterable[int]) -> set[int]:
        self._now = self._kernels.digests()
        self._plain = self._now.copy()
        self._plains.give(self._plain_kept[self._plain_kept != 0])
        self._plain_kept = np.zeros(len(self._chunks), np.uint64)
        written = {a: self._written(a) for a in suspects}
        slots = self._plains.take(sum(map(len, written.values())))
        kept, used = set(), 0
        for address, chunks in written.items():
            # What there is no room for is not tried.
            if used + len(chunks) <= len(slots):
                self._plain_kept[chunks] = slots[used : used + len(chunks)]
                used += len(chunks)
                kept.add(address)
        self._plains.give(slots[used:])
        chosen = np.flatnonzero(self._plain_kept)
        rows = self._rows(chosen, self._chunks["address"][chosen])
        rows["to"] = self._plain_kept[chosen]
        self._kernels.put(rows)
        return kept

    def unmoved(self, mutated: Iterable[int], mutation: Mutation | None) -> bool:
        self._now = self._kernels.digests()
        differing = np.flatnonzero(self._now != self._plain)
        chosen = self._places(mutated)
        if mutation is None or not np.isin(differing, chosen).all():
            return not len(differing)
        rows = np.zeros(len(differing), judge_dtype)
        rows["after"], rows["bytes"] = self._chunks["address"][differing], self._chunks["bytes"][differing]
        rows["plain"] = self._plain_kept[differing]
        rows["start"], rows["start_word"] = self._kept[differing], self._word[differing]
        rows["changed"], rows["changed_word"] = self._changed(differing, mutation)
        return self._kernels.judge(rows, shift=mutation.shift, flip=int(mutation.flip))

    def close(self) -> None:
        self._starts.close()
        self._plains.close()
        self._kernels.close()

    def _places(self, addresses: Iterable[int]) -> Index:
        parts = [np.arange(self._of[a].start, self._of[a].stop) for a in addresses]
        return np.concatenate(parts) if parts else np.zeros(0, np.intp)

    def _written(self, address: int) -> Index:
        """The chunks of a range that the plain replay wrote."""
        mine = self._of[address]
        return np.flatnonzero(self._plain[mine] != self._start[mine]) + np.intp(mine.start)

    def _keep(self, chosen: Index, slots: npt.NDArray[np.uint64]) -> None:
        rows = self._rows(chosen, self._chunks["address"][chosen])
        rows["to"] = slots
        self._kernels.put(rows)
        self._kept[chosen] = slots

    def _changed(self, chosen: Index, mutation: Mutation) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
        words = mutation.of_words(self._word[chosen], self._chunks["bytes"][chosen])
        kept = self._kept[chosen]
        return (np.zeros_like(kept) if mutation.fill is not None else kept), words

    def _rows(self, chosen: Index, source: np.ndarray, word: np.ndarray | int = 0) -> np.ndarray:
        rows = np.zeros(len(chosen), put_dtype)
        rows["to"], rows["bytes"] = self._chunks["address"][chosen], self._chunks["bytes"][chosen]
        rows["from"], rows["word"] = source, word
        return rows

    def _refuse(self, lost: Index, what: str = "a replay") -> None:
        chunk = self._chunks[lost[0]]
        raise StateLost(
            f"{what} wrote {len(lost)} chunks of {CHUNK} bytes, the first at {int(chunk['address']):#x}, and cannot "
            f"be undone, since {int(self._bare.sum())} chunks with content found no room beside the engine's memory: "
            "give the control run more free device or host memory, or a smaller KV cache"
        )


class Memory:
    """Every watched live allocation, as it was when ``begin`` was called.

    ``room`` says how many bytes of device and of host memory snapshots may take; what they take is allocated after the
    watched allocations were listed, and is not watched.  ``windows`` are the
    ``fdy_window`` rows of this process, rank ``rank``: memory of other ranks in them is watched, too.
    """

    def __init__(
        self, hook: _hook.Hook, *, windows: np.ndarray = NO_WINDOWS, rank: int = 0, room: Room = free_room
    ) -> None:
        allocations = hook.allocations()
        live = allocations[allocations["live"] == 1]
        by_arena = {w: [(int(a["address"]), int(a["bytes"])) for a in live[live["arena"] == w]] for w in _WATCHED}
        host = by_arena.pop(ARENAS.index("host"))
        device = [r for ranges in by_arena.values() for r in ranges]
        device += [(int(w["address"]), int(w["bytes"])) for w in windows[windows["rank"] != rank]]
        self.ranges: list[tuple[int, int]] = [*device, *host]
        addressed = Addressed(np.concatenate([allocations, _as_allocations(windows)]))
        self._whole = True
        self._sides: list[Side] = [HostSide(hook, host, addressed)] if host else []
        if device:
            self._sides.append(DeviceSide(hook, device, addressed, room))

    def begin(self, replays: Iterable[Callable[[], None]]) -> None:
        """Takes memory as it is now for the start of every later replay.

        ``replays`` are all that will be run, plain: they say what has to be kept where there is no room for all.
        """
        kept = [side.take() for side in self._sides]
        self._whole = all(kept)
        self.adopt(replays)

    def adopt(self, replays: Iterable[Callable[[], None]]) -> None:
        """Says what else will be run, plain, from now on; does nothing where there was room for all."""
        if not self._whole:
            for replay in replays:
                self.restore()
                replay()
                for side in self._sides:
                    side.adopt()
            self.restore()

    @contextmanager
    def moved(self, change: Callable[[], None]) -> Iterator[None]:
        """Inside, every replay starts from what ``change`` makes of the memory that ``begin`` took.

        It costs one look at all memory and copies of the chunks that ``change`` writes.  Raises ``StateLost`` if there
        is no room for these.
        """
        self.restore()
        change()
        try:
            for side in self._sides:
                side.move()
            yield
        finally:
            for side in self._sides:
                side.move_back()
        self.restore()

    def movable(self, addresses: Iterable[int]) -> set[int]:
        """Those of ``addresses`` that are watched, can be put back and hold no addresses of memory."""
        return {a for side, own in self._by_side(addresses) for a in own if side.movable(a)}

    def restore(self) -> None:
        """Puts the start back.  Raises ``StateLost`` if a replay wrote what was not kept."""
        for side in self._sides:
            side.restore()

    def mutate(self, addresses: set[int], mutation: Mutation) -> None:
        """Changes ranges from the start; a replay and ``unmoved`` follow."""
        for side, own in self._by_side(addresses):
            side.mutate(own, mutation)

    def note_plain(self, suspects: set[int]) -> set[int]:
        """After a plain replay: remembers what it left.  Those of ``suspects`` that may be mutated before another."""
        return {a for side, own in self._by_side(suspects) for a in side.note_plain(own)}

    def unmoved(self, mutated: set[int], mutation: Mutation | None) -> bool:
        """Whether a replay after ``mutate`` left what the plain one did.

        In what was mutated, a byte that the plain replay leaves alone keeps the mutation, as it kept its old value.
        """
        # All sides look, so that each knows what it has to put back.
        unmoved = [side.unmoved(own, mutation) for side, own in self._by_side(mutated)]
        return all(unmoved)

    def close(self) -> None:
        """Gives back what snapshots took."""
        for side in self._sides:
            side.close()

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _by_side(self, addresses: Iterable[int]) -> Iterator[tuple[Side, list[int]]]:
        ordered = sorted(addresses)
        for side in self._sides:
            yield side, [a for a in ordered if side.owns(a)]
