# SPDX-License-Identifier: Apache-2.0
"""Canonical graphs: splicing children in keeps what runs before what; numbering follows first use."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from foundryd._native import _hook
from foundryd.capture.canonical import (
    CHILD,
    EMPTY,
    KERNEL,
    NONE,
    Graph,
    Numbering,
    canonical,
    field_table,
    flatten,
    template_key,
)
from foundryd.errors import UnsupportedNode


def graph(nodes, edges=(), children=()):
    table = np.zeros(len(nodes), _hook.node_dtype)
    params = np.zeros(16 * len(nodes), np.uint8)
    for i, (row, fields) in enumerate(zip(table, nodes, strict=True)):
        row["function"] = row["comm_group"] = row["child"] = NONE
        row["param_offset"] = 16 * i
        for name, value in fields.items():
            row[name] = value
        params[16 * i : 16 * i + 8] = np.frombuffer(np.uint64(fields.get("function", 0)).tobytes(), np.uint8)
    links = np.zeros(len(edges), _hook.edge_dtype)
    for row, (a, b, *rest) in zip(links, edges, strict=True):
        row["from"], row["to"] = a, b
        row["type"] = rest[0] if rest else 0
    return SimpleNamespace(
        nodes=table, edges=links, attributes=np.zeros(0, _hook.attribute_dtype), params=params, children=list(children)
    )


def kernel(function):
    return {"type": KERNEL, "function": function, "param_bytes": 8}


def order(nodes, edges):
    """Pairs of function numbers (before, after), by reachability over kernels."""
    reach = {(int(e["from"]), int(e["to"])) for e in edges}
    for middle in range(len(nodes)):
        reach |= {(a, d) for a, b in reach if b == middle for c, d in reach if c == middle}
    named = nodes["function"]
    return {(int(named[a]), int(named[b])) for a, b in reach if named[a] != NONE and named[b] != NONE}


def test_a_spliced_child_runs_between_its_neighbours():
    child = graph([kernel(10), kernel(11), kernel(12)], [(0, 1), (0, 2)])
    outer = graph([kernel(1), {"type": CHILD, "child": 0}, kernel(2)], [(0, 1), (1, 2)], [child])
    nodes, edges, _, params = flatten(outer)
    assert sorted(nodes["function"].tolist()) == [1, 2, 10, 11, 12]
    assert order(nodes, edges) == {
        (1, 10), (1, 11), (1, 12), (1, 2), (10, 11), (10, 12), (10, 2), (11, 2), (12, 2)
    }  # fmt: skip
    for node in nodes:  # every kernel found its own parameters again
        at = int(node["param_offset"])
        assert int(params[at : at + 8].view(np.uint64)[0]) == int(node["function"])


def test_children_nest():
    inner = graph([kernel(20)])
    middle = graph([{"type": CHILD, "child": 0}, kernel(21)], [(0, 1)], [inner])
    outer = graph([kernel(1), {"type": CHILD, "child": 0}], [(0, 1)], [middle])
    nodes, edges, _, _ = flatten(outer)
    assert order(nodes, edges) == {(1, 20), (1, 21), (20, 21)}


def test_a_child_without_nodes_keeps_its_place():
    outer = graph([kernel(1), {"type": CHILD, "child": 0}, kernel(2)], [(0, 1), (1, 2)], [graph([])])
    nodes, edges, _, _ = flatten(outer)
    assert (nodes["type"] == EMPTY).sum() == 1
    assert order(nodes, edges) == {(1, 2)}


def test_a_programmatic_edge_into_several_roots_is_refused():
    child = graph([kernel(10), kernel(11)])
    with pytest.raises(UnsupportedNode, match="programmatic"):
        flatten(graph([kernel(1), {"type": CHILD, "child": 0}], [(0, 1, 1)], [child]))


def test_numbers_follow_first_use_whatever_the_process_called_them():
    def numbered(offset):
        functions, groups = Numbering(), Numbering()
        made = [
            canonical(k, graph([kernel(f + offset) for f in fs]), functions, groups, lambda g: g)
            for k, fs in (("a", (7, 3)), ("b", (3, 9)))
        ]
        return [g.nodes["function"].tolist() for g in made]

    assert numbered(0) == numbered(100) == [[0, 1], [1, 2]]


def test_template_key_sees_edges_their_data_and_attributes_but_not_functions():
    def key(**change):
        base = graph([kernel(1), kernel(change.pop("function", 2))], [(0, 1, change.pop("edge", 0))])
        if change.pop("attribute", False):
            base.attributes = np.ones(1, _hook.attribute_dtype)
        return template_key(canonical("k", base, Numbering(), Numbering(), lambda g: g))

    assert key() == key(function=5)
    assert key() != key(edge=1)
    assert key() != key(attribute=True)


FREE = {"function", "grid", "block", "shared_bytes", "comm_group"}  # what members may differ in, see fdy_node


def whole(nodes, edges=2, attributes=2, params=64):
    return Graph(
        "k",
        np.zeros(nodes, _hook.node_dtype),
        np.zeros(edges, _hook.edge_dtype),
        np.zeros(attributes, _hook.attribute_dtype),
        np.zeros(params, np.uint8),
    )


@pytest.mark.parametrize("part", ["nodes", "edges", "attributes"])
def test_every_field_is_in_the_template_key_or_free(part):
    """A struct with a new field fails here until it is said which of both it is."""
    table = getattr(whole(3), part)
    assert table.dtype.names
    for name in table.dtype.names:
        for last in range(int(np.prod(table.dtype[name].shape, dtype=int))):
            changed = whole(3)
            getattr(changed, part)[name].reshape(len(table), -1)[-1, last] = 1
            free = part == "nodes" and name in FREE
            assert (template_key(changed) == template_key(whole(3))) == free, name


def test_parameters_are_in_the_template_key_by_their_length_only():
    changed = whole(3)
    changed.params[5] = 1
    assert template_key(changed) == template_key(whole(3))
    assert template_key(whole(3, params=68)) != template_key(whole(3))


def test_bytes_of_nodes_are_never_taken_for_edges():
    random = np.random.default_rng(1)
    raw = bytearray(random.integers(0, 256, 112, np.uint8).tobytes())
    raw[0] = ord("|")
    four = whole(4, edges=0, attributes=0)
    rows = np.frombuffer(bytes(raw), np.uint32).reshape(7, 4)
    shared = ("type", "param_kind", "param_offset", "param_bytes", "attribute_first", "attribute_count", "child")
    for name, row in zip(shared, rows, strict=True):
        four.nodes[name] = row
    none = whole(0, edges=7, attributes=0)
    none.edges = np.frombuffer(bytes(raw[1:]) + b"|", _hook.edge_dtype)
    assert template_key(four) != template_key(none)


def test_cluster_shapes_have_templates_of_their_own():
    def key(*shape):
        one = whole(1, attributes=1)
        one.attributes["id"] = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        one.attributes["value"][0, :12] = np.array(shape, "<u4").view(np.uint8)
        return template_key(one)

    assert len({key(2, 1, 1), key(1, 2, 1), key(1, 1, 2), key(4, 1, 1), template_key(whole(1, attributes=1))}) == 5


def test_field_boundaries_cover_every_parameter_of_every_kernel():
    made = canonical("k", graph([kernel(0), kernel(1)]), Numbering(), Numbering(), lambda g: g)
    table = field_table(made.nodes, [[(0, 4), (4, 4)], [(0, 8)]])
    start = made.param_start()
    assert table[-3:].tolist() == [[start, 4], [start + 4, 4], [start + 16, 8]]
    assert (np.diff(table[:, 0]) > 0).all()
    assert len(table) == start // 4 + 3
