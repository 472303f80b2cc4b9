# SPDX-License-Identifier: Apache-2.0
"""Rows about modules, libraries, functions and launches."""

from __future__ import annotations

import ctypes
from typing import Any

from bench import Bench, attribute, code, cu, handle, name_of, ok, raw, row

FUNCTION = cu.CUfunction_attribute
SHARED = FUNCTION.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


@row("module.instances")
def instances(x: Bench) -> Any:
    """The same image loaded twice is two sets of globals."""
    other = ok(cu.cuModuleLoadData(x.image))
    mine, size = ok(cu.cuModuleGetGlobal(x.module, b"conformance_counter"))
    theirs, _ = ok(cu.cuModuleGetGlobal(other, b"conformance_counter"))
    x.write(int(mine), [100])
    out = [int(mine) != int(theirs), size, x.read(int(mine)), x.read(int(theirs))]
    x.write(int(mine), [7])
    ok(cu.cuModuleUnload(other))
    return out


@row("module.not_found")
def not_found(x: Bench) -> Any:
    return [
        code(cu.cuModuleGetFunction(x.module, b"nothing")),
        code(cu.cuModuleGetGlobal(x.module, b"nothing")),
        code(cu.cuLibraryGetKernel(x.library, b"nothing")),
        code(cu.cuLibraryGetGlobal(x.library, b"nothing")),
        code(cu.cuModuleLoad(b"/nonexistent/file")),
        code(cu.cuLibraryLoadFromFile(b"/nonexistent/file", [], [], 0, [], [], 0)),
    ]


@row("bad_images.loaded")
def bad_images(x: Bench) -> Any:
    return [
        code(cu.cuModuleLoadData(b"this is no image" * 8)),
        code(cu.cuModuleLoadData(b"\x7fELF" + bytes(256))),
        code(cu.cuLibraryLoadData(b"this is no image" * 8, [], [], 0, [], [], 0)),
    ]


PTX = b"""// of an older device
.version 6.4
.target sm_75
.address_size 64
.visible .entry store(.param .u64 store_to)
{
    .reg .u64 to;
    ld.param.u64 to, [store_to];
    st.global.u32 [to], 42;
    ret;
}
"""


@row("module.ptx")
def ptx(x: Bench) -> Any:
    """PTX for an older device is compiled, and its kernel writes pinned memory at the address that the host knows."""
    loaded = cu.cuModuleLoadData(PTX + b"\0")
    if code(loaded) != "SUCCESS":
        return code(loaded)
    address = int(ok(cu.cuMemHostAlloc(64, 0)))
    word = ctypes.c_uint32.from_address(address)
    word.value = 0
    pointer = ctypes.c_uint64(address)
    arguments = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
    function = ok(cu.cuModuleGetFunction(loaded[1], b"store"))
    ok(cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, 0, ctypes.addressof(arguments), 0))
    ok(cu.cuCtxSynchronize())
    stored = word.value
    ok(cu.cuMemFreeHost(address))
    ok(cu.cuModuleUnload(loaded[1]))
    return stored


@row("bad_library.asked")
def bad_library(x: Bench) -> Any:
    """What a library says later that was loaded from bytes that are no image."""
    library = cu.cuLibraryLoadData(b"this is no image" * 8, [], [], 0, [], [], 0)
    if code(library) != "SUCCESS":
        return code(library)
    return {
        "kernel": code(cu.cuLibraryGetKernel(library[1], b"add_value")),
        "module": code(cu.cuLibraryGetModule(library[1])),
        "unload": code(cu.cuLibraryUnload(library[1])),
    }


@row("module.counts")
def counts(x: Bench) -> Any:
    functions = ok(cu.cuModuleGetFunctionCount(x.module))
    kernels = ok(cu.cuLibraryGetKernelCount(x.library))
    names = sorted(ok(cu.cuFuncGetName(f)).decode() for f in ok(cu.cuModuleEnumerateFunctions(functions, x.module)))
    same = sorted(ok(cu.cuKernelGetName(k)).decode() for k in ok(cu.cuLibraryEnumerateKernels(kernels, x.library)))
    return [functions, kernels, names == same, names]


