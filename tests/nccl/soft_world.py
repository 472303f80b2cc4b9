# SPDX-License-Identifier: Apache-2.0
"""One rank of the soft library's checks: its place, its communicator and memory, and what checks share."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from ctypes import c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parent))  # -P left it out

import cuda_nccl as cn
import reference

RANK, SIZE = int(sys.argv[2]), int(sys.argv[3])
UNIQUE_ID = cn.UniqueId.of(bytes.fromhex(sys.argv[4]))
FOLDER = Path(sys.argv[5])

REDUCING = {"AllReduce", "Reduce", "ReduceScatter"}
ROOTED = {"Reduce", "Broadcast", "Gather", "Scatter"}
SLICED_SEND = {"ReduceScatter", "AlltoAll", "Scatter"}
SLICED_RECV = {"AllGather", "AlltoAll", "Gather"}
ALL = ["AllReduce", "Reduce", "ReduceScatter", "AllGather", "Gather", "AlltoAll", "Broadcast", "Scatter"]

Array = npt.NDArray[Any]


class World:
    def __init__(self, connect: bool = True) -> None:
        self.cuda = cn.Cuda()
        self.nccl = cn.Nccl(cn.soft_nccl())
        self.stream = self.cuda.stream()
        self.comm = self.nccl.init(SIZE, UNIQUE_ID, RANK) if connect else c_void_p()

    def call(self, name: str, send: int, recv: int, count: int, dtype: str, op: str, root: int) -> None:
        middle = ([cn.OPS[op]] if name in REDUCING else []) + ([root] if name in ROOTED else [])
        self.nccl.call(
            name, c_void_p(send), c_void_p(recv), c_size_t(count), cn.TYPES[dtype], *middle, self.comm, self.stream
        )

    def run(self, name: str, dtype: str, op: str, count: int, root: int, seed: int, in_place: bool) -> None:
        """One collective against the reference; ``count`` as the call takes it."""
        sends = SIZE if name in SLICED_SEND else 1
        recvs = SIZE if name in SLICED_RECV else 1
        inputs = [reference.random(dtype, count * sends, seed * 1000 + rank) for rank in range(SIZE)]
        expected = reference.collective(name, dtype, op, inputs, root)[RANK]
        item = inputs[0].itemsize
        if in_place:  # at the place that NCCL calls in place
            recv = self.cuda.alloc(item * count * max(sends, recvs))
            send = recv + (RANK * count * item if recvs > sends else 0)
            if sends > recvs:
                send, recv = recv, recv + RANK * count * item
            base = min(send, recv)
            self.cuda.write(send, inputs[RANK])
        else:
            base = send = self.cuda.upload(inputs[RANK])
            recv = self.cuda.alloc(item * count * recvs)
        marker = np.full(count * recvs * item, 0xA5, np.uint8)
        if not in_place:
            self.cuda.write(recv, marker)
        self.call(name, send, recv, count, dtype, op, root)
        self.cuda.synchronize(self.stream)
        label = f"{name} {dtype} {op} count {count} root {root} in place {in_place}"
        if expected is not None:
            got = self.cuda.read(recv, count * recvs, reference.storage(dtype))
            assert got.tobytes() == expected.tobytes(), f"{label}: {got[:8]} and not {expected[:8]}"
        elif not in_place:
            assert np.array_equal(self.cuda.read(recv, marker.size, np.uint8), marker), f"{label}: written off the root"
        self.cuda.free(base)
        if not in_place:
            self.cuda.free(recv)

    def sum_of_ranks(self, comm: c_void_p | None = None, stream: c_void_p | None = None, count: int = 5) -> float:
        memory = self.cuda.upload(np.full(count, RANK + 1, np.float32))
        self.nccl.all_reduce(memory, memory, count, "float32", "sum", comm or self.comm, stream or self.stream)
        self.cuda.synchronize(stream or self.stream)
        got = self.cuda.read(memory, count, np.float32)
        self.cuda.free(memory)
        assert np.all(got == got[0])
        return float(got[0])


TOTAL = SIZE * (SIZE + 1) / 2


def fails(w: World, enqueue: Callable[[], object]) -> None:
    """The work fails.  The driver tells of an asynchronous error at whatever call comes next, enqueuing or waiting."""
    try:
        enqueue()
        w.cuda.synchronize(w.stream)
    except (cn.CudaError, cn.NcclError):
        return
    raise AssertionError("it did not fail")


def wait_for_file(name: str) -> None:
    end = time.monotonic() + 60
    while not (FOLDER / name).exists():
        assert time.monotonic() < end, f"{name} did not appear"
        time.sleep(0.005)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


class Captured:
    """A captured collective with what it reads and gives in each turn."""

    def __init__(self, w: World, name: str, count: int) -> None:
        self.name = name
        self.w = w
        self.sends = count * (SIZE if name in SLICED_SEND else 1)
        self.recvs = count * (SIZE if name in SLICED_RECV else 1)
        self.send, self.recv = w.cuda.alloc(4 * self.sends), w.cuda.alloc(4 * self.recvs)
        self.graph = w.cuda.capture(w.stream, lambda: w.call(name, self.send, self.recv, count, "float32", "sum", 0))

    def inputs(self, turn: int) -> list[Array]:
        return [reference.random("float32", self.sends, turn * 100 + rank + len(self.name)) for rank in range(SIZE)]

    def check(self, turn: int) -> None:
        expected = reference.collective(self.name, "float32", "sum", self.inputs(turn), 0)[RANK]
        assert expected is not None
        got = self.w.cuda.read(self.recv, self.recvs, np.float32)
        assert got.tobytes() == expected.tobytes(), f"{self.name} in turn {turn}"
