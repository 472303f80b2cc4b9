# SPDX-License-Identifier: Apache-2.0
"""The driver and NCCL calls that these tests make, through ctypes: rank processes start fast and need no CUDA wheel."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, byref, c_char, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from foundryd import _native

TYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
NODE_TYPES = {0: "kernel", 1: "memcpy", 2: "memset", 3: "host", 4: "child", 5: "empty", 6: "wait", 7: "record"}

SUCCESS, UNHANDLED_CUDA, SYSTEM, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE = range(7)


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]

    def raw(self) -> bytes:
        return ctypes.string_at(byref(self), 128)

    @classmethod
    def of(cls, raw: bytes) -> UniqueId:
        return cls.from_buffer_copy(raw)


class Config(ctypes.Structure):
    """ncclConfig_t of 2.29 with its first fields by name."""

    _fields_ = [
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("between", c_int * 15),
        ("graph_usage_mode", c_int),
        ("num_rma_ctx", c_int),
    ]

    @classmethod
    def make(cls, size: int = 88, magic: int = 0xCAFEBEEF, **fields: int) -> Config:
        undefined = -(2**31)
        config = cls(size, magic, 22907, undefined, (c_int * 15)(*[undefined] * 15), undefined, undefined)
        ctypes.memset(ctypes.addressof(config) + 32, 0, 8)  # net_name
        ctypes.memset(ctypes.addressof(config) + 48, 0, 8)  # comm_name
        for name, value in fields.items():
            setattr(config, name, value)
        return config


class SimInfo(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("estimated_time", c_float)]


class NcclError(Exception):
    def __init__(self, name: str, code: int, message: str) -> None:
        super().__init__(f"{name}: {code}: {message}")
        self.code = code
        self.message = message


class CudaError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class Nccl:
    """One of the two libraries.  Calls raise on failure."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))
        self.lib.ncclGetLastError.restype = ctypes.c_char_p
        self.lib.ncclGetErrorString.restype = ctypes.c_char_p
        self.lib.ncclCommInitRank.argtypes = [POINTER(c_void_p), c_int, UniqueId, c_int]
        self.lib.ncclCommInitRankConfig.argtypes = [POINTER(c_void_p), c_int, UniqueId, c_int, c_void_p]

    def result(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.lib, "nccl" + name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        code = self.result(name, *arguments)
        if code != SUCCESS:
            raise NcclError(name, code, self.last_error())

    def last_error(self, comm: c_void_p | None = None) -> str:
        text: bytes = self.lib.ncclGetLastError(comm)
        return text.decode()

    def version(self) -> int:
        out = c_int()
        self.call("GetVersion", byref(out))
        return out.value

    def unique_id(self) -> UniqueId:
        out = UniqueId()
        self.call("GetUniqueId", byref(out))
        return out

    def init(self, size: int, unique: UniqueId, rank: int, config: Config | None = None) -> c_void_p:
        comm = c_void_p()
        if config is None:
            self.call("CommInitRank", byref(comm), size, unique, rank)
        else:
            self.call("CommInitRankConfig", byref(comm), size, unique, rank, byref(config))
        return comm

    def split(self, comm: c_void_p, color: int, key: int) -> c_void_p:
        child = c_void_p(1)
        self.call("CommSplit", comm, color, key, byref(child), None)
        return child

    def size_and_rank(self, comm: c_void_p) -> tuple[int, int]:
        size, rank = c_int(), c_int()
        self.call("CommCount", comm, byref(size))
        self.call("CommUserRank", comm, byref(rank))
        return size.value, rank.value

    def async_error(self, comm: c_void_p) -> int:
        out = c_int(-1)
        self.call("CommGetAsyncError", comm, byref(out))
        return out.value

    @contextmanager
    def group(self) -> Iterator[None]:
        self.call("GroupStart")
        try:
            yield
        finally:
            self.call("GroupEnd")

    # count is in elements; addresses are integers
    def all_reduce(
        self, send: int, recv: int, count: int, dtype: str, op: str | int, comm: c_void_p, stream: c_void_p
    ) -> None:
        number = op if isinstance(op, int) else OPS[op]
        self.call("AllReduce", c_void_p(send), c_void_p(recv), c_size_t(count), TYPES[dtype], number, comm, stream)

    def all_gather(self, send: int, recv: int, count: int, dtype: str, comm: c_void_p, stream: c_void_p) -> None:
        self.call("AllGather", c_void_p(send), c_void_p(recv), c_size_t(count), TYPES[dtype], comm, stream)

    def send(self, send: int, count: int, dtype: str, peer: int, comm: c_void_p, stream: c_void_p) -> None:
        self.call("Send", c_void_p(send), c_size_t(count), TYPES[dtype], peer, comm, stream)

    def recv(self, recv: int, count: int, dtype: str, peer: int, comm: c_void_p, stream: c_void_p) -> None:
        self.call("Recv", c_void_p(recv), c_size_t(count), TYPES[dtype], peer, comm, stream)


class Cuda:
    """The software driver with the primary context of device 0 current."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")
        self.call("cuInit", 0)
        device, context = c_int(), c_void_p()
        self.call("cuDeviceGet", byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.context = context

    def result(self, name: str, *arguments: Any) -> int:
        return int(getattr(self.lib, name)(*arguments))

    def call(self, name: str, *arguments: Any) -> None:
        code = self.result(name, *arguments)
        if code != 0:
            raise CudaError(name, code)

    def stream(self) -> c_void_p:
        out = c_void_p()
        self.call("cuStreamCreate", byref(out), 1)  # non-blocking
        return out

    def synchronize(self, stream: c_void_p) -> None:
        self.call("cuStreamSynchronize", stream)

    def alloc(self, nbytes: int) -> int:
        out = c_uint64()
        self.call("cuMemAlloc_v2", byref(out), c_size_t(max(nbytes, 1)))
        return out.value

    def free(self, address: int) -> None:
        self.call("cuMemFree_v2", c_uint64(address))

    def upload(self, array: npt.NDArray[Any]) -> int:
        address = self.alloc(array.nbytes)
        self.write(address, array)
        return address

    def write(self, address: int, array: npt.NDArray[Any]) -> None:
        flat = np.ascontiguousarray(array)
        if flat.nbytes:
            self.call("cuMemcpyHtoD_v2", c_uint64(address), flat.ctypes.data_as(c_void_p), c_size_t(flat.nbytes))

    def read(self, address: int, count: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        out = np.empty(count, dtype)
        if out.nbytes:
            self.call("cuMemcpyDtoH_v2", out.ctypes.data_as(c_void_p), c_uint64(address), c_size_t(out.nbytes))
        return out

    def capture(self, stream: c_void_p, fill: Callable[[], None]) -> c_void_p:
        self.call("cuStreamBeginCapture_v2", stream, 1)  # thread-local
        graph = c_void_p()
        try:
            fill()
        finally:
            ended = self.result("cuStreamEndCapture", stream, byref(graph))
        if ended != 0:
            raise CudaError("cuStreamEndCapture", ended)
        return graph

    def instantiate(self, graph: c_void_p) -> c_void_p:
        out = c_void_p()
        self.call("cuGraphInstantiateWithFlags", byref(out), graph, c_uint64(0))
        return out

    def launch(self, executable: c_void_p, stream: c_void_p) -> None:
        self.call("cuGraphLaunch", executable, stream)

    def nodes(self, graph: c_void_p) -> list[c_void_p]:
        count = c_size_t()
        self.call("cuGraphGetNodes", graph, None, byref(count))
        array = (c_void_p * max(count.value, 1))()
        if count.value:
            self.call("cuGraphGetNodes", graph, array, byref(count))
        return [c_void_p(array[i]) for i in range(count.value)]

    def kind(self, node: c_void_p) -> str:
        out = c_int()
        self.call("cuGraphNodeGetType", node, byref(out))
        return NODE_TYPES[out.value]

    def kinds(self, graph: c_void_p) -> list[str]:
        return sorted(self.kind(node) for node in self.nodes(graph))

    def dependencies(self, node: c_void_p) -> list[int]:
        get = self.lib.cuGraphNodeGetDependencies
        count = c_size_t()
        self.call("cuGraphNodeGetDependencies", node, None, byref(count))
        array = (c_void_p * max(count.value, 1))()
        if count.value:
            assert get(node, array, byref(count)) == 0
        return [int(array[i]) for i in range(count.value)]

    def child(self, node: c_void_p) -> c_void_p:
        out = c_void_p()
        self.call("cuGraphChildGraphNodeGetGraph", node, byref(out))
        return out


def soft_nccl() -> Path:
    return _native.find("soft/libnccl.so.2")


def environment(**extra: str) -> dict[str, str]:
    """The environment of a process that runs on the software driver."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("NCCL_", "FOUNDRYD_"))}
    env["LD_LIBRARY_PATH"] = str(_native.soft_folder())
    env["OMP_NUM_THREADS"] = "1"
    return env | extra
