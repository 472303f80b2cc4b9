# SPDX-License-Identifier: Apache-2.0
"""Rows about executables: instantiation, launches, updates and their refusals."""

from __future__ import annotations

import ctypes
from typing import Any

from bench import Bench, chain, code, cu, fill, handle, name_of, ok, raw, row

IDS = cu.CUlaunchAttributeID
PRIORITIES = 8  # CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY


class UpdateInfo(ctypes.Structure):
    """CUgraphExecUpdateResultInfo: the bindings give none after a refusal."""

    _fields_ = (("result", ctypes.c_int), ("node", ctypes.c_void_p), ("origin", ctypes.c_void_p))


def update(executable: Any, graph: Any) -> list[Any]:
    """Code and result of an update, and whether it names nodes."""
    info = UpdateInfo()
    got = raw("cuGraphExecUpdate_v2", handle(executable), handle(graph), ctypes.byref(info))
    result = name_of(cu.CUgraphExecUpdateResult(info.result)).removeprefix("GRAPH_EXEC_UPDATE_")
    return [got, result, info.node is not None, info.origin is not None]


@row("exec.flags")
def flags(x: Bench) -> Any:
    graph, _ = chain(x, [1], x.buffer(64))
    out = []
    for given in (0, 1, 8, 9, 16):
        got = cu.cuGraphInstantiate(graph, given)
        out.append([code(got), ok(cu.cuGraphExecGetFlags(got[1])) if code(got) == "SUCCESS" else None])
    params = cu.CUDA_GRAPH_INSTANTIATE_PARAMS()
    params.flags = 2
    params.hUploadStream = x.stream()
    got = cu.cuGraphInstantiateWithParams(graph, params)
    out.append([code(got), ok(cu.cuGraphExecGetFlags(got[1])), int(params.result_out)])
    return out


@row("exec.launches")
def launches(x: Bench) -> Any:
    """Launched often, on several streams, and after its graph is gone."""
    target = x.buffer(64)
    graph, _ = chain(x, [1, 1, 1], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    uploaded = code(cu.cuGraphUpload(executable, x.stream()))
    ok(cu.cuGraphDestroy(graph))
    for stream in (x.stream(), x.stream(), 0):
        for _ in range(5):
            ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuCtxSynchronize())
    return [uploaded, x.read(target)]


@row("exec.independent")
def independent(x: Bench) -> Any:
    """Changing the graph after instantiation changes no executable."""
    target = x.buffer(64)
    graph, nodes = chain(x, [1], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphKernelNodeSetParams(nodes[0], x.kernel_params(value=100, address=target)))
    x.launch(executable)
    return x.read(target)


@row("exec.set_kernel_params")
def set_kernel_params(x: Bench) -> Any:
    """New parameters and function for a node of an executable; the graph's node stays as it is."""
    target = x.buffer(64, 3)
    graph, nodes = chain(x, [1, 1], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    params = x.kernel_params(x.function("scale_value"), 10, address=target)
    params.gridDimX = 4
    changed = code(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], params))
    x.launch(executable)
    first = x.read(target)
    kept = ok(cu.cuGraphKernelNodeGetParams(nodes[0]))
    x.run(graph)
    wrong, others = chain(x, [1], target)
    return [
        changed,
        first,
        int(kept.func) == int(x.function("add_value")),
        kept.gridDimX,
        x.read(target),
        code(cu.cuGraphExecKernelNodeSetParams(executable, others[0], params)),
        len(x.nodes(wrong)),
    ]


@row("exec.set_by_kern")
def set_by_kern(x: Bench) -> Any:
    """From a function of a module to a kernel of a library, and back."""
    target = x.buffer(64)
    graph, nodes = chain(x, [1], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    there = code(
        cu.cuGraphExecKernelNodeSetParams(
            executable, nodes[0], x.kernel_params(kernel=x.kernel("add_value"), value=10, address=target)
        )
    )
    x.launch(executable)
    back = code(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], x.kernel_params(value=100, address=target)))
    x.launch(executable)
    return [there, back, x.read(target)]


