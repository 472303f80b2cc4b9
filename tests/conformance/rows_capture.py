# SPDX-License-Identifier: Apache-2.0
"""Rows about stream capture: what it takes, what it refuses, what becomes of a refused capture."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from bench import (
    GLOBAL,
    GRANULE,
    RELAXED,
    THREAD,
    Bench,
    code,
    cu,
    ok,
    row,
)


@row("capture.life")
def life(x: Bench) -> Any:
    stream = x.stream()
    out = [x.status(stream)]
    x.begin(stream)
    out += [x.status(stream), code(cu.cuStreamBeginCapture(stream, THREAD))]
    ok(x.add(stream))
    graph = x.end(stream)
    return [*out, x.status(stream), x.types(graph), code(cu.cuStreamEndCapture(stream))]


@row("capture.empty")
def empty(x: Bench) -> Any:
    graph = x.captured(lambda stream: None)
    executable = cu.cuGraphInstantiate(graph, 0)
    stream = x.stream()
    return [x.types(graph), code(executable), code(cu.cuGraphLaunch(executable[1], stream))]


@row("capture.not_executed")
def not_executed(x: Bench) -> Any:
    target = x.buffer(64)
    graph = x.captured(lambda stream: ok(x.add(stream, 3, address=target)))
    before = x.read(target)
    x.run(graph)
    return [before, x.read(target)]


@row("capture.legacy_stream")
def legacy_stream(x: Bench) -> Any:
    return [code(cu.cuStreamBeginCapture(0, RELAXED)), code(cu.cuStreamBeginCapture(cu.CUstream(1), RELAXED))]


def during(x: Bench, call: Callable[[Any], Any], mode: Any, exchange: Any = None, flags: int = 1) -> list[str]:
    """A call while a stream is captured: its code, and that of the capture's end."""
    stream = x.stream(flags)
    x.begin(stream, mode)
    ok(x.add(stream))
    if exchange is not None:
        before = ok(cu.cuThreadExchangeStreamCaptureMode(exchange))
    result = call(stream)
    if exchange is not None:
        ok(cu.cuThreadExchangeStreamCaptureMode(before))
    answer = result if isinstance(result, str) else code(result)
    return [answer, code(cu.cuStreamEndCapture(stream))]


