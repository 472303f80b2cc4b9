# SPDX-License-Identifier: Apache-2.0
"""One worker's side: when it attaches, what lies in arenas, and where its graphs come from.

Knows nothing of vLLM's objects: the seams of a range of versions call it.  Whatever goes wrong while restoring ends
in ``give_up``, after which every call here does nothing and the worker captures as it always did.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from foundryd.archive.identity import Provider
from foundryd.capture.recording import Recording
from foundryd.engines.torch import graphset
from foundryd.engines.vllm import collector
from foundryd.engines.vllm.report import StartUp
from foundryd.errors import (
    EngineUnsupported,
    FoundrydError,
    IdentityMismatch,
    LayoutDiverged,
    NotEnoughMemory,
    RestoreError,
)
from foundryd.session.arrays import freeze_key
from foundryd.session.report import new_attach_id, of_fallback, without_lease
from foundryd.settings import Mode, Settings

log = logging.getLogger("foundryd.vllm")

_MIB = 1 << 20
_RESERVE, _RESERVE_OF_MANY = 256, 2048  # MiB: see Settings.kv_reserve
_STEP = 128 * _MIB  # of the size of a KV cache that is captured

Communicators = Callable[[], Iterable[tuple[int, Sequence[int]]]]


class WorkerGraphs(graphset.GraphSet):
    """The graphs of a vLLM worker, with what the worker decided before it had any.

    Attributes
    ----------
    resolved : what must be equal where it is restored, by name; scalars and lists.
    sizes : what a restore takes over: ``kv_cache_bytes``.
    cold : whether the worker compiled what another capture will load.
    """

    def __init__(self, config: Settings, provider: Provider, communicators: Communicators) -> None:
        self.resolved: dict[str, Any] = {}
        self.sizes: dict[str, int] = {}
        self.cold = False
        self._communicators = communicators
        super().__init__(config, providers=[provider])

    @property
    def recorded(self) -> Mapping[str, Any]:
        """What the worker that was captured had decided; empty unless this one may restore."""
        engine = {} if self._session is None else self._session.engine
        vllm: Mapping[str, Any] = engine.get("vllm", {})
        return vllm

    def prepare(self) -> None:
        """Restores if there is something to restore from, and tells the other ranks if there is not."""
        self._prepare()

    def use_current_stream(self) -> None:
        """Captures on the stream that is current, where the engine warmed up."""
        self._stream = torch.cuda.current_stream(self.device)
        self._pool = torch.cuda.graph_pool_handle()

    def give_up(self, error: FoundrydError) -> None:
        """Captures natively from now on; a second reason changes nothing."""
        if self._session is not None:
            self._give_session_up(error)
        elif self.fallback is None:
            self._fall_back(error)

    def _declare_communicators(self) -> None:
        # vLLM's collectives under capture run on communicators of its own, which exist since it set its groups up.
        for handle, ranks in self._communicators():
            self.declare_communicator(handle, ranks)

    def _describe_engine(self) -> dict[str, Any]:
        return {**super()._describe_engine(), "vllm": {"resolved": self.resolved, "sizes": self.sizes}}

    def _examine(self, recording: Recording) -> None:
        super()._examine(recording)
        recording.notes["cold"] = self.cold

    def _check_engine(self, recorded: Mapping[str, Any]) -> None:
        if "vllm" not in recorded:
            raise RestoreError("the archive was not captured by vLLM: capture this model with vLLM")
        compare(recorded["vllm"]["resolved"], self.resolved)
        try:
            super()._check_engine(recorded)
        except LayoutDiverged:
            # Garbage may hold tensors of arenas: the worker that was captured had collected it all.
            collector.collect()
            super()._check_engine(recorded)


def compare(then: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raises ``IdentityMismatch`` at the first thing that this worker decided in another way than the captured one."""
    for name in sorted({*then, *now}):
        old, new = freeze_key(then.get(name)), freeze_key(now.get(name))
        if old != new:
            raise IdentityMismatch(
                f"vllm.{name} is {new} and the archive has {old} (vLLM decided it from its settings and this "
                "machine): start vLLM as it was captured, or capture again"
            )