@row("exec.keeps_attributes")
def keeps_attributes(x: Bench) -> Any:
    """Parameters carry no attributes: a cooperative node stays one, and then refuses too large a grid."""
    target = x.buffer(64)
    graph, nodes = chain(x, [1], target)
    value = cu.CUkernelNodeAttrValue()
    value.cooperative = 1
    ok(cu.cuGraphKernelNodeSetAttribute(nodes[0], IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    changed = code(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], x.kernel_params(value=5, address=target)))
    x.launch(executable)
    plain, _ = chain(x, [1], target)
    large = x.kernel_params(value=5, address=target)
    large.gridDimX = 1 << 20
    return [
        changed,
        x.read(target),
        update(executable, plain),
        code(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], large)),
    ]


@row("exec.set_behind_programmatic")
def set_behind_programmatic(x: Bench) -> Any:
    """New parameters for the kernels at both ends of an edge with data."""
    attribute = cu.CUlaunchAttribute()
    attribute.id = IDS.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    graph = x.captured(lambda s: (ok(x.add(s)), ok(x.add_with_attributes(s, [attribute])), ok(x.add(s))))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    got = [code(cu.cuGraphExecKernelNodeSetParams(executable, n, x.kernel_params(value=10))) for n in x.nodes(graph)]
    x.clear(x.words, 64)
    x.launch(executable)
    return [got, x.read(x.words)]


@row("exec.change_in_flight")
def change_in_flight(x: Bench) -> Any:
    """A change does not reach launches that are already enqueued."""
    target = x.buffer(64)
    graph, nodes = chain(x, [1], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    stream = x.stream()
    x.busy(stream)
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], x.kernel_params(value=100, address=target)))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    return x.read(target)


@row("exec.global_written_later")
def global_written_later(x: Bench) -> Any:
    """A module's variable written after instantiation is seen by the next launch."""
    out = x.buffer(4)
    params = x.kernel_params(x.function("bump_counter"))
    params.kernelParams = ((out,), (ctypes.c_void_p,))
    graph = x.graph()
    ok(cu.cuGraphAddKernelNode(graph, [], 0, params))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    counter, _ = ok(cu.cuModuleGetGlobal(x.module, b"conformance_counter"))
    x.write(int(counter), [500])
    x.launch(executable)
    return x.read(out)


@row("exec.set_fill")
def set_fill(x: Bench) -> Any:
    target = x.buffer(256)

    def attempt(before: dict[str, int], after: dict[str, int]) -> Any:
        x.clear(target, 256)
        params = x.memset_params(1, 64)
        params.dst = target
        for name, value in before.items():
            setattr(params, name, value)
        graph = x.graph()
        node = ok(cu.cuGraphAddMemsetNode(graph, [], 0, params, x.context))
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        for name, value in after.items():
            setattr(params, name, value)
        got = code(cu.cuGraphExecMemsetNodeSetParams(executable, node, params, x.context))
        x.launch(executable)
        return [got, sum(v != 0 for v in x.read(target, 256)), x.read(target)[0]]

    return {
        "value": attempt({}, {"value": 2}),
        "wider": attempt({}, {"width": 128}),
        "narrower": attempt({}, {"width": 32}),
        "element": attempt({}, {"elementSize": 1, "width": 4, "value": 3}),
        "rows_value": attempt({"height": 2, "pitch": 512}, {"value": 2}),
        "rows_width": attempt({"height": 2, "pitch": 512}, {"width": 32}),
        "to_rows": attempt({}, {"height": 2, "pitch": 512}),
    }


@row("exec.set_copy")
def set_copy(x: Bench) -> Any:
    target, source = x.buffer(64), x.buffer(64, 9)
    pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))
    graph = x.graph()
    node = ok(cu.cuGraphAddMemcpyNode(graph, [], 0, x.copy_params(target, source, 64), x.context))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    longer = code(cu.cuGraphExecMemcpyNodeSetParams(executable, node, x.copy_params(target, source, 128), x.context))
    from_host = x.copy_params(target, 0, 64)
    from_host.srcMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_HOST
    from_host.srcHost = pinned
    host = code(cu.cuGraphExecMemcpyNodeSetParams(executable, node, from_host, x.context))
    x.launch(executable)
    out = [longer, host, sum(v == 9 for v in x.read(target, 64))]
    ok(cu.cuMemFreeHost(pinned))
    return out


