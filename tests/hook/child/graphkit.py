# SPDX-License-Identifier: Apache-2.0
"""Making, reading and building graphs in children of the tests."""

from __future__ import annotations

import base64
import ctypes as c
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from cuda.bindings import driver as cu
from soft import ok

from foundryd import _native
from foundryd._native import _hook
from foundryd.capture.images import entries

THREAD_LOCAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def image(name: str = "hooktest") -> bytes:
    return _native.image(name).read_bytes()


def elf(name: str = "hooktest") -> bytes:
    """The code of an image for the software driver, with the padding of its entry."""
    return next(e.payload for e in entries(image(name)) if e.architecture == 90)


class Module:
    """An image loaded through one of the two interfaces, with its functions."""

    def __init__(self, library: bool = False, data: bytes | None = None) -> None:
        self.library = library
        self.data = data or image()
        if library:
            self.handle = ok(cu.cuLibraryLoadData(self.data, [], [], 0, [], [], 0))
        else:
            self.handle = ok(cu.cuModuleLoadData(self.data))

    def kernel(self, name: str) -> Any:
        return ok(cu.cuLibraryGetKernel(self.handle, name.encode()))

    def function(self, name: str) -> Any:
        if self.library:
            return ok(cu.cuKernelGetFunction(self.kernel(name)))
        return ok(cu.cuModuleGetFunction(self.handle, name.encode()))

    def global_address(self, name: str) -> tuple[int, int]:
        call = cu.cuLibraryGetGlobal if self.library else cu.cuModuleGetGlobal
        address, size = ok(call(self.handle, name.encode()))
        return int(address), int(size)


Arguments = Sequence[tuple[Any, Any]]  # (value, ctypes type)


def u64(*values: int) -> Arguments:
    return [(v, c.c_uint64) for v in values]


def launch(
    function: Any,
    stream: Any,
    arguments: Arguments,
    grid: Sequence[int] = (1, 1, 1),
    block: Sequence[int] = (1, 1, 1),
    shared: int = 0,
) -> None:
    values, types = tuple(v for v, _ in arguments), tuple(t for _, t in arguments)
    ok(cu.cuLaunchKernel(function, *grid, *block, shared, stream, (values, types), 0))


class Extra:
    """The ``extra`` array of a launch with packed parameters; keep it until the launch returned."""

    def __init__(self, packed: bytes) -> None:
        self._buffer = c.create_string_buffer(packed, len(packed))
        self._size = c.c_size_t(len(packed))
        self._array = (c.c_void_p * 5)(1, c.addressof(self._buffer), 2, c.addressof(self._size), None)
        self.address = c.addressof(self._array)


def launch_extra(function: Any, stream: Any, packed: bytes, grid: Sequence[int] = (1, 1, 1)) -> None:
    extra = Extra(packed)
    ok(cu.cuLaunchKernel(function, *grid, 1, 1, 1, 0, stream, 0, extra.address))


def launch_with(function: Any, stream: Any, arguments: Arguments, attributes: Sequence[Any], grid: int = 1) -> None:
    """``cuLaunchKernelEx``."""
    config = cu.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    config.hStream = stream
    config.attrs = list(attributes)
    config.numAttrs = len(attributes)
    values, types = tuple(v for v, _ in arguments), tuple(t for _, t in arguments)
    ok(cu.cuLaunchKernelEx(config, function, (values, types), 0))


def stream() -> Any:
    return ok(cu.cuStreamCreate(cu.CUstream_flags.CU_STREAM_NON_BLOCKING))


def event() -> Any:
    return ok(cu.cuEventCreate(cu.CUevent_flags.CU_EVENT_DISABLE_TIMING))


def capture(body: Callable[[Any], None], on: Any = None) -> Any:
    """What ``body`` puts on a stream, as a graph."""
    on = stream() if on is None else on
    ok(cu.cuStreamBeginCapture(on, THREAD_LOCAL))
    try:
        body(on)
    finally:
        graph = ok(cu.cuStreamEndCapture(on))
    return graph


def replay(graph: Any, times: int = 1) -> None:
    executable = ok(cu.cuGraphInstantiate(cu.CUgraph(int(graph)), 0))
    on = stream()
    for _ in range(times):
        ok(cu.cuGraphLaunch(executable, on))
    ok(cu.cuStreamSynchronize(on))
    ok(cu.cuGraphExecDestroy(executable))


def plain(graph: Any) -> dict[str, Any]:
    """A read graph as JSON."""

    def packed(array: Any) -> str:
        return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()

    return {
        "nodes": packed(graph.nodes),
        "edges": packed(graph.edges),
        "attributes": packed(graph.attributes),
        "params": packed(graph.params),
        "children": [plain(child) for child in graph.children],
    }


def arrays(graph: dict[str, Any]) -> Any:
    """The other way."""

    def unpacked(text: str, dtype: Any) -> Any:
        return np.frombuffer(base64.b64decode(text), dtype)

    return _hook.GraphArrays(
        unpacked(graph["nodes"], _hook.node_dtype),
        unpacked(graph["edges"], _hook.edge_dtype),
        unpacked(graph["attributes"], _hook.attribute_dtype),
        unpacked(graph["params"], np.uint8),
        [arrays(child) for child in graph["children"]],
    )


def recorded(hook: Any) -> dict[str, Any]:
    """Everything but graphs that another process needs to build what this one read."""
    functions, _fields, settings, names = hook.functions()
    used = sorted({int(f["module"]) for f in functions})
    return {
        "functions": [
            [int(f["module"]), name, settings[f["setting_first"] :][: f["setting_count"]].tolist()]
            for f, name in zip(functions, names, strict=True)
        ],
        "modules": [[m, int(hook.modules()[m]["api"]), base64.b64encode(hook.module_image(m)).decode()] for m in used],
    }


def load(hook: Any, record: dict[str, Any]) -> list[int]:
    """Loads recorded modules and functions; function handles."""
    modules = {m: hook.load_module(api, base64.b64decode(data)) for m, api, data in record["modules"]}
    return [
        hook.load_function(
            modules[m], name, np.array([tuple(s) for s in settings], _hook.setting_dtype) if settings else None
        )
        for m, name, settings in record["functions"]
    ]


def words(address: int, count: int) -> list[int]:
    out = np.zeros(count, np.uint64)
    ok(cu.cuCtxSynchronize())
    ok(cu.cuMemcpyDtoH(out.ctypes.data, address, out.nbytes))
    return [int(w) for w in out]


def write_words(address: int, values: Sequence[int]) -> None:
    data = np.array(values, np.uint64)
    ok(cu.cuMemcpyHtoD(address, data.ctypes.data, data.nbytes))


@contextmanager
def forked(main: Any, side: Any) -> Iterator[None]:
    """Work on ``side`` that starts after ``main`` stands now; joined at the end."""
    before, after = event(), event()
    ok(cu.cuEventRecord(before, main))
    ok(cu.cuStreamWaitEvent(side, before, 0))
    yield
    ok(cu.cuEventRecord(after, side))
    ok(cu.cuStreamWaitEvent(main, after, 0))


def refusal(call: Callable[[], Any]) -> list[str]:
    """Type and text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]
