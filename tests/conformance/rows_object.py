# SPDX-License-Identifier: Apache-2.0
"""Rows about user objects: what graphs, clones and executables keep alive."""

from __future__ import annotations

import ctypes
from typing import Any

from bench import Bench, code, cu, ok, row, wait_until
from rows_graph import kernel_node

# ---- user objects -----------------------------------------------------------------------------------------------


class Object:
    """A user object that counts its destructions."""

    def __init__(self, references: int = 1) -> None:
        self.destroyed: list[int] = []
        self.callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: self.destroyed.append(data or 0))
        pointer = ctypes.cast(self.callback, ctypes.c_void_p).value
        self.handle = ok(cu.cuUserObjectCreate(5, pointer, references, 1))

    def gone(self) -> bool:
        return wait_until(lambda: len(self.destroyed) > 0, 5)

    def kept(self) -> bool:
        return not wait_until(lambda: len(self.destroyed) > 0, 0.1)


def object_graph(x: Bench) -> tuple[Any, Object]:
    graph, held = x.graph(), Object()
    kernel_node(x, graph)
    ok(cu.cuGraphRetainUserObject(graph, held.handle, 1, 1))
    return graph, held


@row("user_object.graph")
def of_graph(x: Bench) -> Any:
    graph, held = object_graph(x)
    before = held.kept()
    ok(cu.cuGraphDestroy(graph))
    return [before, held.gone(), held.destroyed]


@row("user_object.executable")
def of_executable(x: Bench) -> Any:
    graph, held = object_graph(x)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))
    kept = held.kept()
    ok(cu.cuGraphExecDestroy(executable))
    return [kept, held.gone()]


@row("user_object.clone")
def of_clone(x: Bench) -> Any:
    graph, held = object_graph(x)
    copy = ok(cu.cuGraphClone(graph))
    ok(cu.cuGraphDestroy(graph))
    kept = held.kept()
    ok(cu.cuGraphDestroy(copy))
    return [kept, held.gone()]


@row("user_object.child")
def of_child(x: Bench) -> Any:
    """A child-graph node keeps what the small graph kept, and so does an executable made of it."""
    graph, held = object_graph(x)
    outer = x.graph()
    ok(cu.cuGraphAddChildGraphNode(outer, [], 0, graph))
    ok(cu.cuGraphDestroy(graph))
    kept = held.kept()
    executable = ok(cu.cuGraphInstantiate(outer, 0))
    ok(cu.cuGraphDestroy(outer))
    still = held.kept()
    ok(cu.cuGraphExecDestroy(executable))
    return [kept, still, held.gone()]


@row("user_object.update")
def of_update(x: Bench) -> Any:
    """An update takes the new graph's references and lets the old ones go."""
    first, old = object_graph(x)
    second, new = object_graph(x)
    executable = ok(cu.cuGraphInstantiate(first, 0))
    ok(cu.cuGraphDestroy(first))
    ok(cu.cuGraphExecUpdate(executable, second))
    ok(cu.cuGraphDestroy(second))
    out = [old.gone(), new.kept()]
    ok(cu.cuGraphExecDestroy(executable))
    return [*out, new.gone()]


@row("user_object.counts")
def of_counts(x: Bench) -> Any:
    """References of the program and of a graph.

    Left out: releasing some that one does not hold is undefined, and driver 580.159.04 crashed while this row did so.
    """
    held = Object(2)
    out = [
        code(cu.cuUserObjectRetain(held.handle, 1)),
        code(cu.cuUserObjectRelease(held.handle, 1)),
        code(cu.cuUserObjectRelease(held.handle, 1)),
        held.kept(),
        code(cu.cuUserObjectRelease(held.handle, 1)),
        held.gone(),
    ]
    graph = x.graph()
    second = Object()
    out += [
        code(cu.cuGraphRetainUserObject(graph, second.handle, 1, 0)),
        code(cu.cuUserObjectRelease(second.handle, 1)),
        second.kept(),
        code(cu.cuGraphReleaseUserObject(graph, second.handle, 1)),
        second.gone(),
    ]
    return out


@row("user_object.running")
def of_running(x: Bench) -> Any:
    """An executable destroyed while it runs keeps its objects until it has run."""
    graph, held = x.graph(), Object()
    params = x.kernel_params(x.function("take_time"))
    params.kernelParams = ((400,), (ctypes.c_uint32,))
    ok(cu.cuGraphAddKernelNode(graph, [], 0, params))
    ok(cu.cuGraphRetainUserObject(graph, held.handle, 1, 1))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphDestroy(graph))
    stream = x.stream()
    ok(cu.cuGraphLaunch(executable, stream))
    destroyed = code(cu.cuGraphExecDestroy(executable))
    early = bool(held.destroyed)
    ok(cu.cuStreamSynchronize(stream))
    return [destroyed, early, held.gone()]