@row("exec.set_child")
def set_child(x: Bench) -> Any:
    target = x.buffer(64)
    inner, _ = chain(x, [1, 1], target)
    same, _ = chain(x, [10, 10], target)
    longer, _ = chain(x, [1, 1, 1], target)
    outer = x.graph()
    node = ok(cu.cuGraphAddChildGraphNode(outer, [], 0, inner))
    executable = ok(cu.cuGraphInstantiate(outer, 0))
    changed = code(cu.cuGraphExecChildGraphNodeSetParams(executable, node, same))
    x.launch(executable)
    return [changed, x.read(target), code(cu.cuGraphExecChildGraphNodeSetParams(executable, node, longer))]


@row("exec.set_inside_child")
def set_inside_child(x: Bench) -> Any:
    """A node of a child graph, addressed in the executable of the parent."""
    target = x.buffer(64)
    inner, nodes = chain(x, [1], target)
    outer = x.graph()
    made = ok(cu.cuGraphAddChildGraphNode(outer, [], 0, inner))
    held = ok(cu.cuGraphNodeFindInClone(nodes[0], ok(cu.cuGraphChildGraphNodeGetGraph(made))))
    executable = ok(cu.cuGraphInstantiate(outer, 0))
    got = code(cu.cuGraphExecKernelNodeSetParams(executable, held, x.kernel_params(value=7, address=target)))
    x.launch(executable)
    return [got, x.read(target)]


@row("exec.set_event")
def set_event(x: Bench) -> Any:
    first, second = x.event(), x.event()
    graph = x.graph()
    record = ok(cu.cuGraphAddEventRecordNode(graph, [], 0, first))
    wait = ok(cu.cuGraphAddEventWaitNode(graph, [], 0, first))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    out = [
        code(cu.cuGraphExecEventRecordNodeSetEvent(executable, record, second)),
        code(cu.cuGraphExecEventWaitNodeSetEvent(executable, wait, second)),
    ]
    x.launch(executable)
    return [*out, code(cu.cuEventQuery(second)), int(ok(cu.cuGraphEventRecordNodeGetEvent(record))) == int(first)]


@row("exec.enabled")
def enabled(x: Bench) -> Any:
    target = x.buffer(64)
    graph, nodes = chain(x, [1, 10], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    got = code(cu.cuGraphNodeSetEnabled(executable, nodes[1], 0))
    x.launch(executable)
    first = x.read(target)
    state = ok(cu.cuGraphNodeGetEnabled(executable, nodes[1]))
    ok(cu.cuGraphNodeSetEnabled(executable, nodes[1], 1))
    x.launch(executable)
    return [got, first, state, x.read(target)]


# ---- updates of the whole ---------------------------------------------------------------------------------------


@row("exec.update")
def whole_update(x: Bench) -> Any:
    target = x.buffer(64)
    graph, nodes = chain(x, [1, 2], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    other, _ = chain(x, [10, 20], target)
    got = update(executable, other)
    ok(cu.cuGraphDestroy(other))
    x.launch(executable)
    first = x.read(target)
    single = code(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], x.kernel_params(value=100, address=target)))
    x.launch(executable)
    return [got, first, single, x.read(target)]