@row("module.handles")
def handles(x: Bench) -> Any:
    """How function, module, kernel and library lead to each other."""
    kernel = x.kernel("add_value")
    function = ok(cu.cuKernelGetFunction(kernel))
    module = ok(cu.cuLibraryGetModule(x.library))
    return {
        "kernel_library": int(ok(cu.cuKernelGetLibrary(kernel))) == int(x.library),
        "function_module": int(ok(cu.cuFuncGetModule(function))) == int(module),
        "same_function": int(ok(cu.cuModuleGetFunction(module, b"add_value"))) == int(function),
        "module_function": int(ok(cu.cuFuncGetModule(x.function("add_value")))) == int(x.module),
        "same_twice": int(x.function("add_value")) == int(x.function("add_value")),
        "kernel_twice": int(x.kernel("add_value")) == int(kernel),
        "unload_of_library": code(cu.cuModuleUnload(module)),
        "library_global": int(ok(cu.cuLibraryGetGlobal(x.library, b"conformance_table"))[0])
        == int(ok(cu.cuModuleGetGlobal(module, b"conformance_table"))[0]),
    }


def disguised(call: str) -> Any:
    """A row with one call that gets a kernel in the place of a function, in a process of its own."""

    @row(f"disguised_{call}.kernel")
    def as_function(x: Bench) -> Any:
        kernel = handle(x.kernel("add_value"))
        text, pointer, number = ctypes.c_char_p(), ctypes.c_void_p(), ctypes.c_int()
        offset, size = ctypes.c_size_t(), ctypes.c_size_t()
        arguments: dict[str, tuple[Any, ...]] = {
            "cuFuncGetName": (ctypes.byref(text), kernel),
            "cuFuncGetModule": (ctypes.byref(pointer), kernel),
            "cuFuncGetParamInfo": (kernel, ctypes.c_size_t(0), ctypes.byref(offset), ctypes.byref(size)),
            "cuFuncGetAttribute": (ctypes.byref(number), 0, kernel),
            "cuFuncSetAttribute": (kernel, int(SHARED), 40000),
            "cuFuncIsLoaded": (ctypes.byref(number), kernel),
            "cuFuncLoad": (kernel,),
        }
        return raw(call, *arguments[call])

    return as_function


for _call in (
    "cuFuncGetName",
    "cuFuncGetModule",
    "cuFuncGetParamInfo",
    "cuFuncGetAttribute",
    "cuFuncSetAttribute",
    "cuFuncIsLoaded",
    "cuFuncLoad",
):
    disguised(_call)


@row("disguised_node.added")
def disguised_node(x: Bench) -> Any:
    """A node whose `func` is a kernel; if it can be added, what it says of itself."""
    kernel = x.kernel("add_value")
    added = cu.cuGraphAddKernelNode(x.graph(), [], 0, x.kernel_params(cu.CUfunction(int(kernel))))
    if code(added) != "SUCCESS":
        return code(added)
    params = ok(cu.cuGraphKernelNodeGetParams(added[1]))
    return [int(params.func) == int(ok(cu.cuKernelGetFunction(kernel))), int(params.kern) == int(kernel)]


@row("module.occupancy_of_kernel")
def occupancy_of_kernel(x: Bench) -> Any:
    """The occupancy calls take kernels, says the manual."""
    kernel = cu.CUfunction(int(x.kernel("add_value")))
    return code(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(kernel, 32, 0))


@row("module.kernel_launched")
def kernel_launched(x: Bench) -> Any:
    return code(x.add(x.stream(), 1, cu.CUfunction(int(x.kernel("add_value")))))


@row("module.parameters")
def parameters(x: Bench) -> Any:
    function, kernel = x.function("mixed_parameters"), x.kernel("mixed_parameters")
    seen = [list(cu.cuFuncGetParamInfo(function, i)[1:]) for i in range(5)]
    return [
        seen,
        seen == [list(cu.cuKernelGetParamInfo(kernel, i)[1:]) for i in range(5)],
        code(cu.cuFuncGetParamInfo(function, 5)),
        code(cu.cuFuncGetParamInfo(x.function("no_parameters"), 0)),
        list(cu.cuFuncGetParamInfo(x.function("large_parameter"), 1)[1:]),
    ]


