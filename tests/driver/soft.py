# SPDX-License-Identifier: Apache-2.0
"""For programs of the driver tests: a context and a few kernels on the software driver."""

from __future__ import annotations

import ctypes
import json
import os
from typing import Any

from cuda.bindings import driver as cu

from foundryd import _native

THREAD = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class Failed(Exception):
    """A driver call failed."""


def code(result: Any) -> str:
    return str(cu.CUresult(int(result[0])).name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_")


def ok(result: Any) -> Any:
    if int(result[0]) != 0:
        raise Failed(code(result))
    return result[1] if len(result) == 2 else result[1:]


def answer(value: Any) -> None:
    """The program's result."""
    print(json.dumps(value, default=int), flush=True)


def start(device: int = 0) -> Any:
    """Initialises, and makes the device's primary context current."""
    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(context))
    return context


def load(name: str = "driver_tests") -> Any:
    return ok(cu.cuModuleLoadData(_native.image(name).read_bytes()))


def function(module: Any, name: str) -> Any:
    return ok(cu.cuModuleGetFunction(module, name.encode()))


def launch(f: Any, stream: Any, address: int, grid: int = 1) -> Any:
    return cu.cuLaunchKernel(f, grid, 1, 1, 1, 1, 1, 0, stream, ((address,), (ctypes.c_void_p,)), 0)


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self, module: Any, stream: Any) -> None:
        self.flag = int(ok(cu.cuMemHostAlloc(4, 0)))
        ctypes.c_uint32.from_address(self.flag).value = 0
        ok(launch(function(module, "gate"), stream, self.flag))

    def open(self) -> None:
        ctypes.c_uint32.from_address(self.flag).value = 1


def words(address: int, count: int) -> list[int]:
    out = (ctypes.c_uint32 * count)()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(out), address, 4 * count))
    return list(out)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Counters(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("launches", "captures", "graph_launches", "instantiations", "module_loads", "allocations")
    )


class Ticket(ctypes.Structure):
    """A CUipcMemHandle: the bindings do not show its bytes."""

    _fields_ = (("data", ctypes.c_uint8 * 64),)


def library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def counters(owner: int) -> dict[str, int]:
    out = Counters()
    assert library().softcuda_counters(owner, ctypes.byref(out)) == 0
    return {name: getattr(out, name) for name, _ in Counters._fields_}


def properties() -> Any:
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.requestedHandleTypes = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    return made


def access() -> Any:
    made = cu.CUmemAccessDesc()
    made.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


def map_memory(handle: Any, size: int = 2 << 20) -> int:
    base = int(ok(cu.cuMemAddressReserve(size, 0, 0, 0)))
    ok(cu.cuMemMap(base, size, 0, handle, 0))
    ok(cu.cuMemSetAccess(base, size, [access()], 1))
    return base


def unmap(base: int, size: int = 2 << 20) -> None:
    ok(cu.cuMemUnmap(base, size))
    ok(cu.cuMemAddressFree(base, size))
