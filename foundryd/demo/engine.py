# SPDX-License-Identifier: Apache-2.0
"""The engine of one rank: weights, KV cache and communicators, a graph for each batch size, and the step loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundryd.demo import weights
from foundryd.demo.config import DemoConfig
from foundryd.demo.device import Device
from foundryd.demo.images import CompiledImages, SoftImages
from foundryd.demo.model import Inputs, Kernels, Model, Shard
from foundryd.demo.nccl import Communicator, share_devices
from foundryd.demo.numerics import ACTIVATION, prompts
from foundryd.demo.rendezvous import Store
from foundryd.errors import UsageError
from foundryd.session.arena import arena
from foundryd.session.driver import software_driver
from foundryd.session.graphset import GraphSet

I32 = NDArray[np.int32]
PLACES = ("weights", "kv", "io")


@dataclass(frozen=True)
class Disturbance:
    """A change of the engine's own allocations, to see a restore refuse it: ``extra:kv`` or ``larger:weights``.

    ``extra`` makes one more allocation at the end of the arena, ``missing`` takes the last one from elsewhere, and
    ``larger`` adds a page to the first.
    """

    kind: str
    place: str

    @classmethod
    def parse(cls, text: str) -> Disturbance:
        kind, _, place = text.partition(":")
        if kind not in ("extra", "missing", "larger") or place not in PLACES:
            raise UsageError(
                f"the disturbance is {text!r}: write extra, missing or larger, then : and weights, kv or io"
            )
        return cls(kind, place)


class Engine:
    """One rank.

    Parameters
    ----------
    graphs : captures or restores; made before the device, since its environment must precede the first context.
    timeout : seconds to wait for the other ranks.
    """

    def __init__(
        self,
        config: DemoConfig,
        rank: int,
        device: Device,
        graphs: GraphSet,
        store: Store,
        *,
        timeout: float = 60.0,
        disturbance: Disturbance | None = None,
    ) -> None:
        self.config, self.rank, self.device, self.graphs = config, rank, device, graphs
        self.timings: dict[str, float] = {}  # milliseconds
        self._disturbance = disturbance
        self._graphs: dict[int, tuple[Any, Any]] = {}
        shard = Shard.of(config, rank)
        with self._timed("kernels_ms"):
            images = SoftImages() if software_driver() else CompiledImages(device.capability())
            kernels = Kernels(device, images, shard)
        with self._timed("weights_ms"):
            self._weights = self._load_weights()
        cache_shape = (config.max_batch, config.max_seq, shard.kv_heads, config.head_dim)
        cache = self._allocate("kv", [cache_shape] * (2 * config.layers))
        self._cache = dict.fromkeys(cache, cache_shape)
        tokens, positions = self._allocate("io", [(config.max_batch,)] * 2)
        with arena("host"):
            self._positions = device.pinned(config.max_batch)
        self._inputs = Inputs(tokens, positions, self._positions.ctypes.data)
        device.write(positions, np.zeros(config.max_batch, dtype=np.int32))
        self._feed(np.zeros(config.max_batch, dtype=np.int32), 0)
        with self._timed("communicators_ms"):
            share_devices(rank, config.mesh.world, device.count)
            axes = [axis for axis in ("tp", "ep") if getattr(config.mesh, axis) > 1]
            self._communicators = {axis: self._communicator(axis, store, timeout) for axis in axes}
        self._model = Model(
            config,
            shard,
            device,
            kernels,
            self._weights,
            list(zip(cache[::2], cache[1::2], strict=True)),
            self._inputs,
            self._communicators.get("tp"),
            self._communicators.get("ep"),
        )

    def prepare(self) -> None:
        """Gets the graph of every batch size, the largest first."""
        with self._timed("graphs_ms"):
            for batch in sorted(self.config.batch_sizes, reverse=True):
                self._graphs[batch] = self.graphs.capture_or_restore(
                    ("decode", batch), partial(self._model.step, batch), stream=self.device.stream
                )
            self.graphs.finish(vary=self._vary)

    def decode(self) -> dict[int, I32]:
        """Decodes this cell's requests of each batch size; int32 [batch, steps] each, what each step sampled."""
        with self._timed("decode_ms"):
            return {batch: self._decode(batch) for batch in self.config.batch_sizes}

    def close(self) -> None:
        """Ends graphs, communicators and the device, in that order."""
        self.device.synchronise()
        self.graphs.close()
        for communicator in self._communicators.values():
            communicator.close()
        self.device.close()

    def _decode(self, batch: int) -> I32:
        c = self.config
        prompt = prompts(c.seed, c.cell(self.rank), batch, c.prompt, c.vocab)
        graph, output = self._graphs[batch]
        sampled = []
        for step in range(c.steps):
            # After the prompt a step finds its tokens where the one before left them.
            self._feed(prompt[:, step] if step < c.prompt else None, step)
            graph.replay(self.device.stream)
            sampled.append(self.device.read(output.address, output.shape, output.dtype))
        return np.stack(sampled, axis=1)

    def _feed(self, tokens: I32 | None, position: int) -> None:
        self._positions[:] = position
        if tokens is not None:
            self.device.write(self._inputs.tokens, tokens)

    def _vary(self, seed: int) -> None:
        """Puts inputs and cache into the state of a request that is under way, another for each seed."""
        c, generator = self.config, np.random.default_rng(seed)
        for address, shape in self._cache.items():
            self.device.upload(address, generator.integers(-ACTIVATION, ACTIVATION + 1, shape).astype(np.float32))
        tokens = generator.integers(0, c.vocab, c.max_batch, dtype=np.int32)
        self._feed(tokens, int(generator.integers(1, c.max_seq)))

    def _load_weights(self) -> dict[str, int]:
        values = weights.shard(self.config, self.rank)
        addresses = dict(zip(values, self._allocate("weights", [v.shape for v in values.values()]), strict=True))
        for name, address in addresses.items():
            self.device.upload(address, values[name])
        return addresses

    def _allocate(self, place: str, shapes: list[tuple[int, ...]]) -> list[int]:
        """Memory of the arena ``place``, an allocation for each shape of four-byte elements."""
        kind = self._disturbance.kind if self._disturbance and self._disturbance.place == place else ""
        shapes = [(int(np.prod(shape)),) for shape in shapes]
        if kind == "larger":
            shapes[0] = (shapes[0][0] + 1024,)
        with arena(place):
            addresses = [self.device.allocate(shape) for shape in (shapes[:-1] if kind == "missing" else shapes)]
            if kind == "extra":
                self.device.allocate((1024,))
        if kind == "missing":
            addresses.append(self.device.allocate(shapes[-1]))
        return addresses

    def _communicator(self, axis: str, store: Store, timeout: float) -> Communicator:
        ranks = self.config.mesh.group(self.rank, (axis,))
        communicator = Communicator(ranks, self.rank, f"{axis}/{ranks[0]}", store, timeout)
        self.graphs.declare_communicator(communicator.handle, ranks)
        return communicator

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = perf_counter()
        try:
            yield
        finally:
            self.timings[name] = (perf_counter() - start) * 1e3
