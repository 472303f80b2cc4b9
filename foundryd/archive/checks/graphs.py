# SPDX-License-Identifier: Apache-2.0
"""Templates and members: nodes, edges, attributes, and the words in which members differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from foundryd.archive.checks.findings import Findings, in_range
from foundryd.archive.dtypes import Records
from foundryd.archive.index import Template, Variant
from foundryd.archive.members import GraphParts, graph_block, plain_key
from foundryd.errors import UsageError

_CHILD_DEPTH = 8
# What may differ between members, besides parameters.
_VARYING = ("function", "grid", "block", "shared_bytes", "comm_group")


@dataclass(frozen=True)
class _Known:
    """What nodes are made of and refer to: parameter bytes of each function, placeholders."""

    dtypes: Records
    function_bytes: npt.NDArray[np.int64]
    groups: npt.NDArray[np.uint32]


class Shape:
    """Which bytes of a template's block may differ between members or ranks.

    Attributes
    ----------
    length : bytes of the block.
    """

    def __init__(self, graph: GraphParts) -> None:
        of_node = np.zeros(graph.nodes.dtype.itemsize, np.uint8)
        for name in _VARYING:
            of_node[_field(graph, name)] = 1
        may = [
            part
            for each in graph.walk()
            for part in (np.tile(of_node, len(each.nodes)), np.ones(each.params.nbytes, np.uint8))
        ]
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(may), dtype=np.int64)])
        self.length = len(self._before) - 1

    def fixed(self, start: npt.NDArray[np.int64], width: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Whether words, which lie inside the block, have a byte that belongs to the template."""
        wrong: npt.NDArray[np.bool_] = self._before[start + width] - self._before[start] != width
        return wrong


def check_graphs(found: Findings, variant: Variant, groups: npt.NDArray[np.uint32]) -> list[Shape | None]:
    """Templates and members of a variant; ``groups`` are the placeholders of its communication ops.

    Returns
    -------
    The shape of each template, None where it could not be told.
    """
    sizes = [min(max(function.param_bytes, -1), 2**32) for function in variant.functions]
    known = _Known(found.dtypes, np.array(sizes, np.int64), groups)
    shapes = [
        _check_template(found.inside(f"template {number}"), template, known)
        for number, template in enumerate(variant.templates)
    ]
    _check_members(found, variant)
    return shapes


def _check_members(found: Findings, variant: Variant) -> None:
    owners: dict[int, int] = {}
    for number, template in enumerate(variant.templates):
        here = found.inside(f"template {number}")
        here.need(bool(template.members), "has no members")
        for member in template.members:
            if not here.need(
                in_range(member, len(variant.members)),
                f"has member {member}, and there are {len(variant.members)} members",
            ):
                continue
            here.need(member not in owners, f"has member {member}, which template {owners.get(member)} has too")
            owners[member] = number
    keys: dict[Any, int] = {}
    for number, entry in enumerate(variant.members):
        here = found.inside(f"member {number}")
        here.need(
            owners.get(number) == entry.template,
            f"says template {entry.template}, and it is template {owners.get(number)} that has it",
        )
        here.need(0 <= entry.instantiate_flags < 2**32, f"has the impossible flags {entry.instantiate_flags}")
        try:
            key = plain_key(entry.key)
        except UsageError as error:
            here.add(str(error))
            continue
        here.need(key not in keys, f"has the key {entry.key!r}, as member {keys.get(key)} has")
        keys.setdefault(key, number)


def _check_template(found: Findings, template: Template, known: _Known) -> Shape | None:
    graph = _check_graph(found, template, known, 0)
    positions = found.array(template.positions, "<u4", "positions")
    columns = found.length(template.columns, "columns")
    if graph is None:
        return None
    shape = Shape(graph)
    if positions is None or columns is None:
        return shape
    rows, cols, length = len(positions), len(template.members), shape.length
    good = found.need(
        columns == rows * cols * 4,
        f"has {columns} bytes of columns, and {rows} positions in {cols} members need {rows * cols * 4}",
    )
    good &= found.none(positions % 4 != 0, "position", "is not that of a 4-byte word")
    good &= found.none(positions.astype(np.int64) + 4 > length, "position", f"is outside the block of {length} bytes")
    good &= found.none(positions[1:] <= positions[:-1], "position", "is not before the next one")
    if good:
        start = positions.astype(np.int64)
        fixed = shape.fixed(start, np.full(rows, 4, np.int64))
        good = found.none(fixed, "position", "is in a part of a node that belongs to the template") and length % 4 == 0
    if good and found.deep:
        matrix = found.array(template.columns, "<u4", "columns")
        if matrix is not None:
            _check_columns(found, graph, positions, matrix.reshape(rows, cols), known)
    return shape


