# SPDX-License-Identifier: Apache-2.0
"""The rank's side of the daemon: one archive and one plan, mapped read-only, and the lease.

The mappings do not depend on the daemon: they stay when it ends, is killed or is replaced.  The lease is the connection
to its door, so it ends with ``close`` and with the process.  A child made by ``os.fork`` does not keep it: its copy is
closed in the child, and every descriptor is close-on-exec.  (A fork in C code that executes no other program is not
seen; such a child keeps the lease until it ends, unless the parent calls ``close``, which ends it in any case.)

When the daemon goes, a thread of the lease gets it back from the next one: see ``foundryd.session.lease``.
"""

from __future__ import annotations

import errno
import mmap
import secrets
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

from foundryd.daemon import limits, messages, plans
from foundryd.daemon.client import expect, knock, receive_packet, welcomed
from foundryd.daemon.messages import Attach, Granted
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store, find_variant
from foundryd.daemon.tools import ArchiveTools
from foundryd.errors import DaemonError, ProtocolError
from foundryd.faults import fault
from foundryd.session.lease import Claim, DaemonInfo, Keeper, Lease

__all__ = ["Attachment", "DaemonInfo", "Lease", "attach", "attach_file"]


class Attachment:
    """What a rank restores from.  A context manager.

    Attributes
    ----------
    archive, plan : read-only bytes in shared memory: the inflated archive, and the rank's plan.
    name, digest : of the archive.
    variant, rank, group, generation : what the rank is; the variant in its canonical spelling.
    lease : None without a daemon.
    daemon : the one that the lease is from, None without a daemon.
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
        attach_id: str = "",
    ) -> None:
        with ExitStack() as undo:
            undo.callback(archive.close)
            undo.callback(plan.close)
            fault("map")
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
        self.attach_id = attach_id

    @property
    def daemon(self) -> DaemonInfo | None:
        """The daemon that the lease is from, another one after that was restarted."""
        return self.lease.daemon if self.lease is not None else None

    @property
    def lost(self) -> bool:
        """Whether there was a lease and it ended; the memory stays, and the lease comes back with a new daemon."""
        return self.lease is not None and self.lease.lost

    def close(self) -> None:
        """Ends the lease and frees the memory, which arrays made from it keep for as long as they live."""
        if self.lease is not None:
            self.lease.close()
        try:
            fault("detach")
        finally:
            self._free()

    def _free(self) -> None:
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
    keep: bool = True,
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
    keep : whether a lost lease is asked for again in the background, for as long as the attachment is open.

    Raises
    ------
    DaemonNotRunning : nobody answers; the message has the command that starts a daemon.
    ProtocolError : the daemon speaks other versions; the message has both ranges.
    NotInArchiveError : no such archive, variant or rank; the message says what exists.
    RankTaken : another process has that rank; the message names it.
    PermissionRefused : the daemon does not serve this user.
    DaemonError : it refused for another reason, or did not answer in time; or this process has no descriptor left.
    """
    request = Attach(archive, group, rank, variant, attach_id or secrets.token_hex(8))
    try:
        return _attach(request, runtime_dir, timeout, keep)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        raise DaemonError(
            f"the archive cannot be attached in this process ({error.strerror}): raise its limit of descriptors "
            "(ulimit -n) or of memory"
        ) from error


def _attach(request: Attach, runtime_dir: Path, timeout: float, keep: bool) -> Attachment:
    runtime = RuntimeDir(runtime_dir)
    deadline = time.monotonic() + timeout
    sock = knock(runtime, deadline, request)
    with ExitStack() as undo:
        undo.callback(sock.close)
        keeper = Keeper() if keep else None  # its thread starts while the daemon is at work
        if keeper is not None:
            undo.callback(keeper.leave)
        welcome = welcomed(sock, runtime, deadline)
        fault("attach")
        with receive_packet(sock, runtime, deadline, descriptors=2) as packet:
            granted = expect(messages.decode_answer(packet.payload), Granted)
            if packet.count != 2:
                raise ProtocolError(f"the daemon granted a lease with {packet.count} descriptors and not 2: report it")
            memory = Sealed.adopt(packet.take(), granted.archive_bytes)
            undo.callback(memory.close)
            plan = Sealed.adopt(packet.take(), granted.plan_bytes)
            undo.callback(plan.close)
            fault("plan")
        daemon = DaemonInfo(welcome.pid, welcome.build, welcome.protocol, welcome.instance, runtime.path)
        claim = Claim(
            runtime,
            granted.archive,
            granted.digest,
            granted.group,
            granted.rank,
            granted.variant,
            granted.generation,
            memory.duplicate(),
        )
        undo.callback(claim.memory.close)
        lease = Lease(sock, granted.lease, daemon, claim, keeper)
        undo.callback(lease.close)
        attachment = Attachment(
            archive=memory,
            plan=plan,
            name=granted.archive,
            digest=granted.digest,
            variant=granted.variant,
            rank=granted.rank,
            group=granted.group,
            generation=granted.generation,
            lease=lease,
            attach_id=request.attach_id,
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
        plan = plans.compute(store.tools, resident, found.name, rank, limits.Room())
        return Attachment(
            archive=resident.memory.duplicate(),
            plan=plan,
            name=resident.name,
            digest=resident.digest,
            variant=found.name,
            rank=rank,
        )
    finally:
        store.close()
