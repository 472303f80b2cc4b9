# SPDX-License-Identifier: Apache-2.0
"""``GraphSet`` for PyTorch: captured, recorded or restored, as the environment says."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from foundryd.archive.identity import Provider
from foundryd.capture.recording import Recording
from foundryd.engines.torch.graph import TorchCapture, TorchRestored, capture
from foundryd.engines.torch.groups import connect
from foundryd.engines.torch.identity import TorchFacts
from foundryd.engines.torch.memory import Arenas, Bound, check, clear_unused, referred_to, unpooled_blocks
from foundryd.engines.torch.rng import Registered, prologues
from foundryd.engines.torch.store import default_store
from foundryd.engines.torch.world import LoneWorld
from foundryd.errors import CaptureError, RestoreError, UsageError
from foundryd.session import graphset
from foundryd.session.policy import RestorePolicy
from foundryd.session.store import Store
from foundryd.session.vary import Vary
from foundryd.settings import Mode, Settings, settings


class GraphSet(graphset.GraphSet):
    """The graphs of a PyTorch program; make it before CUDA is initialised.

    While capturing, ``torch.distributed`` is a world without peers (see ``foundryd.engines.torch.world``).

    Attributes
    ----------
    device : this rank's device, made current.
    """

    def __init__(
        self,
        config: Settings,
        *,
        store: Store | None = None,
        policy: RestorePolicy | None = None,
        providers: Sequence[Provider] = (),
    ) -> None:
        backend = torch.cuda.get_allocator_backend()
        if config.mode is Mode.CAPTURE and backend != "native":
            raise CaptureError(_allocator_refused(backend))
        if config.mode is not Mode.OFF and torch.cuda.is_initialized():
            raise UsageError("CUDA is initialised already: make the GraphSet before anything touches the GPU")
        super().__init__(config, store=store, providers=[TorchFacts(), *providers], policy=policy)
        if self._session is not None and backend != "native":
            self._give_session_up(RestoreError(_allocator_refused(backend)))
        self._world = LoneWorld(config.rank, config.world_size) if self.mode is Mode.CAPTURE else None
        if self._world is not None:
            self._world.enter()
        self.device = torch.device("cuda", config.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(self.device)
        self._arenas = Arenas(self.device)
        self._bound = Bound()
        self._generators: list[torch.Generator] = []
        self._registered: list[Registered] = []
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._earlier: list[tuple[int, int]] = []  # blocks of no arena that were there before the first graph

    @classmethod
    def from_env(cls, *, store: Store | None = None, policy: RestorePolicy | None = None) -> GraphSet:
        """The graphs of this process, as ``FOUNDRYD_MODE`` and its companions say.

        ``store`` is how ranks reach one another; the default process group's is used if there is none.  ``policy`` says
        which graphs are ready once they are restored; the environment's is used if there is none.
        """
        return cls(settings(), store=store, policy=policy)

    def arena(self, name: str) -> AbstractContextManager[None]:
        """Tensors made inside lie in the arena ``weights``, ``kv`` or ``io``: what graphs read and the engine fills.

        A restoring engine must make the same tensors there, in the same order; make temporaries outside.  Pinned
        memory needs no choice, so ``host`` changes nothing.
        """
        # A process that fell back compares nothing, and its allocator may have no pools.
        return nullcontext() if self.mode is Mode.OFF or self.fallback is not None else self._arenas.use(name)

    def bind(self, name: str, thing: torch.Tensor | torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Names tensors (or a module's, or a mapping's) that graphs use and the engine fills or updates.

        A restore is refused unless each lies where it lay, with the same shape, strides and type; while capturing,
        each must lie in an arena that a restoring engine fills.  So a tensor that is bound cannot silently become
        another's memory.
        """
        self._bound.add(name, thing)

    def capture_or_restore(  # type: ignore[override]
        self, key: Any, fn: Callable[[], Any], *, generators: Sequence[torch.Generator] = (), warmups: int = 1
    ) -> tuple[TorchCapture | TorchRestored, Any]:
        """The graph of what ``fn`` does on the current device, and what ``fn`` returns (nested tensors).

        When capturing, ``fn`` is called ``warmups`` times and once more under capture, on a stream of its own.  When
        restoring it is not called.  ``generators`` are those that ``fn`` draws from beside the device's default one.
        """
        self._check_open(key)
        places = self._places(generators)
        self._prepare()
        if self._session is not None:
            graph = self._session.graph(key)
            recorded = self._session.engine["torch"]
            before = prologues(graph.outputs["rng"], recorded["rng"], self._generators, self.device)
            restored = TorchRestored(graph, self.device, before)
            return restored, restored.result
        native = self._capture(fn, places, generators, warmups)
        self._keep(key, native)
        return native, native.result

    def close(self) -> None:
        """Destroys the graphs and gives the lease back; call before process groups are destroyed."""
        if self._stream is not None or self._session is not None:
            torch.cuda.synchronize(self.device)
        super().close()
        self._registered.clear()
        self._bound.clear()
        if self._world is not None:
            self._world.leave()

    def _places(self, generators: Sequence[torch.Generator]) -> list[int]:
        """Where the device's generator and ``generators`` are among those seen so far."""
        if not self._generators:
            self._generators.append(torch.cuda.default_generators[self.device.index])
        for generator in generators:
            if not any(generator is known for known in self._generators):
                self._generators.append(generator)
        return [0, *(next(i for i, k in enumerate(self._generators) if k is g) for g in generators)]

    def _before_first(self) -> None:
        if self._store is None:
            self._store = default_store()
        if self.fallback is not None:
            return
        self._declare_communicators()
        if self._recorder is not None:
            self._earlier = unpooled_blocks()

    def _declare_communicators(self) -> None:
        """Makes and declares the communicators that graphs may use; an engine that has its own declares those."""
        if self._session is None:
            connect(self.device, self.declare_communicator)
            return
        used, before = self._session.used_declarations, self.declared
        connect(self.device, self.declare_communicator, lambda place: before + place in used)

    def _capture(
        self, fn: Callable[[], Any], places: list[int], generators: Sequence[torch.Generator], warmups: int
    ) -> TorchCapture:
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
            self._pool = torch.cuda.graph_pool_handle()
        registered: list[tuple[int, Registered]] = []
        if self._recorder is not None:
            for generator in self._generators[len(self._registered) :]:
                self._registered.append(Registered(generator, self.device))
            registered = [(place, self._registered[place]) for place in places]
        return capture(
            fn,
            pool=self._pool,
            stream=self._stream,
            warmups=warmups,
            registered=registered,
            generators=generators,
        )

    def _write_recording(self, vary: Vary) -> None:
        if self._hook is not None:
            self._bound.require_in_arenas(self._hook.allocations())
        # What nothing uses any more need not be held.
        gc.collect()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        clear_unused(self._recorder.parameters())
        super()._write_recording(vary)

    def _examine(self, recording: Recording) -> None:
        # A buffer that the engine updates, but made outside of arenas, is the one mistake that nothing else shows.
        still = set(unpooled_blocks())
        outside = referred_to([block for block in self._earlier if block in still], recording)
        recording.notes["outside"] = [list(block) for block in outside]

    def _describe_outputs(self) -> None:
        for native in self._natives:
            assert isinstance(native, TorchCapture)
            native.describe()

    def _describe_engine(self) -> dict[str, Any]:
        return {
            "torch": {
                "bound": self._bound.recorded(),
                "blocks": self._arenas.blocks(),
                "rng": [[r.cells.seed, r.cells.offset] for r in self._registered],
            }
        }

    def _named_addresses(self) -> Iterable[int]:
        return [address for address, *_ in self._bound.recorded().values()]

    def _check_engine(self, recorded: Mapping[str, Any]) -> None:
        if "torch" not in recorded:
            raise RestoreError("the archive was captured by a program without PyTorch: capture this program")
        check(recorded["torch"], self._bound.recorded(), self._arenas.blocks())


def _allocator_refused(backend: str) -> str:
    return (
        f"PyTorch's allocator back-end is {backend}, which leaves memory to the driver's pools, and graphs need "
        "memory at fixed addresses: take backend out of PYTORCH_CUDA_ALLOC_CONF"
    )
