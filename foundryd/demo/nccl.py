# SPDX-License-Identifier: Apache-2.0
"""The handful of NCCL calls that the demo makes, through ctypes.

The library is asked for by its soname, so what is preloaded or in ``LD_LIBRARY_PATH`` decides which one answers.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import lru_cache

from foundryd.demo.rendezvous import Store
from foundryd.errors import DeadlineExceeded, DriverCallFailed, UsageError

FLOAT = 7  # ncclFloat32
SUM = 0
ALL_TO_ALL_SINCE = 22803  # the first version that has ncclAlltoAll


class UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * 128),)


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The process's NCCL."""
    try:
        lib = ctypes.CDLL("libnccl.so.2")
    except OSError as error:
        raise UsageError(f"NCCL cannot be loaded ({error}): use --driver soft, or install cu12 or cu13") from None
    size, handle, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int
    lib.ncclGetErrorString.restype = ctypes.c_char_p
    lib.ncclGetErrorString.argtypes = [number]
    lib.ncclCommInitRank.argtypes = [ctypes.POINTER(handle), number, UniqueId, number]
    lib.ncclAllReduce.argtypes = [pointer, pointer, size, number, number, handle, pointer]
    lib.ncclReduceScatter.argtypes = [pointer, pointer, size, number, number, handle, pointer]
    lib.ncclAllGather.argtypes = [pointer, pointer, size, number, handle, pointer]
    lib.ncclSend.argtypes = [pointer, size, number, number, handle, pointer]
    lib.ncclRecv.argtypes = [pointer, size, number, number, handle, pointer]
    for name in ("ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort"):
        getattr(lib, name).argtypes = [handle]
    if version(lib) >= ALL_TO_ALL_SINCE:
        lib.ncclAlltoAll.argtypes = [pointer, pointer, size, number, handle, pointer]
    return lib


def version(lib: ctypes.CDLL) -> int:
    """NCCL's version code, 22809 for 2.28.9."""
    code = ctypes.c_int()
    _check(lib, "ncclGetVersion", ctypes.byref(code))
    return code.value


def _check(lib: ctypes.CDLL, name: str, *args: object) -> None:
    result = getattr(lib, name)(*args)
    if result != 0:
        cause = lib.ncclGetErrorString(result).decode()
        raise DriverCallFailed(f"{name} failed with {result} ({cause}): see NCCL_DEBUG=WARN")


def share_devices(rank: int, world: int, devices: int) -> None:
    """To be called before NCCL is used: where there are fewer devices than ranks, each rank says that it is a host.

    NCCL refuses two ranks of one host on one device; those of several hosts it connects by sockets.
    """
    if world > devices:
        os.environ.setdefault("NCCL_HOSTID", f"foundryd-demo-rank-{rank}")


class Communicator:
    """One rank's end of a communicator; made on all its ranks at once.

    Parameters
    ----------
    ranks : world ranks, in communicator order.
    rank : the world rank of this process.
    name : the same on all its ranks and no other communicator's.
    timeout : seconds to wait for the unique id.
    """

    def __init__(self, ranks: Sequence[int], rank: int, name: str, store: Store, timeout: float) -> None:
        self._lib = library()
        self.size = len(ranks)
        self.ranks = tuple(ranks)
        unique = UniqueId()
        key = f"nccl/{name}"
        if rank == ranks[0]:
            self._call("ncclGetUniqueId", ctypes.byref(unique))
            store.set(key, bytes(unique))
        else:
            try:
                unique = UniqueId.from_buffer_copy(store.get(key, timeout))
            except TimeoutError as error:
                raise DeadlineExceeded(f"the communicator {name} cannot be made: {error}") from None
        handle = ctypes.c_void_p()
        self._call("ncclCommInitRank", ctypes.byref(handle), self.size, unique, ranks.index(rank))
        self.handle = handle.value or 0

    def _call(self, name: str, *args: object) -> None:
        _check(self._lib, name, *args)

    def all_reduce(self, buffer: int, count: int, stream: int) -> None:
        """Adds ``count`` floats over the ranks, in place."""
        self._call("ncclAllReduce", buffer, buffer, count, FLOAT, SUM, self.handle, stream)

    def all_gather(self, send: int, receive: int, count: int, stream: int) -> None:
        """Joins ``count`` floats of each rank."""
        self._call("ncclAllGather", send, receive, count, FLOAT, self.handle, stream)

    def reduce_scatter(self, send: int, receive: int, count: int, stream: int) -> None:
        """Adds over the ranks and leaves ``count`` floats to each."""
        self._call("ncclReduceScatter", send, receive, count, FLOAT, SUM, self.handle, stream)

    def all_to_all(self, send: int, receive: int, count: int, stream: int) -> None:
        """Gives ``count`` floats to each rank, by one call where NCCL has it."""
        if version(self._lib) >= ALL_TO_ALL_SINCE:
            self._call("ncclAlltoAll", send, receive, count, FLOAT, self.handle, stream)
        else:
            self.exchange(send, receive, count, stream)

    def exchange(self, send: int, receive: int, count: int, stream: int) -> None:
        """Gives ``count`` floats to each rank, as a group of sends and receives."""
        self._call("ncclGroupStart")
        for peer in range(self.size):
            self._call("ncclSend", send + 4 * count * peer, count, FLOAT, peer, self.handle, stream)
            self._call("ncclRecv", receive + 4 * count * peer, count, FLOAT, peer, self.handle, stream)
        self._call("ncclGroupEnd")

    def close(self) -> None:
        """Ends the communicator; every rank of it must."""
        self._call("ncclCommDestroy", self.handle)