def _check_graph(found: Findings, template: Template, known: _Known, depth: int) -> GraphParts | None:
    if not found.need(depth < _CHILD_DEPTH, f"has children more than {_CHILD_DEPTH} deep"):
        return None
    nodes = found.array(template.nodes, found.dtypes.node, "nodes")
    edges = found.array(template.edges, found.dtypes.edge, "edges")
    attributes = found.array(template.attributes, found.dtypes.attribute, "attributes")
    params = found.array(template.params, np.uint8, "parameters")
    children = []
    for number, child in enumerate(template.children):
        here = found.inside(f"child {number}")
        here.need(
            not child.members and not child.positions and not child.columns,
            "has members of its own, and the words of a child belong to its parent's block",
        )
        part = _check_graph(here, child, known, depth + 1)
        if part is not None:
            children.append(part)
    if nodes is None or edges is None or attributes is None or params is None or len(children) < len(template.children):
        return None
    found.need(params.nbytes % 4 == 0, f"has {params.nbytes} bytes of parameters, not a multiple of 4")
    graph = GraphParts(nodes, edges, attributes, params, tuple(children))
    _check_nodes(found, graph, known)
    _check_edges(found, len(nodes), edges)
    found.none(attributes["reserved"] != 0, "attribute", "has reserved bits set")
    return graph


def _check_nodes(found: Findings, graph: GraphParts, known: _Known) -> None:
    nodes = graph.nodes
    kinds, none = known.dtypes.node_type, known.dtypes.none
    if not found.none(nodes["type"] >= len(kinds), "node", "has a type that does not exist"):
        return
    functions = len(known.function_bytes)
    kernel, parent, comm = (nodes["type"] == kinds[name] for name in ("KERNEL", "CHILD", "COMM"))
    found.none(kernel & (nodes["function"] >= functions), "node", f"has a function that is not one of {functions}")
    found.none(~kernel & (nodes["function"] != none), "node", "has a function and is no kernel")
    empty = (nodes["grid"] == 0).any(axis=1) | (nodes["block"] == 0).any(axis=1)
    found.none(kernel & empty, "node", "launches an empty grid or block")
    children = len(graph.children)
    found.none(parent & (nodes["child"] >= children), "node", f"has a child that is not one of {children}")
    found.none(~parent & (nodes["child"] != none), "node", "has a child and is no child node")
    used = nodes["child"][parent]
    found.need(
        len(np.unique(used)) == len(used) == children, f"has {children} children and {len(used)} child nodes for them"
    )
    found.none(
        comm & ~np.isin(nodes["comm_group"], known.groups), "node", "is a placeholder of a group that no operation has"
    )
    found.none(~comm & (nodes["comm_group"] != none), "node", "has a communication group and is no placeholder")
    attribute_end = nodes["attribute_first"].astype(np.uint64) + nodes["attribute_count"]
    found.none(
        (nodes["attribute_count"] > 0) & (attribute_end > len(graph.attributes)),
        "node",
        f"has attributes beyond the {len(graph.attributes)} there are",
    )
    _check_params(found, graph, known)


def _check_params(found: Findings, graph: GraphParts, known: _Known) -> None:
    nodes, kinds, forms = graph.nodes, known.dtypes.node_type, known.dtypes.param_kind
    kernel = nodes["type"] == kinds["KERNEL"]
    copy = (nodes["type"] == kinds["MEMCPY"]) | (nodes["type"] == kinds["MEMSET"])
    nothing, listed, extra, struct = (
        nodes["param_kind"] == forms[name] for name in ("NONE", "LIST", "EXTRA", "STRUCT")
    )
    size = nodes["param_bytes"].astype(np.uint64)
    none = nothing & (size == 0)
    fits = np.where(kernel, none | listed | extra, np.where(copy, struct & (size > 0), none))
    found.none(~fits, "node", "has parameters of a kind that its type does not take")
    told = np.flatnonzero(kernel & listed & (nodes["function"] < len(known.function_bytes)))
    wrong = known.function_bytes[nodes["function"][told]] != size[told].astype(np.int64)
    for place in told[wrong][:1]:
        found.add(f"node {place} has {size[place]} bytes of parameters, and its function takes another number")
    start = nodes["param_offset"].astype(np.uint64)
    inside = found.none(
        (size > 0) & (start + size > graph.params.nbytes),
        "node",
        f"has parameters beyond the block of {graph.params.nbytes} bytes",
    )
    if inside:
        having = np.flatnonzero(size > 0)
        having = having[np.argsort(start[having], kind="stable")]
        for place in np.flatnonzero((start + size)[having][:-1] > start[having][1:])[:1]:
            found.add(f"node {having[place]} shares parameter bytes with node {having[place + 1]}")


