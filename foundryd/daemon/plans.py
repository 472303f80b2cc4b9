# SPDX-License-Identifier: Apache-2.0
"""Plans of ranks, computed once and kept as sealed memory."""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable

from foundryd.daemon import limits
from foundryd.daemon.resident import Resident
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store
from foundryd.daemon.tools import ArchiveTools
from foundryd.daemon.worker import Worker
from foundryd.errors import DaemonError, FoundrydError
from foundryd.faults import fault

log = logging.getLogger(__name__)

Key = tuple[str, str, int]
Waiter = Callable[[Sealed | FoundrydError], None]

# Of the descriptors and the free memory that there are, plans that nobody asked for take one in so many at most.
SHARE = 8


def compute(
    tools: ArchiveTools, resident: Resident, variant: str, rank: int, room: limits.Room, expected: int = 0
) -> Sealed:
    """The plan of one rank in sealed memory.

    ``expected`` are the bytes that it presumably has; nothing is computed where there is no room for it.

    Raises
    ------
    NotEnoughMemory : there is no room for it.
    FoundrydError : whatever else the computation raises.
    """
    try:
        fault("plan")
        what = f"the plan of rank {rank} of {variant} in the archive {resident.name}"
        room.check(2 * expected, what)  # computed, and in shared memory
        pieces = tools.compute_plan(resident.reader, variant, rank)
        try:
            room.take(sum(memoryview(piece).nbytes for piece in pieces), what)
            return Sealed.from_bytes(f"foundryd:plan:{variant}:{rank}", *pieces)
        finally:
            del pieces  # an error keeps this frame for a while, and where memory is short that may be too long
    except FoundrydError:
        raise
    except Exception as error:
        raise DaemonError(
            f"the plan of rank {rank} of {variant} in the archive {resident.name} cannot be computed ({error!r}): "
            "report it with the archive"
        ) from error


class Plans:
    """Plans by (digest, variant, rank).  Used in the loop's thread only.

    Parameters
    ----------
    observe : called in the worker's thread with the seconds that computing each plan took.
    ahead : bytes that all plans may take before one is computed that nobody asked for.
    """

    def __init__(
        self,
        store: Store,
        worker: Worker,
        observe: Callable[[float], object] = lambda seconds: None,
        ahead: int = 0,
    ) -> None:
        self._store = store
        self._worker = worker
        self._observe = observe
        self._plans: dict[Key, Sealed] = {}
        self._waiting: dict[Key, list[Waiter]] = {}
        self._ahead_bytes = ahead
        self._memory = limits.Room()  # used in the worker's thread only
        self._room = 0  # of these bytes what the machine allowed when it was last looked at
        self._ahead: deque[tuple[Resident, str, int]] = deque()
        self._computing_ahead = False
        self.computed = 0  # how often one was computed

    def request(self, resident: Resident, variant: str, rank: int, waiter: Waiter) -> None:
        """Calls ``waiter`` with the plan or the error, at once when it is there; ranks that ask together share one."""
        key = (resident.digest, variant, rank)
        if key in self._plans:
            waiter(self._plans[key])
        elif key in self._waiting:
            self._waiting[key].append(waiter)
        else:
            self._start(resident, variant, rank, [waiter])

    def prepare(self, resident: Resident) -> None:
        """Computes plans of an archive before they are asked for, as many as there may be.

        They are computed one at a time, so a request waits for at most one that it did not ask for.  A plan that cannot
        be computed is left out: whoever asks for it is told why.
        """
        self._room = min(self._ahead_bytes, limits.available()[0] // SHARE)
        self._ahead += [(resident, v.name, rank) for v in resident.index.variants for rank in v.rank_class.ranks]
        self._continue()

    @property
    def bytes(self) -> int:
        """Shared memory that all plans take."""
        return sum(plan.size for plan in self._plans.values())

    def stop_preparing(self, digest: str) -> None:
        """Begins no more plans of an archive that nobody asked for."""
        self._ahead = deque(entry for entry in self._ahead if entry[0].digest != digest)

    def forget(self, digest: str) -> None:
        """Drops the plans of an archive."""
        for key in [k for k in self._plans if k[0] == digest]:
            self._plans.pop(key).close()

    def close(self) -> None:
        """Drops all plans."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()

    def _start(
        self,
        resident: Resident,
        variant: str,
        rank: int,
        waiters: list[Waiter],
        then: Callable[[], object] = lambda: None,
    ) -> None:
        key = (resident.digest, variant, rank)
        self._waiting[key] = waiters

        def finish(result: Sealed | BaseException) -> None:
            self._finish(key, result)
            then()

        alike = [plan.size for (digest, name, _), plan in self._plans.items() if (digest, name) == key[:2]]
        expected = max(alike, default=0)
        self._worker.submit(lambda: self._compute(resident, variant, rank, expected), finish)

    def _continue(self) -> None:
        """Starts the next plan that nobody asked for, unless one is being computed."""
        while self._ahead and not self._computing_ahead:
            resident, variant, rank = self._ahead.popleft()
            key = (resident.digest, variant, rank)
            if key in self._plans or key in self._waiting:
                continue
            if not self._room_ahead():
                log.debug("no more plans are computed ahead: %d take %d bytes", len(self._plans), self.bytes)
                self._ahead.clear()
                return
            self._computing_ahead = True
            self._start(resident, variant, rank, [], self._prepared)

    def _prepared(self) -> None:
        self._computing_ahead = False
        self._continue()

    def _room_ahead(self) -> bool:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY and len(self._plans) >= descriptors // SHARE:
            return False
        # One more is taken to be as large as the largest.
        return self.bytes + max((plan.size for plan in self._plans.values()), default=0) < self._room

    def _compute(self, resident: Resident, variant: str, rank: int, expected: int) -> Sealed:
        begin = time.monotonic()
        plan = compute(self._store.tools, resident, variant, rank, self._memory, expected)
        self._observe(time.monotonic() - begin)
        return plan

    def _finish(self, key: Key, result: Sealed | BaseException) -> None:
        if not isinstance(result, Sealed | FoundrydError):
            raise result
        if isinstance(result, Sealed):
            self.computed += 1
            self._plans[key] = result
        for waiter in self._waiting.pop(key):
            waiter(result)