@row("module.lazy_loading")
def lazy_loading(x: Bench) -> Any:
    library = ok(cu.cuLibraryLoadData(x.image, [], [], 0, [], [], 0))
    function = ok(cu.cuKernelGetFunction(ok(cu.cuLibraryGetKernel(library, b"add_value"))))
    before = name_of(ok(cu.cuFuncIsLoaded(function)))
    loaded = code(cu.cuFuncLoad(function))
    after = name_of(ok(cu.cuFuncIsLoaded(function)))
    ok(cu.cuLibraryUnload(library))
    return [before, loaded, after]


@row("module.lazy_enumerated")
def lazy_enumerated(x: Bench) -> Any:
    """A function that was listed and never asked for by name."""
    module = ok(cu.cuModuleLoadData(x.image))
    listed = ok(cu.cuModuleEnumerateFunctions(ok(cu.cuModuleGetFunctionCount(module)), module))
    [function] = [f for f in listed if ok(cu.cuFuncGetName(f)) == b"add_value"]
    out = [name_of(ok(cu.cuFuncIsLoaded(function)))]
    ok(cu.cuModuleGetFunction(module, b"add_value"))
    out.append(name_of(ok(cu.cuFuncIsLoaded(function))))
    ok(cu.cuModuleUnload(module))
    return out


@row("module.attributes")
def attributes(x: Bench) -> Any:
    function, kernel = x.function("scale_value"), x.kernel("scale_value")
    own = ok(cu.cuKernelGetFunction(kernel))
    out: dict[str, Any] = {
        "threads": ok(cu.cuFuncGetAttribute(FUNCTION.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function)),
        "default_shared": ok(cu.cuFuncGetAttribute(SHARED, function)),
        "carveout": ok(cu.cuFuncGetAttribute(FUNCTION.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, function)),
        "set": code(cu.cuFuncSetAttribute(function, SHARED, 100000)),
        "get": ok(cu.cuFuncGetAttribute(SHARED, function)),
        "most": code(cu.cuFuncSetAttribute(function, SHARED, 227 << 10)),
        "too_much": code(cu.cuFuncSetAttribute(function, SHARED, (227 << 10) + 1)),
        "negative": code(cu.cuFuncSetAttribute(function, SHARED, -1)),
        "read_only": code(cu.cuFuncSetAttribute(function, FUNCTION.CU_FUNC_ATTRIBUTE_NUM_REGS, 10)),
    }
    out["kernel_set"] = code(cu.cuKernelSetAttribute(SHARED, 90000, kernel, 0))
    out["function_sees"] = ok(cu.cuFuncGetAttribute(SHARED, own))
    ok(cu.cuFuncSetAttribute(own, SHARED, 80000))
    out["kernel_sees"] = ok(cu.cuKernelGetAttribute(SHARED, kernel, 0))
    return out


@row("module.global_after_launch")
def global_after_launch(x: Bench) -> Any:
    """Kernels write to the globals of their own module."""
    out = x.buffer(4)
    stream = x.stream()
    arguments = ((out,), (ctypes.c_void_p,))
    ok(cu.cuLaunchKernel(x.function("bump_counter"), 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))
    ok(cu.cuStreamSynchronize(stream))
    mine = x.read(int(ok(cu.cuModuleGetGlobal(x.module, b"conformance_counter"))[0]))
    theirs = x.read(int(ok(cu.cuLibraryGetGlobal(x.library, b"conformance_counter"))[0]))
    return [x.read(out), mine, theirs]


# ---- launches ---------------------------------------------------------------------------------------------------