class Adapter:
    """A worker of vLLM, from before its first GPU context to its last graph.

    Attributes
    ----------
    report : how the worker starts, as far as it is known.
    captured : the keys of the graphs that were recorded, in their order.
    """

    def __init__(self, config: Settings, report: StartUp) -> None:
        self.report = report
        self._config = config
        self._graphs: WorkerGraphs | None = None
        self.captured: list[Any] = []

    def attach(self, provider: Provider, check: Callable[[], None], communicators: Communicators) -> None:
        """Takes a lease, or begins to record; must precede the first GPU context.

        ``check`` raises ``EngineUnsupported`` for an engine that the seams do not fit.  ``communicators`` says which
        NCCL communicators graphs may use, as (handle, ranks).  A capture raises what is wrong.
        """
        if self.off:
            return
        try:
            check()
            self._graphs = WorkerGraphs(self._config, provider, communicators)
        except FoundrydError as error:
            if self.capturing:
                raise
            attach_id = new_attach_id()
            without_lease(self._config, of_fallback(self._config, attach_id, error, {}), error)
            log.warning("capturing natively (%s): %s", error.reason, error)
            self.report.fallback = error
        if self._graphs is not None:
            self.report.fallback = self._graphs.fallback
        self.freeze()

    def freeze(self) -> None:
        """Keeps Python's garbage collector from what there is now, if this worker may restore.

        To be called where the worker has just collected, or has nothing on the device yet.
        """
        if self.restoring:
            collector.freeze()

    def uncollected(self) -> AbstractContextManager[None]:
        """Inside, the collector runs only when it is asked to, if this worker may restore."""
        return collector.paused() if self.restoring else nullcontext()

    def tidy(self) -> None:
        """Frees device memory that garbage and PyTorch's allocator keep, as vLLM does before it captures."""
        with self.report.part("tidy"):
            gc.collect()
            torch.cuda.empty_cache()

    @property
    def capturing(self) -> bool:
        """Whether this process records."""
        return self._config.mode is Mode.CAPTURE

    @property
    def off(self) -> bool:
        """Whether this process only says how it started."""
        return self._config.mode is Mode.OFF

    @property
    def active(self) -> bool:
        """Whether this process records, or may still restore or has."""
        return self._graphs is not None and (self.capturing or self.restoring)

    @property
    def restoring(self) -> bool:
        """Whether this process may still restore, or has."""
        return self._graphs is not None and self._graphs.session is not None

    @property
    def without_trials(self) -> bool:
        """Whether this worker makes no captures on trial.

        Ranks communicate in them, so all of a world must take the same way: a rank that gave up makes none either, but
        where all of them did, since the engine is not supported.
        """
        if self.active:
            return True
        others = self._config.mode is Mode.RESTORE and self._config.world_size > 1
        return others and not isinstance(self.report.fallback, EngineUnsupported)

    @property
    def device(self) -> torch.device:
        """The worker's device, once it attached."""
        assert self._graphs is not None
        return self._graphs.device

    def give_up(self, error: FoundrydError) -> None:
        """Lets the worker capture natively; raises the error if it records."""
        if self.off:
            return
        if self.capturing:
            raise error
        if self._graphs is not None:
            self._graphs.give_up(error)
        collector.thaw()
        self.report.fallback = self.report.fallback or error

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Gives up at an error of foundryd's own inside."""
        try:
            yield
        except FoundrydError as error:
            self.give_up(error)

    def arena(self, name: str) -> AbstractContextManager[None]:
        """Tensors made inside lie in that arena, unless this worker neither records nor restores."""
        return nullcontext() if self._graphs is None else self._graphs.arena(name)

    def resolve(self, **facts: Any) -> None:
        """What the worker decided: recorded, or compared before anything is restored."""
        if self._graphs is not None:
            self._graphs.resolved.update(facts)

    def kv_bytes(self, measured: int) -> int:
        """How many bytes the KV cache may have, where profiling found ``measured``.

        Addresses follow from it, so a restore takes what the archive says.  No two runs measure the same, so a capture
        leaves a reserve for the restore, and takes whole steps, so that other ranks and controls come to the same size.
        """
        if self._graphs is None:
            return measured
        if self.capturing:
            reserve = self._config.kv_reserve
            if reserve is None:
                reserve = _RESERVE if self._config.world_size == 1 else _RESERVE_OF_MANY
            size = max(0, measured - reserve * _MIB)
            self._graphs.sizes["kv_cache_bytes"] = size - size % _STEP if size > _STEP else size
            return self._graphs.sizes["kv_cache_bytes"]
        recorded: int | None = self._graphs.recorded.get("sizes", {}).get("kv_cache_bytes")
        if not self.restoring or recorded is None:
            return measured
        if recorded > measured:
            self.give_up(
                NotEnoughMemory(
                    f"the KV cache of the archive takes {recorded:,} bytes and this worker has {measured:,} for it: "
                    "free device memory, or capture again with a larger FOUNDRYD_KV_RESERVE"
                )
            )
            return measured
        return recorded

    def bind(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Names tensors on the device that graphs use and the worker fills."""
        if self._graphs is not None and self.active:
            self._graphs.bind("vllm", {name: t for name, t in tensors.items() if t.is_cuda})

    def restore(self, keys: Callable[[], Sequence[Any]]) -> dict[Any, tuple[Any, Any]] | None:
        """Every graph of ``keys`` with what its function returned, or None: then the worker captures natively.

        ``keys`` is asked for only if there is something to restore from.
        """
        if self._graphs is None:
            return None
        wanted: list[Any] = []
        with self.guarded(), self.report.part("keys"):
            if self.restoring:
                wanted = list(keys())
                self.resolve(graphs=sorted(list(key) for key in wanted))
        with self.guarded(), self.report.part("restore"):
            # Also after a fallback: only then do the other ranks learn of it.
            self._graphs.prepare()
        self.report.fallback = self.report.fallback or self._graphs.fallback
        session = self._graphs.session
        if session is None:
            # What vLLM collects before it captures, it is to collect whole.
            collector.thaw()
            return None
        with self.guarded(), self.report.part("outputs"):
            restored = {key: self._graphs.capture_or_restore(key, _never) for key in wanted}
            self.report.way, self.report.graphs = "restored", len(restored)
            self.report.restore = dict(session.phases)
            return restored
        return None

    def begin_capture(self) -> None:
        """Records from here on, on the stream that is current; precedes the worker's warm-ups."""
        assert self._graphs is not None
        self._graphs.use_current_stream()
        # What warm-ups make is the graphs' own, not a tensor that was there and that the worker might update.
        self._graphs.prepare()
        self.report.way = "captured"

    def capture(self, key: Any, fn: Callable[[], Any]) -> tuple[Any, Any]:
        """Captures ``fn``, for which the worker warmed up; the graph and what ``fn`` returned."""
        assert self._graphs is not None
        self.captured.append(key)
        self.resolve(graphs=sorted(list(key) for key in self.captured))
        self.report.graphs = len(self.captured)
        return self._graphs.capture_or_restore(key, fn, warmups=0)

    def write(self, vary: Callable[[int], None], vary_graph: Callable[[Any, int], None], *, cold: bool) -> None:
        """After the last graph that was captured: writes the recording; see ``GraphSet.finish``.

        ``cold``: the worker compiled what another capture will load, and so has memory elsewhere.
        """
        assert self._graphs is not None
        self._graphs.cold = cold
        self._graphs.finish(vary, vary_graph)

    def start_background(self) -> None:
        """After the last graph that was restored: lets the background begin."""
        if self._graphs is not None:
            with self.guarded(), self.report.part("background"):
                self._graphs.finish()

    def publish(self) -> None:
        """Says how the worker started, which it has."""
        self.report.publish(self._config.startup_report)

    def close(self) -> None:
        """Destroys the graphs and gives the lease back."""
        # What the worker leaves behind may be garbage only now.
        collector.thaw()
        if self._graphs is None:
            return
        try:
            self._graphs.close()
        except FoundrydError as error:
            log.warning("the graphs were not destroyed (%s): %s", error.reason, error)
        self._graphs = None


def _never() -> Any:
    raise AssertionError("the function of a restored graph is never called")
