# SPDX-License-Identifier: Apache-2.0
"""Graphs built from arrays, with their lifetimes: executables go before graphs, graphs before what they splice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd._native import _hook, _rankpatch
from foundryd.archive import index as ix
from foundryd.errors import ArchiveFormatError, DriverCallFailed, UsageError
from foundryd.session.driver import call


class Bindings:
    """What an archive's function and symbol numbers mean in this process.

    ``module_ids`` gives the hook's module for each of the variant's; raises ``DriverCallFailed`` or ``RestoreError``
    if one has no such function or global.
    """

    def __init__(
        self,
        hook: _hook.Hook,
        module_ids: Sequence[int],
        functions: Sequence[ix.Function],
        symbols: Sequence[ix.Symbol],
    ) -> None:
        self.module_ids = list(module_ids)
        self.functions = np.array(
            [
                hook.load_function(self.module_ids[f.module], f.name, np.array(f.settings, _hook.setting_dtype))
                for f in functions
            ],
            np.uint64,
        )
        self.symbols = np.array([hook.global_address(self.module_ids[s.module], s.name)[0] for s in symbols], np.uint64)

    def relocate(self, block: np.ndarray, relocations: np.ndarray) -> None:
        """Writes the addresses of globals into a block (uint8, in place); ``relocations`` are those of the block.

        Raises ``ArchiveFormatError`` if one does not fit.
        """
        try:
            _rankpatch.relocate(block, relocations, self.symbols)
        except ValueError as error:
            raise ArchiveFormatError(f"relocations of the archive do not fit: {error}; capture again") from error


class SmallGraphs:
    """The re-issued collectives, one small graph for each distinct group; they live as long as their users."""

    def __init__(self, hook: _hook.Hook) -> None:
        self._hook = hook
        self.handles: list[int] = []

    def issue(self, comm_ops: np.ndarray) -> None:
        """Issues every group of ``comm_ops`` once, in order of its number."""
        count = int(comm_ops["group"].max()) + 1 if len(comm_ops) else 0
        for group in range(count):
            self.handles.append(self._hook.comm_reissue(comm_ops[comm_ops["group"] == group]))

    def close(self) -> None:
        """Destroys the small graphs."""
        while self.handles:
            self._hook.destroy_graph(self.handles.pop())


class BuiltGraph:
    """A graph that the hook built, and its executable while it has one.

    The graph stays for as long as this does, so that an executable that was given away costs no second building.
    ``changeable`` keeps what ``set_kernel_params`` needs.
    """

    def __init__(
        self,
        hook: _hook.Hook,
        nodes: np.ndarray,
        edges: np.ndarray,
        attributes: np.ndarray,
        params: np.ndarray,
        functions: np.ndarray,
        comm_graphs: list[int],
        instantiate_flags: int = 0,
        *,
        instantiate: bool = True,
        changeable: bool = False,
    ) -> None:
        self._hook = hook
        self._flags = instantiate_flags
        self._executable: Any = None
        self._change: Callable[[np.ndarray, np.ndarray], None] | None = None
        arrays = _hook.GraphArrays(nodes=nodes, edges=edges, attributes=attributes, params=params, children=[])
        self._graph: int | None
        if changeable:
            self._graph, made = hook.build_graph_and_nodes(arrays, functions, comm_graphs)

            def change(changed: np.ndarray, which: np.ndarray) -> None:
                parts = _hook.GraphArrays(
                    nodes=nodes, edges=edges[:0], attributes=attributes, params=changed, children=[]
                )
                hook.set_kernel_params(int(self._executable), parts, functions, made, which)

            self._change = change
        else:
            self._graph = hook.build_graph(arrays, functions, comm_graphs)
        if instantiate:
            try:
                self.instantiate()
            except BaseException:
                self.close()
                raise

    @property
    def executable(self) -> bool:
        """Whether it can be launched."""
        return self._executable is not None

    def instantiate(self) -> None:
        """Makes an executable of its own."""
        self._executable = call("cuGraphInstantiate", driver.CUgraph(self._graph), self._flags)

    def take_over(self, other: BuiltGraph) -> bool:
        """Takes the executable of ``other`` and changes it into this graph's; False if the driver refuses the change.

        The executable may be in flight: an update reaches later launches only (the driver's manual, cuGraphExecUpdate;
        row ``flight.updated`` of the conformance tests).
        """
        if other._flags != self._flags:
            return False
        try:
            call("cuGraphExecUpdate", other._executable, driver.CUgraph(self._graph))
        except DriverCallFailed as error:
            if error.code != driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE:
                raise
            return False
        self._executable, other._executable = other._executable, None
        return True

    def set_kernel_params(self, params: np.ndarray, which: np.ndarray) -> None:
        """Gives the kernels at the places ``which`` of the executable what ``params`` has for them, for later launches.

        Everything else of a node stays as it was built (rows ``exec.set_kernel_params``, ``exec.keeps_attributes`` and
        ``exec.set_behind_programmatic`` of the conformance tests).  Raises ``DriverCallFailed`` if the driver refuses
        one; some of them have changed then.
        """
        if self._change is None or self._executable is None:
            raise UsageError("a graph without an executable, or that was not built changeable: build it so")
        self._change(params, which.astype(np.uint32))

    def launch(self, stream: int) -> None:
        """Launches on ``stream``; does not wait."""
        call("cuGraphLaunch", self._executable, driver.CUstream(stream))

    def drop_executable(self) -> None:
        """Destroys the executable; one that is in flight ends first, as the manual says of cuGraphExecDestroy."""
        if self._executable is not None:
            call("cuGraphExecDestroy", self._executable)
            self._executable = None

    def close(self) -> None:
        """Destroys executable and graph."""
        self.drop_executable()
        if self._graph is not None:
            self._hook.destroy_graph(self._graph)
            self._graph = None
