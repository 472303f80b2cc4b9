# SPDX-License-Identifier: Apache-2.0
"""``GraphSet``: the one line in an engine's capture loop."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from foundryd._native import _hook
from foundryd.errors import CaptureError, FoundrydError, HookMissing, UsageError
from foundryd.session.identity import machine_identity
from foundryd.session.native import NativeGraph, capture_native
from foundryd.session.session import Session, attach, give_up
from foundryd.session.store import Store
from foundryd.settings import Mode, Settings, settings

log = logging.getLogger("foundryd")


class ReplayableGraph(Protocol):
    """What ``capture_or_restore`` returns, however the graph came about."""

    def replay(self, stream: int) -> None:
        """Launches the graph on ``stream`` (a driver handle); does not wait."""


class GraphSet:
    """An engine's graphs: captured, recorded or restored, as the environment says.

    Attributes
    ----------
    mode : what the environment asked for.
    restored : True once graphs come from an archive.
    fallback : why an engine that should have restored captures natively instead, or None.
    """

    def __init__(
        self, config: Settings, *, store: Store | None = None, connect: Callable[[], None] | None = None
    ) -> None:
        self.mode = config.mode
        self.fallback: FoundrydError | None = None
        self._settings = config
        self._store = store
        self._connect = connect
        self._session: Session | None = None
        self._hook: _hook.Hook | None = _hook.Hook() if _hook.available() else None
        self._recorder: Any = None
        self._natives: list[NativeGraph] = []
        self._finished = False
        if self.mode is Mode.CAPTURE:
            self._start_recording()
        elif self.mode is Mode.RESTORE:
            try:
                self._session = attach(config)
            except FoundrydError as error:
                self._fall_back(error)

    @classmethod
    def from_env(cls, *, store: Store | None = None, connect: Callable[[], None] | None = None) -> GraphSet:
        """The graphs of this process; call before the first CUDA context.

        ``store`` is how ranks reach one another; a world of one rank needs none.  ``connect`` opens peers' memory, see
        ``Session.restore``.
        """
        return cls(settings(), store=store, connect=connect)

    @property
    def restored(self) -> bool:
        """Whether graphs come from the archive."""
        return self._session is not None and self._session.restored

    @property
    def session(self) -> Session | None:
        """The session with the daemon, in restore mode while nothing failed."""
        return self._session

    def declare_communicator(self, handle: int, ranks: Sequence[int]) -> None:
        """Says which world ranks the NCCL communicator ``handle`` joins, in the order of their ranks in it."""
        if self._hook is not None and self.mode is not Mode.OFF:
            self._hook.comm_declare(handle, np.array(ranks, np.uint32))

    def capture_or_restore(self, key: Any, fn: Callable[[], Any], *, stream: int) -> tuple[ReplayableGraph, Any]:
        """The graph of what ``fn`` launches on ``stream``, and what ``fn`` returns.

        When capturing, ``fn`` is called twice: as a warm-up and under capture.  When restoring it is not called at all.
        """
        if self._finished:
            raise UsageError(f"the graph {key!r} was asked for after finish(): ask for every graph before")
        if self._session is not None and not self._session.restored:
            try:
                self._session.restore(self._store, connect=self._connect)
            except FoundrydError as error:
                self._session.close()
                self._session = None
                self._fall_back(error)
        if self._session is not None:
            graph = self._session.graph(key)
            return graph, graph.outputs
        native = capture_native(fn, stream)
        self._natives.append(native)
        if self._recorder is not None:
            self._recorder.add(key, native)
        return native, native.outputs

    def finish(self) -> None:
        """Ends the loop: writes the recording when capturing."""
        self._finished = True
        if self._recorder is not None:
            self._write_recording()

    def close(self) -> None:
        """Destroys the graphs and gives the lease back; call before communicators are destroyed."""
        if self._session is not None:
            self._session.close()
            self._session = None
        while self._natives:
            self._natives.pop().close()

    def __enter__(self) -> GraphSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fall_back(self, error: FoundrydError) -> None:
        self.fallback = error
        if self._store is not None and self._settings.world_size > 1:
            # The others must not wait for a rank that will not come.
            give_up(self._store, self._settings, error)
        log.warning("capturing natively (%s): %s", error.reason, error)

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
        self._recorder = Recorder(self._hook, self._settings, machine_identity().fields)

    def _write_recording(self) -> None:
        from foundryd.capture.control import prove
        from foundryd.capture.recording import load, save

        assert self._hook is not None
        assert self._settings.recording is not None
        recording = self._recorder.recording()
        if self._settings.references:
            others = [load(p) for p in self._settings.references]
            recording.notes.update(
                prove(self._hook, recording, others, self._recorder.natives, self._recorder.module_ids)
            )
        save(recording, self._settings.recording)
