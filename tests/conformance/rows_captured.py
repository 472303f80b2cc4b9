# SPDX-License-Identifier: Apache-2.0
"""Rows about what a capture makes: nodes, edges, and looking into it while it goes on."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from bench import GLOBAL, THREAD, Bench, attribute, code, cu, handle, ok, raw, row
from rows_capture import fork
from rows_module import Extra, launch_raw

# ---- what becomes a node ----------------------------------------------------------------------------------------


@row("capture.node_kinds")
def node_kinds(x: Bench) -> Any:
    host = (ctypes.c_uint8 * 4096)()
    address = ctypes.addressof(host)
    pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    pointer = ctypes.cast(callback, ctypes.c_void_p).value

    def kinds(work: Callable[[Any], Any]) -> Any:
        stream = x.stream()
        x.begin(stream)
        answer = code(work(stream))
        graph = cu.cuStreamEndCapture(stream)
        return [answer, x.types(graph[1]) if code(graph) == "SUCCESS" else code(graph)]

    out = {
        "fill": kinds(lambda s: cu.cuMemsetD32Async(x.words, 1, 64, s)),
        "fill_2d": kinds(lambda s: cu.cuMemsetD2D8Async(x.words, 128, 1, 64, 4, s)),
        "fill_nothing": kinds(lambda s: cu.cuMemsetD8Async(x.words, 1, 0, s)),
        "copy_device": kinds(lambda s: cu.cuMemcpyDtoDAsync(x.words, x.words + 4096, 64, s)),
        "copy_nothing": kinds(lambda s: cu.cuMemcpyDtoDAsync(x.words, x.words + 4096, 0, s)),
        "copy_generic": kinds(lambda s: cu.cuMemcpyAsync(x.words, x.words + 4096, 64, s)),
        "copy_from_pinned": kinds(lambda s: cu.cuMemcpyHtoDAsync(x.words, pinned, 64, s)),
        "copy_from_pageable": kinds(lambda s: cu.cuMemcpyHtoDAsync(x.words, address, 64, s)),
        "copy_to_pinned": kinds(lambda s: cu.cuMemcpyDtoHAsync(pinned, x.words, 64, s)),
        "copy_to_pageable": kinds(lambda s: cu.cuMemcpyDtoHAsync(address, x.words, 64, s)),
        "host_function": kinds(lambda s: cu.cuLaunchHostFunc(s, pointer, 0)),
        "alloc": kinds(lambda s: cu.cuMemAllocAsync(4096, s)),
        "event": kinds(lambda s: cu.cuEventRecord(x.event(), s)),
        "cooperative": kinds(
            lambda s: cu.cuLaunchCooperativeKernel(x.function("add_value"), 2, 1, 1, 32, 1, 1, 0, s, x.add_arguments())
        ),
    }
    ok(cu.cuMemFreeHost(pinned))
    return out


@row("capture.copy_types")
def copy_types(x: Bench) -> Any:
    """Memory types in the parameters of captured copies."""
    pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))

    def seen(work: Callable[[Any], Any]) -> Any:
        node = x.only(x.captured(lambda s: ok(work(s))), "MEMCPY")
        p = ok(cu.cuGraphMemcpyNodeGetParams(node))
        return [
            int(p.srcMemoryType),
            int(p.dstMemoryType),
            p.WidthInBytes,
            p.Height,
            p.Depth,
            p.srcPitch,
            p.dstPitch,
            p.srcHeight,
            p.dstHeight,
        ]

    out = [
        seen(lambda s: cu.cuMemcpyDtoDAsync(x.words, x.words + 4096, 64, s)),
        seen(lambda s: cu.cuMemcpyAsync(x.words, x.words + 4096, 64, s)),
        seen(lambda s: cu.cuMemcpyHtoDAsync(x.words, pinned, 64, s)),
        seen(lambda s: cu.cuMemcpyDtoHAsync(pinned, x.words, 64, s)),
    ]
    ok(cu.cuMemFreeHost(pinned))
    return out


@row("capture.fill_params")
def fill_params(x: Bench) -> Any:
    def seen(work: Callable[[Any], Any]) -> Any:
        p = ok(cu.cuGraphMemsetNodeGetParams(x.only(x.captured(lambda s: ok(work(s))), "MEMSET")))
        return [int(p.dst) - x.words, p.pitch, p.value, p.elementSize, p.width, p.height]

    return [
        seen(lambda s: cu.cuMemsetD8Async(x.words, 0xAB, 100, s)),
        seen(lambda s: cu.cuMemsetD16Async(x.words, 0xABCD, 100, s)),
        seen(lambda s: cu.cuMemsetD32Async(x.words, 0xABCDEF01, 100, s)),
        seen(lambda s: cu.cuMemsetD2D8Async(x.words, 128, 7, 64, 4, s)),
    ]


@row("capture.extra")
def extra(x: Bench) -> Any:
    """A captured launch through `extra` gives `extra` back and no parameter list."""
    target = x.buffer(64)
    block = target.to_bytes(8, "little") + (5).to_bytes(4, "little") + (64).to_bytes(4, "little")
    stream = x.stream()
    x.begin(stream)
    launched = launch_raw(x, "add_value", stream, None, Extra(block))
    graph = x.end(stream)
    params = ok(cu.cuGraphKernelNodeGetParams(x.only(graph, "KERNEL")))
    array = (ctypes.c_void_p * 5).from_address(int(params.extra)) if params.extra else None
    if array is None:
        return [launched, "no extra"]
    size = ctypes.c_size_t.from_address(array[3] if array[0] == 1 else array[1]).value
    data = ctypes.string_at(array[1] if array[0] == 1 else array[3], size)
    x.run(graph)
    return [
        launched,
        int(params.kernelParams or 0) == 0,
        [v or 0 for v in (array[0], array[2], array[4])],
        size,
        data == block,
        x.read(target),
    ]


@row("capture.short_extra")
def captured_short_extra(x: Bench) -> Any:
    out = x.buffer(4)
    block = out.to_bytes(8, "little") + (40).to_bytes(8, "little") + bytes(16) + (2).to_bytes(8, "little")
    stream = x.stream()
    x.begin(stream)
    launched = launch_raw(x, "large_parameter", stream, None, Extra(block))
    graph = x.end(stream)
    params = ok(cu.cuGraphKernelNodeGetParams(x.only(graph, "KERNEL")))
    array = (ctypes.c_void_p * 5).from_address(int(params.extra))
    size = ctypes.c_size_t.from_address(array[3] if array[0] == 1 else array[1]).value
    x.run(graph)
    return [launched, size, x.read64(out)]


@row("capture.kernel_handle")
def kernel_handle(x: Bench) -> Any:
    """A captured launch by kernel: which of `func` and `kern` the node has."""
    own = ok(cu.cuKernelGetFunction(x.kernel("add_value")))
    out = {}
    for name, function in (
        ("kernel", cu.CUfunction(int(x.kernel("add_value")))),
        ("function_of_kernel", own),
        ("function_of_module", x.function("add_value")),
    ):
        graph = x.captured(lambda s, f=function: ok(x.add(s, 1, f)))
        params = ok(cu.cuGraphKernelNodeGetParams(x.only(graph, "KERNEL")))
        out[name] = {
            "func": "null"
            if int(params.func) == 0
            else "given"
            if int(params.func) == int(function)
            else "function"
            if int(params.func) == int(own)
            else "other",
            "kern": "null"
            if int(params.kern) == 0
            else "kernel"
            if int(params.kern) == int(x.kernel("add_value"))
            else "other",
            "ctx": "null" if int(params.ctx) == 0 else "context" if int(params.ctx) == int(x.context) else "other",
        }
    return out


@row("capture.unloaded_kernel")
def unloaded_kernel(x: Bench) -> Any:
    """The first launch of a lazily loaded kernel is inside a capture."""
    library = ok(cu.cuLibraryLoadData(x.image, [], [], 0, [], [], 0))
    out = {}
    for label, mode in (("global", GLOBAL), ("thread_local", THREAD)):
        name = {"global": b"add_value", "thread_local": b"scale_value"}[label]
        function = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, name))))
        stream = x.stream()
        x.begin(stream, mode)
        out[label] = [code(x.add(stream, 1, function)), code(cu.cuStreamEndCapture(stream))]
    return out


# ---- looking into a capture -------------------------------------------------------------------------------------


@row("capture.info")
def info(x: Bench) -> Any:
    stream = x.stream()
    x.begin(stream)
    first = ok(cu.cuStreamGetCaptureInfo(stream))
    ok(x.add(stream))
    second = ok(cu.cuStreamGetCaptureInfo(stream))
    graph = x.end(stream)
    third = ok(cu.cuStreamGetCaptureInfo(stream))
    x.begin(stream)
    fourth = ok(cu.cuStreamGetCaptureInfo(stream))
    x.end(stream)
    return [
        first[5],
        second[5],
        int(second[2]) == int(graph),
        first[1] == second[1],
        first[1] != fourth[1],
        int(third[0]),
        x.types(graph),
    ]


@row("capture.placeholder")
def placeholder(x: Bench) -> Any:
    """A child node put into a capture by hand, then made the frontier, as the NCCL stubs do it."""
    inner = x.captured(lambda s: ok(x.add(s)))
    stream = x.stream()
    x.begin(stream)
    ok(x.add(stream))
    graph = ok(cu.cuStreamGetCaptureInfo(stream))[2]
    before = x.frontier(stream)
    node = ok(cu.cuGraphAddChildGraphNode(graph, before, len(before), inner))
    updated = code(cu.cuStreamUpdateCaptureDependencies(stream, [node], None, 1, 1))
    frontier = x.frontier(stream)
    ok(x.add(stream))
    out = x.end(stream)
    return [updated, len(before), [int(n) for n in frontier] == [int(node)], x.types(out), len(x.edges(out))]


@row("capture.update_dependencies")
def update_dependencies(x: Bench) -> Any:
    stream = x.stream()
    outside = code(cu.cuStreamUpdateCaptureDependencies(stream, [], None, 0, 1))
    x.begin(stream)
    ok(x.add(stream))
    first = x.frontier(stream)
    emptied = code(cu.cuStreamUpdateCaptureDependencies(stream, [], None, 0, 1))
    ok(x.add(stream))
    second = x.frontier(stream)
    added = code(cu.cuStreamUpdateCaptureDependencies(stream, first, None, 1, 0))
    both = len(x.frontier(stream))
    twice = code(cu.cuStreamUpdateCaptureDependencies(stream, first, None, 1, 0))
    still = len(x.frontier(stream))
    ok(cu.cuStreamUpdateCaptureDependencies(stream, second, None, 1, 1))
    foreign = x.graph()
    alien = ok(cu.cuGraphAddEmptyNode(foreign, [], 0))
    refused = code(cu.cuStreamUpdateCaptureDependencies(stream, [alien], None, 1, 0))
    ended = cu.cuStreamEndCapture(stream)
    return [
        outside,
        emptied,
        added,
        both,
        twice,
        still,
        refused,
        code(ended),
        len(x.edges(ended[1])) if code(ended) == "SUCCESS" else None,
    ]


@row("capture.leaf_by_hand")
def leaf_by_hand(x: Bench) -> Any:
    """A node added to a forked stream's end by hand and left out of its frontier does not count as unjoined."""
    stream, event = x.stream(), x.event()
    x.begin(stream)
    ok(x.add(stream))
    graph = ok(cu.cuStreamGetCaptureInfo(stream))[2]
    tail = x.frontier(stream)
    ok(cu.cuGraphAddEventRecordNode(graph, tail, len(tail), event))
    ok(x.add(stream))
    ended = cu.cuStreamEndCapture(stream)
    return [code(ended), x.types(ended[1]) if code(ended) == "SUCCESS" else None]


