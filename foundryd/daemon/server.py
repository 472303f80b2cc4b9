# SPDX-License-Identifier: Apache-2.0
"""The daemon: one process, one event loop over door and control, one worker thread for what takes long."""

from __future__ import annotations

import json
import logging
import os
import signal
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import zmq

from foundryd.daemon import messages
from foundryd.daemon.control import Control, Reply
from foundryd.daemon.door import Connection, Door, attach_of
from foundryd.daemon.http import Answer, Http
from foundryd.daemon.leases import Leases
from foundryd.daemon.loop import Loop
from foundryd.daemon.messages import ArchiveState, Attach, Done, Event, EventKind, LeaseState, Report, Tick, Welcome
from foundryd.daemon.metrics import CONTENT_TYPE, Metrics, Snapshot
from foundryd.daemon.notify import Notifier
from foundryd.daemon.plans import Plans
from foundryd.daemon.resident import Resident, free
from foundryd.daemon.returning import Returning
from foundryd.daemon.runtime import Info, Lock, RuntimeDir
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store, archive_name, find_variant
from foundryd.daemon.worker import Worker
from foundryd.errors import DaemonError, FoundrydError
from foundryd.faults import fault
from foundryd.logs import attach_field
from foundryd.settings import settings

log = logging.getLogger(__name__)

# How long an archive is not inflated after the start when ranks had it from the last daemon: they try every second.
PATIENCE = 2.5
TICK = 1.0  # seconds between ticks to subscribers and looks at the runtime directory


@dataclass
class _Loading:
    """An archive on its way, and who waits for it."""

    state: ArchiveState
    path: Path
    attaches: list[tuple[Connection, Attach]]


