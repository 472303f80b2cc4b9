# SPDX-License-Identifier: Apache-2.0
"""Device memory looked at and written where it is: kernels over chunks, and room to keep chunks in.

The kernels are PTX, which the driver compiles, or an image of the same for the software driver.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cuda.bindings import driver

from foundryd import _native
from foundryd.daemon import limits
from foundryd.errors import DriverCallFailed, UsageError
from foundryd.session.driver import call, software_driver

CHUNK = 64 << 10  # bytes
THREADS = 256  # of a block, as in memory.ptx
_PTX = Path(__file__).parent / "kernels" / "memory.ptx"
_ALIGNMENT = 16

Addresses = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.void]

# The rows of memory.ptx.
chunk_dtype = np.dtype([("address", "<u8"), ("bytes", "<u8")])
put_dtype = np.dtype([("to", "<u8"), ("from", "<u8"), ("bytes", "<u8"), ("word", "<u8")])
judge_dtype = np.dtype(
    [
        (name, "<u8")
        for name in ("after", "plain", "start", "changed", "bytes", "start_word", "changed_word", "reserved")
    ]
)


def chunks_of(ranges: Sequence[tuple[int, int]]) -> Rows:
    """``chunk_dtype`` rows that cover (address, bytes) ranges in their order; the last of a range may be short."""
    parts = []
    for address, size in ranges:
        if address % _ALIGNMENT:
            raise UsageError(f"device memory at {address:#x} is not aligned to {_ALIGNMENT} bytes: give an allocation")
        starts = np.arange(0, size, CHUNK, dtype=np.uint64)
        part = np.zeros(len(starts), chunk_dtype)
        part["address"] = starts + np.uint64(address)
        part["bytes"] = np.minimum(np.uint64(size) - starts, np.uint64(CHUNK))
        parts.append(part)
    return np.concatenate(parts) if parts else np.zeros(0, chunk_dtype)


@dataclass(frozen=True)
class Survey:
    """What each chunk holds.

    Attributes
    ----------
    digest : uint64; chunks of one place that differ in one 8-byte word never share it, others with chance 2**-64.
    mixed : whether its 8-byte words are not all alike.
    pointers : whether one of them is an address between the bounds that were asked for.
    first : its first 8-byte word.
    """

    digest: npt.NDArray[np.uint64]
    mixed: npt.NDArray[np.bool_]
    pointers: npt.NDArray[np.bool_]
    first: npt.NDArray[np.uint64]


class _Buffer:
    """Device memory that grows."""

    def __init__(self) -> None:
        self._address, self._bytes = 0, 0

    def at_least(self, size: int) -> int:
        """Its address with room for ``size`` bytes; what it held is lost when it grows."""
        if size > self._bytes:
            self.close()
            self._address = int(call("cuMemAlloc", size))
            self._bytes = size
        return self._address

    def close(self) -> None:
        if self._bytes:
            call("cuMemFree", self._address)
            self._address, self._bytes = 0, 0


class MemoryKernels:
    """The kernels, in the current context.  Every method waits until its work is done.

    Raises ``DriverCallFailed``, here and later.
    """

    def __init__(self) -> None:
        image = _native.image("capture_memory").read_bytes() if software_driver() else _PTX.read_bytes() + b"\0"
        self._module = call("cuModuleLoadData", image)
        self._stream: Any = None
        self._rows, self._chunks, self._out = _Buffer(), _Buffer(), _Buffer()
        self._count = 0
        try:
            self._survey, self._put, self._judge = (
                call("cuModuleGetFunction", self._module, name) for name in (b"survey", b"put", b"judge")
            )
            self._stream = call("cuStreamCreate", driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        except BaseException:
            self.close()
            raise

    def watch(self, chunks: Rows) -> None:
        """The chunks that ``survey`` and ``digests`` look at."""
        self._count = len(chunks)
        if self._count:
            self._upload(self._chunks.at_least(chunks.nbytes), chunks)
            self._out.at_least(4 * 8 * self._count)

    def survey(self, low: int = 0, high: int = 0) -> Survey:
        """Waits for all work of the context, then looks at every watched chunk; pointers are to [``low``, ``high``)."""
        call("cuCtxSynchronize")
        columns = self._look(low, high, 4)
        return Survey(columns[0], columns[1] != 0, columns[2] != 0, columns[3])

    def digests(self) -> npt.NDArray[np.uint64]:
        """``Survey.digest`` alone."""
        return self._look(0, 0, 1).reshape(-1)

    def put(self, rows: Rows, *, shift: bool = False, flip: int = 0) -> None:
        """Copies or fills, by ``put_dtype`` rows."""
        if len(rows):
            at = self._rows.at_least(rows.nbytes)
            self._upload(at, rows)
            self._launch(self._put, len(rows), (ctypes.c_uint64(at), ctypes.c_uint32(shift), ctypes.c_uint32(flip)))
            self._wait()

    def judge(self, rows: Rows, *, shift: bool = False, flip: int = 0) -> bool:
        """Whether every byte of the ``judge_dtype`` rows is as it may be."""
        if not len(rows):
            return True
        at = self._rows.at_least(rows.nbytes + 8)
        verdict = at + rows.nbytes
        self._upload(at, rows)
        call("cuMemsetD8Async", verdict, 0, 8, self._stream)
        arguments = (ctypes.c_uint64(at), ctypes.c_uint64(verdict), ctypes.c_uint32(shift), ctypes.c_uint32(flip))
        self._launch(self._judge, len(rows), arguments)
        return not self._download(verdict, 1).any()

    def close(self) -> None:
        """Gives everything back."""
        for buffer in (self._rows, self._chunks, self._out):
            buffer.close()
        if self._stream is not None:
            call("cuStreamDestroy", self._stream)
            self._stream = None
        if self._module is not None:
            call("cuModuleUnload", self._module)
            self._module = None

    def __enter__(self) -> MemoryKernels:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self, low: int, high: int, columns: int) -> npt.NDArray[np.uint64]:
        if not self._count:
            return np.zeros((columns, 0), np.uint64)
        out = self._out.at_least(0)
        call("cuMemsetD8Async", out, 0, 3 * 8 * self._count, self._stream)
        places = (self._chunks.at_least(0), out, low, high - low)
        arguments = (*(ctypes.c_uint64(p) for p in places), ctypes.c_uint32(self._count))
        self._launch(self._survey, self._count, arguments)
        return self._download(out, columns * self._count).reshape(columns, self._count)

    def _launch(self, function: Any, blocks: int, arguments: Sequence[Any]) -> None:
        pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(a) for a in arguments))
        at = ctypes.addressof(pointers)
        call("cuLaunchKernel", function, blocks, 1, 1, THREADS, 1, 1, 0, self._stream, at, 0)

    def _upload(self, address: int, rows: Rows) -> None:
        rows = np.ascontiguousarray(rows)
        call("cuMemcpyHtoDAsync", address, rows.ctypes.data, rows.nbytes, self._stream)
        self._wait()

    def _download(self, address: int, words: int) -> npt.NDArray[np.uint64]:
        out = np.empty(words, np.uint64)
        call("cuMemcpyDtoHAsync", out.ctypes.data, address, out.nbytes, self._stream)
        self._wait()
        return out

    def _wait(self) -> None:
        call("cuStreamSynchronize", self._stream)


# Left alone: executables are instantiated beside the snapshots, and host memory is not ours alone.
_DEVICE_SLACK = 1 << 30
_HOST_SLACK = 4 << 30


def free_room() -> tuple[int, int]:
    """Bytes of device and of host memory that snapshots may take now."""
    free, _ = call("cuMemGetInfo")
    return max(0, int(free) - _DEVICE_SLACK), max(0, limits.available()[0] - _HOST_SLACK)


class Pool:
    """Slots of one chunk each: in device memory while there is room, then in pinned host memory."""

    _SLAB = 4096  # slots that are allocated at once, at most

    def __init__(self, room: Callable[[], tuple[int, int]] = free_room) -> None:
        self._room = room
        self._slabs: list[tuple[str, int]] = []  # what frees it, and its address
        self._free: list[Addresses] = []

    def take(self, count: int) -> Addresses:
        """Addresses of ``count`` slots, or of fewer if there is no room for all."""
        have = sum(len(part) for part in self._free)
        while have < count and (slab := self._grow(count - have)) is not None:
            self._free.append(slab)
            have += len(slab)
        every = np.concatenate([*self._free, np.zeros(0, np.uint64)])
        self._free = [every[count:]]
        return every[:count]

    def give(self, slots: Addresses) -> None:
        """Makes slots free again."""
        self._free.append(slots)

    def close(self) -> None:
        """Gives all memory back."""
        self._free = []
        while self._slabs:
            call(*self._slabs.pop())

    def _grow(self, count: int) -> Addresses | None:
        device, host = (space // CHUNK for space in self._room())
        for room, allocate, free in ((device, _on_device, "cuMemFree"), (host, _on_host, "cuMemFreeHost")):
            slots = min(count, room, self._SLAB)
            if slots > 0:
                try:
                    address = allocate(slots * CHUNK)
                except DriverCallFailed:  # what was free is in pieces, or somebody else took it
                    continue
                self._slabs.append((free, address))
                return np.uint64(address) + np.arange(slots, dtype=np.uint64) * np.uint64(CHUNK)
        return None


def _on_device(size: int) -> int:
    return int(call("cuMemAlloc", size))


def _on_host(size: int) -> int:
    # Kernels reach pinned memory at the address that it has here.
    return int(call("cuMemHostAlloc", size, 0))