@row("capture.side_stream_destroyed")
def side_stream_destroyed(x: Bench) -> Any:
    """A stream that joined, worked, was joined and is destroyed before the capture ends; and one left unjoined."""
    out = []
    for join in (True, False):
        origin, other = x.stream(), ok(cu.cuStreamCreate(1))
        x.begin(origin)
        ok(x.add(origin))
        fork(x, origin, other)
        ok(x.add(other))
        if join:
            fork(x, other, origin)
        destroyed = code(cu.cuStreamDestroy(other))
        out.append([destroyed, x.status(origin), code(cu.cuStreamEndCapture(origin))])
    return out


@row("capture.event_destroyed")
def event_destroyed(x: Bench) -> Any:
    origin, other, event = x.stream(), x.stream(), x.event()
    x.begin(origin)
    ok(x.add(origin))
    ok(cu.cuEventRecord(event, origin))
    ok(cu.cuStreamWaitEvent(other, event, 0))
    destroyed = code(cu.cuEventDestroy(event))
    ok(x.add(other))
    fork(x, other, origin)
    return [destroyed, code(cu.cuStreamEndCapture(origin))]


@row("capture.to_graph")
def to_graph(x: Bench) -> Any:
    """Two captures into one graph, the second behind the first."""
    graph, stream = x.graph(), x.stream()
    began = code(cu.cuStreamBeginCaptureToGraph(stream, graph, None, None, 0, THREAD))
    ok(x.add(stream))
    first = x.frontier(stream)
    ended = cu.cuStreamEndCapture(stream)
    second = code(cu.cuStreamBeginCaptureToGraph(stream, graph, first, None, 1, THREAD))
    ok(x.add(stream))
    again = cu.cuStreamEndCapture(stream)
    return [began, code(ended), int(ended[1]) == int(graph), second, code(again), x.types(graph), len(x.edges(graph))]


