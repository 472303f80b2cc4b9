# SPDX-License-Identifier: Apache-2.0
"""Rows about executables that are made, changed and destroyed while others are in flight or a stream is captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench import GLOBAL, RELAXED, THREAD, Bench, chain, code, cu, ok, row
from rows_capture import during


@row("flight.updated")
def updated(x: Bench) -> Any:
    """An update of the whole graph does not reach launches that are already enqueued."""
    target = x.buffer(64)
    executable = ok(cu.cuGraphInstantiate(chain(x, [1, 2], target)[0], 0))
    other, _ = chain(x, [100, 200], target)
    stream = x.stream()
    x.busy(stream)
    ok(cu.cuGraphLaunch(executable, stream))
    got = code(cu.cuGraphExecUpdate(executable, other))
    ok(cu.cuGraphDestroy(other))
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    return [got, x.read(target)]


@row("flight.destroyed")
def destroyed(x: Bench) -> Any:
    """An executable that is destroyed while it is in flight runs to its end, and nobody waits for that."""
    target = x.buffer(64)
    graph, _ = chain(x, [1, 2], target)
    executable = ok(cu.cuGraphInstantiate(graph, 0))
    stream = x.stream()
    x.busy(stream, 1500)
    ok(cu.cuGraphLaunch(executable, stream))
    answers = [code(cu.cuGraphExecDestroy(executable)), code(cu.cuGraphDestroy(graph)), code(cu.cuStreamQuery(stream))]
    ok(cu.cuStreamSynchronize(stream))
    return [*answers, x.read(target)]


@row("flight.made_beside_work")
def made_beside_work(x: Bench) -> Any:
    """Executables of several hundred nodes are made, changed and destroyed beside a kernel: what waits for it."""
    target = x.buffer(64)
    graphs = [chain(x, [value] * 600, target)[0] for value in (1, 2)]
    ready = ok(cu.cuGraphInstantiate(graphs[0], 0))
    busy, idle = x.stream(), x.stream()
    x.busy(busy, 3000)
    after: dict[str, str] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        out = ok(call())
        after[name] = code(cu.cuStreamQuery(busy))
        return out

    def work() -> None:
        made = step("instantiate", lambda: cu.cuGraphInstantiate(graphs[0], 0))
        step("update", lambda: cu.cuGraphExecUpdate(made, graphs[1]))
        step("destroy", lambda: cu.cuGraphExecDestroy(made))

    step("launch", lambda: cu.cuGraphLaunch(ready, idle))
    x.elsewhere(work)
    ok(cu.cuCtxSynchronize())
    return [after, x.read(target)]


@row("flight.loaded_beside_work")
def loaded_beside_work(x: Bench) -> Any:
    """Images and functions are loaded by another thread beside a kernel: what waits for it, and a launch meanwhile."""
    target = x.buffer(64)
    ready = ok(cu.cuGraphInstantiate(chain(x, [1], target)[0], 0))
    busy, idle = x.stream(), x.stream()
    x.busy(busy, 3000)
    after: dict[str, str] = {}

    def step(name: str, call: Callable[[], Any]) -> Any:
        out = ok(call())
        after[name] = code(cu.cuStreamQuery(busy))
        return out

    def work() -> None:
        module = step("module", lambda: cu.cuModuleLoadData(x.image))
        step("function", lambda: cu.cuFuncLoad(ok(cu.cuModuleGetFunction(module, b"scale_value"))))
        library = step("library", lambda: cu.cuLibraryLoadData(x.image, [], [], 0, [], [], 0))
        function = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"scale_value"))))
        step("kernel", lambda: cu.cuFuncLoad(function))

    x.elsewhere(work)
    step("launch", lambda: cu.cuGraphLaunch(ready, idle))
    ok(cu.cuCtxSynchronize())
    return [after, x.read(target)]


@row("flight.elsewhere")
def elsewhere(x: Bench) -> Any:
    """Executables in the hands of another thread during a capture, with that thread's own mode relaxed or not."""
    target = x.buffer(64)
    first, second = (chain(x, [value], target)[0] for value in (1, 2))
    idle = x.stream()
    calls: dict[str, Callable[[Any], Any]] = {
        "instantiate": lambda _: cu.cuGraphInstantiate(first, 0),
        "update": lambda made: cu.cuGraphExecUpdate(made, second),
        "launch": lambda made: cu.cuGraphLaunch(made, idle),
        "destroy": cu.cuGraphExecDestroy,
    }
    out: dict[str, Any] = {}
    for label, mode, own, names in (
        ("global", GLOBAL, None, ("instantiate",)),
        ("global.relaxed", GLOBAL, RELAXED, tuple(calls)),
        ("thread_local", THREAD, None, tuple(calls)),
        ("thread_local.relaxed", THREAD, RELAXED, tuple(calls)),
    ):
        for name in names:
            made = ok(cu.cuGraphInstantiate(first, 0))

            def there(_: Any, call: Callable[[Any], Any] = calls[name], made: Any = made, own: Any = own) -> str:
                def body() -> str:
                    if own is not None:
                        ok(cu.cuThreadExchangeStreamCaptureMode(own))
                    return code(call(made))

                return str(x.elsewhere(body))

            out[f"{label}.{name}"] = during(x, there, mode)
            ok(cu.cuCtxSynchronize())
    return out


@row("flight.here")
def here(x: Bench) -> Any:
    """The capturing thread itself makes and launches an executable, its own mode relaxed around the first."""
    target = x.buffer(64)
    graph, _ = chain(x, [1], target)
    idle = x.stream()

    def make(_: Any) -> Any:
        before = ok(cu.cuThreadExchangeStreamCaptureMode(RELAXED))
        made = cu.cuGraphInstantiate(graph, 0)
        ok(cu.cuThreadExchangeStreamCaptureMode(before))
        return f"{code(made)},{code(cu.cuGraphLaunch(made[1], idle))}"

    out = [during(x, make, mode) for mode in (GLOBAL, THREAD)]
    ok(cu.cuCtxSynchronize())
    return [out, x.read(target)]
