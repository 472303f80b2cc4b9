# SPDX-License-Identifier: Apache-2.0
"""Graphs of one process in the form that an archive holds: numbered by first use, without nested children."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from foundryd.errors import UnsupportedNode

NONE = 0xFFFFFFFF  # FDY_NONE
KERNEL, MEMCPY, MEMSET, EMPTY, CHILD, COMM = range(6)  # fdy_node_type


@dataclass
class Graph:
    """One captured graph; arrays have the dtypes of ``records.h``, ``params`` is uint8."""

    key: Any
    nodes: np.ndarray
    edges: np.ndarray
    attributes: np.ndarray
    params: np.ndarray
    outputs: Any = None
    instantiate_flags: int = 0

    @property
    def block(self) -> np.ndarray:
        """Bytes that a rank must reproduce: nodes, then parameters (uint8)."""
        return np.concatenate([self.nodes.view(np.uint8).reshape(-1), self.params])

    def param_start(self) -> int:
        """Offset of the parameters in ``block``."""
        return int(self.nodes.nbytes)

    def nodes_at(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For bytes of ``block`` among the parameters (int [n]): the node of each, and its place within the node's own.

        A byte that no node has counts as one of the node before it.
        """
        at = offsets.astype(np.int64) - self.param_start()
        begin = self.nodes["param_offset"].astype(np.int64)
        with_params = np.flatnonzero(self.nodes["param_bytes"])
        order = with_params[np.argsort(begin[with_params], kind="stable")]
        nodes = order[np.maximum(np.searchsorted(begin[order], at, side="right") - 1, 0)]
        return nodes, at - begin[nodes]

    def in_kernels(self, offsets: np.ndarray) -> np.ndarray:
        """Which bytes of ``block`` (int [n]) are parameters of kernels."""
        inside = offsets >= self.param_start()
        found = np.zeros(len(offsets), bool)
        if inside.any():
            found[inside] = self.nodes["type"][self.nodes_at(offsets[inside])[0]] == KERNEL
        return found


