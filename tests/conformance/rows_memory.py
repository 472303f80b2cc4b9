# SPDX-License-Identifier: Apache-2.0
"""Rows about memory: plain, virtual, pinned, shared."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from typing import Any

from bench import GRANULE, Bench, code, cu, name_of, ok, raw, row

ATTRIBUTES = (
    "MEMORY_TYPE",
    "DEVICE_POINTER",
    "HOST_POINTER",
    "IS_MANAGED",
    "DEVICE_ORDINAL",
    "IS_LEGACY_CUDA_IPC_CAPABLE",
    "RANGE_START_ADDR",
    "RANGE_SIZE",
    "MAPPED",
    "ALLOWED_HANDLE_TYPES",
    "SYNC_MEMOPS",
    "MAPPING_SIZE",
    "MAPPING_BASE_ADDR",
)
ADDRESSES = {"DEVICE_POINTER", "HOST_POINTER", "RANGE_START_ADDR", "MAPPING_BASE_ADDR"}


def pointer_attributes(address: int, base: int) -> dict[str, Any]:
    """Attributes of an address; addresses relative to ``base``."""
    out: dict[str, Any] = {}
    for name in ATTRIBUTES:
        number = int(getattr(cu.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}"))
        value = ctypes.c_uint64(0)
        got = raw("cuPointerGetAttribute", ctypes.byref(value), number, ctypes.c_uint64(address))
        if got != "SUCCESS":
            out[name] = got
        elif name in ADDRESSES:
            out[name] = value.value - base
        else:
            out[name] = ctypes.c_int64(value.value).value if name == "DEVICE_ORDINAL" else value.value
    return out


@row("memory.free")
def free(x: Bench) -> Any:
    address = int(ok(cu.cuMemAlloc(8 << 20)))
    interior = code(cu.cuMemFree(address + 256))
    return [
        interior,
        code(cu.cuMemFree(address)),
        code(cu.cuMemFree(address)),
        code(cu.cuMemFree(0)),
        code(cu.cuMemFree(0x1000)),
    ]


@row("memory.alloc_limits")
def alloc_limits(x: Bench) -> Any:
    return [code(cu.cuMemAlloc(0)), code(cu.cuMemAlloc(1 << 50)), code(cu.cuMemAlloc(1))]


@row("memory.alignment")
def alignment(x: Bench) -> Any:
    small = [int(ok(cu.cuMemAlloc(100))) for _ in range(8)]
    large = [int(ok(cu.cuMemAlloc(3 << 20))) for _ in range(4)]
    for address in small + large:
        ok(cu.cuMemFree(address))
    return [all(a % 512 == 0 for a in small), all(a % GRANULE == 0 for a in large)]


@row("memory.address_range")
def address_range(x: Bench) -> Any:
    address = int(ok(cu.cuMemAlloc(5000)))
    base, size = ok(cu.cuMemGetAddressRange(address + 4000))
    past = code(cu.cuMemGetAddressRange(0x1000))
    ok(cu.cuMemFree(address))
    freed = code(cu.cuMemGetAddressRange(address))
    return [int(base) - address, size, past, freed]


@row("memory.copy_unknown")
def copy_unknown(x: Bench) -> Any:
    data = (ctypes.c_uint8 * 64)()
    host = ctypes.addressof(data)
    large = int(ok(cu.cuMemAlloc(4 << 20)))
    out = {
        "to_null": code(cu.cuMemcpyHtoD(0, host, 64)),
        "to_unknown": code(cu.cuMemcpyHtoD(0x1000, host, 64)),
        "to_host_as_device": code(cu.cuMemcpyHtoD(host, host, 64)),
        "past_end": code(cu.cuMemcpyHtoD(large + (4 << 20) - 32, host, 64)),
        "fill_unknown": code(cu.cuMemsetD8(0x1000, 0, 64)),
        "fill_past_end": code(cu.cuMemsetD8(large + (4 << 20) - 32, 0, 64)),
        "fill_misaligned": code(cu.cuMemsetD32(large + 2, 0, 4)),
        "nothing": code(cu.cuMemcpyHtoD(large, host, 0)),
        "generic_host_to_device": code(cu.cuMemcpy(large, host, 64)),
        "generic_host_to_host": code(cu.cuMemcpy(host, host, 64)),
    }
    ok(cu.cuMemFree(large))
    return out


@row("memory.plain_attributes")
def plain_attributes(x: Bench) -> Any:
    address = int(ok(cu.cuMemAlloc(6 << 20)))
    out = pointer_attributes(address + 512, address)
    ok(cu.cuMemFree(address))
    return out


@row("memory.unknown_attributes")
def unknown_attributes(x: Bench) -> Any:
    data = (ctypes.c_uint8 * 64)()
    address = ctypes.addressof(data)
    return pointer_attributes(address, address)


@row("memory.global_attributes")
def global_attributes(x: Bench) -> Any:
    address, size = ok(cu.cuModuleGetGlobal(x.module, b"conformance_table"))
    got = pointer_attributes(int(address), int(address))
    return [size, got["MEMORY_TYPE"], got["DEVICE_POINTER"], got["IS_MANAGED"], got["IS_LEGACY_CUDA_IPC_CAPABLE"]]


@row("memory.async_pool")
def async_pool(x: Bench) -> Any:
    stream = x.stream()
    address = int(ok(cu.cuMemAllocAsync(1 << 20, stream)))
    fill = code(cu.cuMemsetD8Async(address, 1, 1 << 20, stream))
    freed = code(cu.cuMemFreeAsync(address, stream))
    ok(cu.cuStreamSynchronize(stream))
    second = int(ok(cu.cuMemAllocAsync(1 << 20, stream)))
    plain_free = code(cu.cuMemFree(second))
    return [fill, freed, plain_free]


@row("memory.legacy_ipc")
def legacy_ipc(x: Bench) -> Any:
    address = int(ok(cu.cuMemAlloc(4 << 20)))
    interior = code(cu.cuIpcGetMemHandle(address + 4096))
    ticket = ok(cu.cuIpcGetMemHandle(address))
    own = code(cu.cuIpcOpenMemHandle(ticket, 1))
    ok(cu.cuMemFree(address))
    with x.mapped() as (base, _):
        virtual = code(cu.cuIpcGetMemHandle(base))
    return [interior, own, virtual, code(cu.cuIpcGetMemHandle(0x1000))]


# ---- virtual memory ---------------------------------------------------------------------------------------------


@row("vmm.granularity")
def granularity(x: Bench) -> Any:
    flags = cu.CUmemAllocationGranularity_flags
    return [
        ok(cu.cuMemGetAllocationGranularity(x.properties(), flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)),
        ok(cu.cuMemGetAllocationGranularity(x.properties(), flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED)),
    ]


@row("vmm.reserve_hint")
def reserve_hint(x: Bench) -> Any:
    """A taken address gives another place, not an error; a crooked one is wrong.  So small a reservation may come out
    elsewhere though its place is free: the driver has room by it for one of these.  `segment.wished` asks large ones.
    """
    hint, size = 0x6100_0000_0000, 16 << 20

    def attempt(stack: contextlib.ExitStack, address: int) -> str:
        got = cu.cuMemAddressReserve(size, 0, address, 0)
        if code(got) != "SUCCESS":
            return code(got)
        stack.callback(cu.cuMemAddressFree, got[1], size)
        return "there" if int(got[1]) == address else "elsewhere"

    with contextlib.ExitStack() as stack:
        out = {
            "free": attempt(stack, hint),
            "taken": attempt(stack, hint),
            "inside": attempt(stack, hint + (8 << 20)),
            "crooked": attempt(stack, hint + (64 << 20) + 4096),
        }
    with contextlib.ExitStack() as stack:
        out["free_again"] = attempt(stack, hint)
    return out


@row("vmm.reserve_large")
def reserve_large(x: Bench) -> Any:
    hint, size = 0x6000_0000_0000, 6 * (256 << 30)
    with x.reserved(size, hint) as base, x.memory() as memory:
        last = base + size - GRANULE
        with x.at(last, GRANULE, memory):
            fill = code(cu.cuMemsetD8(last, 1, GRANULE))
            ok(cu.cuCtxSynchronize())
    return [base == hint, fill]


@row("vmm.reserve_sizes")
def reserve_sizes(x: Bench) -> Any:
    out = {}
    for label, size, alignment in (
        ("zero", 0, 0),
        ("page", 4096, 0),
        ("crooked", GRANULE + 4096, 0),
        ("alignment_not_power", GRANULE, 3 << 20),
        ("alignment_small", GRANULE, 4096),
        ("alignment_large", GRANULE, 1 << 30),
        ("flags", GRANULE, 0),
    ):
        got = cu.cuMemAddressReserve(size, alignment, 0, 1 if label == "flags" else 0)
        out[label] = code(got)
        if out[label] == "SUCCESS":
            if alignment and int(got[1]) % alignment:
                out[label] = "MISALIGNED"
            ok(cu.cuMemAddressFree(got[1], size))
    return out


@row("vmm.create_limits")
def create_limits(x: Bench) -> Any:
    """Sizes that cannot be.

    Left out: a handle that was never given out.  Driver 580.159.04 crashed while this row released one.
    """
    return [
        code(cu.cuMemCreate(0, x.properties(), 0)),
        code(cu.cuMemCreate(4096, x.properties(), 0)),
        code(cu.cuMemCreate(1 << 50, x.properties(), 0)),
    ]


@row("no_access.touched")
def no_access(x: Bench) -> Any:
    """Mapped memory cannot be touched before access is set."""
    data = (ctypes.c_uint8 * 64)()
    access = x.access()  # its location is a view of it
    location = access.location
    with x.reserved(4 * GRANULE) as base, x.memory() as memory:
        with x.at(base, GRANULE, memory, access=False):
            out = [code(cu.cuMemcpyHtoD(base, ctypes.addressof(data), 64))]
            out.append(ok(cu.cuMemGetAccess(location, base)))
            ok(cu.cuMemSetAccess(base, GRANULE, [access], 1))
            out.append(ok(cu.cuMemGetAccess(location, base)))
            out.append(code(cu.cuMemcpyHtoD(base, ctypes.addressof(data), 64)))
        out.append(code(cu.cuMemcpyHtoD(base, ctypes.addressof(data), 64)))
    return out


@row("vmm.map_limits")
def map_limits(x: Bench) -> Any:
    """Where memory cannot be mapped, most of it not whole.  No handle that was never given out, as in
    `vmm.create_limits`.
    """
    with x.mapped(2 * GRANULE) as (base, memory):
        free_place = base + 4 * GRANULE

        def attempt(address: int, size: int, offset: int = 0) -> str:
            got = code(cu.cuMemMap(address, size, offset, memory, 0))
            if got == "SUCCESS":
                ok(cu.cuMemUnmap(address, size))
            return got

        return {
            "taken": attempt(base, GRANULE),
            "overlap": attempt(base + GRANULE, 2 * GRANULE),
            "offset": attempt(free_place, GRANULE, GRANULE),
            "beyond": attempt(free_place, 4 * GRANULE),
            "crooked": attempt(free_place + 4096, GRANULE),
            "unreserved": attempt(0x6200_0000_0000, GRANULE),
            "half": attempt(free_place, GRANULE),
        }


@row("vmm.unmap_limits")
def unmap_limits(x: Bench) -> Any:
    """A mapping is unmapped whole, several at once if they touch."""
    size = 8 * GRANULE
    with contextlib.ExitStack() as stack:
        memories = [stack.enter_context(x.memory(2 * GRANULE)) for _ in range(2)]
        base = int(ok(cu.cuMemAddressReserve(size, 0, 0, 0)))
        for i, memory in enumerate(memories):
            ok(cu.cuMemMap(base + 2 * i * GRANULE, 2 * GRANULE, 0, memory, 0))
        return {
            "access_part": code(cu.cuMemSetAccess(base, GRANULE, [x.access()], 1)),
            "access_both": code(cu.cuMemSetAccess(base, 4 * GRANULE, [x.access()], 1)),
            "access_gap": code(cu.cuMemSetAccess(base, 6 * GRANULE, [x.access()], 1)),
            "unmap_part": code(cu.cuMemUnmap(base, GRANULE)),
            "unmap_straddling": code(cu.cuMemUnmap(base + GRANULE, 2 * GRANULE)),
            "free_mapped": code(cu.cuMemAddressFree(base, size)),
            "free_part": code(cu.cuMemAddressFree(base + 4 * GRANULE, 4 * GRANULE)),
            "unmap_both": code(cu.cuMemUnmap(base, 4 * GRANULE)),
            "unmap_again": code(cu.cuMemUnmap(base, 2 * GRANULE)),
            "free": code(cu.cuMemAddressFree(base, size)),
        }


@row("vmm.release_while_mapped")
def release_while_mapped(x: Bench) -> Any:
    with x.reserved(4 * GRANULE) as base, contextlib.ExitStack() as stack:
        with x.memory() as memory:
            stack.enter_context(x.at(base, GRANULE, memory))
        x.write(base, [1, 2, 3])
        kept = x.read(base, 3)
        retained = cu.cuMemRetainAllocationHandle(base)
        if code(retained) == "SUCCESS":
            stack.callback(cu.cuMemRelease, retained[1])
        return [kept, code(retained), int(retained[1]) == int(memory)]


@row("vmm.alias")
def alias(x: Bench) -> Any:
    """The same memory at two places, and shared through a descriptor."""
    with x.mapped() as (base, memory):
        other = base + 2 * GRANULE
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        descriptor = ok(cu.cuMemExportToShareableHandle(memory, kind, 0))
        imported = ok(cu.cuMemImportFromShareableHandle(int(descriptor), kind))
        os.close(int(descriptor))
        try:
            with x.at(other, GRANULE, imported):
                x.write(base, [11, 22])
                seen = x.read(other, 2)
            properties = ok(cu.cuMemGetAllocationPropertiesFromHandle(imported))
        finally:
            cu.cuMemRelease(imported)
        return [seen, name_of(properties.type), int(properties.location.id), int(properties.requestedHandleTypes)]


@row("vmm.not_shareable")
def not_shareable(x: Bench) -> Any:
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    with x.mapped(shareable=False) as (_, memory):
        export = code(cu.cuMemExportToShareableHandle(memory, kind, 0))
    reading, writing = os.pipe()
    bad = code(cu.cuMemImportFromShareableHandle(reading, kind))
    os.close(reading)
    os.close(writing)
    return [export, bad]


@row("vmm.across_mappings")
def across_mappings(x: Bench) -> Any:
    """Copies, fills and kernels run over the border of two mappings."""
    stream = x.stream()
    with x.reserved(4 * GRANULE) as base, contextlib.ExitStack() as stack:
        for i in range(2):
            memory = stack.enter_context(x.memory())
            stack.enter_context(x.at(base + i * GRANULE, GRANULE, memory))
        border = base + GRANULE - 128
        fill = code(cu.cuMemsetD32Async(border, 5, 64, stream))
        add = code(x.add(stream, 2, address=border))
        ok(cu.cuStreamSynchronize(stream))
        values = set(x.read(border, 64))
        ranges = [ok(cu.cuMemGetAddressRange(base + i * GRANULE + 64)) for i in range(2)]
        return [fill, add, sorted(values), [[int(a) - base, size] for a, size in ranges]]


@row("vmm.attributes")
def attributes(x: Bench) -> Any:
    with x.mapped(2 * GRANULE) as (base, _):
        return pointer_attributes(base + GRANULE, base)


@row("vmm_plain.calls")
def plain_calls(x: Bench) -> Any:
    """What calls for cuMemAlloc memory say to mapped memory."""
    with x.mapped() as (base, _):
        plain = int(ok(cu.cuMemAlloc(GRANULE)))
        out = {
            "free": code(cu.cuMemFree(base)),
            "retain_plain": code(cu.cuMemRetainAllocationHandle(plain)),
            "unmap_plain": code(cu.cuMemUnmap(plain, GRANULE)),
            "host_register": code(cu.cuMemHostRegister(base, GRANULE, 0)),
        }
        ok(cu.cuMemFree(plain))
        return out


# ---- pinned host memory -----------------------------------------------------------------------------------------


@row("host.alloc")
def host_alloc(x: Bench) -> Any:
    address = int(ok(cu.cuMemHostAlloc(10000, 2)))
    flags = ok(cu.cuMemHostGetFlags(address))
    pointer = int(ok(cu.cuMemHostGetDevicePointer(address, 0)))
    attributes = pointer_attributes(address + 64, address)
    del attributes["MAPPING_SIZE"]  # the driver takes as much as it likes
    return [
        flags,
        pointer - address,
        attributes,
        code(cu.cuMemHostUnregister(address)),
        code(cu.cuMemFreeHost(address + 64)),
        code(cu.cuMemFreeHost(address)),
        code(cu.cuMemFreeHost(address)),
    ]


@row("host.flags")
def host_flags(x: Bench) -> Any:
    """The flags that memory was pinned with, as the driver gives them back."""
    out = []
    for make in (lambda: cu.cuMemAllocHost(64), *(lambda f=f: cu.cuMemHostAlloc(64, f) for f in (0, 1, 3, 4))):
        address = int(ok(make()))
        out.append(ok(cu.cuMemHostGetFlags(address)))
        ok(cu.cuMemFreeHost(address))
    return out


def fixed_mapping(hint: int, size: int) -> int:
    """Private anonymous memory at an address of one's own choice; its address."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    fixed = 0x100000  # MAP_FIXED_NOREPLACE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed
    got = libc.mmap(hint, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    return 0 if got in (None, ctypes.c_void_p(-1).value) else int(got)


@row("host.register_fixed")
def register_fixed(x: Bench) -> Any:
    """Memory at a fixed address, registered, used by copies and kernels under its own address."""
    hint, size = 0x6150_0000_0000, 8 << 20
    base = fixed_mapping(hint, size)
    x.later.callback(ctypes.CDLL(None).munmap, ctypes.c_void_p(base), ctypes.c_size_t(size))
    x.later.callback(cu.cuMemHostUnregister, base)  # says so if it is not registered any more
    registered = code(cu.cuMemHostRegister(base, size, 2))
    pointer = int(ok(cu.cuMemHostGetDevicePointer(base, 0)))
    stream = x.stream()
    ok(cu.cuMemsetD32Async(pointer, 40, 64, stream))
    ok(x.add(stream, 2, address=pointer))
    ok(cu.cuStreamSynchronize(stream))
    value = ctypes.c_uint32.from_address(base + 4).value
    return [
        base == hint,
        registered,
        pointer - base,
        value,
        ok(cu.cuMemHostGetFlags(base)),
        pointer_attributes(base + 4096, base),
        code(cu.cuMemHostRegister(base, size, 2)),
        code(cu.cuMemHostRegister(base + 4096, 4096, 2)),
        code(cu.cuMemHostUnregister(base + 4096)),
        code(cu.cuMemFreeHost(base)),
        code(cu.cuMemHostUnregister(base)),
        code(cu.cuMemHostUnregister(base)),
    ]


@row("host.register_limits")
def register_limits(x: Bench) -> Any:
    data = (ctypes.c_uint8 * 20000)()
    address = ctypes.addressof(data)
    crooked = code(cu.cuMemHostRegister(address + 3, 5000, 0))
    if crooked == "SUCCESS":
        ok(cu.cuMemHostUnregister(address + 3))
    return [
        crooked,
        code(cu.cuMemHostRegister(0, 4096, 0)),
        code(cu.cuMemHostRegister(address, 0, 0)),
        code(cu.cuMemHostRegister(0x6160_0000_0000, 4096, 0)),
        code(cu.cuMemHostGetDevicePointer(address, 0)),
        code(cu.cuMemHostGetFlags(address)),
    ]