@row("capture_destroy.graph_inside")
def destroy_graph_inside(x: Bench) -> Any:
    stream = x.stream()
    x.begin(stream)
    ok(x.add(stream))
    graph = ok(cu.cuStreamGetCaptureInfo(stream))[2]
    node = x.frontier(stream)[0]
    return [code(cu.cuGraphDestroyNode(node)), code(cu.cuGraphDestroy(graph)), code(cu.cuStreamEndCapture(stream))]


# ---- programmatic launches --------------------------------------------------------------------------------------

PROGRAMMATIC = attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)


@row("capture.programmatic_edge")
def programmatic_edge(x: Bench) -> Any:
    graph = x.captured(lambda s: (ok(x.add(s)), ok(x.add_with_attributes(s, [PROGRAMMATIC])), ok(x.add(s))))
    edges = sorted(data for _, _, data in x.edges(graph))
    count = ctypes.c_size_t(8)
    nodes = (ctypes.c_void_p * 8)()
    targets = (ctypes.c_void_p * 8)()
    lossy = raw("cuGraphGetEdges", handle(graph), nodes, targets, ctypes.byref(count))
    count = ctypes.c_size_t(8)
    lossy_too = raw("cuGraphGetEdges_v2", handle(graph), nodes, targets, None, ctypes.byref(count))
    count = ctypes.c_size_t(0)
    counted = raw("cuGraphGetEdges", handle(graph), None, None, ctypes.byref(count))
    target = [n for n in x.nodes(graph) if any(b == int(n) and d[2] == 1 for _, b, d in x.edges(graph))]
    count8 = ctypes.c_size_t(8)
    dependencies = raw("cuGraphNodeGetDependencies", handle(target[0]), nodes, ctypes.byref(count8)) if target else None
    ran = code(cu.cuGraphInstantiate(graph, 0))
    return [edges, lossy, lossy_too, counted, count.value, dependencies, ran]


