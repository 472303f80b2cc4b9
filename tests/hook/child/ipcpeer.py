# SPDX-License-Identifier: Apache-2.0
"""A rank that does what the test says: one JSON line ``[name, arguments...]`` in, one JSON line out."""

from __future__ import annotations

import ctypes as c
import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import Any

import fdyhook as fdy
import soft
from cuda.bindings import driver as cu

LAZY = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def start(device: int = 0) -> None:
    soft.start(device)


def devices() -> int:
    soft.ok(cu.cuInit(0))
    return int(soft.ok(cu.cuDeviceGetCount()))


def malloc(size: int, arena: int = fdy.DEFAULT) -> int:
    with fdy.arena(arena):
        return soft.malloc(size)


def free(address: int) -> None:
    soft.free(address)


def get(address: int) -> str:
    handle = soft.ok(cu.cuIpcGetMemHandle(address))
    return c.string_at(int(handle.getPtr()), 64).hex()


def ipc_handle(text: str) -> Any:
    handle = cu.CUipcMemHandle()
    c.memmove(int(handle.getPtr()), bytes.fromhex(text), 64)
    return handle


def open_handle(text: str) -> int:
    return int(soft.ok(cu.cuIpcOpenMemHandle(ipc_handle(text), LAZY)))


def refused(text: str) -> list[Any]:
    """Code, message and seconds of an open that fails."""
    started = time.monotonic()
    code = cu.cuIpcOpenMemHandle(ipc_handle(text), LAZY)[0]
    return [code.name, fdy.last_error(), time.monotonic() - started]


def close(address: int) -> str:
    return str(cu.cuIpcCloseMemHandle(address)[0].name)


def write(address: int, text: str) -> None:
    """The bytes are there for every process when this returns: a copy of a few may still be on its way after the call,
    in order for this context's work alone.
    """
    data = bytes.fromhex(text)
    soft.ok(cu.cuMemcpyHtoD(address, data, len(data)))
    soft.ok(cu.cuCtxSynchronize())


def fill(address: int, value: int, size: int) -> None:
    soft.ok(cu.cuMemsetD8(address, value, size))
    soft.ok(cu.cuCtxSynchronize())


def read(address: int, size: int) -> str:
    data = bytearray(size)
    buffer = (c.c_char * size).from_buffer(data)
    soft.ok(cu.cuMemcpyDtoH(c.addressof(buffer), address, size))
    return data.hex()


def readable(address: int) -> bool:
    buffer = c.create_string_buffer(4)
    return bool(cu.cuMemcpyDtoH(c.addressof(buffer), address, 4)[0] == soft.SUCCESS)


def address_range(address: int) -> list[int]:
    """What the driver's three questions say of an address: base, bytes, base, bytes, offset to the base."""
    start_attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR
    size_attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_RANGE_SIZE
    base, size = soft.ok(cu.cuMemGetAddressRange(address))
    one = soft.ok(cu.cuPointerGetAttribute(start_attribute, address))
    both = soft.ok(cu.cuPointerGetAttributes(2, [start_attribute, size_attribute], address))
    return [int(base), int(size), int(one), *(int(x) for x in both)]


def buffer_id(address: int) -> int:
    return int(soft.ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID, address)))


def peer_handle(text: str, rank: int) -> str:
    return fdy.ipc_peer_handle(bytes.fromhex(text), rank).hex()


def windows() -> list[Any]:
    return fdy.windows()


def set_rank(rank: int) -> None:
    fdy.set_rank(rank)


def set_layout(base: int, stride: int, recorded: list[Any]) -> None:
    fdy.set_layout(base, stride, recorded)


def map_held() -> None:
    fdy.map_held()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def free_memory_now() -> int:
    return soft.free_memory()


def occupy(address: int) -> None:
    """A page of this process at a place that something else wants."""
    library = c.CDLL(None, use_errno=True)
    library.mmap.restype = c.c_void_p
    private_anonymous_fixed = 0x2 | 0x20 | 0x100000
    got = library.mmap(c.c_void_p(address), c.c_size_t(4096), 0, private_anonymous_fixed, -1, c.c_long(0))
    if got != address:
        raise OSError(c.get_errno(), "the place is taken already")


def get_codes() -> list[str]:
    """What a handle of pinned memory, of an arena's free space and of no memory at all is answered."""
    pinned = int(soft.ok(cu.cuMemHostAlloc(4096, 0)))
    free_space = fdy.report().arena_base + (100 << 30)
    return [cu.cuIpcGetMemHandle(a)[0].name for a in (pinned, free_space, 0x1000)]


def threads() -> list[str]:
    return sorted(p.read_text().strip() for p in Path("/proc/self/task").glob("*/comm"))


def cycles(text: str, count: int) -> list[int]:
    """Opens and closes over and over: what is left over in descriptors, mappings and device memory."""
    close(open_handle(text))
    before = descriptors(), mappings(), soft.free_memory()
    for _ in range(count):
        if close(open_handle(text)) != "CUDA_SUCCESS":
            raise RuntimeError("a close failed")
    after = descriptors(), mappings(), soft.free_memory()
    return [b - a for a, b in zip(before, after, strict=True)]


def open_from_threads(text: str, count: int) -> list[int]:
    """The addresses that as many threads got at once; all are closed again."""
    context = soft.ok(cu.cuCtxGetCurrent())
    out: list[int] = []

    def work() -> None:
        soft.ok(cu.cuCtxSetCurrent(context))
        out.append(open_handle(text))

    workers = [threading.Thread(target=work) for _ in range(count)]
    [w.start() for w in workers]
    [w.join() for w in workers]
    for address in out:
        close(address)
    return out


def fork_and_stay() -> int:
    """A child that outlives this process for a while and does nothing."""
    child = os.fork()
    if child == 0:
        for file in (0, 1, 2):
            os.close(file)
        time.sleep(60)
        os._exit(0)
    return child


_taken: list[int] = []


def take_descriptors(but: int) -> None:
    """Leaves so many descriptors free, and no more."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    try:
        while True:
            _taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(but):
            os.close(_taken.pop())


def free_descriptors() -> None:
    while _taken:
        os.close(_taken.pop())


def last_error() -> str:
    return fdy.last_error()


def main() -> None:
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        try:
            answer = {"is": globals()[name](*arguments)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
