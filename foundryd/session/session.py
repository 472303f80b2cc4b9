# SPDX-License-Identifier: Apache-2.0
"""The rank's side: attach before the first context, restore when the engine has its memory and communicators."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from foundryd._native import _hook
from foundryd.archive import identity
from foundryd.archive.identity import Provider
from foundryd.archive.reader import ArchiveReader
from foundryd.errors import (
    AttachTooLate,
    DeadlineExceeded,
    FoundrydError,
    HookMissing,
    LeaseLost,
    NotInArchiveError,
    PeerFailed,
    UsageError,
)
from foundryd.faults import fault
from foundryd.logs import attach_field, set_up_rank
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.plan import Plan
from foundryd.session import client
from foundryd.session.agreement import PHASES, Agreement, check_op_lists, describe_ops, why
from foundryd.session.arrays import freeze_key
from foundryd.session.communicators import used_declarations
from foundryd.session.driver import driver_ms, time_calls
from foundryd.session.executables import Executables, RestoredGraph
from foundryd.session.identity import machine_identity
from foundryd.session.local_ranks import check_local_rank
from foundryd.session.materialize import Materializer, check_layout
from foundryd.session.policy import RestorePolicy
from foundryd.session.report import is_file, new_attach_id, of_fallback, of_restore, over_lease
from foundryd.session.store import Store
from foundryd.settings import Settings, settings

log = logging.getLogger(__name__)

_ATTACH_DEADLINE = 30.0  # seconds
_DEADLINE = 120.0  # seconds for each thing that another rank owes


def attach(config: Settings | None = None, providers: Sequence[Provider] = (), *, attach_id: str = "") -> Session:
    """Takes a lease and the layout; must precede the process's first CUDA context.

    ``providers`` know facts of the engine that the archive's identity may name; ``attach_id`` is in the log's lines.

    Raises ``HookMissing``, ``AttachTooLate``, ``IdentityMismatch``, ``NotInArchiveError`` or a ``DaemonError``.
    """
    config = settings() if config is None else config
    set_up_rank(config.log_format, config.log)
    attach_id = attach_id or new_attach_id()
    started = time.monotonic()
    if not _hook.available():
        raise HookMissing(
            "the hook is not in this process, so its memory layout is not the archive's: start it with foundryd run"
        )
    hook = _hook.Hook()
    report = hook.report()
    if report.mode != 2:
        raise HookMissing(
            "the hook was loaded without FOUNDRYD_MODE=restore: set it before the process starts, as foundryd run does"
        )
    if report.contexts:
        raise AttachTooLate(
            f"this process already has {report.contexts} CUDA context(s), and addresses cannot be fixed after "
            "the first: attach before anything touches the GPU"
        )
    if config.driver_clock:
        time_calls(hook)
    if is_file(config.archive):
        attachment = client.attach_file(Path(config.archive), variant=_variant(config), rank=config.rank)
    else:
        attachment = client.attach(
            runtime_dir=config.runtime_dir,
            archive=config.archive,
            group=config.group,
            rank=config.rank,
            variant=_variant(config),
            timeout=_ATTACH_DEADLINE,
            attach_id=attach_id,
        )
    try:
        session = Session(hook, attachment, config, providers, attach_id=attach_id)
    except BaseException:
        attachment.close()
        raise
    session.phases["attach"] = (time.monotonic() - started) * 1000
    source = "a file" if attachment.daemon is None else f"the daemon with pid {attachment.daemon.pid}"
    who = (config.rank, config.group, attachment.name, attachment.variant, source)
    log.info("rank %d of %s attached to %s, %s, of %s", *who, extra=attach_field(attach_id))
    return session


def _variant(config: Settings) -> str:
    return str(Mesh.parse(config.variant)) if config.variant else ""


def _agreement(store: Store, config: Settings, deadline: float) -> Agreement:
    return Agreement(store, config.rank, config.world_size, group=config.group, deadline=deadline)


def give_up(store: Store, config: Settings, error: FoundrydError) -> None:
    """Tells the other ranks, instead of restoring, that this one does not, so that none of them does.

    To be called where this rank would have restored, since it waits until the others are there to hear it.
    """
    try:
        _agreement(store, config, _DEADLINE).join(why(error))
    except (PeerFailed, DeadlineExceeded) as other:
        log.info("rank %d gave up and so do others: %s", config.rank, other)


class Session:
    """A lease on an archive, and what was restored from it; use ``attach``.

    Attributes
    ----------
    joined : whether ``restore`` came to where the other ranks hear of this one.
    restored : whether ``restore`` succeeded.
    phases : milliseconds of each phase so far, in order; ``graphs`` are those that the policy wants first.
    driver_ms : milliseconds of each phase in the driver, where ``FOUNDRYD_DRIVER_CLOCK`` is set.
    plan : what this rank does differently from the reference rank.
    attach_id : what the daemon's log and this process's call this attach.
    """

    def __init__(
        self,
        hook: _hook.Hook,
        attachment: client.Attachment,
        config: Settings,
        providers: Sequence[Provider] = (),
        *,
        attach_id: str = "",
    ) -> None:
        self._hook = hook
        self._attachment = attachment
        self._config = config
        self._materializer: Materializer | None = None
        self._graphs: dict[Any, RestoredGraph] = {}
        self.attach_id = attach_id
        self.joined = False
        self.restored = False
        self.phases: dict[str, float] = {}
        self.driver_ms: dict[str, float] = {}
        self.plan = Plan.from_buffer(attachment.plan)
        self._reader = ArchiveReader(attachment.archive, trusted=True)
        self._variant = self._reader.index.variants[self.plan.place]
        if self.plan.world != config.world_size:
            raise UsageError(
                f"the variant {self.plan.variant} has {self.plan.world} ranks and WORLD_SIZE is "
                f"{config.world_size}: choose the variant that fits with FOUNDRYD_VARIANT"
            )
        hook.set_rank(config.rank)
        here = machine_identity(providers, local_rank=config.local_rank)
        identity.check(self._reader.index.identity, here, attachment.name)
        if not config.local_rank_unused:
            check_local_rank(self._reader, self._variant, config.rank, config.local_rank)
        hook.set_layout(
            self._variant.arena_base,
            self._variant.arena_stride,
            self._reader.array(self._variant.allocations, _hook.allocation_dtype),
        )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def restore(
        self,
        store: Store | None = None,
        *,
        deadline: float = _DEADLINE,
        connect: Callable[[], None] | None = None,
        policy: RestorePolicy | None = None,
        start: bool = True,
    ) -> None:
        """Makes every graph of the archive one that this rank can replay.

        The engine must have made its weights, KV cache, buffers and communicators, in the context that is current.
        ``store`` joins the ranks; ``deadline`` is in seconds for each thing that another rank owes.  ``connect`` is
        called once all memory of the capture is mapped: it exchanges the IPC handles that the engine exchanged after
        capturing.  ``policy`` says which graphs have an executable when this returns (default: as the environment
        says); the others get one in the background, which starts now or, without ``start``, with ``start_background``,
        or when they are replayed.  Raises ``RestoreError`` and its kinds; the process can then still capture natively.
        """
        agreement = self._agreement(store, deadline)
        policy = RestorePolicy.from_settings(self._config) if policy is None else policy
        try:
            self._restore(agreement, connect, policy)
        except BaseException as error:
            # Whatever it is, an interrupt or an error of ``connect`` too: nobody waits for this rank, nothing stays.
            cause: BaseException = error
            if agreement is not None:
                cause = agreement.blame(PHASES, error) if isinstance(error, FoundrydError) else error
                self._undo(partial(agreement.fail, PHASES, why(cause)))
            self._undo(self._teardown)
            self._undo(self._hook.release_held)
            if cause is error:
                raise
            raise cause from error
        self.restored = True
        log.info("restored in %.0f ms", sum(self.phases.values()), extra=attach_field(self.attach_id))
        over_lease(self._attachment, of_restore(self._config, self.attach_id, self.phases))
        if start:
            self.start_background()

    def start_background(self) -> None:
        """Lets a thread build the graphs that are not ready, if the policy says so; once, after ``restore``."""
        if (executables := self._executables) is not None and self.restored:
            executables.start()

    def wait(self, deadline: float = 120.0) -> None:
        """Waits until the background has built what the policy wants; ``deadline`` is in seconds.

        Raises ``DeadlineExceeded``, or the ``RestoreError`` of the first graph that could not be built.
        """
        if (executables := self._executables) is not None:
            executables.wait(deadline)

    @property
    def background_ms(self) -> float | None:
        """Milliseconds that the background took; None while it works, and where there was none."""
        return None if self._executables is None else self._executables.background_ms

    @property
    def background_driver_ms(self) -> float | None:
        """Milliseconds of the background in the driver, like ``driver_ms``."""
        return None if self._executables is None else self._executables.background_driver_ms

    def report_fallback(self, error: FoundrydError) -> None:
        """Tells the daemon that this rank captures natively, for its metrics; must precede ``close``."""
        over_lease(self._attachment, of_fallback(self._config, self.attach_id, error, self.phases))

    def graph(self, key: Any) -> RestoredGraph:
        """The graph that the engine captured under ``key``; raises ``NotInArchiveError``."""
        try:
            return self._graphs[freeze_key(key)]
        except KeyError:
            raise NotInArchiveError(
                f"the archive has no graph {key!r} for {self.plan.variant} but {len(self._graphs)} others: "
                "capture it, or ask for one that is there"
            ) from None

    @property
    def graphs(self) -> dict[Any, RestoredGraph]:
        """Every restored graph by key."""
        return dict(self._graphs)

    @property
    def engine(self) -> dict[str, Any]:
        """What the engine's adapter recorded, to compare with before restoring."""
        return dict(self._variant.engine)

    @property
    def archive_memory(self) -> str:
        """Which shared memory holds the archive: equal in two processes exactly if they share one copy."""
        address = np.frombuffer(self._attachment.archive, np.uint8).ctypes.data
        for line in Path("/proc/self/maps").read_text().splitlines():
            span, _, _, device, inode, *_ = line.split(maxsplit=5)
            first, last = (int(part, 16) for part in span.split("-"))
            if first <= address < last:
                return f"{device}:{inode}"
        raise LeaseLost("the archive is not mapped any more: attach again")

    @property
    def used_declarations(self) -> set[int]:
        """Which communicators graphs use, as places in the order in which the captured engine declared them."""
        return used_declarations(self._variant, self._reader.array(self._variant.comm_ops, _hook.comm_op_dtype))

    def close(self) -> None:
        """Destroys the restored graphs and ends the lease.

        Raises ``DeadlineExceeded``, and keeps both, if the driver does not come back from building a graph; and what
        destroying a graph raises, after all else is let go.
        """
        failed: FoundrydError | None = None
        try:
            self._teardown()
        except DeadlineExceeded:
            raise
        except FoundrydError as error:
            failed = error
        self._reader.close()
        self._attachment.close()
        if failed is not None:
            raise failed

    def _agreement(self, store: Store | None, deadline: float) -> Agreement | None:
        if self.plan.world == 1:
            return None
        if store is None:
            raise UsageError(
                f"a world of {self.plan.world} ranks cannot restore without a store: pass one to GraphSet.from_env"
            )
        return _agreement(store, self._config, deadline)

    @property
    def _executables(self) -> Executables | None:
        return None if self._materializer is None else self._materializer.executables

    def _restore(self, agreement: Agreement | None, connect: Callable[[], None] | None, policy: RestorePolicy) -> None:
        with self._phase("join"):
            if agreement is not None:
                self.joined = True
                agreement.join()
        fault("restore")
        with self._phase("layout"):
            materializer = self._materializer = Materializer(self._hook, self._reader, self._variant, self.plan)
            materializer.arrange(policy, extra=attach_field(self.attach_id))
            check_layout(self._hook)
            self._hook.map_held()
        with self._phase("modules"):
            materializer.load_modules()
        with self._phase("functions"):
            materializer.bind_functions()
        with self._phase("content"):
            materializer.upload_content()
        with self._phase("agreement"):
            materializer.match_communicators()
            if connect is not None:
                connect()
            materializer.check_windows()
            if agreement is not None:
                mine = describe_ops(materializer.comm_ops, lambda slot: self.plan.communicators[slot])
                check_op_lists(mine, self.plan.rank, agreement.each("ops", mine))
        with self._phase("communication"):
            materializer.reissue()
        with self._phase("graphs"):
            self._graphs = materializer.build_graphs()
        with self._phase("done"):
            if agreement is not None:
                agreement.exchange("done", True)

    def _teardown(self) -> None:
        self.restored = False
        materializer, self._materializer = self._materializer, None
        if materializer is not None:
            try:
                materializer.close()
            except DeadlineExceeded:
                self._materializer = materializer
                raise
        self._graphs = {}

    def _undo(self, step: Callable[[], None]) -> None:
        """A step back after an error, which is the one to raise whatever else fails now."""
        try:
            step()
        except Exception as error:
            log.error("a restore that failed cannot be undone: %s", error, extra=attach_field(self.attach_id))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started, before = time.monotonic(), driver_ms()
        yield
        self.phases[name] = (time.monotonic() - started) * 1000
        if self._config.driver_clock:
            self.driver_ms[name] = driver_ms() - before
