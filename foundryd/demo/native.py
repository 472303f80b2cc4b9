# SPDX-License-Identifier: Apache-2.0
"""A graph set that only captures: what ``foundryd.GraphSet`` does when no mode is set."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver

from foundryd.demo.device import checked
from foundryd.errors import FoundrydError
from foundryd.settings import Mode


@dataclass(frozen=True)
class DeviceArray:
    """An array on the device: address, shape and NumPy type."""

    address: int
    shape: tuple[int, ...]
    dtype: str


@contextmanager
def arena(name: str) -> Iterator[None]:
    """Arenas belong to the hook; without it nothing happens."""
    yield


class NativeGraph:
    def __init__(self, graph: driver.CUgraph, executable: driver.CUgraphExec) -> None:
        self._graph = graph
        self._executable = executable

    def replay(self, stream: int) -> None:
        checked(driver.cuGraphLaunch, self._executable, stream)

    def close(self) -> None:
        checked(driver.cuGraphExecDestroy, self._executable)
        checked(driver.cuGraphDestroy, self._graph)


class GraphSet:
    """Captures each graph when it is asked for."""

    mode = Mode.OFF
    restored = False
    fallback: FoundrydError | None = None

    def __init__(self) -> None:
        self._graphs: dict[Hashable, tuple[NativeGraph, Any]] = {}

    @classmethod
    def from_env(cls, store: object) -> GraphSet:
        return cls()

    def declare_communicator(self, handle: int, ranks: Sequence[int]) -> None:
        pass

    def capture_or_restore(self, key: Hashable, fn: Callable[[], Any], *, stream: int) -> tuple[NativeGraph, Any]:
        fn()
        checked(driver.cuStreamBeginCapture, stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        outputs = fn()
        graph = checked(driver.cuStreamEndCapture, stream)
        made = NativeGraph(graph, checked(driver.cuGraphInstantiate, graph, 0))
        self._graphs[key] = made, outputs
        return made, outputs

    def finish(self) -> None:
        pass

    def close(self) -> None:
        for graph, _ in self._graphs.values():
            graph.close()
        self._graphs.clear()