def calls(x: Bench) -> dict[str, Callable[[Any], Any]]:
    """Calls that a capture may or may not mind; each cleans up after itself where it can."""
    address = ctypes.addressof(x.host)
    idle, event = x.stream(), x.event()
    ok(cu.cuEventRecord(event, idle))
    ok(cu.cuStreamSynchronize(idle))
    graph = x.graph()
    ok(cu.cuGraphAddKernelNode(graph, [], 0, x.kernel_params()))
    executable = ok(cu.cuGraphInstantiate(graph, 0))

    def then(call: Callable[[], Any], undo: Callable[[Any], Any]) -> Any:
        result = call()
        if code(result) == "SUCCESS":
            undo(result[1])
        return result

    def reserve() -> Any:
        return then(lambda: cu.cuMemAddressReserve(GRANULE, 0, 0, 0), lambda a: cu.cuMemAddressFree(a, GRANULE))

    def mapping() -> Any:
        base = cu.cuMemAddressReserve(GRANULE, 0, 0, 0)
        memory = cu.cuMemCreate(GRANULE, x.properties(), 0)
        if code(base) != "SUCCESS" or code(memory) != "SUCCESS":
            return "not tried"
        answers = [
            code(cu.cuMemMap(base[1], GRANULE, 0, memory[1], 0)),
            code(cu.cuMemSetAccess(base[1], GRANULE, [x.access()], 1)),
            code(cu.cuMemUnmap(base[1], GRANULE)),
            code(cu.cuMemRelease(memory[1])),
            code(cu.cuMemAddressFree(base[1], GRANULE)),
        ]
        return ",".join(answers)

    def kept(call: Callable[[], Any], undo: Callable[[Any], Any]) -> Any:
        """For what cannot be undone inside the capture."""
        result = call()
        if code(result) == "SUCCESS":
            x.later.callback(undo, result[1])
        return result

    def load() -> Any:
        return kept(lambda: cu.cuModuleLoadData(x.image), cu.cuModuleUnload)

    def load_library() -> Any:
        return kept(lambda: cu.cuLibraryLoadData(x.image, [], [], 0, [], [], 0), cu.cuLibraryUnload)

    def loaded(load_it: Callable[[], Any], undo: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The end of something that was loaded before the capture."""
        left = [ok(load_it())]
        x.later.callback(lambda: left and undo(left[0]))

        def unload(_: Any) -> Any:
            result = undo(left[0])
            if code(result) == "SUCCESS":
                left.clear()
            return result

        return unload

    def register() -> Any:
        result = cu.cuMemHostRegister(address, 4096, 0)
        if code(result) == "SUCCESS":
            cu.cuMemHostUnregister(address)
        return result

    return {
        "mem_alloc": lambda _: then(lambda: cu.cuMemAlloc(64), cu.cuMemFree),
        "host_alloc": lambda _: then(lambda: cu.cuMemHostAlloc(64, 0), cu.cuMemFreeHost),
        "host_register": lambda _: register(),
        "reserve": lambda _: reserve(),
        "create": lambda _: then(lambda: cu.cuMemCreate(GRANULE, x.properties(), 0), cu.cuMemRelease),
        "mapping": lambda _: mapping(),
        "get_info": lambda _: cu.cuMemGetInfo(),
        "address_range": lambda _: cu.cuMemGetAddressRange(x.words),
        "module_load": lambda _: load(),
        "library_load": lambda _: load_library(),
        "module_unload": loaded(lambda: cu.cuModuleLoadData(x.image), cu.cuModuleUnload),
        "library_unload": loaded(lambda: cu.cuLibraryLoadData(x.image, [], [], 0, [], [], 0), cu.cuLibraryUnload),
        "get_function": lambda _: cu.cuModuleGetFunction(x.module, b"no_parameters"),
        "set_attribute": lambda _: cu.cuFuncSetAttribute(
            x.function("scale_value"), cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 1000
        ),
        "get_global": lambda _: cu.cuModuleGetGlobal(x.module, b"conformance_table"),
        "stream_create": lambda _: then(lambda: cu.cuStreamCreate(1), cu.cuStreamDestroy),
        "event_create": lambda _: then(lambda: cu.cuEventCreate(2), cu.cuEventDestroy),
        "context_synchronize": lambda _: cu.cuCtxSynchronize(),
        "synchronize_self": cu.cuStreamSynchronize,
        "query_self": cu.cuStreamQuery,
        "synchronize_other": lambda _: cu.cuStreamSynchronize(idle),
        "query_other": lambda _: cu.cuStreamQuery(idle),
        "event_query": lambda _: cu.cuEventQuery(event),
        "event_synchronize": lambda _: cu.cuEventSynchronize(event),
        "event_record_other": lambda _: cu.cuEventRecord(event, idle),
        "launch_other": lambda _: x.add(idle),
        "copy": lambda _: cu.cuMemcpyHtoD(x.words, address, 64),
        "copy_device": lambda _: cu.cuMemcpyDtoD(x.words, x.words + 4096, 64),
        "fill": lambda _: cu.cuMemsetD8(x.words, 0, 64),
        "instantiate": lambda _: then(lambda: cu.cuGraphInstantiate(graph, 0), cu.cuGraphExecDestroy),
        "graph_launch_self": lambda s: cu.cuGraphLaunch(executable, s),
        "graph_launch_other": lambda _: cu.cuGraphLaunch(executable, idle),
        "graph_upload_self": lambda s: cu.cuGraphUpload(executable, s),
        "graph_upload_other": lambda _: cu.cuGraphUpload(executable, idle),
        "graph_create": lambda _: then(lambda: cu.cuGraphCreate(0), cu.cuGraphDestroy),
        "launch_null": lambda _: x.add(0),
        "primary_retain": lambda _: then(
            lambda: cu.cuDevicePrimaryCtxRetain(0), lambda _: cu.cuDevicePrimaryCtxRelease(0)
        ),
    }


@row("capture.calls_global")
def calls_global(x: Bench) -> Any:
    return {name: during(x, call, GLOBAL) for name, call in calls(x).items()}


@row("capture.calls_thread_local")
def calls_thread_local(x: Bench) -> Any:
    return {name: during(x, call, THREAD) for name, call in calls(x).items()}


@row("capture.calls_relaxed")
def calls_relaxed(x: Bench) -> Any:
    return {name: during(x, call, RELAXED) for name, call in calls(x).items()}


@row("capture.calls_exchanged")
def calls_exchanged(x: Bench) -> Any:
    """A global capture, with the thread's own mode relaxed around the call, as NCCL and PyTorch do it."""
    wanted = ("mem_alloc", "module_load", "event_query", "mapping", "create", "synchronize_other", "copy")
    return {name: during(x, calls(x)[name], GLOBAL, RELAXED) for name in wanted}


@row("capture.calls_blocking")
def calls_blocking(x: Bench) -> Any:
    """The same with a blocking stream: the null stream would have to wait for it."""
    wanted = ("launch_null", "copy", "fill", "launch_other")
    return {name: during(x, calls(x)[name], RELAXED, flags=0) for name in wanted}


@row("capture.calls_elsewhere")
def calls_elsewhere(x: Bench) -> Any:
    """Calls of another thread during a capture."""
    out: dict[str, Any] = {}
    for label, mode in (("global", GLOBAL), ("thread_local", THREAD), ("relaxed", RELAXED)):
        for name in ("mem_alloc", "event_query", "synchronize_other", "launch_other", "module_load"):
            call = calls(x)[name]

            def there(stream: Any, call: Callable[[Any], Any] = call) -> str:
                return str(x.elsewhere(lambda: code(call(stream))))

            out[f"{label}.{name}"] = during(x, there, mode)
    return out


@row("capture.wrong_thread")
def wrong_thread(x: Bench) -> Any:
    out = {}
    for label, mode in (("global", GLOBAL), ("thread_local", THREAD), ("relaxed", RELAXED)):
        stream = x.stream()
        x.begin(stream, mode)
        ok(x.add(stream))
        there = x.elsewhere(lambda s=stream: code(cu.cuStreamEndCapture(s)))
        out[label] = [there, code(cu.cuStreamEndCapture(stream))]
    return out


@row("capture.launch_from_other_thread")
def launch_from_other_thread(x: Bench) -> Any:
    stream = x.stream()
    x.begin(stream, THREAD)
    there = x.elsewhere(lambda: code(x.add(stream)))
    graph = cu.cuStreamEndCapture(stream)
    return [there, code(graph), x.types(graph[1]) if code(graph) == "SUCCESS" else None]


@row("capture.exchange")
def exchange(x: Bench) -> Any:
    first = ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
    second = ok(cu.cuThreadExchangeStreamCaptureMode(first))
    return [int(first), int(second), x.elsewhere(lambda: int(ok(cu.cuThreadExchangeStreamCaptureMode(GLOBAL))))]


# ---- several streams --------------------------------------------------------------------------------------------


def fork(x: Bench, origin: Any, other: Any) -> None:
    event = x.event()
    ok(cu.cuEventRecord(event, origin))
    ok(cu.cuStreamWaitEvent(other, event, 0))


@row("capture.fork_join")
def fork_join(x: Bench) -> Any:
    origin, other = x.stream(), x.stream()
    target = x.buffer(2)
    x.begin(origin)
    ok(x.digit(origin, target, 1))
    fork(x, origin, other)
    joined = x.status(other)
    ok(x.digit(other, target, 2))
    fork(x, other, origin)
    ok(x.digit(origin, target, 3))
    graph = x.end(origin)
    x.run(graph)
    return [joined, x.types(graph), len(x.edges(graph)), x.read64(target), x.status(other)]


@row("capture.unjoined")
def unjoined(x: Bench) -> Any:
    origin, other = x.stream(), x.stream()
    x.begin(origin)
    ok(x.add(origin))
    fork(x, origin, other)
    ok(x.add(other))
    ended = cu.cuStreamEndCapture(origin)
    return [code(ended), x.status(origin), x.status(other), code(x.add(other))]


@row("capture.forked_idle")
def forked_idle(x: Bench) -> Any:
    """A stream that joined and did nothing need not be joined again."""
    origin, other = x.stream(), x.stream()
    x.begin(origin)
    ok(x.add(origin))
    fork(x, origin, other)
    return [code(cu.cuStreamEndCapture(origin)), x.status(other)]


@row("capture.end_other")
def end_other(x: Bench) -> Any:
    origin, other = x.stream(), x.stream()
    x.begin(origin)
    ok(x.add(origin))
    fork(x, origin, other)
    return [code(cu.cuStreamEndCapture(other)), code(cu.cuStreamEndCapture(origin))]


@row("capture.merge")
def merge(x: Bench) -> Any:
    first, second, event = x.stream(), x.stream(), x.event()
    x.begin(first)
    x.begin(second)
    ok(x.add(first))
    ok(cu.cuEventRecord(event, first))
    merged = code(cu.cuStreamWaitEvent(second, event, 0))
    return [merged, code(cu.cuStreamEndCapture(first)), code(cu.cuStreamEndCapture(second))]


@row("capture.isolation")
def isolation(x: Bench) -> Any:
    """A wait on an event that was recorded outside, and on one that never was."""
    out = []
    for recorded in (True, False):
        stream, event = x.stream(), x.event()
        if recorded:
            ok(cu.cuEventRecord(event, x.stream()))
        x.begin(stream)
        ok(x.add(stream))
        out.append(
            [code(cu.cuStreamWaitEvent(stream, event, 0)), x.status(stream), code(cu.cuStreamEndCapture(stream))]
        )
    return out


@row("capture.captured_event")
def captured_event(x: Bench) -> Any:
    """What can be done with an event that a capture recorded."""
    out: dict[str, Any] = {}
    for name, call in (("query", cu.cuEventQuery), ("synchronize", cu.cuEventSynchronize)):
        stream, event = x.stream(), x.event()
        x.begin(stream)
        ok(cu.cuEventRecord(event, stream))
        out[name] = [code(call(event)), code(cu.cuStreamEndCapture(stream))]
    stream, event = x.stream(), x.event()
    x.begin(stream)
    ok(x.add(stream))
    ok(cu.cuEventRecord(event, stream))
    x.end(stream)
    out["query_after"] = code(cu.cuEventQuery(event))
    out["wait_after"] = code(cu.cuStreamWaitEvent(x.stream(), event, 0))
    ok(cu.cuEventRecord(event, stream))
    out["recorded_again"] = code(cu.cuEventSynchronize(event))
    return out


@row("capture.external_events")
def external_events(x: Bench) -> Any:
    stream, event = x.stream(), x.event()
    x.begin(stream)
    out = [
        code(cu.cuStreamWaitEvent(stream, event, 1)),
        code(x.add(stream)),
        code(cu.cuEventRecordWithFlags(event, stream, 1)),
    ]
    graph = x.end(stream)
    record, wait = x.only(graph, "EVENT_RECORD"), x.only(graph, "WAIT_EVENT")
    same = [
        int(ok(cu.cuGraphEventRecordNodeGetEvent(record))) == int(event),
        int(ok(cu.cuGraphEventWaitNodeGetEvent(wait))) == int(event),
    ]
    before = code(cu.cuEventQuery(event))
    x.run(graph)
    return [*out, x.types(graph), len(x.edges(graph)), same, before, code(cu.cuEventQuery(event))]


@row("capture.external_order")
def external_order(x: Bench) -> Any:
    """An external wait holds the graph until eager work is done, an external record lets eager work go on after it."""
    event, done = x.event(), x.event()
    number = x.buffer(2)
    stream = x.stream()
    x.begin(stream)
    ok(cu.cuStreamWaitEvent(stream, event, 1))
    ok(x.digit(stream, number, 2))
    ok(cu.cuEventRecordWithFlags(done, stream, 1))
    executable = ok(cu.cuGraphInstantiate(x.end(stream), 0))
    eager, last = x.stream(), x.stream()
    x.busy(eager)
    ok(x.digit(eager, number, 1))
    ok(cu.cuEventRecord(event, eager))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamWaitEvent(last, done, 0))
    ok(x.digit(last, number, 3))
    ok(cu.cuStreamSynchronize(last))
    return x.read64(number)