@row("exec.update_refusals")
def update_refusals(x: Bench) -> Any:
    """Topologies, types and attributes that an executable does not take."""
    target = x.buffer(64)

    def attempt(make: Any, instantiate: int = 0, base: Any = None) -> Any:
        x.clear(target, 64)
        graph = chain(x, [1, 1, 1], target)[0] if base is None else base()
        executable = ok(cu.cuGraphInstantiate(graph, instantiate))
        got = update(executable, make())
        x.launch(executable)
        return [got, x.read(target)[0]]

    def with_attribute(name: str, **fields: Any) -> Any:
        graph, nodes = chain(x, [5, 5, 5], target)
        value = cu.CUkernelNodeAttrValue()
        fill(value, fields)
        ok(cu.cuGraphKernelNodeSetAttribute(nodes[1], getattr(IDS, f"CU_LAUNCH_ATTRIBUTE_{name}"), value))
        return graph

    def fan(first_second: bool) -> Any:
        """Two kernels into one; the edges added in one order or the other."""
        graph = x.graph()
        a, b, c = (
            ok(cu.cuGraphAddKernelNode(graph, [], 0, x.kernel_params(value=v, address=target))) for v in (1, 2, 4)
        )
        for origin in (a, b) if first_second else (b, a):
            ok(cu.cuGraphAddDependencies(graph, [origin], [c], [cu.CUgraphEdgeData()], 1))
        return graph

    def reordered() -> Any:
        """The same chain, its nodes made in the opposite order."""
        graph = x.graph()
        nodes = [ok(cu.cuGraphAddKernelNode(graph, [], 0, x.kernel_params(value=5, address=target))) for _ in range(3)]
        for origin, end in ((2, 1), (1, 0)):
            ok(cu.cuGraphAddDependencies(graph, [nodes[origin]], [nodes[end]], [cu.CUgraphEdgeData()], 1))
        return graph

    def rewired() -> Any:
        graph, nodes = chain(x, [5, 5, 5], target)
        ok(cu.cuGraphAddDependencies(graph, [nodes[0]], [nodes[2]], [cu.CUgraphEdgeData()], 1))
        return graph

    def open_chain() -> Any:
        graph, nodes = chain(x, [5, 5, 5], target)
        ok(cu.cuGraphRemoveDependencies(graph, [nodes[1]], [nodes[2]], [cu.CUgraphEdgeData()], 1))
        return graph

    def programmatic() -> Any:
        graph, nodes = chain(x, [5, 5, 5], target)
        data = cu.CUgraphEdgeData()
        data.from_port = data.type = 1
        ok(cu.cuGraphRemoveDependencies(graph, [nodes[1]], [nodes[2]], [cu.CUgraphEdgeData()], 1))
        ok(cu.cuGraphAddDependencies(graph, [nodes[1]], [nodes[2]], [data], 1))
        return graph

    cluster = {"x": 2, "y": 1, "z": 1}
    return {
        "shorter": attempt(lambda: chain(x, [5, 5], target)[0]),
        "longer": attempt(lambda: chain(x, [5, 5, 5, 5], target)[0]),
        "type": attempt(lambda: chain(x, [5, 5, 5], target, "kmk")[0]),
        "more_edges": attempt(rewired),
        "fewer_edges": attempt(open_chain),
        "node_order": attempt(reordered),
        "edge_order": attempt(lambda: fan(False), base=lambda: fan(True)),
        "edge_data": attempt(programmatic),
        "cooperative": attempt(lambda: with_attribute("COOPERATIVE", cooperative=1)),
        "cluster": attempt(lambda: with_attribute("CLUSTER_DIMENSION", clusterDim=cluster)),
        "priority": attempt(lambda: with_attribute("PRIORITY", priority=-2)),
        "priority_used": attempt(lambda: with_attribute("PRIORITY", priority=-2), PRIORITIES),
        "domain": attempt(
            lambda: with_attribute(
                "MEM_SYNC_DOMAIN", memSyncDomain=cu.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE
            )
        ),
        "function": attempt(lambda: _with_function(x, target)),
        "kernel_handle": attempt(lambda: _with_kernel(x, target)),
        "extra": attempt(lambda: _with_extra(x, target)),
    }


def _with_function(x: Bench, target: int) -> Any:
    graph, nodes = chain(x, [5, 5, 5], target)
    ok(cu.cuGraphKernelNodeSetParams(nodes[1], x.kernel_params(x.function("scale_value"), 2, address=target)))
    return graph


def _with_kernel(x: Bench, target: int) -> Any:
    graph, nodes = chain(x, [5, 5, 5], target)
    ok(cu.cuGraphKernelNodeSetParams(nodes[1], x.kernel_params(kernel=x.kernel("add_value"), value=5, address=target)))
    return graph


def _with_extra(x: Bench, target: int) -> Any:
    from rows_module import Extra

    graph, nodes = chain(x, [5, 5, 5], target)
    block = Extra(target.to_bytes(8, "little") + (5).to_bytes(4, "little") + (64).to_bytes(4, "little"))
    params = x.kernel_params()
    params.kernelParams = 0
    params.extra = block.address()
    ok(cu.cuGraphKernelNodeSetParams(nodes[1], params))
    return graph


