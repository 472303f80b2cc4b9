# SPDX-License-Identifier: Apache-2.0
"""A rank's lease, and how it comes back when its daemon is replaced.

A thread waits for the end of the connection without running any code.  Then it looks for a daemon, every second at
most, and asks for the same lease.  If the daemon has not loaded the archive yet it asks for the memory that the rank
has, and serves that instead of a second copy.  The rank's own mappings are never touched, whatever comes of it.
"""

from __future__ import annotations

import logging
import os
import random
import select
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundryd.daemon import messages, wire
from foundryd.daemon.client import expect, open_door, receive_packet
from foundryd.daemon.messages import Attach, Ended, Granted, Offer, Reattach, Resumed, Wanted
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.sealed import Sealed
from foundryd.errors import DaemonError, DaemonNotRunning, FoundrydError, LeaseLost, ProtocolError
from foundryd.faults import fault
from foundryd.forks import tell_of_forks

log = logging.getLogger("foundryd")

FIRST_PAUSE = 0.05  # seconds before the first look for a new daemon; doubled after each
LONGEST_PAUSE = 1.0  # while there is none: connecting to nobody costs nothing
LONGEST_PAUSE_REFUSED = 30.0  # while there is one that refuses
GREETING = 5.0  # seconds for the daemon's greeting
ATTEMPT = 120.0  # seconds for one attempt, the daemon's loading of the archive included


@dataclass(frozen=True)
class DaemonInfo:
    """The daemon that a lease is from."""

    pid: int  # as the daemon sees it
    build: str
    protocol: int
    instance: str
    runtime_dir: Path


@dataclass(frozen=True)
class Claim:
    """What a rank tells a daemon that does not know it.  ``memory`` is the lease's own."""

    runtime: RuntimeDir
    archive: str
    digest: str
    group: str
    rank: int
    variant: str
    generation: int
    memory: Sealed


class Keeper:
    """The thread of a lease, started before there is one: to wait for its start can take as long as all the rest."""

    def __init__(self) -> None:
        self._lease: Lease | None = None
        self._decided = threading.Event()
        self._thread = threading.Thread(target=self._run, name="foundryd-lease", daemon=True)
        self._thread.start()

    def keep(self, lease: Lease) -> threading.Thread:
        """Keeps the lease from now on."""
        self._lease = lease
        self._decided.set()
        return self._thread

    def leave(self) -> None:
        """Ends the thread, unless it has a lease."""
        self._decided.set()
        if self._lease is None:
            self._thread.join(1.0)

    def _run(self) -> None:
        self._decided.wait()
        if self._lease is not None:
            self._lease._keep()


