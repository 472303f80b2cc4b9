# SPDX-License-Identifier: Apache-2.0
"""Rows about the process: initialisation, forks, contexts, finding functions."""

from __future__ import annotations

import ctypes
import os
from typing import Any

from bench import Bench, code, cu, handle, library, name_of, ok, raw, row


@row("process.uninitialised")
def uninitialised(_: Any) -> Any:
    return [
        code(cu.cuDeviceGetCount()),
        code(cu.cuMemAlloc(4)),
        code(cu.cuCtxGetCurrent()),
        code(cu.cuDriverGetVersion()),
    ]


@row("process.init_flags")
def init_flags(_: Bench) -> Any:
    return [code(cu.cuInit(1)), code(cu.cuInit(0))]


@row("process.forked_child")
def forked_child(x: Bench) -> Any:
    """A child of an initialised process cannot use the driver; its parent goes on."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        answers = [code(cu.cuInit(0)), code(cu.cuCtxGetCurrent()), code(cu.cuMemAlloc(4)), code(cu.cuDeviceGetCount())]
        os.write(writing, ",".join(answers).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        answers = pipe.read().split(",")
    os.waitpid(child, 0)
    return {"child": answers, "parent": code(x.add(x.stream()))}


@row("process.device_uuids")
def device_uuids(_: Any) -> Any:
    """Whether the UUIDs of devices are there, differ, and stay."""
    ok(cu.cuInit(0))
    count = ok(cu.cuDeviceGetCount())
    first, again = ([bytes(ok(cu.cuDeviceGetUuid(i)).bytes) for i in range(count)] for _ in range(2))
    return {
        "bytes": sorted({len(uuid) for uuid in first}),
        "set": all(any(uuid) for uuid in first),
        "different": len(set(first)) == count,
        "same": first == again,
        "no_device": [
            code(cu.cuDeviceGetUuid(count)),
            code(cu.cuDeviceTotalMem(count)),
            code(cu.cuDeviceGetName(8, count)),
        ],
    }


@row("process.error_names")
def error_names(_: Bench) -> Any:
    name = ok(cu.cuGetErrorName(cu.CUresult.CUDA_ERROR_STREAM_CAPTURE_ISOLATION))
    pointer = ctypes.c_char_p()
    return [name.decode(), raw("cuGetErrorName", 12345, ctypes.byref(pointer)), pointer.value is None]


def find(symbol: str, version: int, flags: int = 0) -> tuple[str, int, int]:
    """Code, address and status of cuGetProcAddress_v2."""
    pointer, status = ctypes.c_void_p(1), ctypes.c_int(-1)
    got = raw(
        "cuGetProcAddress_v2",
        symbol.encode(),
        ctypes.byref(pointer),
        version,
        ctypes.c_uint64(flags),
        ctypes.byref(status),
    )
    return got, pointer.value or 0, status.value


def exported(symbol: str) -> int:
    """Where a symbol of the driver is; 0 if it exports none."""
    try:
        return ctypes.cast(getattr(library(), symbol), ctypes.c_void_p).value or 0
    except AttributeError:
        return 0


def binds(symbol: str, version: int, target: str, flags: int = 0) -> bool:
    """Whether a look-up gives the exported symbol of that name."""
    return find(symbol, version, flags)[1] == exported(target) != 0


@row("process.find_unknown")
def find_unknown(_: Bench) -> Any:
    got, address, status = find("cuThereIsNoSuchCall", 13000)
    return [got, address == 0, status]


@row("process.find_too_old")
def find_too_old(_: Bench) -> Any:
    got, address, status = find("cuGraphCreate", 9000)
    return [got, address == 0, status]


@row("process.find_too_new")
def find_too_new(_: Bench) -> Any:
    got, _, _ = find("cuMemAlloc", 99000)
    return got


@row("process.find_versioned_name")
def find_versioned_name(_: Bench) -> Any:
    got, address, status = find("cuMemAlloc_v2", 13000)
    return [got, address == 0, status]


@row("process.find_without_status")
def find_without_status(_: Bench) -> Any:
    pointer = ctypes.c_void_p(1)
    got = raw("cuGetProcAddress_v2", b"cuNone", ctypes.byref(pointer), 13000, ctypes.c_uint64(0), None)
    old = raw("cuGetProcAddress", b"cuNone", ctypes.byref(pointer), 13000, ctypes.c_uint64(0))
    return [got, old]


@row("process.find_versions")
def find_versions(_: Bench) -> Any:
    """Which variant a name and version give."""
    asked = [
        ("cuMemAlloc", 3020, "cuMemAlloc_v2"),
        ("cuMemFree", 13000, "cuMemFree_v2"),
        ("cuCtxCreate", 11030, "cuCtxCreate_v2"),
        ("cuCtxCreate", 11040, "cuCtxCreate_v3"),
        ("cuCtxCreate", 12050, "cuCtxCreate_v4"),
        ("cuGetProcAddress", 11030, "cuGetProcAddress"),
        ("cuGetProcAddress", 12000, "cuGetProcAddress_v2"),
        ("cuStreamGetCaptureInfo", 11030, "cuStreamGetCaptureInfo_v2"),
        ("cuStreamGetCaptureInfo", 12030, "cuStreamGetCaptureInfo_v3"),
        ("cuGraphAddDependencies", 12020, "cuGraphAddDependencies"),
        ("cuGraphAddDependencies", 12030, "cuGraphAddDependencies_v2"),
        ("cuGraphKernelNodeGetParams", 11080, "cuGraphKernelNodeGetParams"),
        ("cuGraphKernelNodeGetParams", 12000, "cuGraphKernelNodeGetParams_v2"),
        ("cuGraphExecUpdate", 12000, "cuGraphExecUpdate_v2"),
        ("cuGraphInstantiateWithFlags", 13000, "cuGraphInstantiateWithFlags"),
        ("cuMemcpyHtoDAsync", 13000, "cuMemcpyHtoDAsync_v2"),
    ]
    return {f"{name}@{version}": binds(name, version, target) for name, version, target in asked}


@row("process.find_per_thread")
def find_per_thread(_: Bench) -> Any:
    _, address, status = find("cuLaunchKernel", 5000, 2)
    return {
        "launch": binds("cuLaunchKernel", 13000, "cuLaunchKernel_ptsz", 2),
        "legacy": binds("cuLaunchKernel", 13000, "cuLaunchKernel", 1),
        "copy": binds("cuMemcpyHtoD", 13000, "cuMemcpyHtoD_v2_ptds", 2),
        "info": binds("cuStreamGetCaptureInfo", 13000, "cuStreamGetCaptureInfo_v3_ptsz", 2),
        "without": binds("cuMemAlloc", 13000, "cuMemAlloc_v2", 2),
        "too_old": [
            "per thread" if address == exported("cuLaunchKernel_ptsz") else "null" if address == 0 else "other",
            status,
        ],
    }


@row("context.no_current")
def no_current(x: Bench) -> Any:
    def work() -> Any:
        ok(cu.cuCtxSetCurrent(0))
        return [
            code(cu.cuMemAlloc(4)),
            code(cu.cuStreamCreate(0)),
            code(cu.cuCtxSynchronize()),
            code(cu.cuCtxGetDevice()),
            int(ok(cu.cuCtxGetCurrent())) == 0,
            code(cu.cuCtxPopCurrent()),
            code(cu.cuMemAddressReserve(2 << 20, 0, 0, 0)),
            code(cu.cuMemCreate(2 << 20, x.properties(), 0)),
            code(cu.cuLibraryLoadData(x.image, [], [], 0, [], [], 0)),
            code(cu.cuModuleLoadData(x.image)),
            code(cu.cuGraphCreate(0)),
        ]

    return x.elsewhere(work)


@row("context.primary")
def primary(x: Bench) -> Any:
    again = ok(cu.cuDevicePrimaryCtxRetain(x.device))
    flags, active = ok(cu.cuDevicePrimaryCtxGetState(x.device))
    released = code(cu.cuDevicePrimaryCtxRelease(x.device))
    return [int(again) == int(x.context), flags, active, released, ok(cu.cuDevicePrimaryCtxGetState(x.device))[1]]


@row("context.stack")
def stack(x: Bench) -> Any:
    ok(cu.cuCtxPushCurrent(x.context))
    popped = ok(cu.cuCtxPopCurrent())
    return [int(popped) == int(x.context), int(ok(cu.cuCtxGetCurrent())) == int(x.context)]


@row("context.own")
def own(x: Bench) -> Any:
    """A context of one's own has its own modules and streams, and becomes current."""
    made = raw("cuCtxCreate_v2", ctypes.byref(new := ctypes.c_void_p()), 0, 0)
    current = int(ok(cu.cuCtxGetCurrent())) == new.value
    foreign = code(x.add(0))
    destroyed = raw("cuCtxDestroy_v2", new)
    back = int(ok(cu.cuCtxGetCurrent())) == int(x.context)
    return [made, current, foreign, destroyed, back]


@row("context.destroy_primary")
def destroy_primary(x: Bench) -> Any:
    return raw("cuCtxDestroy_v2", handle(x.context))


@row("context.bad_handle")
def bad_device(x: Bench) -> Any:
    return [code(cu.cuDeviceGet(99)), code(cu.cuDevicePrimaryCtxRetain(99)), code(cu.cuDeviceGet(-1))]


@row("context.queries")
def queries(x: Bench) -> Any:
    least, greatest = ok(cu.cuCtxGetStreamPriorityRange())
    limits = [code(cu.cuCtxGetLimit(cu.CUlimit(i))) for i in range(4)]
    return [least, greatest, ok(cu.cuCtxGetFlags()), limits, name_of(ok(cu.cuModuleGetLoadingMode()))]
