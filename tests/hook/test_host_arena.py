# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory has recorded addresses, and is pinned."""

from __future__ import annotations

import os
from typing import Any

STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
HOST = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0) + 5 * STRIDE
GRANULE = 2 << 20

ALLOCATE = """
import ctypes, fdyhook as fdy, soft
cu = soft.cu
soft.start()
out = [int(soft.ok(cu.cuMemHostAlloc(n, flags))) for n, flags in ((100, 0), (5000, 3), (3 << 20, 4))]
out.append(int(soft.ok(cu.cuMemAllocHost(64))))
soft.ok(cu.cuMemFreeHost(out[1]))
out.append(int(soft.ok(cu.cuMemAllocHost(4000))))
fdy.answer(out)
"""


def test_addresses_are_the_same_in_every_process(hooked: Any) -> None:
    first = hooked.python(ALLOCATE, "capture")
    # On whole pages, as the driver's own.
    assert first == [HOST, HOST + 4096, HOST + GRANULE, HOST + 3 * 4096, HOST + 4096]
    assert first == hooked.python(ALLOCATE, "capture")
    assert not any(HOST <= a < HOST + STRIDE for a in hooked.python(ALLOCATE, None))


def test_the_host_writes_and_the_device_reads(hooked: Any) -> None:
    text, kind, same, unmapped = hooked.python(
        """
        import ctypes, fdyhook as fdy, soft
        cu = soft.cu
        soft.start()
        host = int(soft.ok(cu.cuMemHostAlloc(4096, 0)))
        ctypes.memmove(host, b"written by the host", 19)
        device, back = soft.malloc(4096), int(soft.ok(cu.cuMemHostAlloc(4096, 0)))
        stream = soft.ok(cu.cuStreamCreate(1))
        soft.ok(cu.cuMemcpyHtoDAsync(device, host, 4096, stream))
        soft.ok(cu.cuMemcpyDtoHAsync(back, device, 4096, stream))
        soft.ok(cu.cuStreamSynchronize(stream))
        kind = int(soft.ok(cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host)))
        same = int(soft.ok(cu.cuMemHostGetDevicePointer(host, 0))) == host
        text = ctypes.string_at(back, 19).decode()
        soft.ok(cu.cuMemFreeHost(host)), soft.ok(cu.cuMemFreeHost(back))
        gone = cu.cuPointerGetAttribute(cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, host)[0].name
        fdy.answer([text, kind, same, gone])
        """,
        "capture",
    )
    assert text == "written by the host"
    assert kind == 1  # host memory
    assert same
    assert unmapped == "CUDA_ERROR_INVALID_VALUE"


def test_staging_buffers_beyond_the_recording_disturb_nothing(hooked: Any) -> None:
    recorded = [[5, 0, HOST, 4096, 1], [5, 1, HOST + GRANULE, 3 << 20, 1]]
    made, divergence, resized = hooked.python(
        """
        import os, fdyhook as fdy, soft
        recorded = fdy.given()
        fdy.set_layout(fdy.BASE, fdy.STRIDE, recorded)
        read, write = os.pipe()
        if os.fork() == 0:
            soft.start()
            soft.ok(soft.cu.cuMemHostAlloc(4097, 0))
            os.write(write, fdy.divergence()[0].encode())
            os._exit(0)
        soft.start()
        made = [int(soft.ok(soft.cu.cuMemHostAlloc(n, 0))) for n in (4096, 3 << 20, 64)]
        os.close(write)
        fdy.answer([made, fdy.divergence()[0], os.fdopen(read).read()])
        """,
        "restore",
        given=recorded,
    )
    assert made[:2] == [HOST, HOST + GRANULE]
    assert made[2] >= HOST + GRANULE + (3 << 20)
    assert divergence == "none"
    assert resized == "size"
