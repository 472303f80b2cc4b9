# SPDX-License-Identifier: Apache-2.0
"""The driver's own cost of a graph: to build it again, node by node, and to instantiate it; nothing is launched."""

from __future__ import annotations

import time
from collections.abc import Callable
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


@dataclass(frozen=True)
class Cost:
    """Milliseconds, and how much was built."""

    nodes: int
    edges: int
    build_ms: float
    instantiate_ms: float


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
    nodes = [add(graph) for add in reading.adders]
    for data, origins, targets in reading.edges:
        call(
            "cuGraphAddDependencies",
            graph,
            [nodes[i] for i in origins],
            [nodes[i] for i in targets],
            [data] * len(origins),
            len(origins),
        )
    built = time.perf_counter()
    executable = call("cuGraphInstantiate", graph, 0)
    done = time.perf_counter()
    call("cuGraphExecDestroy", executable)
    call("cuGraphDestroy", graph)
    edges = sum(len(origins) for _, origins, _ in reading.edges)
    return Cost(len(nodes), edges, (built - started) * 1e3, (done - built) * 1e3)


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
        return _kernel(node)
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


def _kernel(node: Any) -> Add:
    params = call("cuGraphKernelNodeGetParams", node)

    def add(graph: Any) -> Any:
        made = call("cuGraphAddKernelNode", graph, None, 0, params)
        call("cuGraphKernelNodeCopyAttributes", made, node)
        return made

    return add
