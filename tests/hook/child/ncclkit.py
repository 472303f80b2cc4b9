# SPDX-License-Identifier: Apache-2.0
"""NCCL through ctypes, for children of the tests; whichever libnccl.so.2 the process finds."""

from __future__ import annotations

import ctypes as c
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

UINT64, SUM, MAX = 5, 0, 2


class UniqueId(c.Structure):
    _fields_ = (("internal", c.c_byte * 128),)


class NcclError(Exception):
    pass


class Nccl:
    def __init__(self) -> None:
        self.library = c.CDLL("libnccl.so.2")

    def __call__(self, name: str, *arguments: Any) -> None:
        code = getattr(self.library, name)(*arguments)
        if code:
            raise NcclError(f"{name} answers {code}")

    def unique_id(self) -> bytes:
        out = UniqueId()
        self("ncclGetUniqueId", c.byref(out))
        return bytes(out)

    def init(self, size: int, rank: int, unique: bytes = bytes(128)) -> Communicator:
        handle = c.c_void_p()
        self("ncclCommInitRank", c.byref(handle), size, UniqueId.from_buffer_copy(unique), rank)
        return Communicator(self, handle)

    @contextmanager
    def group(self) -> Iterator[None]:
        self("ncclGroupStart")
        yield
        self("ncclGroupEnd")


def _stream(stream: Any) -> c.c_void_p:
    return c.c_void_p(int(stream))


class Communicator:
    """Collectives of 64-bit words."""

    def __init__(self, nccl: Nccl, place: c.c_void_p) -> None:
        # In a group NCCL writes to this place when the group ends, so it is kept.
        self.nccl, self._handle = nccl, place

    @property
    def handle(self) -> int:
        return self._handle.value or 0

    def split(self, color: int, key: int) -> Communicator:
        out = c.c_void_p()
        self.nccl("ncclCommSplit", self._handle, color, key, c.byref(out), None)
        return Communicator(self.nccl, out)

    def destroy(self) -> None:
        self.nccl("ncclCommDestroy", self._handle)

    def all_reduce(self, send: int, recv: int, count: int, stream: Any, op: int = SUM) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64, op
        self.nccl("ncclAllReduce", *arguments, self._handle, _stream(stream))

    def all_gather(self, send: int, recv: int, count: int, stream: Any) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64
        self.nccl("ncclAllGather", *arguments, self._handle, _stream(stream))

    def reduce_scatter(self, send: int, recv: int, count: int, stream: Any, op: int = SUM) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64, op
        self.nccl("ncclReduceScatter", *arguments, self._handle, _stream(stream))

    def broadcast(self, send: int, recv: int, count: int, root: int, stream: Any) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64, root
        self.nccl("ncclBroadcast", *arguments, self._handle, _stream(stream))

    def bcast(self, data: int, count: int, root: int, stream: Any) -> None:
        self.nccl("ncclBcast", c.c_void_p(data), c.c_size_t(count), UINT64, root, self._handle, _stream(stream))

    def reduce(self, send: int, recv: int, count: int, root: int, stream: Any, op: int = SUM) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64, op, root
        self.nccl("ncclReduce", *arguments, self._handle, _stream(stream))

    def all_to_all(self, send: int, recv: int, count: int, stream: Any) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64
        self.nccl("ncclAlltoAll", *arguments, self._handle, _stream(stream))

    def gather(self, send: int, recv: int, count: int, root: int, stream: Any) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64, root
        self.nccl("ncclGather", *arguments, self._handle, _stream(stream))

    def scatter(self, send: int, recv: int, count: int, root: int, stream: Any) -> None:
        arguments = c.c_void_p(send), c.c_void_p(recv), c.c_size_t(count), UINT64, root
        self.nccl("ncclScatter", *arguments, self._handle, _stream(stream))

    def send(self, data: int, count: int, peer: int, stream: Any) -> None:
        self.nccl("ncclSend", c.c_void_p(data), c.c_size_t(count), UINT64, peer, self._handle, _stream(stream))

    def recv(self, data: int, count: int, peer: int, stream: Any) -> None:
        self.nccl("ncclRecv", c.c_void_p(data), c.c_size_t(count), UINT64, peer, self._handle, _stream(stream))

    def every_kind(self, send: int, recv: int, count: int, peer: int, stream: Any) -> None:
        """Each kind of call once, in the order of ``CommOpKind``; a send and a receive as a group."""
        self.all_reduce(send, recv, count, stream)
        self.all_gather(send, recv, count, stream)
        self.reduce_scatter(send, recv, count, stream)
        self.broadcast(send, recv, count, peer, stream)
        self.reduce(send, recv, count, peer, stream, MAX)
        self.all_to_all(send, recv, count, stream)
        self.gather(send, recv, count, peer, stream)
        self.scatter(send, recv, count, peer, stream)
        with self.nccl.group():
            self.send(send, count, peer, stream)
            self.recv(recv, count, peer, stream)