def flatten(graph: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Nodes, edges, attributes and parameters of a graph with its child graphs spliced in.

    A child's roots take over the edges into the child node and its leaves the edges out of it; a child without nodes
    becomes an empty node.  Placeholders of communication keep nothing of their child.
    """
    nodes = graph.nodes.copy()
    nodes["child"][nodes["type"] == COMM] = NONE
    if not (nodes["type"] == CHILD).any():
        return nodes, graph.edges, graph.attributes, graph.params

    out_nodes: list[np.ndarray] = []
    out_attributes: list[np.ndarray] = []
    out_params: list[np.ndarray] = []
    out_edges: list[np.ndarray] = []
    entry: list[list[int]] = []
    leave: list[list[int]] = []
    counts = [0, 0, 0]

    def append(part: np.ndarray, attributes: np.ndarray, params: np.ndarray) -> int:
        first = counts[0]
        part = part.copy()
        part["attribute_first"] += counts[1]
        part["param_offset"] += counts[2]
        padded = np.zeros(-(-len(params) // 16) * 16, np.uint8)
        padded[: len(params)] = params
        out_nodes.append(part)
        out_attributes.append(attributes)
        out_params.append(padded)
        counts[0] += len(part)
        counts[1] += len(attributes)
        counts[2] += len(padded)
        return first

    own_attributes, own_params = graph.attributes, graph.params
    append(nodes[:0], own_attributes, own_params)
    for node in nodes:
        one = np.array([node], nodes.dtype)
        if node["type"] != CHILD:
            first = counts[0]
            out_nodes.append(one)
            counts[0] += 1
            entry.append([first])
            leave.append([first])
            continue
        child_nodes, child_edges, child_attributes, child_params = flatten(graph.children[int(node["child"])])
        if len(child_nodes) == 0:
            one["type"], one["child"] = EMPTY, NONE
            first = counts[0]
            out_nodes.append(one)
            counts[0] += 1
            entry.append([first])
            leave.append([first])
            continue
        first = append(child_nodes, child_attributes, child_params)
        shifted = child_edges.copy()
        shifted["from"] += first
        shifted["to"] += first
        out_edges.append(shifted)
        entry.append([first + i for i in range(len(child_nodes)) if i not in set(child_edges["to"].tolist())])
        leave.append([first + i for i in range(len(child_nodes)) if i not in set(child_edges["from"].tolist())])
    for edge in graph.edges:
        sources, targets = leave[int(edge["from"])], entry[int(edge["to"])]
        if edge["type"] != 0 and (len(sources) != 1 or len(targets) != 1):
            raise UnsupportedNode(
                "a programmatic edge touches a child graph, which cannot be spliced: capture without it"
            )
        pairs = np.repeat(np.array([edge], graph.edges.dtype), len(sources) * len(targets))
        pairs["from"] = np.repeat(sources, len(targets))
        pairs["to"] = np.tile(targets, len(sources))
        out_edges.append(pairs)
    return (
        np.concatenate(out_nodes),
        np.concatenate(out_edges) if out_edges else graph.edges[:0],
        np.concatenate(out_attributes),
        np.concatenate(out_params),
    )


@dataclass
class Numbering:
    """Numbers things by first use over all graphs, so that two ranks number alike."""

    numbers: dict[Any, int] = field(default_factory=dict)

    def of(self, thing: Any) -> int:
        """Number of ``thing``, new or known."""
        return self.numbers.setdefault(thing, len(self.numbers))

    def map(self, values: np.ndarray, key: Callable[[int], Any] = lambda v: v) -> np.ndarray:
        """``values`` renumbered, in order; ``NONE`` stays."""
        return np.array([NONE if v == NONE else self.of(key(int(v))) for v in values.tolist()], np.uint32)


def canonical(
    key: Any,
    graph: Any,
    functions: Numbering,
    groups: Numbering,
    group_key: Callable[[int], Any],
    *,
    outputs: Any = None,
    instantiate_flags: int = 0,
) -> Graph:
    """The canonical form of a graph that the hook read; ``group_key`` tells the content of a communication group."""
    nodes, edges, attributes, params = flatten(graph)
    nodes = nodes.copy()
    nodes["function"] = functions.map(nodes["function"])
    nodes["comm_group"] = groups.map(nodes["comm_group"], group_key)
    order = np.lexsort((edges["to_port"], edges["from_port"], edges["to"], edges["from"]))
    return Graph(key, nodes, edges[order], attributes, params, outputs, instantiate_flags)


# What members of one template share of a node; see fdy_node.
_SHARED = ("type", "param_kind", "param_offset", "param_bytes", "attribute_first", "attribute_count", "child")


def template_key(graph: Graph) -> bytes:
    """Equal for graphs that may share a template: node types, edges with their data, attributes, parameter layout."""
    shared = np.stack([graph.nodes[name] for name in _SHARED]) if len(graph.nodes) else np.zeros(0, np.uint32)
    # The counts come first, so that what is nodes in one graph cannot be edges in another.
    counts = (len(graph.nodes), len(graph.edges), len(graph.attributes), len(graph.params))
    return b"".join(
        [
            *(count.to_bytes(8, "little") for count in counts),
            np.ascontiguousarray(shared).tobytes(),
            np.ascontiguousarray(graph.edges).tobytes(),
            np.ascontiguousarray(graph.attributes).tobytes(),
        ]
    )


def field_table(nodes: np.ndarray, function_fields: list[list[tuple[int, int]]]) -> np.ndarray:
    """Boundaries of the fields of a member block: int64 [n][2] of (offset, bytes), ascending.

    Every number of a node is a field; a kernel's parameters are as its function declares them; a driver struct of a
    memcpy or memset node is fields of 8 bytes.
    """
    start = int(nodes.nbytes)
    numbers = np.stack([np.arange(0, start, 4), np.full(start // 4, 4)], axis=1)
    # A layout of no fields ends the table, so that nodes without a function have one to point at.
    layouts = np.array([f for fields in function_fields for f in fields] + [(0, 0)], np.int64)
    sizes = np.array([len(fields) for fields in function_fields] + [0], np.int64)
    kernel = nodes["type"] == KERNEL
    function = np.where(kernel, nodes["function"], len(function_fields)).astype(np.int64)
    counts = np.where(kernel, sizes[function], nodes["param_bytes"].astype(np.int64) // 8)
    owners = np.repeat(np.arange(len(nodes)), counts)
    within = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
    declared = layouts[np.where(kernel[owners], (np.cumsum(sizes) - sizes)[function[owners]] + within, 0)]
    plain = np.stack([8 * within, np.full(len(within), 8)], axis=1)
    table = np.where(kernel[owners][:, None], declared, plain)
    table[:, 0] += start + nodes["param_offset"][owners].astype(np.int64)
    return np.concatenate([numbers, table]).astype(np.int64)


def wide_words(graph: Graph, function_fields: list[list[tuple[int, int]]]) -> np.ndarray:
    """Offsets in the block, int64 [n], of every aligned 8-byte word of a parameter that could hold an address."""
    fields = field_table(graph.nodes, function_fields)[graph.param_start() // 4 :]
    first = (fields[:, 0] + 7) // 8 * 8
    counts = np.maximum(fields.sum(axis=1) - first, 0) // 8
    within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.asarray(np.repeat(first, counts) + 8 * within)
