# SPDX-License-Identifier: Apache-2.0
"""What the rows of the conformance script stand on: a context, kernels, and shorthand for driver calls.

Everything goes through ``cuda.bindings``, but for calls that must be made with an argument left out or a struct
prepared byte by byte; those go through ``ctypes`` to the same library.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

GLOBAL = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
THREAD = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
NON_BLOCKING = 1
GRANULE = 2 << 20
KERNELS = Path(__file__).with_name("kernels.cpp")
PRELOADED = (
    *("add_value", "scale_value", "append_digit", "take_time"),
    *("large_parameter", "mixed_parameters", "tell_launch"),
)

Row = Callable[["Bench"], Any]
ROWS: dict[str, dict[str, Row]] = {}


class CallFailed(Exception):
    """A call that a row needs has failed."""


def row(name: str) -> Callable[[Row], Row]:
    """Registers a row under ``group.name``; the group's rows run in one process, in the order of the file."""
    group = name.partition(".")[0]

    def register(function: Row) -> Row:
        ROWS.setdefault(group, {})[name] = function
        return function

    return register


def name_of(value: Any) -> str:
    """The short name of a result code or another enumerator."""
    return str(value.name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_").removeprefix("CU_")


def code(result: Any) -> str:
    """The result code of a call, by name."""
    if isinstance(result, tuple):
        result = result[0]
    return name_of(cu.CUresult(int(result)))


def ok(result: tuple[Any, ...]) -> Any:
    """What a call returned beside its code; raises if the call failed."""
    if result[0] != cu.CUresult.CUDA_SUCCESS:
        raise CallFailed(code(result))
    rest = result[1:]
    return rest[0] if len(rest) == 1 else rest


def library() -> ctypes.CDLL:
    """The driver that the process uses."""
    return ctypes.CDLL("libcuda.so.1")


def is_software() -> bool:
    """Whether that is the software driver."""
    return hasattr(library(), "softcuda_counters")


def raw(name: str, *arguments: Any) -> str:
    """Calls an exported symbol; the code by name."""
    return code(cu.CUresult(getattr(library(), name)(*arguments)))


def handle(value: Any) -> ctypes.c_void_p:
    """A handle for ``raw``."""
    return ctypes.c_void_p(int(value))


def image(path: str | None) -> bytes:
    """The kernels as the driver takes them: a fat binary on the software driver, a cubin on a GPU."""
    if path is not None:
        return Path(path).read_bytes()
    if is_software():
        from foundryd import _native

        return _native.image("conformance").read_bytes()
    from cuda.bindings import nvrtc

    def done(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CallFailed(str(result[0]))
        return result[1] if len(result) > 1 else None

    major = ok(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 0))
    minor = ok(cu.cuDeviceGetAttribute(cu.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0))
    program = done(nvrtc.nvrtcCreateProgram(KERNELS.read_bytes(), b"kernels.cu", 0, [], []))
    options = [b"--gpu-architecture=sm_%d%d" % (major, minor), b"--std=c++17"]
    done(nvrtc.nvrtcCompileProgram(program, len(options), options))
    cubin = bytes(done(nvrtc.nvrtcGetCUBINSize(program)))
    done(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


class Bench:
    """One process with a primary context and the kernels loaded twice: as a module and as a library."""

    def __init__(self, image_path: str | None) -> None:
        ok(cu.cuInit(0))
        self.device = ok(cu.cuDeviceGet(0))
        self.context = ok(cu.cuDevicePrimaryCtxRetain(self.device))
        ok(cu.cuCtxSetCurrent(self.context))
        self.image = image(image_path)
        self.module = ok(cu.cuModuleLoadData(self.image))
        self.library = ok(cu.cuLibraryLoadData(self.image, [], [], 0, [], [], 0))
        for name in PRELOADED:
            ok(cu.cuFuncLoad(self.function(name)))
            ok(cu.cuFuncLoad(ok(cu.cuKernelGetFunction(self.kernel(name)))))
        self.words = self.buffer(4096)
        self.host = (ctypes.c_uint8 * 4096)()
        self._streams: list[Any] = []
        self.later = contextlib.ExitStack()  # what is undone after the row, however it ends

    # -- objects

    def function(self, name: str) -> Any:
        return ok(cu.cuModuleGetFunction(self.module, name.encode()))

    def kernel(self, name: str) -> Any:
        return ok(cu.cuLibraryGetKernel(self.library, name.encode()))

    def stream(self, flags: int = NON_BLOCKING, priority: int = 0) -> Any:
        made = ok(cu.cuStreamCreateWithPriority(flags, priority))
        self._streams.append(made)
        return made

    def event(self, flags: int = 2) -> Any:
        return ok(cu.cuEventCreate(flags))

    def buffer(self, count: int, value: int = 0) -> int:
        address = int(ok(cu.cuMemAlloc(4 * count)))
        self.clear(address, count, value)
        return address

    def clear(self, address: int, count: int, value: int = 0) -> None:
        """Fills words and waits: the rows' streams do not wait for the null stream."""
        ok(cu.cuMemsetD32(address, value, count))
        ok(cu.cuCtxSynchronize())

    def read(self, address: int, count: int = 1) -> list[int]:
        out = (ctypes.c_uint32 * count)()
        ok(cu.cuMemcpyDtoH(ctypes.addressof(out), address, 4 * count))
        return list(out)

    def read64(self, address: int) -> int:
        out = ctypes.c_uint64()
        ok(cu.cuMemcpyDtoH(ctypes.addressof(out), address, 8))
        return out.value

    def write(self, address: int, values: list[int]) -> None:
        data = (ctypes.c_uint32 * len(values))(*values)
        ok(cu.cuMemcpyHtoD(address, ctypes.addressof(data), 4 * len(values)))
        ok(cu.cuCtxSynchronize())

    # -- work

    def add_arguments(self, value: int = 1, address: int | None = None, count: int = 64) -> Any:
        return (
            (self.words if address is None else address, value, count),
            (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32),
        )

    def add(self, stream: Any, value: int = 1, function: Any = None, address: int | None = None) -> Any:
        """Launches ``x += value`` on 64 words."""
        function = self.function("add_value") if function is None else function
        return cu.cuLaunchKernel(function, 2, 1, 1, 32, 1, 1, 0, stream, self.add_arguments(value, address), 0)

    def digit(self, stream: Any, address: int, value: int) -> Any:
        arguments = ((address, value), (ctypes.c_void_p, ctypes.c_uint32))
        return cu.cuLaunchKernel(self.function("append_digit"), 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0)

    def busy(self, stream: Any, milliseconds: int = 300) -> None:
        """Keeps a stream busy for a while."""
        arguments = ((milliseconds,), (ctypes.c_uint32,))
        ok(cu.cuLaunchKernel(self.function("take_time"), 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))

    def add_with_attributes(self, stream: Any, attributes: list[Any], value: int = 1, grid: int = 2) -> Any:
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
        config.sharedMemBytes = 0
        config.hStream = stream
        config.attrs = attributes
        config.numAttrs = len(attributes)
        return cu.cuLaunchKernelEx(config, self.function("add_value"), self.add_arguments(value), 0)

    def kernel_params(
        self, function: Any = None, value: int = 1, kernel: Any = None, address: int | None = None
    ) -> Any:
        params = cu.CUDA_KERNEL_NODE_PARAMS()
        if kernel is None:
            params.func = self.function("add_value") if function is None else function
        else:
            params.kern = kernel
            params.ctx = self.context
        params.gridDimX, params.gridDimY, params.gridDimZ = 2, 1, 1
        params.blockDimX, params.blockDimY, params.blockDimZ = 32, 1, 1
        params.sharedMemBytes = 0
        params.kernelParams = self.add_arguments(value, address)
        return params

    def memset_params(self, value: int = 0, words: int = 64, height: int = 1, pitch: int = 0) -> Any:
        params = cu.CUDA_MEMSET_NODE_PARAMS()
        params.dst = self.words
        params.value = value
        params.elementSize = 4
        params.width = words
        params.height = height
        params.pitch = pitch
        return params

    def copy_params(self, destination: int, source: int, size: int) -> Any:
        params = cu.CUDA_MEMCPY3D()
        params.srcMemoryType = params.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        params.srcDevice, params.dstDevice = source, destination
        params.WidthInBytes, params.Height, params.Depth = size, 1, 1
        return params

    # -- graphs

    def graph(self) -> Any:
        return ok(cu.cuGraphCreate(0))

    def begin(self, stream: Any, mode: Any = THREAD) -> None:
        ok(cu.cuStreamBeginCapture(stream, mode))

    def end(self, stream: Any) -> Any:
        return ok(cu.cuStreamEndCapture(stream))

    def captured(self, work: Callable[[Any], Any], mode: Any = THREAD) -> Any:
        """A graph of what ``work(stream)`` enqueues."""
        stream = self.stream()
        self.begin(stream, mode)
        work(stream)
        return self.end(stream)

    def status(self, stream: Any) -> str:
        return name_of(ok(cu.cuStreamIsCapturing(stream))).removeprefix("STREAM_CAPTURE_STATUS_")

    def frontier(self, stream: Any) -> list[Any]:
        """The nodes that the next captured node will depend on."""
        info = ok(cu.cuStreamGetCaptureInfo(stream))
        return list(info[3][: info[5]])

    def frontier_edges(self, stream: Any) -> list[list[int]]:
        info = ok(cu.cuStreamGetCaptureInfo(stream))
        return [edge_data(data) for data in info[4][: info[5]]]

    def nodes(self, graph: Any) -> list[Any]:
        count = ok(cu.cuGraphGetNodes(graph, 0))[1]
        return list(ok(cu.cuGraphGetNodes(graph, count))[0]) if count else []

    def types(self, graph: Any) -> list[str]:
        return sorted(node_type(node) for node in self.nodes(graph))

    def edges(self, graph: Any) -> list[tuple[int, int, list[int]]]:
        count = ok(cu.cuGraphGetEdges(graph, 0))[3]
        if not count:
            return []
        origin, target, data, _ = ok(cu.cuGraphGetEdges(graph, count))
        return [(int(a), int(b), edge_data(d)) for a, b, d in zip(origin, target, data, strict=True)]

    def edge_list(self, graph: Any, named: dict[str, Any]) -> list[list[Any]]:
        """Edges with names in place of handles, sorted."""
        known = {int(node): name for name, node in named.items()}
        return sorted([known.get(a, "?"), known.get(b, "?"), d] for a, b, d in self.edges(graph))

    def only(self, graph: Any, kind: str) -> Any:
        found = [node for node in self.nodes(graph) if node_type(node) == kind]
        if len(found) != 1:
            raise CallFailed(f"{len(found)} nodes of type {kind}")
        return found[0]

    def run(self, graph: Any, flags: int = 0, stream: Any = None) -> None:
        """Instantiates, launches once, waits, destroys the executable."""
        executable = ok(cu.cuGraphInstantiate(graph, flags))
        self.launch(executable, stream)
        ok(cu.cuGraphExecDestroy(executable))

    def launch(self, executable: Any, stream: Any = None) -> None:
        stream = self.stream() if stream is None else stream
        ok(cu.cuGraphLaunch(executable, stream))
        ok(cu.cuStreamSynchronize(stream))

    # -- memory of the virtual-memory calls

    def properties(self, shareable: bool = True) -> Any:
        properties = cu.CUmemAllocationProp()
        properties.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = 0
        kinds = cu.CUmemAllocationHandleType
        properties.requestedHandleTypes = (
            kinds.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR if shareable else kinds.CU_MEM_HANDLE_TYPE_NONE
        )
        return properties

    def access(self) -> Any:
        access = cu.CUmemAccessDesc()
        access.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = 0
        access.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    @contextlib.contextmanager
    def reserved(self, size: int, hint: int = 0) -> Iterator[int]:
        base = int(ok(cu.cuMemAddressReserve(size, 0, hint, 0)))
        try:
            yield base
        finally:
            cu.cuMemAddressFree(base, size)

    @contextlib.contextmanager
    def memory(self, size: int = GRANULE, shareable: bool = True) -> Iterator[Any]:
        handle = ok(cu.cuMemCreate(size, self.properties(shareable), 0))
        try:
            yield handle
        finally:
            cu.cuMemRelease(handle)

    @contextlib.contextmanager
    def at(self, base: int, size: int, memory: Any, access: bool = True) -> Iterator[None]:
        """Memory mapped at an address."""
        ok(cu.cuMemMap(base, size, 0, memory, 0))
        try:
            if access:
                ok(cu.cuMemSetAccess(base, size, [self.access()], 1))
            yield
        finally:
            cu.cuMemUnmap(base, size)

    @contextlib.contextmanager
    def mapped(self, size: int = GRANULE, shareable: bool = True) -> Iterator[tuple[int, Any]]:
        """A reservation of four times the size with memory mapped at its start."""
        with self.reserved(4 * size) as base, self.memory(size, shareable) as memory, self.at(base, size, memory):
            yield base, memory

    # -- other threads

    def elsewhere(self, work: Callable[[], Any]) -> Any:
        """Runs ``work`` in another thread with the same context."""
        out: list[Any] = []

        def body() -> None:
            try:
                ok(cu.cuCtxSetCurrent(self.context))
                out.append(work())
            except Exception as error:
                out.append(f"{type(error).__name__}: {error}")

        thread = threading.Thread(target=body)
        thread.start()
        thread.join(20)
        return out[0] if out else "timeout"

    def tidy(self) -> None:
        """Ends what a row left behind, also one that failed midway: captures first of all."""
        mode = cu.cuThreadExchangeStreamCaptureMode(GLOBAL)
        del mode
        for stream in self._streams:
            status = cu.cuStreamIsCapturing(stream)
            if status[0] == cu.CUresult.CUDA_SUCCESS and int(status[1]) != 0:
                cu.cuStreamEndCapture(stream)
            cu.cuStreamDestroy(stream)
        self._streams.clear()
        cu.cuCtxSynchronize()
        self.later.close()


def node_type(node: Any) -> str:
    """A node's type by name."""
    return name_of(ok(cu.cuGraphNodeGetType(node))).removeprefix("GRAPH_NODE_TYPE_")


def edge_data(data: Any) -> list[int]:
    """Edge data as ``[from_port, to_port, type]``."""
    return [
        int(data.from_port[0] if isinstance(data.from_port, bytes) else data.from_port),
        int(data.to_port[0] if isinstance(data.to_port, bytes) else data.to_port),
        int(data.type[0] if isinstance(data.type, bytes) else data.type),
    ]


def attribute(identifier: str, **fields: Any) -> Any:
    """A launch attribute: ``attribute("PRIORITY", priority=-1)``."""
    made = cu.CUlaunchAttribute()
    made.id = getattr(cu.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{identifier}")
    fill(made.value, fields)
    return made


def fill(value: Any, fields: dict[str, Any]) -> None:
    """Sets the members of an attribute value; a dict is for a struct in it."""
    for field, content in fields.items():
        if isinstance(content, dict):
            for inner, number in content.items():
                setattr(getattr(value, field), inner, number)
        else:
            setattr(value, field, content)


def wait_until(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Waits for something asynchronous; False if it did not come."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return condition()


def chain(x: Bench, values: list[int], target: int, kinds: str = "") -> tuple[Any, list[Any]]:
    """A chain of kernels; ``kinds`` may ask for ``m`` (memset) or ``c`` (copy) in places."""
    graph, nodes = x.graph(), []
    for i, value in enumerate(values):
        before = nodes[-1:]
        kind = kinds[i] if i < len(kinds) else "k"
        if kind == "m":
            params = x.memset_params(value)
            params.dst = target
            node = ok(cu.cuGraphAddMemsetNode(graph, before, len(before), params, x.context))
        elif kind == "c":
            copy = x.copy_params(target, x.words, 64)
            node = ok(cu.cuGraphAddMemcpyNode(graph, before, len(before), copy, x.context))
        else:
            node = ok(cu.cuGraphAddKernelNode(graph, before, len(before), x.kernel_params(value=value, address=target)))
        nodes.append(node)
    return graph, nodes
