# SPDX-License-Identifier: Apache-2.0
"""The driver's own cost of a graph: to build it again, node by node, and to instantiate it; nothing is launched.

``cost`` takes a graph down before the next one is built, which then finds memory that was just used.  ``keep`` has all
of them at once, as an engine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from cuda.bindings import driver as cu

from foundryd.session.driver import call

Add = Callable[[Any], Any]
KIND = cu.CUgraphNodeType


@dataclass(frozen=True)
class Reading:
    """A graph as it takes to build it again.

    Attributes
    ----------
    adders : for each node, what adds its like to a graph.
    edges : for each distinct edge data, it and the places of the nodes that its edges join.
    """

    adders: list[Add]
    edges: list[tuple[Any, list[int], list[int]]]

    @property
    def edge_count(self) -> int:
        """How many edges there are."""
        return sum(len(origins) for _, origins, _ in self.edges)


@dataclass(frozen=True)
class Cost:
    """Milliseconds, and how much was built."""

    nodes: int
    edges: int
    build_ms: float
    instantiate_ms: float


@dataclass(frozen=True)
class KeptCost(Cost):
    """The same of a graph that stays, and what of ``build_ms`` two calls take, their bindings included.

    Attributes
    ----------
    kernels : nodes that both calls were made for.
    add_kernels_ms : in ``cuGraphAddKernelNode``.
    copy_attributes_ms : in ``cuGraphKernelNodeCopyAttributes``.
    """

    kernels: int
    add_kernels_ms: float
    copy_attributes_ms: float


@dataclass(frozen=True)
class Kernel:
    """Adds the like of a kernel node, by two calls."""

    node: Any
    params: Any

    def __call__(self, graph: Any) -> Any:
        made = self.add(graph)
        self.copy_attributes(made)
        return made

    def add(self, graph: Any) -> Any:
        """A node without attributes."""
        return call("cuGraphAddKernelNode", graph, None, 0, self.params)

    def copy_attributes(self, made: Any) -> None:
        """Gives a node those of the one that was read."""
        call("cuGraphKernelNodeCopyAttributes", made, self.node)


def read(graph: int) -> Reading:
    """Reads a ``CUgraph``, which must live as long as what is read of it."""
    handle = cu.CUgraph(graph)
    count = call("cuGraphGetNodes", handle, 0)[1]
    nodes = list(call("cuGraphGetNodes", handle, count)[0]) if count else []
    context = call("cuCtxGetCurrent")
    places = {int(node): place for place, node in enumerate(nodes)}
    return Reading([_adder(node, context) for node in nodes], _edges(handle, places))


def cost(reading: Reading) -> Cost:
    """Builds and instantiates once, and takes both down."""
    started = time.perf_counter()
    graph = call("cuGraphCreate", 0)
    _add_edges(graph, [add(graph) for add in reading.adders], reading)
    built = time.perf_counter()
    executable = call("cuGraphInstantiate", graph, 0)
    done = time.perf_counter()
    call("cuGraphExecDestroy", executable)
    call("cuGraphDestroy", graph)
    return Cost(len(reading.adders), reading.edge_count, (built - started) * 1e3, (done - built) * 1e3)


def keep(readings: Mapping[int, Reading]) -> dict[int, KeptCost]:
    """Builds and instantiates all of them, each beside those before it, and then takes all down."""
    with ExitStack() as kept:
        return {key: _kept(reading, kept) for key, reading in readings.items()}


def _kept(reading: Reading, kept: ExitStack) -> KeptCost:
    reading_ns = _reading_ns()
    clock, adding, copying, kernels = time.perf_counter_ns, 0, 0, 0
    started = clock()
    graph = call("cuGraphCreate", 0)
    kept.callback(call, "cuGraphDestroy", graph)
    nodes = []
    for add in reading.adders:
        if isinstance(add, Kernel):
            before = clock()
            made = add.add(graph)
            between = clock()
            add.copy_attributes(made)
            copying += clock() - between
            adding += between - before
            kernels += 1
        else:
            made = add(graph)
        nodes.append(made)
    _add_edges(graph, nodes, reading)
    built = clock()
    executable = call("cuGraphInstantiate", graph, 0)
    done = clock()
    kept.callback(call, "cuGraphExecDestroy", executable)
    # What the clock took is no part of a floor: three readings for a kernel, of which each call has one in its time.
    build = built - started - 3 * kernels * reading_ns
    parts = (adding - kernels * reading_ns, copying - kernels * reading_ns)
    return KeptCost(
        len(nodes), reading.edge_count, build / 1e6, (done - built) / 1e6, kernels, *(part / 1e6 for part in parts)
    )


def _reading_ns() -> float:
    """What one reading of the clock takes, at least."""
    rounds, times = 100, []
    for _ in range(5):
        started = time.perf_counter_ns()
        for _ in range(rounds):
            time.perf_counter_ns()
        times.append((time.perf_counter_ns() - started) / rounds)
    return min(times)


def _add_edges(graph: Any, nodes: list[Any], reading: Reading) -> None:
    for data, origins, targets in reading.edges:
        call(
            "cuGraphAddDependencies",
            graph,
            [nodes[i] for i in origins],
            [nodes[i] for i in targets],
            [data] * len(origins),
            len(origins),
        )


def _edges(handle: Any, places: dict[int, int]) -> list[tuple[Any, list[int], list[int]]]:
    """Edges by their data: some drivers give all edges of one call the data of the first."""
    count = call("cuGraphGetEdges", handle, 0)[3]
    if not count:
        return []
    runs: dict[tuple[int, int, int], tuple[Any, list[int], list[int]]] = {}
    origins, targets, data, _ = call("cuGraphGetEdges", handle, count)
    for origin, target, edge in zip(origins, targets, data, strict=True):
        key = (int(edge.from_port), int(edge.to_port), int(edge.type))
        _, left, right = runs.setdefault(key, (edge, [], []))
        left.append(places[int(origin)])
        right.append(places[int(target)])
    return list(runs.values())


def _adder(node: Any, context: Any) -> Add:
    kind = KIND(int(call("cuGraphNodeGetType", node)))
    if kind is KIND.CU_GRAPH_NODE_TYPE_KERNEL:
        return Kernel(node, call("cuGraphKernelNodeGetParams", node))
    if kind is KIND.CU_GRAPH_NODE_TYPE_EMPTY:
        return lambda graph: call("cuGraphAddEmptyNode", graph, None, 0)
    if kind in (KIND.CU_GRAPH_NODE_TYPE_MEMSET, KIND.CU_GRAPH_NODE_TYPE_MEMCPY):
        name = "Memset" if kind is KIND.CU_GRAPH_NODE_TYPE_MEMSET else "Memcpy"
        params = call(f"cuGraph{name}NodeGetParams", node)
        return lambda graph: call(f"cuGraphAdd{name}Node", graph, None, 0, params, context)
    if kind in (KIND.CU_GRAPH_NODE_TYPE_WAIT_EVENT, KIND.CU_GRAPH_NODE_TYPE_EVENT_RECORD):
        name = "EventWait" if kind is KIND.CU_GRAPH_NODE_TYPE_WAIT_EVENT else "EventRecord"
        event = call(f"cuGraph{name}NodeGetEvent", node)
        return lambda graph: call(f"cuGraphAdd{name}Node", graph, None, 0, event)
    if kind is KIND.CU_GRAPH_NODE_TYPE_HOST:
        params = call("cuGraphHostNodeGetParams", node)
        return lambda graph: call("cuGraphAddHostNode", graph, None, 0, params)
    raise NotImplementedError(f"the graph has a node of type {kind.name}, which this measurement cannot build")
