# SPDX-License-Identifier: Apache-2.0
"""A thin checked wrapper of ``cuda.bindings``: context, stream, memory, modules, launches."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver
from numpy.typing import NDArray

from foundryd.errors import DriverCallFailed, UsageError

THREADS = 128  # of a block
MAX_BLOCKS = 256  # of a launch: kernels stride


def checked(function: Callable[..., Any], *args: Any) -> Any:
    """Calls the driver; returns what it gives beside the status, or raises ``DriverCallFailed``."""
    status, *results = function(*args)
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverCallFailed(f"{function.__name__} failed with {status.name}: see the driver's manual for its causes")
    return results[0] if len(results) == 1 else tuple(results)


class Device:
    """The primary context of one device and the stream that everything runs on.

    Attributes
    ----------
    count : how many devices there are; ordinals beyond begin again with the first.

    Raises
    ------
    UsageError : there is no device.
    """

    def __init__(self, ordinal: int) -> None:
        checked(driver.cuInit, 0)
        self.count: int = checked(driver.cuDeviceGetCount)
        if self.count == 0:
            raise UsageError("the driver has no device: use --driver soft, or a machine with a GPU")
        self.handle = checked(driver.cuDeviceGet, ordinal % self.count)
        self.context = checked(driver.cuDevicePrimaryCtxRetain, self.handle)
        checked(driver.cuCtxSetCurrent, self.context)
        self.stream = int(checked(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def capability(self) -> str:
        """Compute capability, ``90`` for example."""
        attribute = driver.CUdevice_attribute
        return "".join(
            str(checked(driver.cuDeviceGetAttribute, a, self.handle))
            for a in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )

    def allocate(self, shape: tuple[int, ...], itemsize: int = 4) -> int:
        """Address of new device memory; its content is undefined."""
        return int(checked(driver.cuMemAlloc, max(1, math.prod(shape)) * itemsize))

    def upload(self, address: int, values: NDArray[Any]) -> None:
        """Copies a host array to the device and waits."""
        values = np.ascontiguousarray(values)
        checked(driver.cuMemcpyHtoD, address, values.ctypes.data, values.nbytes)

    def write(self, address: int, values: NDArray[Any]) -> None:
        """Copies a host array to the device in the stream's order."""
        values = np.ascontiguousarray(values)
        checked(driver.cuMemcpyHtoDAsync, address, values.ctypes.data, values.nbytes, self.stream)

    def read(self, address: int, shape: tuple[int, ...], dtype: str) -> NDArray[Any]:
        """Waits for the stream and copies device memory to a new host array."""
        out = np.empty(shape, dtype=dtype)
        checked(driver.cuMemcpyDtoHAsync, out.ctypes.data, address, out.nbytes, self.stream)
        self.synchronise()
        return out

    def pinned(self, count: int) -> NDArray[np.int32]:
        """Page-locked host memory as an int32 array; it lives as long as the context."""
        address = int(checked(driver.cuMemHostAlloc, 4 * count, 0))
        return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address))

    def poison(self, size: int) -> list[tuple[int, int]]:
        """Allocates ``size`` bytes of device and of page-locked memory and fills them; (address, bytes) of both."""
        address = int(checked(driver.cuMemAlloc, size))
        checked(driver.cuMemsetD8Async, address, 0xA5, size, self.stream)
        self.synchronise()
        pinned = self.pinned(-(-size // 4))
        pinned[:] = 0x5A5A5A5A
        return [(address, size), (pinned.ctypes.data, pinned.nbytes)]

    def synchronise(self) -> None:
        """Waits for the stream."""
        checked(driver.cuStreamSynchronize, self.stream)

    def close(self) -> None:
        """Ends the stream and releases the primary context with all its memory."""
        checked(driver.cuStreamDestroy, self.stream)
        checked(driver.cuDevicePrimaryCtxRelease, self.handle)


class Kernel:
    """A function on the device with its parameter types.

    Parameters
    ----------
    handle : a CUfunction, or a CUkernel, which the driver takes in its place.
    types : one letter of the ``struct`` module for each parameter, ``P``, ``i`` or ``f``; a ctypes structure where
        the kernel takes one by value.
    packed : hand the parameters over as one packed buffer (``extra``), as cuBLAS does.
    """

    def __init__(
        self, device: Device, handle: int, types: str | type[ctypes.Structure], *, packed: bool = False
    ) -> None:
        self._device = device
        self._handle = driver.CUfunction(handle)
        self._packed = packed
        self._format = None if isinstance(types, type) else f"@{types}"
        if isinstance(types, type):
            self._offsets, self._bytes = [0], ctypes.sizeof(types)
        else:
            # "0P" adds nothing but the padding before a pointer, so a prefix with it ends where the pointer begins.
            self._offsets = [struct.calcsize(f"@{types[:i]}0{letter}") for i, letter in enumerate(types)]
            self._bytes = struct.calcsize(f"@{types}")

    def __call__(self, items: int, *args: Any) -> None:
        """Launches with a thread for each item, up to a limit, on the device's stream."""
        blocks = min(MAX_BLOCKS, -(-items // THREADS))
        buffer = args[0] if self._format is None else ctypes.create_string_buffer(struct.pack(self._format, *args))
        base = ctypes.addressof(buffer)
        params, extra = 0, 0
        if self._packed:
            length = ctypes.c_size_t(self._bytes)
            # CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END
            settings = (ctypes.c_void_p * 5)(1, base, 2, ctypes.addressof(length), 0)
            extra = ctypes.addressof(settings)
        else:
            pointers = (ctypes.c_void_p * len(self._offsets))(*(base + offset for offset in self._offsets))
            params = ctypes.addressof(pointers)
        stream = self._device.stream
        checked(driver.cuLaunchKernel, self._handle, blocks, 1, 1, THREADS, 1, 1, 0, stream, params, extra)


class Module:
    """An image loaded with ``cuModuleLoadData``."""

    def __init__(self, image: bytes) -> None:
        self._handle = checked(driver.cuModuleLoadData, image)

    def function(self, name: str) -> int:
        return int(checked(driver.cuModuleGetFunction, self._handle, name.encode()))

    def variable(self, name: str) -> tuple[int, int]:
        """Address and size of a global."""
        address, size = checked(driver.cuModuleGetGlobal, self._handle, name.encode())
        return int(address), int(size)


class Library:
    """An image loaded with ``cuLibraryLoadData``; its kernels belong to no context."""

    def __init__(self, image: bytes) -> None:
        self._handle = checked(driver.cuLibraryLoadData, image, None, None, 0, None, None, 0)

    def function(self, name: str) -> int:
        return int(checked(driver.cuLibraryGetKernel, self._handle, name.encode()))

    def variable(self, name: str) -> tuple[int, int]:
        """Address and size of a global in the current context."""
        address, size = checked(driver.cuLibraryGetGlobal, self._handle, name.encode())
        return int(address), int(size)