@row("capture.programmatic_after_fill")
def programmatic_after_fill(x: Bench) -> Any:
    graph = x.captured(
        lambda s: (ok(cu.cuMemsetD32Async(x.words, 0, 64, s)), ok(x.add_with_attributes(s, [PROGRAMMATIC])))
    )
    return [data for _, _, data in x.edges(graph)]


@row("capture.programmatic_attribute")
def programmatic_attribute(x: Bench) -> Any:
    """Whether the node keeps an attribute that became edge data."""
    graph = x.captured(lambda s: ok(x.add_with_attributes(s, [PROGRAMMATIC])))
    node = x.only(graph, "KERNEL")
    identifier = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    value = (ctypes.c_uint8 * 64)()
    return raw("cuGraphKernelNodeGetAttribute", handle(node), int(identifier), value)


@row("capture.programmatic_event")
def programmatic_event(x: Bench) -> Any:
    out = {}
    for kind in ("PROGRAMMATIC_EVENT", "LAUNCH_COMPLETION_EVENT"):
        origin, other, event = x.stream(), x.stream(), x.event()
        field = {"PROGRAMMATIC_EVENT": "programmaticEvent", "LAUNCH_COMPLETION_EVENT": "launchCompletionEvent"}[kind]
        fields = {"event": event, "flags": 0}
        if kind == "PROGRAMMATIC_EVENT":
            fields["triggerAtBlockStart"] = 0
        x.begin(origin)
        launched = code(x.add_with_attributes(origin, [attribute(kind, **{field: fields})]))
        waited = code(cu.cuStreamWaitEvent(other, event, 0))
        ok(x.add(other))
        fork(x, other, origin)
        graph = cu.cuStreamEndCapture(origin)
        edges = sorted(data for _, _, data in x.edges(graph[1])) if code(graph) == "SUCCESS" else []
        out[kind] = [launched, waited, code(graph), edges]
    return out


