# SPDX-License-Identifier: Apache-2.0
"""Capturing a graph natively: what an engine does without an archive, and what a recording starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from cuda.bindings import driver

from foundryd.session.arena import arena
from foundryd.session.driver import call


class ReplayableGraph(Protocol):
    """What ``capture_or_restore`` returns, however the graph came about."""

    def replay(self, stream: int) -> None:
        """Launches the graph on ``stream`` (a driver handle); does not wait."""


class CapturedGraph(ReplayableGraph, Protocol):
    """A graph that this process captured: ``graph`` is the driver's handle, ``outputs`` what an archive can hold."""

    graph: Any
    outputs: Any
    instantiate_flags: int

    def rehearse(self, stream: int) -> None:
        """Replays on ``stream`` exactly as every other time, random numbers included; does not wait."""

    def close(self) -> None:
        """Destroys executable and graph."""


@dataclass
class NativeGraph:
    """A graph that this process captured; ``graph`` and ``executable`` are driver handles."""

    graph: Any
    executable: Any
    outputs: Any
    instantiate_flags: int = 0

    def replay(self, stream: int) -> None:
        """Launches the graph on ``stream``; does not wait."""
        call("cuGraphLaunch", self.executable, driver.CUstream(stream))

    def rehearse(self, stream: int) -> None:
        """``replay``: nothing but memory makes two replays differ."""
        self.replay(stream)

    def close(self) -> None:
        """Destroys executable and graph."""
        if self.executable is not None:
            call("cuGraphExecDestroy", self.executable)
            call("cuGraphDestroy", self.graph)
            self.executable = self.graph = None


def capture_native(fn: Callable[[], Any], stream: int, *, instantiate_flags: int = 0) -> NativeGraph:
    """Runs ``fn`` once as a warm-up, captures it on ``stream`` and instantiates the graph.

    What ``fn`` allocates comes from the graph arena.  A capture that ``fn`` breaks off is ended before its exception
    goes on.
    """
    handle = driver.CUstream(stream)
    with arena("graph"):
        fn()
        call("cuStreamSynchronize", handle)
        call("cuStreamBeginCapture", handle, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        try:
            outputs = fn()
        except BaseException:
            _, graph = driver.cuStreamEndCapture(handle)
            if graph:
                driver.cuGraphDestroy(graph)
            raise
        graph = call("cuStreamEndCapture", handle)
    executable = call("cuGraphInstantiate", graph, instantiate_flags)
    return NativeGraph(graph, executable, outputs, instantiate_flags)