class Lease:
    """The rank's place in its group, as long as the connection lives.  Safe to use from several threads.

    Parameters
    ----------
    sock : the connection.
    claim : what is told a new daemon.
    keeper : asks for the lease again when it is lost; None: nobody does.

    Attributes
    ----------
    number : of the lease, another one after it came back.
    daemon : that it is from, or was.
    own_memory : the daemon serves another copy of the archive than the rank maps.
    returned : how often it came back from a new daemon.
    """

    def __init__(
        self, sock: socket.socket, number: int, daemon: DaemonInfo, claim: Claim, keeper: Keeper | None
    ) -> None:
        self.number = number
        self.daemon = daemon
        self.own_memory = False
        self.returned = 0
        self._claim = claim
        self._socket: socket.socket | None = sock
        self._lock = threading.Lock()
        self._why = ""
        self._closed = False
        self._wake = -1
        self._thread: threading.Thread | None = None
        sock.setblocking(False)
        tell_of_forks(self)
        if keeper is not None:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._thread = keeper.keep(self)

    def fileno(self) -> int:
        """Descriptor that becomes readable when the lease is lost, for an engine's own loop; -1 when it has ended."""
        with self._lock:
            return self._socket.fileno() if self._socket is not None else -1

    @property
    def lost(self) -> bool:
        """Whether the lease ended, on whichever side, and did not come back."""
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
                f"the lease {self.number} ended ({self._why}): graphs that are restored go on working; start a daemon, "
                "or attach again if this lease was closed"
            )

    def send(self, payload: bytes) -> None:
        """Sends one packet without waiting; raises ``OSError`` when it cannot go now, nothing when the lease ended."""
        with self._lock:
            if self._socket is not None:
                wire.send(self._socket, payload)

    def close(self) -> None:
        """Ends the lease for good; may be called twice."""
        with self._lock:
            self._closed = True
            if self._socket is not None:
                # Ends the connection even if some forked process still has the descriptor.
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._end("it was closed")
            elif self._wake >= 0:
                os.eventfd_write(self._wake, 1)
        if self._thread is None:
            self._claim.memory.close()
        elif self._thread is not threading.current_thread():
            self._thread.join(1.0)  # longer only amid an attempt, at whose end it finds that this is closed

    def _end(self, why: str) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
            self._why = why
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def forked(self) -> None:
        """Ends it in a child of this process, whose it is not."""
        # The lock may have been held by a thread that does not exist here, as does the one that keeps the lease.
        self._lock = threading.Lock()
        self._closed = True
        self._thread = None
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
        self._end("this process was forked from the one that has it")
        self._claim.memory.close()

    # --- the thread --------------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        try:
            while self._await_loss():
                if not self._return():
                    return
        finally:
            with self._lock:
                os.close(self._wake)
                self._wake = -1
                self._claim.memory.close()

    def _await_loss(self) -> bool:
        """Waits until the lease is lost; False when it was closed."""
        poll = select.poll()
        while True:
            with self._lock:
                if self._closed:
                    return False
                if self._socket is None:
                    return True
                # Should another thread close it before the wait, that one writes ``_wake``.
                poll.register(self._socket, select.POLLIN)
                watched = self._socket.fileno()
            poll.register(self._wake, select.POLLIN)
            poll.poll()
            poll.unregister(watched)
            self._drain()
            if self.lost:
                log.info("the lease %d is lost: restored graphs go on, and a new daemon is looked for", self.number)

    def _return(self) -> bool:
        """Tries until the lease is back; False when it was closed."""
        pause, refused_by = FIRST_PAUSE, None
        while not self._paused(pause, refused_by):
            refused_by = None
            try:
                self._attempt()
            except DaemonNotRunning:
                pause = min(2 * pause, LONGEST_PAUSE)
            except (FoundrydError, OSError) as error:
                log.debug("the lease %d does not come back yet: %s", self.number, error)
                refused_by = self._door()
                pause = min(2 * pause, LONGEST_PAUSE if refused_by is None else LONGEST_PAUSE_REFUSED)
            else:
                return True
        return False

    def _paused(self, seconds: float, refused_by: tuple[int, int] | None) -> bool:
        """Waits a little less than asked, so that ranks spread, and until there is another daemon than the one that
        refused; True when the lease was closed meanwhile.
        """
        deadline = time.monotonic() + seconds * random.uniform(0.75, 1.0)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        while not self._closed and (left := deadline - time.monotonic()) > 0:
            poll.poll(min(left, LONGEST_PAUSE) * 1000)
            self._drain()
            if refused_by is not None and self._door() != refused_by:
                break
        return self._closed

    def _door(self) -> tuple[int, int] | None:
        """What differs between two daemons' doors."""
        try:
            status = os.stat(self._claim.runtime.door)
        except OSError:
            return None
        return status.st_ino, status.st_ctime_ns

    def _drain(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def _attempt(self) -> None:
        sock, welcome = open_door(self._claim.runtime, time.monotonic() + GREETING)
        try:
            fault("reattach")
            ask = _reattach if welcome.protocol >= 2 else _attach_again
            number, own_memory = ask(sock, self._claim, time.monotonic() + ATTEMPT)
            runtime = self._claim.runtime.path
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                sock.setblocking(False)
                self._socket = sock
                self.number = number
                self.own_memory = own_memory
                self.daemon = DaemonInfo(welcome.pid, welcome.build, welcome.protocol, welcome.instance, runtime)
                self.returned += 1
        except BaseException:
            sock.close()
            raise
        log.info("the lease is back: number %d of the daemon with pid %d", number, welcome.pid)


def _reattach(sock: socket.socket, claim: Claim, deadline: float) -> tuple[int, bool]:
    """Number of the lease, and whether the daemon serves another copy."""
    device, inode = claim.memory.inode
    request = Reattach(
        claim.archive,
        claim.digest,
        claim.memory.size,
        device,
        inode,
        claim.group,
        claim.rank,
        claim.variant,
        claim.generation,
    )
    with suppress(BrokenPipeError, ConnectionResetError):  # it is stopping: its last word can still be read
        wire.send(sock, messages.encode(request))
    with receive_packet(sock, claim.runtime, deadline) as packet:
        message = messages.decode_answer(packet.payload)
    if isinstance(message, Wanted):
        fault("publish")
        wire.send(sock, messages.encode(Offer()), (claim.memory.fd,))
        with receive_packet(sock, claim.runtime, deadline) as packet:
            message = messages.decode_answer(packet.payload)
    resumed = expect(message, Resumed)
    return resumed.lease, resumed.own_memory


def _attach_again(sock: socket.socket, claim: Claim, deadline: float) -> tuple[int, bool]:
    """The same from a daemon of version 1, which gives new leases only; the memory that comes with it is let go."""
    wire.send(sock, messages.encode(Attach(claim.digest, claim.group, claim.rank, claim.variant)))
    with receive_packet(sock, claim.runtime, deadline, descriptors=2) as packet:
        granted = expect(messages.decode_answer(packet.payload), Granted)
    if granted.digest != claim.digest:
        raise DaemonError(
            f"the daemon serves the archive {granted.digest[:12]} and this rank was restored from {claim.digest[:12]}: "
            "start it with that archive"
        )
    return granted.lease, True
