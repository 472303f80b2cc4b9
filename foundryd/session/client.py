# SPDX-License-Identifier: Apache-2.0
"""The rank's side of the daemon: one archive and one plan, mapped read-only, and the lease.

The mappings do not depend on the daemon: they stay when it ends, is killed or is replaced.  The lease is the connection
to its door, so it ends with ``close`` and with the process.  A child made by ``os.fork`` does not keep it: its copy is
closed in the child, and every descriptor is close-on-exec.  (A fork in C code that executes no other program is not
seen; such a child keeps the lease until it ends, unless the parent calls ``close``, which ends it in any case.)
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import threading
import time
import weakref
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from foundryd.daemon import messages, plans, wire
from foundryd.daemon.client import expect, open_door, receive_packet
from foundryd.daemon.messages import Attach, Ended, Granted
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store, find_variant
from foundryd.daemon.tools import ArchiveTools
from foundryd.errors import LeaseLost, ProtocolError

_leases: weakref.WeakSet[Lease] = weakref.WeakSet()


@dataclass(frozen=True)
class DaemonInfo:
    """The daemon that a lease is from."""

    pid: int  # as the daemon sees it
    build: str
    protocol: int
    instance: str
    runtime_dir: Path


class Lease:
    """The rank's place in its group, as long as the connection lives.  Safe to use from several threads."""

    def __init__(self, sock: socket.socket, number: int) -> None:
        self.number = number
        self._socket: socket.socket | None = sock
        self._lock = threading.Lock()
        self._why = ""
        sock.setblocking(False)
        _leases.add(self)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the lease is lost, for an engine's own loop; -1 when it has ended."""
        return self._socket.fileno() if self._socket is not None else -1

    @property
    def lost(self) -> bool:
        """Whether the lease ended, on whichever side."""
        with self._lock:
            if self._socket is None:
                return True
            try:
                packet = wire.receive(self._socket)
            except BlockingIOError:
                return False
            except (OSError, ProtocolError) as error:
                self._end(f"the connection to the daemon failed ({error})")
                return True
            if packet is None:
                self._end("the daemon is gone")
                return True
            try:
                message = messages.decode_answer(packet.payload)
            except ProtocolError as error:
                self._end(str(error))
                return True
            self._end(message.message if isinstance(message, Ended) else "the daemon spoke out of turn")
            return True

    def check(self) -> None:
        """Raises ``LeaseLost`` with the reason when the lease ended."""
        if self.lost:
            raise LeaseLost(
                f"the lease {self.number} ended ({self._why}): graphs that are restored go on working; attach again "
                "for a new one"
            )

    def send(self, payload: bytes) -> None:
        """Sends one packet without waiting; raises ``OSError`` when it cannot go now, nothing when the lease ended."""
        with self._lock:
            if self._socket is not None:
                wire.send(self._socket, payload)

    def close(self) -> None:
        """Ends the lease; may be called twice."""
        with self._lock:
            if self._socket is not None:
                # Ends the connection even if some forked process still has the descriptor.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._end("it was closed")

    def _end(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._why = why

    def _forked(self) -> None:
        # The lock may have been held by a thread that does not exist here.
        self._lock = threading.Lock()
        self._end("this process was forked from the one that has it")


def _after_fork() -> None:
    for lease in list(_leases):
        lease._forked()


os.register_at_fork(after_in_child=_after_fork)


class Attachment:
    """What a rank restores from.  A context manager.

    Attributes
    ----------
    archive, plan : read-only bytes in shared memory: the inflated archive, and the rank's plan.
    name, digest : of the archive.
    variant, rank, group, generation : what the rank is; the variant in its canonical spelling.
    lease : None without a daemon.
    daemon : None without a daemon.
    attach_id : what the daemon's log and this process's call this attach.
    """

    def __init__(
        self,
        *,
        archive: Sealed,
        plan: Sealed,
        name: str,
        digest: str,
        variant: str,
        rank: int,
        group: str = "",
        generation: int = 0,
        lease: Lease | None = None,
        daemon: DaemonInfo | None = None,
        attach_id: str = "",
    ) -> None:
        with ExitStack() as undo:
            undo.callback(archive.close)
            undo.callback(plan.close)
            self._mappings: list[mmap.mmap] = [archive.map(), plan.map()]
        self.archive = memoryview(self._mappings[0])
        self.plan = memoryview(self._mappings[1])
        self.name = name
        self.digest = digest
        self.variant = variant
        self.rank = rank
        self.group = group
        self.generation = generation
        self.lease = lease
        self.daemon = daemon
        self.attach_id = attach_id

    @property
    def lost(self) -> bool:
        """Whether there was a lease and it ended; the memory stays."""
        return self.lease is not None and self.lease.lost

    def close(self) -> None:
        """Ends the lease and frees the memory, which arrays made from it keep for as long as they live."""
        if self.lease is not None:
            self.lease.close()
        self.archive.release()
        self.plan.release()
        while self._mappings:
            with suppress(BufferError):  # somebody still reads it: freed with the last reader
                self._mappings.pop().close()

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def attach(
    *,
    runtime_dir: Path,
    archive: str = "",
    group: str = "default",
    rank: int = 0,
    variant: str = "",
    timeout: float = 60.0,
    attach_id: str = "",
) -> Attachment:
    """Takes a lease from the daemon and maps archive and plan.

    Parameters
    ----------
    runtime_dir : the daemon's.
    archive : name or beginning of the digest; empty: the only one.
    group, rank : who this is; each pair has one holder on a node.
    variant : parallel configuration; empty: the only one.
    timeout : seconds for everything, the daemon's loading of the archive and computing of the plan included.
    attach_id : what the daemon's log calls this attach, 1 to 64 letters and digits; empty: a random one.

    Raises
    ------
    DaemonNotRunning : nobody answers; the message has the command that starts a daemon.
    ProtocolError : the daemon speaks other versions; the message has both ranges.
    NotInArchiveError : no such archive, variant or rank; the message says what exists.
    RankTaken : another process has that rank; the message names it.
    PermissionRefused : the daemon does not serve this user.
    DaemonError : it refused for another reason, or did not answer in time.
    """
    attach_id = attach_id or secrets.token_hex(8)
    runtime = RuntimeDir(runtime_dir)
    deadline = time.monotonic() + timeout
    sock, welcome = open_door(runtime, deadline)
    with ExitStack() as undo:
        undo.callback(sock.close)
        with suppress(BrokenPipeError, ConnectionResetError):  # it is stopping: its last word can still be read
            wire.send(sock, messages.encode(Attach(archive, group, rank, variant, attach_id)))
        with receive_packet(sock, runtime, deadline, descriptors=2) as packet:
            granted = expect(messages.decode_answer(packet.payload), Granted)
            if packet.count != 2:
                raise ProtocolError(f"the daemon granted a lease with {packet.count} descriptors and not 2: report it")
            memory = Sealed.adopt(packet.take(), granted.archive_bytes)
            undo.callback(memory.close)
            plan = Sealed.adopt(packet.take(), granted.plan_bytes)
            undo.callback(plan.close)
        attachment = Attachment(
            archive=memory,
            plan=plan,
            name=granted.archive,
            digest=granted.digest,
            variant=granted.variant,
            rank=granted.rank,
            group=granted.group,
            generation=granted.generation,
            lease=Lease(sock, granted.lease),
            daemon=DaemonInfo(welcome.pid, welcome.build, welcome.protocol, welcome.instance, runtime.path),
            attach_id=attach_id,
        )
        undo.pop_all()
    return attachment


def attach_file(path: Path, *, variant: str = "", rank: int = 0, tools: ArchiveTools | None = None) -> Attachment:
    """The same from a file, without a daemon: verified, inflated and planned in this process.

    Raises
    ------
    ArchiveError : the file is not a good archive.
    NotInArchiveError : no such variant or rank.
    NotEnoughMemory : it does not fit.
    """
    store = Store(tools)
    try:
        resident = store.load(path)
        found = find_variant(resident.index, resident.name, variant, rank)
        plan = plans.compute(store.tools, resident, found.name, rank)
        return Attachment(
            archive=Sealed(os.dup(resident.memory.fd), resident.memory.size),
            plan=plan,
            name=resident.name,
            digest=resident.digest,
            variant=found.name,
            rank=rank,
        )
    finally:
        store.close()
