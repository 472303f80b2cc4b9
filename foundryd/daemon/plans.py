# SPDX-License-Identifier: Apache-2.0
"""Plans of ranks, computed once and kept as sealed memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from foundryd.daemon.resident import Resident
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store
from foundryd.daemon.tools import ArchiveTools
from foundryd.daemon.worker import Worker
from foundryd.errors import DaemonError, FoundrydError
from foundryd.faults import fault

Key = tuple[str, str, int]
Waiter = Callable[[Sealed | FoundrydError], None]


def compute(tools: ArchiveTools, resident: Resident, variant: str, rank: int) -> Sealed:
    """The plan of one rank in sealed memory; raises what the computation raises, as a ``FoundrydError``."""
    try:
        fault("plan")
        pieces = tools.compute_plan(resident.reader, variant, rank)
        return Sealed.from_bytes(f"foundryd:plan:{variant}:{rank}", *pieces)
    except FoundrydError:
        raise
    except Exception as error:
        raise DaemonError(
            f"the plan of rank {rank} of {variant} in the archive {resident.name} cannot be computed ({error!r}): "
            "report it with the archive"
        ) from error


class Plans:
    """Plans by (digest, variant, rank).  Used in the loop's thread only.

    ``observe`` is called in the worker's thread with the seconds that computing each plan took.
    """

    def __init__(self, store: Store, worker: Worker, observe: Callable[[float], object] = lambda seconds: None) -> None:
        self._store = store
        self._worker = worker
        self._observe = observe
        self._plans: dict[Key, Sealed] = {}
        self._waiting: dict[Key, list[Waiter]] = {}
        self.computed = 0  # how often one was computed

    def request(self, resident: Resident, variant: str, rank: int, waiter: Waiter) -> None:
        """Calls ``waiter`` with the plan or the error, at once when it is there; ranks that ask together share one."""
        key = (resident.digest, variant, rank)
        if key in self._plans:
            waiter(self._plans[key])
        elif key in self._waiting:
            self._waiting[key].append(waiter)
        else:
            self._waiting[key] = [waiter]
            self._worker.submit(
                lambda: self._compute(resident, variant, rank), lambda result: self._finish(key, result)
            )

    @property
    def bytes(self) -> int:
        """Shared memory that all plans take."""
        return sum(plan.size for plan in self._plans.values())

    def forget(self, digest: str) -> None:
        """Drops the plans of an archive."""
        for key in [k for k in self._plans if k[0] == digest]:
            self._plans.pop(key).close()

    def close(self) -> None:
        """Drops all plans."""
        for plan in self._plans.values():
            plan.close()
        self._plans.clear()

    def _compute(self, resident: Resident, variant: str, rank: int) -> Sealed:
        begin = time.monotonic()
        plan = compute(self._store.tools, resident, variant, rank)
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