class Extra:
    """The `extra` argument of a launch around a block of bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = ctypes.create_string_buffer(data, len(data))
        self.size = ctypes.c_size_t(len(data))
        self.array = (ctypes.c_void_p * 5)(1, ctypes.addressof(self.data), 2, ctypes.addressof(self.size), 0)

    def address(self) -> int:
        """Valid as long as this object is."""
        return ctypes.addressof(self.array)


def launch_raw(x: Bench, name: str, stream: Any, params: int | None, extra: Extra | None) -> str:
    return raw(
        "cuLaunchKernel",
        handle(x.function(name)),
        *[ctypes.c_uint(v) for v in (1, 1, 1, 32, 1, 1, 0)],
        handle(stream),
        ctypes.c_void_p(params),
        ctypes.c_void_p(None if extra is None else extra.address()),
    )


@row("launch.extra")
def extra(x: Bench) -> Any:
    stream = x.stream()
    target = x.buffer(64, 1)
    block = target.to_bytes(8, "little") + (5).to_bytes(4, "little") + (64).to_bytes(4, "little")
    exact = launch_raw(x, "add_value", stream, None, Extra(block))
    ok(cu.cuStreamSynchronize(stream))
    values = x.read(target, 2)
    return {
        "exact": exact,
        "values": values,
        "longer": launch_raw(x, "add_value", stream, None, Extra(block + bytes(8))),
        "none_needed": launch_raw(x, "no_parameters", stream, None, None),
    }


@row("launch_nothing.no_arguments")
def no_arguments(x: Bench) -> Any:
    return launch_raw(x, "add_value", x.stream(), None, None)


@row("launch.short_extra")
def short_extra(x: Bench) -> Any:
    """A block that ends before a large by-value parameter does, as NCCL passes it."""
    stream = x.stream()
    out = x.buffer(4)
    block = out.to_bytes(8, "little") + (40).to_bytes(8, "little") + bytes(16) + (2).to_bytes(8, "little")
    launched = launch_raw(x, "large_parameter", stream, None, Extra(block))
    ok(cu.cuStreamSynchronize(stream))
    return [launched, x.read64(out)]


@row("launch.both")
def both(x: Bench) -> Any:
    stream = x.stream()
    block = Extra(x.words.to_bytes(8, "little") + (0).to_bytes(4, "little") + (64).to_bytes(4, "little"))
    values = [ctypes.c_void_p(x.words), ctypes.c_uint(0), ctypes.c_uint(64)]
    params = (ctypes.c_void_p * 3)(*[ctypes.addressof(v) for v in values])
    return launch_raw(x, "add_value", stream, ctypes.addressof(params), block)


@row("launch.shapes")
def shapes(x: Bench) -> Any:
    stream, function = x.stream(), x.function("add_value")

    def launch(grid: tuple[int, int, int], block: tuple[int, int, int], shared: int = 0) -> str:
        return code(cu.cuLaunchKernel(function, *grid, *block, shared, stream, x.add_arguments(0), 0))

    return {
        "zero_grid": launch((0, 1, 1), (32, 1, 1)),
        "zero_block": launch((1, 1, 1), (0, 1, 1)),
        "large_block": launch((1, 1, 1), (1025, 1, 1)),
        "large_product": launch((1, 1, 1), (64, 32, 1)),
        "deep_block": launch((1, 1, 1), (1, 1, 65)),
        "wide_grid": launch((1, 65536, 1), (1, 1, 1)),
        "shared": launch((1, 1, 1), (32, 1, 1), 48 << 10),
        "large_shared": launch((1, 1, 1), (32, 1, 1), (48 << 10) + 1),
    }


@row("launch.attributes")
def launch_attributes(x: Bench) -> Any:
    stream = x.stream()
    cluster = {"x": 2, "y": 1, "z": 1}
    out = {
        "none": code(x.add_with_attributes(stream, [])),
        "cluster": code(x.add_with_attributes(stream, [attribute("CLUSTER_DIMENSION", clusterDim=cluster)])),
        "cluster_not_divisor": code(
            x.add_with_attributes(stream, [attribute("CLUSTER_DIMENSION", clusterDim=cluster)], grid=3)
        ),
        "cluster_large": code(
            x.add_with_attributes(
                stream, [attribute("CLUSTER_DIMENSION", clusterDim={"x": 16, "y": 1, "z": 1})], grid=16
            )
        ),
        "cooperative": code(x.add_with_attributes(stream, [attribute("COOPERATIVE", cooperative=1)])),
        "cooperative_large": code(
            x.add_with_attributes(stream, [attribute("COOPERATIVE", cooperative=1)], grid=1 << 20)
        ),
        "programmatic": code(
            x.add_with_attributes(
                stream, [attribute("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1)]
            )
        ),
        "priority": code(x.add_with_attributes(stream, [attribute("PRIORITY", priority=-1)])),
        "ignored": code(x.add_with_attributes(stream, [attribute("IGNORE")])),
    }
    ok(cu.cuStreamSynchronize(stream))
    return out
