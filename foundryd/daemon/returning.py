# SPDX-License-Identifier: Apache-2.0
"""Ranks of an earlier daemon, which come back with the memory that it gave them.

Of an archive that is still being loaded one rank's memory is asked for, examined in a thread of its own and, if it is
good, becomes the resident copy; the file is not inflated then.  Every rank gets its lease when the archive is resident.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foundryd.daemon.door import Connection, Door
from foundryd.daemon.loop import Loop
from foundryd.daemon.messages import Reattach
from foundryd.daemon.resident import Resident
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store
from foundryd.daemon.worker import Worker
from foundryd.errors import DaemonError, FoundrydError, NotInArchiveError

log = logging.getLogger(__name__)


class Service(Protocol):
    """What this asks the daemon."""

    def files_loading(self) -> list[Path]:
        """Files of the archives that are being loaded."""

    def resume(self, connection: Connection, request: Reattach, resident: Resident) -> None:
        """Gives a rank its lease again, or raises a ``FoundrydError``."""


@dataclass(eq=False)
class _Rank:
    connection: Connection
    request: Reattach
    asked: bool = False
    sent: bool = False


class Returning:
    """Used in the loop's thread only."""

    def __init__(self, loop: Loop, store: Store, door: Door, service: Service) -> None:
        self._store = store
        self._door = door
        self._service = service
        self._worker = Worker(loop, "foundryd-examiner")
        self._waiting: dict[Connection, _Rank] = {}
        self._asked: dict[str, _Rank] = {}  # by digest: whose memory is awaited or examined

    def arrive(self, connection: Connection, request: Reattach) -> None:
        """A rank came back."""
        self._place(_Rank(connection, request))

    def offer(self, connection: Connection, fd: int) -> None:
        """The rank that was asked sent its memory; raises ``DaemonError`` when it is not sealed."""
        rank = self._waiting[connection]
        digest = rank.request.digest
        memory = Sealed.adopt(fd, rank.request.archive_bytes, f"pid {connection.peer.pid}")
        rank.sent = True
        if self._store.holding(digest) is not None:  # too late: the file was loaded
            memory.close()
            del self._waiting[connection], self._asked[digest]
            self._place(rank)
            return
        files = self._service.files_loading()
        self._store.offers.begin(digest)
        self._worker.submit(
            lambda: self._store.examine(memory, digest, files), lambda result: self._examined(rank, result)
        )

    def left(self, connection: Connection) -> None:
        """A connection ended; if its memory was awaited, another rank's is."""
        rank = self._waiting.pop(connection, None)
        if rank is not None and self._asked.get(rank.request.digest) is rank and not rank.sent:
            self._next(rank.request.digest)

    def loaded(self) -> None:
        """A loading ended: whoever waited for it goes on."""
        # Who was asked answers first, for the door takes a descriptor from nobody else.
        ranks = [rank for rank in self._waiting.values() if rank.sent or not rank.asked]
        for rank in ranks:
            del self._waiting[rank.connection]
        for rank in ranks:
            if rank.connection.closed:
                continue
            try:
                self._place(rank)
            except FoundrydError as error:
                self._door.refuse(rank.connection, error)

    def _place(self, rank: _Rank) -> None:
        digest = rank.request.digest
        resident = self._store.holding(digest)
        if resident is not None:
            self._service.resume(rank.connection, rank.request, resident)
            return
        if not self._service.files_loading():
            raise NotInArchiveError(
                f"the daemon holds no archive with the digest {digest[:12]} that rank {rank.request.rank} was restored "
                "from: start it with that archive"
            )
        self._waiting[rank.connection] = rank
        if digest not in self._asked and not self._store.offers.has(digest):
            self._next(digest)

    def _next(self, digest: str) -> None:
        self._asked.pop(digest, None)
        for rank in self._waiting.values():
            if rank.request.digest == digest and not rank.asked:
                rank.asked = True
                self._asked[digest] = rank
                self._door.invite(rank.connection)
                return

    def _examined(self, rank: _Rank, result: BaseException | None) -> None:
        digest, peer = rank.request.digest, rank.connection.peer
        self._store.offers.end(digest)
        if result is None:
            self._asked.pop(digest, None)
            log.info("the memory of rank %d (pid %d) is that of %s", rank.request.rank, peer.pid, digest[:12])
            return
        error = result if isinstance(result, FoundrydError) else DaemonError(f"memory cannot be examined: {result!r}")
        log.warning(
            "the memory of pid %d is refused: %s", peer.pid, error, exc_info=None if error is result else result
        )
        if self._waiting.pop(rank.connection, None) is rank:
            self._door.refuse(rank.connection, error)
        self._next(digest)