def _check_edges(found: Findings, count: int, edges: npt.NDArray[Any]) -> None:
    source, target = edges["from"], edges["to"]
    good = found.none((source >= count) | (target >= count), "edge", f"has an end that is not one of {count} nodes")
    found.none((edges["reserved"] != 0).any(axis=1), "edge", "has reserved bytes set")
    if good and not _acyclic(count, source, target):
        found.add("its edges form a cycle")


def _acyclic(count: int, source: npt.NDArray[np.uint32], target: npt.NDArray[np.uint32]) -> bool:
    waiting = np.bincount(target, minlength=count).tolist()
    order = np.argsort(source, kind="stable")
    first = np.searchsorted(source[order], np.arange(count + 1)).tolist()
    targets = target[order].tolist()
    ready = [node for node in range(count) if waiting[node] == 0]
    done = 0
    while ready:
        node = ready.pop()
        done += 1
        for follower in targets[first[node] : first[node + 1]]:
            waiting[follower] -= 1
            if waiting[follower] == 0:
                ready.append(follower)
    return done == count


def _check_columns(
    found: Findings,
    graph: GraphParts,
    positions: npt.NDArray[np.uint32],
    columns: npt.NDArray[np.uint32],
    known: _Known,
) -> None:
    """Looks at every member's differing words; ``columns`` is [positions][members]."""
    if columns.size == 0:
        return
    found.none(columns[:, 0] != 0, "position", "does not leave the template's word to its first member")
    values = columns + graph_block(graph).view("<u4")[positions // 4][:, None]
    start = 0
    for part in graph.walk():
        rows = np.flatnonzero((positions >= start) & (positions < start + part.nodes.nbytes))
        offset = positions[rows] - start
        nodes = part.nodes[offset // part.nodes.dtype.itemsize]
        field = offset % part.nodes.dtype.itemsize
        for name in _VARYING:
            mine = np.isin(field, _field(graph, name))
            wrong = _impossible(name, values[rows[mine]], nodes[mine], known)
            for row, member in np.argwhere(wrong)[:1]:
                place = rows[mine][row]
                found.add(
                    f"position {place} gives column {member} the impossible {name} {values[place, member]} in a node "
                    "of type "
                    f"{nodes[mine][row]['type']}"
                )
        start += part.nodes.nbytes + part.params.nbytes


def _impossible(
    name: str, values: npt.NDArray[np.uint32], nodes: npt.NDArray[Any], known: _Known
) -> npt.NDArray[np.bool_]:
    """Which ``values`` [words][members] of a field no node like ``nodes`` [words] can have."""
    kernel, comm = ((nodes["type"] == known.dtypes.node_type[kind])[:, None] for kind in ("KERNEL", "COMM"))
    changed = values != values[:, :1]
    if name == "function":
        exists = values < len(known.function_bytes)
        takes = np.append(known.function_bytes, -1)[np.where(exists, values, len(known.function_bytes))]
        listed = (nodes["param_kind"] == known.dtypes.param_kind["LIST"])[:, None]
        other_size = takes != nodes["param_bytes"][:, None].astype(np.int64)
        return np.asarray(np.where(kernel, ~exists | (listed & other_size), changed))
    if name == "comm_group":
        return np.where(comm, ~np.isin(values, known.groups), changed)
    if name == "shared_bytes":
        return np.where(kernel, False, changed)
    return np.asarray(np.where(kernel, values == 0, changed))


def _field(graph: GraphParts, name: str) -> list[int]:
    """Offsets of a field's bytes in a node."""
    fields = graph.nodes.dtype.fields
    assert fields is not None
    dtype, offset = fields[name][:2]
    return list(range(offset, offset + dtype.itemsize))