@row("exec.update_keeps_handles")
def update_keeps_handles(x: Bench) -> Any:
    """After an update the executable still answers to the nodes of the graph that it was made of, not the new one's."""
    target = x.buffer(64)
    graph, nodes = chain(x, [1], target)
    other, others = chain(x, [1], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    ok(cu.cuGraphExecUpdate(executable, other))
    params = x.kernel_params(value=5, address=target)
    return [
        code(cu.cuGraphExecKernelNodeSetParams(executable, nodes[0], params)),
        code(cu.cuGraphExecKernelNodeSetParams(executable, others[0], params)),
    ]


@row("exec.branches")
def branches(x: Bench) -> Any:
    """A diamond: both branches run before what joins them."""
    number = x.buffer(4)
    graph = x.graph()

    def digit(value: int, before: list[Any], address: int) -> Any:
        params = x.kernel_params(x.function("append_digit"))
        params.kernelParams = ((address, value), (ctypes.c_void_p, ctypes.c_uint32))
        return ok(cu.cuGraphAddKernelNode(graph, before, len(before), params))

    top = digit(1, [], number)
    left = digit(2, [top], number)
    right = digit(3, [top], number + 8)
    digit(4, [left, right], number)
    x.run(graph)
    return [x.read64(number), x.read64(number + 8)]


@row("exec.branch_does_not_wait")
def branch_does_not_wait(x: Bench) -> Any:
    """A branch that waits for an outside event does not hold up the branch beside it."""
    event, through = x.event(), x.event()
    gate = x.stream()
    number = x.buffer(4)
    graph = x.graph()
    wait = ok(cu.cuGraphAddEventWaitNode(graph, [], 0, event))
    params = x.kernel_params(x.function("append_digit"))
    params.kernelParams = ((number, 1), (ctypes.c_void_p, ctypes.c_uint32))
    ok(cu.cuGraphAddKernelNode(graph, [wait], 1, params))
    params.kernelParams = ((number + 8, 2), (ctypes.c_void_p, ctypes.c_uint32))
    free = ok(cu.cuGraphAddKernelNode(graph, [], 0, params))
    ok(cu.cuGraphAddEventRecordNode(graph, [free], 1, through))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    x.busy(gate, 600)
    ok(cu.cuEventRecord(event, gate))
    stream = x.stream()
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuEventSynchronize(through))
    early = code(cu.cuEventQuery(event))
    ok(cu.cuStreamSynchronize(stream))
    return [early, x.read64(number), x.read64(number + 8)]


@row("exec.launch_in_capture")
def launch_in_capture(x: Bench) -> Any:
    """An executable that is launched into a capture, first of all and after a launch of its own."""
    graph, _ = chain(x, [1, 1], x.buffer(64))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    out = []
    for _ in range(2):
        stream = x.stream()
        x.begin(stream)
        out.append([code(cu.cuGraphLaunch(executable, stream)), code(cu.cuStreamEndCapture(stream))])
        x.launch(executable)
    return out


@row("exec.allocation_nodes")
def allocation_nodes(x: Bench) -> Any:
    """Memory allocated and freed inside a capture."""
    stream = x.stream()
    x.begin(stream)
    address = ok(cu.cuMemAllocAsync(4096, stream))
    ok(cu.cuMemsetD32Async(address, 3, 64, stream))
    ok(cu.cuMemcpyDtoDAsync(x.words, address, 256, stream))
    freed = code(cu.cuMemFreeAsync(address, stream))
    graph = x.end(stream)
    cloned = code(cu.cuGraphClone(graph))
    inner = code(cu.cuGraphAddChildGraphNode(x.graph(), [], 0, graph))
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    second = code(cu.cuGraphInstantiate(graph, 0))
    x.launch(executable)
    x.launch(executable)
    ok(cu.cuGraphExecDestroy(executable))
    third = code(cu.cuGraphInstantiate(graph, 0))
    return [freed, x.types(graph), cloned, inner, second, x.read(x.words), third]
