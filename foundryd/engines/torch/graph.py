# SPDX-License-Identifier: Apache-2.0
"""Graphs of a PyTorch program: captured by PyTorch itself, or restored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cuda.bindings import driver

from foundryd.engines.torch import outputs
from foundryd.engines.torch.rng import Prologue, Registered
from foundryd.session.arena import arena
from foundryd.session.driver import call
from foundryd.session.executables import RestoredGraph


class TorchCapture:
    """A graph that PyTorch captured in this process (a ``CapturedGraph``).

    Attributes
    ----------
    result : what the captured function returned.
    outputs : the same, as an archive holds it, with what a replay consumes of each generator.
    """

    def __init__(
        self, graph: torch.cuda.CUDAGraph, result: Any, registered: Sequence[tuple[int, Registered]] = ()
    ) -> None:
        self._torch_graph: torch.cuda.CUDAGraph | None = graph
        self._registered = registered
        self._states = [r.generator.get_state() for _, r in registered]
        self.result = result
        self.graph = graph.raw_cuda_graph()
        flags = call("cuGraphExecGetFlags", driver.CUgraphExec(graph.raw_cuda_graph_exec()))
        self.instantiate_flags = int(flags)
        self.outputs: dict[str, Any] = {}

    def describe(self) -> None:
        """Fills ``outputs``; replays the graph if it was captured with generators that a recording must describe."""
        assert self._torch_graph is not None, "the graph was closed"
        consumed = [[place, r.consumed(self._torch_graph)] for place, r in self._registered]
        device = torch.device("cuda", torch.cuda.current_device())
        self.outputs = {"torch": outputs.encode(self.result, device), "rng": [c for c in consumed if c[1]]}

    def replay(self, stream: int | None = None) -> None:
        """Launches the graph on ``stream`` (a driver handle) or PyTorch's current one; does not wait."""
        assert self._torch_graph is not None, "the graph was closed"
        if stream is None:
            self._torch_graph.replay()
            return
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            self._torch_graph.replay()

    def rehearse(self, stream: int) -> None:
        """Replays with every generator as it was when the graph was captured, and puts the generators back."""
        now = [r.generator.get_state() for _, r in self._registered]
        for (_, registered), state in zip(self._registered, self._states, strict=True):
            registered.generator.set_state(state)
        self.replay(stream)
        for (_, registered), state in zip(self._registered, now, strict=True):
            registered.generator.set_state(state)

    def close(self) -> None:
        """Destroys executable and graph; the tensors that it returned are not to be used any more."""
        if self._torch_graph is not None:
            self._torch_graph.reset()
            self._torch_graph = None
            self.result = None


class TorchRestored:
    """A graph from the archive, with outputs as tensors."""

    def __init__(self, restored: RestoredGraph, device: torch.device, prologues: Sequence[Prologue]) -> None:
        self._restored = restored
        self._prologues = prologues
        self.key = restored.key
        self.result: Any = outputs.decode(restored.outputs["torch"], device)

    def replay(self, stream: int | None = None) -> None:
        """Launches the graph on ``stream`` (a driver handle) or PyTorch's current one; does not wait."""
        if stream is not None and self._prologues:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
                self.replay()
            return
        for prologue in self._prologues:
            prologue.run()
        self._restored.replay(torch.cuda.current_stream().cuda_stream if stream is None else stream)


def capture(
    fn: Callable[[], Any],
    *,
    pool: Any,
    stream: torch.cuda.Stream,
    warmups: int,
    registered: Sequence[tuple[int, Registered]] = (),
    generators: Sequence[torch.Generator] = (),
) -> TorchCapture:
    """Runs ``fn`` ``warmups`` times and captures it, both on ``stream``.

    What ``fn`` allocates under capture comes from ``pool``, whose memory lies in the graph arena.
    """
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    for generator in generators:
        graph.register_generator_state(generator)
    with arena("graph"), torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        result = fn()
    graph.instantiate()
    return TorchCapture(graph, result, registered)
