# SPDX-License-Identifier: Apache-2.0
"""``GraphSet``: the one line in an engine's capture loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foundryd._native import _hook
from foundryd.archive.identity import Provider
from foundryd.errors import CaptureError, FoundrydError, HookMissing, UsageError
from foundryd.logs import attach_field
from foundryd.session.identity import machine_identity
from foundryd.session.native import CapturedGraph, ReplayableGraph, capture_native
from foundryd.session.policy import RestorePolicy
from foundryd.session.report import new_attach_id, of_fallback, without_lease
from foundryd.session.session import Session, attach, give_up
from foundryd.session.store import Store
from foundryd.session.vary import Vary
from foundryd.settings import Mode, Settings, settings

if TYPE_CHECKING:
    from foundryd.capture.recording import Recording

log = logging.getLogger("foundryd")


class GraphSet:
    """An engine's graphs: captured, recorded or restored, as the environment says.

    Attributes
    ----------
    mode : what the environment asked for.
    restored : True once graphs come from an archive.
    fallback : why an engine that should have restored captures natively instead, or None.
    declared : how many communicators were declared.
    """

    def __init__(
        self,
        config: Settings,
        *,
        store: Store | None = None,
        providers: Sequence[Provider] = (),
        policy: RestorePolicy | None = None,
    ) -> None:
        self.mode = config.mode
        self.fallback: FoundrydError | None = None
        self.declared = 0
        self._settings = config
        self._store = store
        self._policy = policy
        self._connect: Callable[[], None] | None = None
        self._providers = tuple(providers)
        self._session: Session | None = None
        self._hook: _hook.Hook | None = _hook.Hook() if _hook.available() else None
        self._recorder: Any = None
        self._natives: list[CapturedGraph] = []
        self._prepared = False  # the other ranks may wait for what this one says
        self._told = False  # they heard of this one
        self._finished = False
        self._closed = False
        self._attach_id = new_attach_id()
        if self.mode is Mode.CAPTURE:
            self._start_recording()
        elif self.mode is Mode.RESTORE:
            try:
                self._session = attach(config, self._providers, attach_id=self._attach_id)
            except FoundrydError as error:
                without_lease(config, of_fallback(config, self._attach_id, error, {}), error)
                self._fall_back(error)

    @classmethod
    def from_env(cls, *, store: Store | None = None, policy: RestorePolicy | None = None) -> GraphSet:
        """The graphs of this process; call before the first CUDA context.

        ``store`` is how ranks reach one another; a world of one rank needs none.  ``policy`` says which graphs are
        ready once they are restored; the environment's is used if there is none.
        """
        return cls(settings(), store=store, policy=policy)

    @property
    def restored(self) -> bool:
        """Whether graphs come from the archive."""
        return self._session is not None and self._session.restored

    @property
    def session(self) -> Session | None:
        """The session with the daemon, in restore mode while nothing failed."""
        return self._session

    def declare_communicator(self, handle: int, ranks: Sequence[int]) -> None:
        """Says which world ranks the NCCL communicator ``handle`` joins, in the order of their ranks in it.

        Declare them in one order when capturing and restoring.  A restoring engine may pass 0 for one that it did not
        make; it has to make those that graphs use.
        """
        self.declared += 1
        if self._hook is not None and self.mode is not Mode.OFF:
            self._hook.comm_declare(handle, np.array(ranks, np.uint32))

    def connect_with(self, connect: Callable[[], None]) -> None:
        """Says how this engine opens memory of its peers that only captures made, see ``Session.restore``."""
        self._connect = connect

    def capture_or_restore(self, key: Any, fn: Callable[[], Any], *, stream: int) -> tuple[ReplayableGraph, Any]:
        """The graph of what ``fn`` launches on ``stream``, and what ``fn`` returns.

        When capturing, ``fn`` is called twice: as a warm-up and under capture.  When restoring it is not called at all.
        """
        self._check_open(key)
        self._prepare()
        if self._session is not None:
            graph = self._session.graph(key)
            return graph, graph.outputs
        native = capture_native(fn, stream)
        self._keep(key, native)
        return native, native.outputs

    def _check_open(self, key: Any) -> None:
        for ended, what in ((self._closed, "close()"), (self._finished, "finish()")):
            if ended:
                raise UsageError(f"the graph {key!r} was asked for after {what}: ask for every graph before")

    def _prepare(self) -> None:
        """Restores, if that is still to be done, or tells the other ranks that this one does not."""
        if self.mode is Mode.OFF:
            return
        if not self._prepared:
            self._prepared = True
            self._before_first()
        if self._session is None:
            self._tell_others()
        elif not self._session.restored:
            try:
                self._check_engine(self._session.engine)
                self._session.restore(self._store, connect=self._connect, policy=self._policy, start=False)
            except FoundrydError as error:
                self._give_session_up(error)

    def _before_first(self) -> None:
        """Lets an adapter find its store and declare communicators, before anything is captured or restored."""

    def _keep(self, key: Any, native: CapturedGraph) -> None:
        """Takes in a graph that this process captured."""
        self._natives.append(native)
        if self._recorder is not None:
            self._recorder.add(key, native)

    def _check_engine(self, recorded: Mapping[str, Any]) -> None:
        """Raises ``LayoutDiverged`` unless the engine is as ``_describe_engine`` described it when it was captured."""

    def _examine(self, recording: Recording) -> None:
        """Lets an adapter say in the recording's notes what whoever captures should know."""

    def _describe_outputs(self) -> None:
        """Brings the ``outputs`` of every captured graph into the form that an archive holds."""

    def _describe_engine(self) -> dict[str, Any]:
        """What an adapter wants to find again when it restores: scalars, lists and dicts."""
        return {}

    def _named_addresses(self) -> Iterable[int]:
        """Addresses in what ``_describe_engine`` says."""
        return ()

    def finish(
        self, vary: Callable[[int], None] | None = None, vary_graph: Callable[[Any, int], None] | None = None
    ) -> None:
        """Ends the loop: writes the recording when capturing; when restoring, starts to build in the background.

        ``vary(seed)`` puts the engine's inputs and KV cache into another valid state, with the same content for the
        same seed, as if it had served requests: more than one cached position, other tokens.  It allocates nothing, and
        what it starts may still run when it returns.  Only a control run calls it, between proofs, and leaves the
        engine in the last of these states.  Without it the proofs hold for memory as it is now, and a value that
        matters only later (a scale of attention while one position is cached) can pass for noise.

        ``vary_graph(key, seed)`` adds what only the graph ``key`` can replay with, such as a schedule that one buffer
        holds for one batch size.  It is called under the same terms whenever the proofs come to that graph, with memory
        as ``vary(seed)`` left it; what it writes is taken back before another graph's turn.  Memory as it is when this
        is called has to do for every graph.
        """
        if self._closed:
            raise UsageError("finish() was called after close(), which let go of every graph: call it before")
        self._finished = True
        if self._recorder is not None:
            self._write_recording(Vary(vary, vary_graph))
        elif self._session is not None:
            self._session.start_background()

    def wait(self, deadline: float = 120.0) -> None:
        """When restoring, waits until the background has built what the policy wants; see ``Session.wait``."""
        if self._session is not None:
            self._session.wait(deadline)

    def close(self) -> None:
        """Destroys the graphs and gives the lease back; call before communicators are destroyed.

        No graph can be had after it.  May be called twice.
        """
        self._closed = True
        if self._session is not None:
            self._session.close()
            self._session = None
        while self._natives:
            self._natives.pop().close()

    def __enter__(self) -> GraphSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _give_session_up(self, error: FoundrydError) -> None:
        """Lets go of the session, after telling the daemon why; what follows is captured natively."""
        assert self._session is not None
        self._session.report_fallback(error)
        self._told = self._session.joined
        self._session.close()
        self._session = None
        self._fall_back(error)

    def _fall_back(self, error: FoundrydError) -> None:
        self.fallback = error
        log.warning("capturing natively (%s): %s", error.reason, error, extra=attach_field(self._attach_id))
        if self._prepared:
            self._tell_others()

    def _tell_others(self) -> None:
        """After a fallback: the others must not wait for a rank that will not come, nor restore without it."""
        if self.fallback is None or self._store is None or self._settings.world_size == 1 or self._told:
            return
        self._told = True
        give_up(self._store, self._settings, self.fallback)

    def _start_recording(self) -> None:
        from foundryd.capture.recorder import Recorder  # only a capturing engine needs it

        if self._hook is None:
            raise HookMissing(
                "FOUNDRYD_MODE is capture, but the hook is not preloaded: start the engine with foundryd capture"
            )
        if self._settings.recording is None:
            raise CaptureError(
                "FOUNDRYD_MODE is capture, but FOUNDRYD_RECORDING is unset: start the engine with foundryd capture"
            )
        here = machine_identity(self._providers, local_rank=self._settings.local_rank)
        self._recorder = Recorder(self._hook, self._settings, here.fields)

    def _write_recording(self, vary: Vary) -> None:
        from foundryd.capture.control import Trials, prove
        from foundryd.capture.journal import Journal, read_strays
        from foundryd.capture.recording import load, save
        from foundryd.capture.structure import alike

        assert self._hook is not None
        assert self._settings.recording is not None
        recording = self._recorder.recording(self._describe_engine(), self._named_addresses())
        self._examine(recording)
        # After the memory was read: an adapter may have to replay graphs to describe them.
        self._describe_outputs()
        for graph, native in zip(recording.graphs, self._natives, strict=True):
            graph.outputs = native.outputs
        if self._settings.references:
            others = [load(p) for p in self._settings.references]
            # A rank that is built otherwise now is captured again, so proofs of this capture would be of no use.
            if alike(recording, [other for other in others if other.rank == recording.rank]):
                trials = Trials(Journal(self._settings.journal), vary, read_strays(self._settings.strays))
                modules = self._recorder.module_ids
                recording.proofs = prove(self._hook, recording, others, self._natives, modules, trials)
        save(recording, self._settings.recording)