class Daemon:
    """Serves one runtime directory until it is told to stop.

    Parameters
    ----------
    runtime : a prepared runtime directory.
    archives : names and paths to load before the daemon is ready; one that cannot be loaded ends it.
    store : where archives live.
    group : group id whose members may attach; None: this user and root only.
    http : port of health and metrics on loopback, 0 for one that the kernel picks; None: not served.
    """

    def __init__(
        self,
        runtime: RuntimeDir,
        archives: Sequence[tuple[str, Path]],
        store: Store,
        *,
        group: int | None = None,
        notifier: Notifier | None = None,
        http: int | None = None,
    ) -> None:
        self._runtime = runtime
        self._initial = list(archives)
        self._store = store
        self._group = group
        self._notifier = notifier or Notifier({})
        self._http_port = http
        self._http: Http | None = None
        self._metrics = Metrics(self._snapshot)
        self._instance = uuid.uuid4().hex
        self._started = time.time()
        self._clock = time.monotonic()
        self._event = 0
        self._ready = False
        self._ending = False
        self._failure: BaseException | None = None
        self._loading: dict[str, _Loading] = {}
        self._limits = settings()
        self._leases = Leases(self._limits.max_clients)
        self._lock: Lock | None = None
        self._holding: list[str] = []  # as written
        self._inherited: set[str] = set()
        self._farewell = "the daemon failed"
        self._on_ready: Callable[[], None] = lambda: None

    # --- running -----------------------------------------------------------------------------------------------------

    def run(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Serves until a request, SIGTERM or SIGINT ends it; ``on_ready`` is called when every archive is resident.

        Raises
        ------
        DaemonAlreadyRunning : another daemon has the runtime directory.
        FoundrydError : an archive of the start cannot be loaded.
        """
        self._on_ready = on_ready
        lock = Lock.acquire(self._runtime)
        try:
            last = self._runtime.info()
            # Handed on until the archive is loaded, for this daemon may die before its ranks are back.
            self._inherited = set(last.holding if last else ())
            self._holding = sorted(self._inherited)
            for digest in self._inherited:
                self._store.offers.expect(digest, PATIENCE)
            self._lock = lock
            self._write_lock()
            self._serve(lock)
        finally:
            lock.release(keep=bool(self._holding))
        if self._failure is not None:
            raise self._failure

    def _serve(self, lock: Lock) -> None:
        self._loop = Loop()
        self._worker = Worker(self._loop)
        self._plans = Plans(self._store, self._worker, self._metrics.planned, self._limits.plans_ahead)
        handlers = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        try:
            self._control = Control(self._loop, context, os.fspath(self._runtime.control), self, self._group)
            try:
                self._open_http()
                # The door opens last: who can connect to it finds everything else there.
                self._door = Door(self._loop, os.fspath(self._runtime.door), self, self._group)
                self._returning = Returning(self._loop, self._store, self._door, self)
                log.info("serving %s as pid %d", self._runtime.path, os.getpid())
                for name, path in self._initial:
                    self._start_loading(name, path, None)
                self._check_ready()
                self._tick(lock)
                self._watchdog()
                try:
                    self._loop.run()
                finally:
                    self._notifier.send("STOPPING=1")
                    self._door.close(self._farewell)
                    if self._http is not None:
                        self._http.close()
            finally:
                self._control.close()
        finally:
            context.term()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            self._plans.close()
            self._loop.close()
        log.info("stopped: %s", self._farewell)

    def _on_signal(self, number: int, frame: object) -> None:
        self._loop.post(lambda: self._end(f"the daemon got {signal.Signals(number).name}"))

    def _end(self, why: str, failure: BaseException | None = None) -> None:
        self._ending = True
        self._farewell = why
        self._failure = self._failure or failure
        self._emit("stopping", message=why)
        self._loop.stop()

    def _tick(self, lock: Lock) -> None:
        if not lock.ours:
            self._end(
                "the runtime directory was removed",
                DaemonError(f"the runtime directory {self._runtime.path} was removed under the daemon: start it again"),
            )
            return
        self._control.push(self.tick)
        self._loop.later(TICK, lambda: self._tick(lock))

    def _watchdog(self) -> None:
        if self._notifier.watchdog is not None:
            self._notifier.send("WATCHDOG=1")
            self._loop.later(self._notifier.watchdog, self._watchdog)

    def _check_ready(self) -> None:
        if not self._ready and not self._initial:
            self._ready = True
            self._emit("ready")
            names = ", ".join(r.name for r in self._store.residents())
            self._notifier.send(f"READY=1\nSTATUS=serving {names or 'no archive'}")
            log.info("ready: %s", names or "no archive")
            self._on_ready()

    def _emit(
        self,
        kind: EventKind,
        *,
        archive: ArchiveState | None = None,
        lease: LeaseState | None = None,
        message: str = "",
    ) -> None:
        self._event += 1
        self._control.push(Event(self._instance, self._event, kind, archive, lease, message))

    # --- archives ----------------------------------------------------------------------------------------------------

    def _start_loading(self, name: str, path: Path, reply: Reply | None) -> None:
        state = ArchiveState(name=name, state="loading", path=messages.printable(path))
        self._loading[name] = _Loading(state, path, [])
        self._emit("archive_loading", archive=state)
        log.info("loading %s from %s", name, path)
        self._worker.submit(lambda: self._store.load(path, name), lambda result: self._loaded(name, reply, result))

    def _loaded(self, name: str, reply: Reply | None, result: Resident | BaseException) -> None:
        loading = self._loading.pop(name)
        if isinstance(result, Resident):
            log.info("%s is resident: %d bytes, digest %s", name, result.memory.size, result.digest)
            self._emit("archive_loaded", archive=result.state)
        else:
            error = result if isinstance(result, FoundrydError) else DaemonError(f"{name} cannot be loaded: {result!r}")
            log.error("%s cannot be loaded: %s", name, error, exc_info=None if error is result else result)
            self._emit("archive_failed", archive=loading.state, message=messages.printable(error))
        # Before new ranks, who would make the group anew.
        self._returning.loaded()
        if isinstance(result, Resident):
            self._inherited.discard(result.digest)
            self._note_holding()
        for connection, request in loading.attaches:
            if connection.closed:
                continue
            try:
                if not isinstance(result, Resident) and request.archive == name:
                    raise error
                self.attach(connection, request)
            except FoundrydError as refusal:
                self._door.refuse(connection, refusal)
        # Memory that came from ranks tells that they are here, with their plans.
        if isinstance(result, Resident) and result.source == "file":
            self._plans.prepare(result)
        initial = [i for i in self._initial if i[0] == name]
        if reply is not None:
            reply(Done(reply.id, os.getpid(), len(self._leases)) if isinstance(result, Resident) else error)
        elif initial and isinstance(result, Resident):
            self._initial.remove(initial[0])
            self._check_ready()
        elif initial:
            self._end(messages.printable(error), error)

    def load(self, request: messages.LoadArchive, reply: Reply) -> None:
        """Control: loads a file, answers when it is resident."""
        path = Path(request.path)
        if not path.is_absolute():
            raise DaemonError(
                f"the path {request.path!r} is not absolute, and the daemon has another folder: make it so"
            )
        name = request.name or archive_name(path)
        if name in self._loading:
            raise DaemonError(f"an archive named {name!r} is being loaded: wait for it")
        self._start_loading(name, path, reply)

    def unload(self, request: messages.UnloadArchive) -> Done:
        """Control: forgets an archive without leases."""
        held = next((r for r in self._store.residents() if r.name == request.name), None)
        holders = [lease for lease in self._leases.all() if held and lease.archive == held.name]
        if holders:
            raise DaemonError(
                f"the archive {request.name} has {len(holders)} leases, of pid {holders[0].pid} for one: end them first"
            )
        resident, last = self._store.remove(request.name)
        if last:
            self._plans.stop_preparing(resident.digest)
            self._store.offers.reopen(resident.digest)
            # In the worker's turn, for a plan of a client that left may still be computed from it.
            self._worker.submit(lambda: free(resident), lambda _: self._plans.forget(resident.digest))
        self._emit("archive_unloaded", archive=resident.state)
        log.info("%s is unloaded", request.name)
        return Done(request.id, os.getpid(), len(self._leases))

    # --- door --------------------------------------------------------------------------------------------------------

    @property
    def welcome(self) -> Welcome:
        """The greeting."""
        return Welcome(messages.NEWEST, messages.BUILD, os.getpid(), self._instance)

    def attach(self, connection: Connection, request: Attach) -> None:
        """Door: finds archive and variant, takes the lease, and grants it when the plan is there."""
        fault("attach")
        loading = self._wait_for(request.archive)
        if loading is not None:
            loading.attaches.append((connection, request))
            return
        resident = self._store.find(request.archive)
        lease = self._take(connection, request, resident)
        self._emit("lease_taken", lease=lease)

        def grant(plan: Sealed | FoundrydError) -> None:
            if connection.closed:
                return
            if isinstance(plan, FoundrydError):
                self._door.refuse(connection, plan)
                return
            who = (lease.number, lease.rank, lease.group, lease.pid)
            log.info("lease %d: rank %d of %s for pid %d", *who, extra=attach_of(connection))
            self._metrics.attached()
            self._door.grant(connection, lease, resident.memory, plan)

        self._plans.request(resident, lease.variant, request.rank, grant)

    def reattach(self, connection: Connection, request: messages.Reattach) -> None:
        """Door: a rank of an earlier daemon."""
        fault("reattach")
        self._returning.arrive(connection, request)

    def offer(self, connection: Connection, fd: int) -> None:
        """Door: the memory of a rank that was asked for it."""
        self._returning.offer(connection, fd)

    def left(self, connection: Connection) -> None:
        """Door: a connection without a lease ended."""
        self._returning.left(connection)

    def files_loading(self) -> list[Path]:
        """Returning: files of the archives that are being loaded."""
        return [entry.path for entry in self._loading.values()]

    def _take(
        self,
        connection: Connection,
        request: Attach | messages.Reattach,
        resident: Resident,
        *,
        generation: int | None = None,
        own_memory: bool = False,
    ) -> LeaseState:
        """The lease that a connection asks for; with a ``generation`` the one that it had from an earlier daemon."""
        lease = self._leases.take(
            group=request.group,
            rank=request.rank,
            variant=find_variant(resident.index, resident.name, request.variant, request.rank).name,
            archive=resident.name,
            digest=resident.digest,
            pid=connection.peer.pid,
            uid=connection.peer.uid,
            attach_id=connection.attach_id,
            generation=generation,
            own_memory=own_memory,
        )
        connection.lease = lease
        self._note_holding()
        return lease

    def resume(self, connection: Connection, request: messages.Reattach, resident: Resident) -> None:
        """Returning: a rank gets its lease again; its memory stays whichever it has."""
        own = resident.memory.inode != (request.device, request.inode)
        lease = self._take(connection, request, resident, generation=request.generation, own_memory=own)
        self._emit(
            "lease_taken", lease=lease, message="attached again, with memory of its own" if own else "attached again"
        )
        log.info("lease %d: rank %d of %s is back, pid %d", lease.number, lease.rank, lease.group, lease.pid)
        self._door.resume(connection, lease)

    def detach(self, lease: LeaseState, why: str) -> None:
        """Door: a lease ended with its connection."""
        self._leases.release(lease)
        self._emit("lease_ended", lease=lease, message=why)
        who = (lease.number, lease.rank, lease.group)
        log.info("lease %d of rank %d of %s ended: %s", *who, why, extra=attach_field(lease.attach_id))
        self._note_holding()
        fault("detach")

    def refused(self, connection: Connection, reason: str) -> None:
        """Door: a lease was asked for in vain."""
        self._metrics.refused(reason)

    def report(self, connection: Connection, report: Report) -> None:
        """Door: a rank says how its restore ended."""
        self._metrics.reported(report)
        if connection.lease is not None:
            connection.lease = self._leases.note(connection.lease, report)
        who = (report.rank, report.group, connection.peer.pid)
        extra = attach_field(report.attach_id)
        if report.outcome == "restored":
            log.info("rank %d of %s (pid %d) restored in %.0f ms", *who, sum(report.phases.values()), extra=extra)
        else:
            why = (messages.reason_label(report.reason), report.message)
            log.warning("rank %d of %s (pid %d) captures natively (%s): %s", *who, *why, extra=extra)

    def _note_holding(self) -> None:
        """Writes down which archives ranks have, for the next daemon; not when this one's end takes their leases."""
        holding = sorted(self._leases.digests() | self._inherited)
        if holding != self._holding and not self._ending:
            self._holding = holding
            try:
                self._write_lock()
            except DaemonError as error:  # the next daemon will not wait for ranks: harmless, but may make a copy
                log.warning("%s", error)

    def _write_lock(self) -> None:
        assert self._lock is not None
        self._lock.write(Info(os.getpid(), self._started, messages.BUILD, self._instance, self._holding))

    def _wait_for(self, wanted: str) -> _Loading | None:
        """What an attach must wait for: the archive of that name, or all that load when it names none or a digest."""
        if wanted in self._loading:
            return self._loading[wanted]
        if any(r.name == wanted for r in self._store.residents()):
            return None
        try:
            if wanted:
                self._store.find(wanted)
                return None
        except FoundrydError:
            pass
        return next(iter(self._loading.values()), None)

    # --- control -----------------------------------------------------------------------------------------------------

    @property
    def tick(self) -> Tick:
        """Control: the number of the last event."""
        return Tick(self._instance, self._event)

    def status(self, id: int) -> messages.Status:
        """Control: everything."""
        return messages.Status(
            id=id,
            instance=self._instance,
            event=self._event,
            pid=os.getpid(),
            build=messages.BUILD,
            protocol=messages.NEWEST,
            ready=self._ready,
            started=self._started,
            uptime_ms=(time.monotonic() - self._clock) * 1000,
            archives=self._archives(),
            leases=self._leases.all(),
            http_port=0 if self._http is None else self._http.port,
            resident_bytes=self._resident_bytes(),
        )

    def archives(self, id: int) -> messages.Archives:
        """Control: the archives."""
        return messages.Archives(id, self._archives())

    def stop(self, request: messages.Stop) -> Done:
        """Control: ends the daemon, after the answer is on its way."""
        self._loop.post(lambda: self._end("the daemon was asked to stop"))
        return Done(request.id, os.getpid(), len(self._leases))

    def _archives(self) -> list[ArchiveState]:
        return [r.state for r in self._store.residents()] + [entry.state for entry in self._loading.values()]

    def _resident_bytes(self) -> int:
        contents = {r.digest: r.memory.size for r in self._store.residents()}
        return sum(contents.values()) + self._plans.bytes

    # --- health ------------------------------------------------------------------------------------------------------

    def _open_http(self) -> None:
        if self._http_port is not None:
            routes = {"/livez": self._livez, "/readyz": self._readyz, "/metrics": self._exposition}
            self._http = Http(self._loop, self._http_port, routes)
            log.info("health and metrics are on http://127.0.0.1:%d", self._http.port)

    def _livez(self) -> Answer:
        return Answer(HTTPStatus.OK, b"ok\n")

    def _readyz(self) -> Answer:
        missing = [{"archive": entry.state.name, "state": entry.state.state} for entry in self._loading.values()]
        ready = self._ready and not missing
        body = json.dumps({"ready": ready, "missing": missing}).encode() + b"\n"
        return Answer(HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE, body, "application/json")

    def _exposition(self) -> Answer:
        return Answer(HTTPStatus.OK, self._metrics.exposition(), CONTENT_TYPE)

    def _snapshot(self) -> Snapshot:
        return Snapshot(
            ready=self._ready and not self._loading,
            resident=len(self._store.residents()),
            loading=len(self._loading),
            resident_bytes=self._resident_bytes(),
            clients=len(self._leases),
        )
