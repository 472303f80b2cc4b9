# SPDX-License-Identifier: Apache-2.0
"""Graphs built from arrays, with their lifetimes: executables go before graphs, graphs before what they splice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd._native import _hook, _rankpatch
from foundryd.archive import index as ix
from foundryd.errors import ArchiveFormatError, DriverCallFailed, UsageError
from foundryd.interrupts import ANY, uninterrupted
from foundryd.session.driver import call


def distinct(numbers: np.ndarray, count: int, what: str) -> np.ndarray:
    """The numbers that occur, ascending, where there are ``count`` of ``what``; nothing is sorted.

    Raises ``ArchiveFormatError`` if one is too large.
    """
    if len(numbers) and (largest := int(numbers.max())) >= count:
        raise ArchiveFormatError(f"a graph uses {what} {largest} of an archive that has {count}: capture again")
    return np.flatnonzero(np.bincount(numbers))


@dataclass(frozen=True)
class Needs:
    """Numbers of an archive's functions and symbols: integers [functions] and [symbols], each once."""

    functions: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    symbols: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))


class Bindings:
    """What an archive's function and symbol numbers mean in this process, found out when they are first needed.

    An archive has functions for every graph, and an engine waits for a few graphs only.  Not for several threads at
    once.

    Parameters
    ----------
    load : gives the hook's module for a place among the variant's modules; called once for each that is needed.

    Attributes
    ----------
    functions : uint64 [functions], driver handles; 0 for those that nothing needed yet.
    symbols : uint64 [symbols], addresses; 0 likewise.
    has_functions, has_symbols : whether none of them is missing.
    """

    def __init__(
        self,
        hook: _hook.Hook,
        load: Callable[[int], int],
        functions: Sequence[ix.Function],
        symbols: Sequence[ix.Symbol],
    ) -> None:
        self._hook = hook
        self._load = load
        self._modules: dict[int, int] = {}
        self._functions = functions
        self._symbols = symbols
        self.functions = np.zeros(len(functions), np.uint64)
        self.symbols = np.zeros(len(symbols), np.uint64)
        self.has_functions = not functions
        self.has_symbols = not symbols

    def module(self, place: int) -> int:
        """The hook's module for the variant's; loaded now if it is not yet."""
        if place not in self._modules:
            self._modules[place] = self._load(place)
        return self._modules[place]

    def modules_of(self, needs: Needs) -> list[int]:
        """Places of the modules that have these, each once."""
        places = [self._functions[n].module for n in needs.functions] + [self._symbols[n].module for n in needs.symbols]
        return list(dict.fromkeys(places))

    def need(self, needs: Needs) -> None:
        """Loads functions in full, with their settings, and finds symbols, unless they are there.

        Raises ``DriverCallFailed`` or ``RestoreError`` if a module has no such function or global.
        """
        for number in needs.functions[self.functions[needs.functions] == 0].tolist():
            wanted = self._functions[number]
            settings = np.array(wanted.settings, _hook.setting_dtype)
            self.functions[number] = self._hook.load_function(self.module(wanted.module), wanted.name, settings)
        for number in needs.symbols[self.symbols[needs.symbols] == 0].tolist():
            symbol = self._symbols[number]
            self.symbols[number] = self._hook.global_address(self.module(symbol.module), symbol.name)[0]
        self.has_functions = self.has_functions or bool(self.functions.all())
        self.has_symbols = self.has_symbols or bool(self.symbols.all())

    def need_all(self) -> None:
        """Loads every function and finds every symbol."""
        self.need(Needs(np.arange(len(self.functions)), np.arange(len(self.symbols))))

    def relocate(self, block: np.ndarray, relocations: np.ndarray) -> None:
        """Writes the addresses of globals into a block (uint8, in place); ``relocations`` are those of the block.

        Raises ``ArchiveFormatError`` if one does not fit, and what ``need`` raises.
        """
        if not self.has_symbols:
            self.need(Needs(symbols=distinct(relocations["symbol"], len(self.symbols), "symbol")))
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
            with uninterrupted(ANY):
                self.handles.append(self._hook.comm_reissue(comm_ops[comm_ops["group"] == group]))

    def close(self) -> None:
        """Destroys the small graphs."""
        while self.handles:
            with uninterrupted(ANY):
                self._hook.destroy_graph(self.handles.pop())


class BuiltGraph:
    """A graph that the hook built, and its executable while it has one.

    The graph stays until ``drop_graph``, so that an executable that was given away costs no second building.
    Where handlers of signals may raise, whoever makes one or has it do something is ``uninterrupted(ANY)`` meanwhile.
    ``changeable`` keeps what ``set_kernel_params`` needs; ``memory`` is the hook's, for who builds one after another.
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
        memory: _hook.BuildMemory | None = None,
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
            self._graph = hook.build_graph(arrays, functions, comm_graphs, memory)
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

    @property
    def has_graph(self) -> bool:
        """Whether it still has the graph, besides an executable."""
        return self._graph is not None

    def instantiate(self) -> None:
        """Makes an executable of its own."""
        self._executable = call("cuGraphInstantiate", driver.CUgraph(self._graph), self._flags)

    def take_over(self, other: BuiltGraph) -> bool:
        """Takes the executable of ``other`` and changes it into this graph's; False if the driver refuses the change.

        The executable may be in flight: an update reaches later launches only (the driver's manual, cuGraphExecUpdate;
        row ``flight.updated`` of the conformance tests).  However this ends, ``other`` does not get it back, since
        nobody knows what a change that did not come to its end has made of it.
        """
        if other._flags != self._flags:
            return False
        executable, other._executable = other._executable, None
        try:
            call("cuGraphExecUpdate", executable, driver.CUgraph(self._graph))
        except BaseException as error:
            call("cuGraphExecDestroy", executable)
            refused = driver.CUresult.CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
            if isinstance(error, DriverCallFailed) and error.code == refused:
                return False
            raise
        self._executable = executable
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

    def drop_graph(self) -> None:
        """Destroys the graph; the executable stays, and is the last one that this has (row ``exec.launches``)."""
        graph, self._graph = self._graph, None
        if graph is not None:
            self._hook.destroy_graph(graph)

    def drop_executable(self) -> None:
        """Destroys the executable; one that is in flight ends first, as the manual says of cuGraphExecDestroy."""
        executable, self._executable = self._executable, None
        if executable is not None:
            call("cuGraphExecDestroy", executable)

    def close(self) -> None:
        """Destroys executable and graph."""
        try:
            self.drop_executable()
        finally:
            self.drop_graph()
