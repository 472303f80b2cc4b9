# SPDX-License-Identifier: Apache-2.0
"""A graph of the control run that is replayed with other parameters from one trial to the next."""

from __future__ import annotations

from types import TracebackType

import numpy as np
from cuda.bindings import driver

from foundryd._native import _hook
from foundryd.capture.canonical import KERNEL, Graph
from foundryd.capture.snapshots import Bytes
from foundryd.errors import DriverCallFailed
from foundryd.session.building import Bindings, BuiltGraph, SmallGraphs
from foundryd.session.driver import call


class Rehearsal:
    """One graph, built when it is first replayed.

    A trial writes the parameters of those kernels alone whose bytes are not what the executable has, whoever gave them;
    on an H200 a kernel takes 1.5 us and another executable 10 ms.  What the driver does not take this way (it refuses
    the node, or the bytes are of a copy or a fill) comes with a new graph.

    Attributes
    ----------
    built : how many graphs the replays have taken so far.
    """

    def __init__(
        self,
        hook: _hook.Hook,
        graph: Graph,
        relocations: np.ndarray,
        bindings: Bindings,
        small: SmallGraphs,
        stream: int,
    ) -> None:
        self.built = 0
        self._hook, self._graph, self._relocations = hook, graph, relocations
        self._bindings, self._small, self._stream = bindings, small, stream
        self._current: BuiltGraph | None = None
        self._has = np.zeros(0, np.uint8)  # the parameters of the executable
        self._block = graph.block
        owners = np.flatnonzero(graph.nodes["param_bytes"])
        begin = graph.nodes["param_offset"][owners].astype(np.intp)
        order = np.argsort(begin, kind="stable")
        self._owners, self._begin = owners[order], begin[order]

    def replay(self, params: Bytes) -> None:
        """Launches the graph with these parameters, and waits."""
        start = self._graph.param_start()
        self._block[start:] = params
        self._bindings.relocate(self._block, self._relocations)
        wanted = self._block[start:]
        if not self._changed_into(wanted):
            self.close()
            self._current = BuiltGraph(
                self._hook,
                self._graph.nodes,
                self._graph.edges,
                self._graph.attributes,
                wanted.copy(),
                self._bindings.functions,
                self._small.handles,
                changeable=True,
            )
            self.built += 1
        self._has = wanted.copy()
        assert self._current is not None
        self._current.launch(self._stream)
        call("cuStreamSynchronize", driver.CUstream(self._stream))

    def close(self) -> None:
        """Destroys executable and graph."""
        if self._current is not None:
            self._current.close()
            self._current = None

    def __enter__(self) -> Rehearsal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _changed_into(self, wanted: Bytes) -> bool:
        """Whether the executable has these parameters now; if not, what it has is not known."""
        if self._current is None:
            return False
        which = self._differing(wanted)
        if not len(which):
            return True
        if (self._graph.nodes["type"][which] != KERNEL).any():
            return False
        try:
            self._current.set_kernel_params(wanted, which)
        except DriverCallFailed:
            return False
        return True

    def _differing(self, wanted: Bytes) -> np.ndarray:
        """The nodes whose parameters are not those of the executable."""
        differs = wanted != self._has
        if not len(self._begin) or not differs.any():
            return self._owners[:0]
        return np.asarray(self._owners[np.logical_or.reduceat(differs, self._begin)])