@row("capture.node_attributes")
def node_attributes(x: Bench) -> Any:
    """Attributes of a captured launch, on its node; the stream's priority among them."""
    stream = x.stream(1, -2)
    x.begin(stream)
    ok(
        x.add_with_attributes(
            stream,
            [
                attribute("CLUSTER_DIMENSION", clusterDim={"x": 2, "y": 1, "z": 1}),
                attribute("MEM_SYNC_DOMAIN", memSyncDomain=cu.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE),
            ],
        )
    )
    node = x.only(x.end(stream), "KERNEL")
    ids = cu.CUlaunchAttributeID
    cluster = ok(cu.cuGraphKernelNodeGetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)).clusterDim
    domain = ok(cu.cuGraphKernelNodeGetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN))
    return {
        "cluster": [cluster.x, cluster.y, cluster.z],
        "priority": ok(cu.cuGraphKernelNodeGetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_PRIORITY)).priority,
        "domain": int(domain.memSyncDomain),
        "cooperative": ok(cu.cuGraphKernelNodeGetAttribute(node, ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)).cooperative,
    }


@row("capture.concurrent_threads")
def concurrent_threads(x: Bench) -> Any:
    """Thread-local captures of two threads do not disturb each other."""
    barrier = threading.Barrier(2, timeout=20)

    def work() -> str:
        stream = ok(cu.cuStreamCreate(1))
        x.begin(stream, THREAD)
        barrier.wait()
        ok(x.add(stream))
        barrier.wait()
        return code(cu.cuStreamEndCapture(stream))

    out: list[Any] = []
    other = threading.Thread(target=lambda: out.append(x.elsewhere(work)))
    other.start()
    mine = work()
    other.join(20)
    return [mine, *out]
