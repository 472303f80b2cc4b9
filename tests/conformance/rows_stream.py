# SPDX-License-Identifier: Apache-2.0
"""Rows about streams and events outside of captures."""

from __future__ import annotations

import ctypes
from typing import Any

from bench import Bench, code, cu, ok, row, wait_until


@row("stream.create")
def create(x: Bench) -> Any:
    priorities = []
    for wanted in (0, -1, -100, 100):
        stream = x.stream(1, wanted)
        priorities.append(ok(cu.cuStreamGetPriority(stream)))
    return [
        priorities,
        ok(cu.cuStreamGetFlags(x.stream(0))),
        ok(cu.cuStreamGetFlags(x.stream(1))),
        code(cu.cuStreamCreate(8)),
        int(cu.cuStreamGetCtx(x.stream())[1]) == int(x.context),
    ]


@row("stream.ids")
def ids(x: Bench) -> Any:
    seen = {ok(cu.cuStreamGetId(stream)) for stream in (x.stream(), x.stream(), 0)}
    return len(seen)


@row("stream.asynchronous")
def asynchronous(x: Bench) -> Any:
    stream, event = x.stream(), x.event()
    x.busy(stream)
    ok(cu.cuEventRecord(event, stream))
    before = [code(cu.cuStreamQuery(stream)), code(cu.cuEventQuery(event))]
    ok(cu.cuStreamSynchronize(stream))
    return [*before, code(cu.cuStreamQuery(stream)), code(cu.cuEventQuery(event)), code(cu.cuEventDestroy(event))]


@row("stream.order_by_event")
def order_by_event(x: Bench) -> Any:
    first, second, event = x.stream(), x.stream(), x.event()
    number = x.buffer(2)
    x.busy(first)
    ok(x.digit(first, number, 1))
    ok(cu.cuEventRecord(event, first))
    ok(cu.cuStreamWaitEvent(second, event, 0))
    ok(x.digit(second, number, 2))
    ok(cu.cuStreamSynchronize(second))
    return x.read64(number)


@row("stream.null_stream")
def null_stream(x: Bench) -> Any:
    """The null stream waits for blocking streams and they for it; non-blocking ones go their own way."""
    blocking, own = x.stream(0), x.stream(1)
    number = x.buffer(2)
    x.busy(blocking)
    ok(x.digit(blocking, number, 1))
    ok(x.digit(0, number, 2))
    ok(x.digit(blocking, number, 3))
    ok(cu.cuStreamSynchronize(blocking))
    ordered = x.read64(number)
    x.busy(own)
    free = code(cu.cuStreamQuery(0))
    ok(cu.cuStreamSynchronize(own))
    x.busy(blocking)
    ok(x.digit(0, number, 4))
    held = code(cu.cuStreamQuery(0))
    ok(cu.cuCtxSynchronize())
    return [ordered, free, held, x.read64(number)]


@row("stream.destroy_pending")
def destroy_pending(x: Bench) -> Any:
    stream = ok(cu.cuStreamCreate(1))
    number = x.buffer(2)
    x.busy(stream)
    ok(x.digit(stream, number, 5))
    destroyed = code(cu.cuStreamDestroy(stream))
    done = wait_until(lambda: x.read64(number) == 5)
    return [destroyed, done]


@row("stream.host_function")
def host_function(x: Bench) -> Any:
    seen: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda data: seen.append(data or 0))
    stream = x.stream()
    pointer = ctypes.cast(callback, ctypes.c_void_p).value
    launched = code(cu.cuLaunchHostFunc(stream, pointer, 77))
    ok(cu.cuStreamSynchronize(stream))
    return [launched, seen]


@row("stream.pageable_source")
def pageable_source(x: Bench) -> Any:
    """An asynchronous copy from pageable memory has read it when the call returns; from pinned memory it has not."""
    data = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    pinned = int(ok(cu.cuMemHostAlloc(64, 0)))
    ctypes.c_uint32.from_address(pinned).value = 1
    stream = x.stream()
    target = x.buffer(16)
    x.busy(stream)
    ok(cu.cuMemcpyHtoDAsync(target, ctypes.addressof(data), 16, stream))
    data[0] = 2
    x.busy(stream)
    ok(cu.cuMemcpyHtoDAsync(target + 32, pinned, 4, stream))
    ctypes.c_uint32.from_address(pinned).value = 2
    ok(cu.cuStreamSynchronize(stream))
    out = [x.read(target)[0], x.read(target + 32)[0]]
    ok(cu.cuMemFreeHost(pinned))
    return out


@row("event.states")
def states(x: Bench) -> Any:
    fresh, timed, other = x.event(), x.event(0), x.event(0)
    stream = x.stream()
    out = [
        code(cu.cuEventQuery(fresh)),
        code(cu.cuEventSynchronize(fresh)),
        code(cu.cuStreamWaitEvent(stream, fresh, 0)),
    ]
    out.append(code(cu.cuEventElapsedTime(timed, other)))
    ok(cu.cuEventRecord(timed, stream))
    x.busy(stream)
    ok(cu.cuEventRecord(other, stream))
    out.append(code(cu.cuEventElapsedTime(timed, other)))
    ok(cu.cuStreamSynchronize(stream))
    elapsed = ok(cu.cuEventElapsedTime(timed, other))
    ok(cu.cuEventRecord(fresh, stream))
    ok(cu.cuStreamSynchronize(stream))
    return [*out, 15 < elapsed < 5000, code(cu.cuEventElapsedTime(timed, fresh))]


@row("event.flags")
def flags(x: Bench) -> Any:
    return [code(cu.cuEventCreate(f)) for f in (0, 1, 2, 4, 6, 64)]


@row("event.external_outside")
def external_outside(x: Bench) -> Any:
    """External flags belong to captures."""
    stream, event = x.stream(), x.event()
    return [
        code(cu.cuEventRecordWithFlags(event, stream, 1)),
        code(cu.cuStreamWaitEvent(stream, event, 1)),
        code(cu.cuEventRecordWithFlags(event, stream, 0)),
        code(cu.cuStreamWaitEvent(stream, event, 2)),
    ]
