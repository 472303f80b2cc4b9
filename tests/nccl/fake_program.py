# SPDX-License-Identifier: Apache-2.0
"""Checks of the fake library, one process each: ``python -P fake_program.py check_name ...``."""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import byref, c_int, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # -P left it out

import cuda_nccl as cn

from foundryd import _native

ANY_ID = cn.UniqueId()  # a fake communicator reaches nobody, so any id does
COUNT = 1000


class World:
    def __init__(self, size: int = 8, rank: int = 3) -> None:
        self.cuda = cn.Cuda()
        self.nccl = cn.Nccl(_native.fake_nccl())
        self.size, self.rank = size, rank
        self.comm = self.nccl.init(size, ANY_ID, rank)
        self.stream = self.cuda.stream()
        # slice i holds i * COUNT, i * COUNT + 1, ...
        self.send = self.cuda.upload(np.arange(size * COUNT, dtype=np.float32))
        self.recv = self.cuda.upload(np.full(size * COUNT, -1, np.float32))

    def own(self) -> Any:
        return np.arange(COUNT, dtype=np.float32)

    def own_slice(self) -> Any:
        return np.arange(self.rank * COUNT, (self.rank + 1) * COUNT, dtype=np.float32)

    def result(self, count: int = COUNT) -> Any:
        self.cuda.synchronize(self.stream)
        return self.cuda.read(self.recv, count, np.float32)

    def op(self, name: str, *middle: int, send: int | None = None, recv: int | None = None, count: int = COUNT) -> None:
        """ncclNAME(send, recv, count, float32, *middle, comm, stream)."""
        source = self.send if send is None else send
        target = self.recv if recv is None else recv
        self.nccl.call(
            name,
            c_void_p(source),
            c_void_p(target),
            c_size_t(count),
            cn.TYPES["float32"],
            *middle,
            self.comm,
            self.stream,
        )


def collectives(w: World) -> list[tuple[str, tuple[int, ...], Any]]:
    """Calls and what they leave, as (name, arguments between type and communicator, result)."""
    own, own_slice, zero = w.own(), w.own_slice(), np.zeros(COUNT, np.float32)
    untouched = np.full(COUNT, -1, np.float32)
    other = (w.rank + 1) % w.size
    return [
        ("AllReduce", (0,), own),
        ("Reduce", (0, w.rank), own),
        ("Reduce", (0, other), untouched),
        ("ReduceScatter", (0,), own_slice),
        ("AllGather", (), np.tile(own, w.size)),
        ("AlltoAll", (), np.tile(own_slice, w.size)),
        ("Gather", (w.rank,), np.tile(own, w.size)),
        ("Gather", (other,), untouched),
        ("Broadcast", (w.rank,), own),
        ("Broadcast", (other,), zero),
        ("Scatter", (w.rank,), own_slice),
        ("Scatter", (other,), zero),
    ]


def reset(w: World) -> None:
    w.cuda.write(w.recv, np.full(w.size * COUNT, -1, np.float32))


def check_eager_calls_leave_own_data() -> None:
    for size, rank in [(8, 3), (64, 0), (64, 63), (5, 4)]:
        w = World(size, rank)
        for name, middle, expected in collectives(w):
            reset(w)
            w.op(name, *middle)
            got = w.result(len(expected))
            assert np.array_equal(got, expected), (size, rank, name, middle, got[:5], expected[:5])


def check_captured_calls_are_one_child_graph_that_does_the_same() -> None:
    w = World()
    for name, middle, expected in collectives(w):
        reset(w)
        graph = w.cuda.capture(w.stream, lambda name=name, middle=middle: w.op(name, *middle))
        assert w.cuda.kinds(graph) == ["child"], name
        inside = set(w.cuda.kinds(w.cuda.child(w.cuda.nodes(graph)[0])))
        assert inside <= {"memcpy", "memset"} or inside == {"empty"}, (name, inside)
        assert np.all(w.result(w.size * COUNT) == -1), f"{name} ran while it was captured"
        executable = w.cuda.instantiate(graph)
        w.cuda.call("cuGraphDestroy", graph)
        for _ in range(2):
            w.cuda.launch(executable, w.stream)
        assert np.array_equal(w.result(len(expected)), expected), (name, middle)


def check_in_place_calls_leave_own_data() -> None:
    w = World()
    everything = np.arange(w.size * COUNT, dtype=np.float32)
    for name, send_slice, recv_slice, expected in [
        ("AllGather", w.rank, 0, np.tile(w.own_slice(), w.size)),
        ("ReduceScatter", 0, w.rank, everything),
        ("AlltoAll", 0, 0, np.tile(w.own_slice(), w.size)),
        ("AllReduce", 0, 0, everything),
    ]:
        w.cuda.write(w.recv, everything)
        middle = (0,) if "Reduce" in name else ()
        w.op(name, *middle, send=w.recv + send_slice * COUNT * 4, recv=w.recv + recv_slice * COUNT * 4)
        assert np.array_equal(w.result(w.size * COUNT), expected), name


def check_a_broadcast_reads_its_source_on_the_root_only() -> None:
    w = World()
    w.op("Broadcast", (w.rank + 1) % w.size, send=0)  # NULL is legal there
    assert np.all(w.result() == 0)
    w.nccl.call("Bcast", c_void_p(w.send), c_size_t(COUNT), cn.TYPES["float32"], w.rank, w.comm, w.stream)
    w.cuda.synchronize(w.stream)
    assert np.array_equal(w.cuda.read(w.send, COUNT, np.float32), w.own())


def check_receives_are_zero_except_from_the_rank_itself() -> None:
    w = World()
    w.nccl.recv(w.recv, COUNT, "float32", 5, w.comm, w.stream)
    assert np.all(w.result() == 0)
    with w.nccl.group():
        for peer in range(w.size):
            w.nccl.send(w.send + peer * COUNT * 4, COUNT, "float32", peer, w.comm, w.stream)
            w.nccl.recv(w.recv + peer * COUNT * 4, COUNT, "float32", peer, w.comm, w.stream)
    got = w.result(w.size * COUNT).reshape(w.size, COUNT)
    for peer in range(w.size):
        assert np.array_equal(got[peer], w.own_slice() if peer == w.rank else np.zeros(COUNT)), peer


def check_a_group_is_one_placeholder_for_each_communicator() -> None:
    w = World()
    second = w.nccl.init(2, ANY_ID, 1)
    first = w.comm

    def fill() -> None:
        with w.nccl.group():
            w.op("AllReduce", 0)
            w.op("AllGather")
            w.comm = second
            w.op("AllReduce", 0)
            w.comm = first
            w.op("ReduceScatter", 0)
        w.op("AllReduce", 0)

    graph = w.cuda.capture(w.stream, fill)
    assert w.cuda.kinds(graph) == ["child"] * 3
    depths = sorted(len(w.cuda.dependencies(node)) for node in w.cuda.nodes(graph))
    assert depths == [0, 1, 1]  # a chain


def check_a_placeholder_is_the_streams_new_frontier() -> None:
    w = World()

    def fill() -> None:
        w.cuda.call("cuMemsetD8Async", ctypes.c_uint64(w.send), 1, c_size_t(16), w.stream)
        w.op("AllReduce", 0)
        w.cuda.call("cuMemsetD8Async", ctypes.c_uint64(w.send), 2, c_size_t(16), w.stream)

    graph = w.cuda.capture(w.stream, fill)
    nodes = {w.cuda.kind(node): node for node in w.cuda.nodes(graph)}
    assert w.cuda.kinds(graph) == ["child", "memset", "memset"]
    assert len(w.cuda.dependencies(nodes["child"])) == 1
    followers = [n for n in w.cuda.nodes(graph) if w.cuda.dependencies(n) == [nodes["child"].value]]
    assert [w.cuda.kind(n) for n in followers] == ["memset"]


def check_nothing_is_enqueued_before_the_outermost_end() -> None:
    w = World()
    w.nccl.call("GroupStart")
    w.nccl.call("GroupStart")
    w.op("AllReduce", 0)
    w.nccl.call("GroupEnd")
    assert np.all(w.result() == -1)
    w.nccl.call("GroupEnd")
    assert np.array_equal(w.result(), w.own())


def check_groups_belong_to_threads() -> None:
    w = World()
    w.nccl.call("GroupStart")
    seen: list[Any] = []

    def other() -> None:
        w.cuda.call("cuCtxSetCurrent", w.cuda.context)
        w.op("AllReduce", 0)
        seen.append(w.result())
        seen.append(w.nccl.result("GroupEnd"))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join(30)
    assert np.array_equal(seen[0], w.own())
    assert seen[1] == cn.INVALID_USAGE  # no group is open there
    w.nccl.call("GroupEnd")


def check_an_error_in_a_group_drops_the_group() -> None:
    w = World()
    w.nccl.call("GroupStart")
    w.op("AllReduce", 0)
    bad = w.nccl.result("AllReduce", c_void_p(w.send), c_void_p(w.recv), c_size_t(1), 99, 0, w.comm, w.stream)
    assert bad == cn.INVALID_ARGUMENT
    assert "99" in w.nccl.last_error()
    assert w.nccl.result("GroupEnd") == cn.INVALID_ARGUMENT
    assert np.all(w.result() == -1)
    w.op("AllReduce", 0)  # the next one is not affected
    assert np.array_equal(w.result(), w.own())


def check_a_simulated_group_launches_nothing() -> None:
    w = World()
    w.nccl.call("GroupStart")
    w.op("AllReduce", 0)
    info = cn.SimInfo(24, 0x74685283, 22809, -1.0)
    w.nccl.call("GroupSimulateEnd", byref(info))
    assert info.estimated_time >= 0
    assert np.all(w.result() == -1)


def check_captured_and_eager_calls_do_not_mix_in_a_group() -> None:
    w = World()
    eager = w.cuda.stream()
    second = w.nccl.init(2, ANY_ID, 1)
    for comm in (w.comm, second):  # in one communicator, and in two
        w.cuda.call("cuStreamBeginCapture_v2", w.stream, 1)
        w.nccl.call("GroupStart")
        w.op("AllReduce", 0)
        w.nccl.result("AllReduce", c_void_p(w.send), c_void_p(w.recv), c_size_t(1), cn.TYPES["float32"], 0, comm, eager)
        assert w.nccl.result("GroupEnd") == cn.INVALID_USAGE
        graph = c_void_p()
        w.cuda.call("cuStreamEndCapture", w.stream, byref(graph))
        assert w.cuda.nodes(graph) == []


def check_streams_of_a_group_are_ordered_around_the_last_one() -> None:
    w = World()
    side = w.cuda.stream()

    def fill() -> None:
        event = c_void_p()
        w.cuda.call("cuEventCreate", byref(event), 2)
        w.cuda.call("cuEventRecord", event, w.stream)
        w.cuda.call("cuStreamWaitEvent", side, event, 0)
        w.cuda.call("cuMemsetD8Async", ctypes.c_uint64(w.send), 0, c_size_t(16), w.stream)
        w.cuda.call("cuMemsetD8Async", ctypes.c_uint64(w.recv), 0, c_size_t(16), side)
        main = w.stream
        with w.nccl.group():
            w.op("AllReduce", 0)
            w.stream = side
            w.op("AllReduce", 0)
        w.stream = main
        w.cuda.call("cuMemsetD8Async", ctypes.c_uint64(w.send), 0, c_size_t(16), w.stream)
        w.cuda.call("cuEventRecord", event, side)
        w.cuda.call("cuStreamWaitEvent", w.stream, event, 0)

    graph = w.cuda.capture(w.stream, fill)
    assert w.cuda.kinds(graph) == ["child", "memset", "memset", "memset"]
    child = next(n for n in w.cuda.nodes(graph) if w.cuda.kind(n) == "child")
    assert len(w.cuda.dependencies(child)) == 2
    after = [n for n in w.cuda.nodes(graph) if child.value in w.cuda.dependencies(n)]
    assert len(after) == 1


def check_empty_calls_and_single_ranks_need_no_placeholder() -> None:
    w = World()
    graph = w.cuda.capture(w.stream, lambda: w.op("AllReduce", 0, count=0))
    assert w.cuda.nodes(graph) == []
    w.comm = w.nccl.init(1, ANY_ID, 0)
    assert w.cuda.kinds(w.cuda.capture(w.stream, lambda: w.op("AllReduce", 0))) == ["memcpy"]
    assert w.cuda.nodes(w.cuda.capture(w.stream, lambda: w.op("AllReduce", 0, send=w.recv))) == []
    w.op("AllGather")
    assert np.array_equal(w.result(), w.own())


def check_a_split_has_unknown_size_until_it_is_declared() -> None:
    w = World()
    assert w.nccl.split(w.comm, -1, 0).value is None
    child = w.nccl.split(w.comm, 0, 1)
    assert w.nccl.size_and_rank(child) == (8, 3)
    w.comm = child
    w.op("AllGather")
    got = w.result(w.size * COUNT)
    assert np.array_equal(got[:COUNT], w.own())
    assert np.all(got[COUNT:] == -1), "only the first slot surely exists"
    assert w.nccl.lib.foundryd_nccl_declare(child, 2, 1) == 0
    assert w.nccl.size_and_rank(child) == (2, 1)
    w.op("AllGather")
    got = w.result(w.size * COUNT)
    assert np.array_equal(got[: 2 * COUNT], np.tile(w.own(), 2))
    assert np.all(got[2 * COUNT :] == -1)
    assert w.nccl.lib.foundryd_nccl_declare(child, 4, 1) == cn.INVALID_ARGUMENT


def check_communicators_are_made_asked_and_ended() -> None:
    w = World()
    nccl = w.nccl
    assert nccl.size_and_rank(w.comm) == (8, 3)
    device = c_int(-1)
    nccl.call("CommCuDevice", w.comm, byref(device))
    assert device.value == 0
    assert nccl.async_error(w.comm) == 0
    scalable = c_void_p()
    nccl.call("CommInitRankScalable", byref(scalable), 64, 63, 1, byref(ANY_ID), None)
    assert nccl.size_and_rank(scalable) == (64, 63)
    everyone = (c_void_p * 1)()
    nccl.call("CommInitAll", everyone, 1, None)
    assert nccl.size_and_rank(c_void_p(everyone[0])) == (1, 0)
    with nccl.group():
        grouped = c_void_p(1)
        nccl.call("CommInitRank", byref(grouped), 4, ANY_ID, 2)
        assert grouped.value is None
    assert nccl.size_and_rank(grouped) == (4, 2)
    shrunk = c_void_p()
    excluded = (c_int * 2)(1, 5)
    nccl.call("CommShrink", w.comm, excluded, 2, byref(shrunk), None, 0)
    assert nccl.size_and_rank(shrunk) == (6, 2)
    nccl.call("CommFinalize", w.comm)
    assert nccl.result("CommFinalize", w.comm) == cn.INVALID_USAGE
    nccl.call("CommDestroy", w.comm)
    assert nccl.result("CommDestroy", w.comm) == cn.INVALID_ARGUMENT  # twice
    assert nccl.result("CommCount", w.comm, byref(device)) == cn.INVALID_ARGUMENT
    nccl.call("CommRevoke", grouped, 0)
    arguments = (c_void_p(w.send), c_void_p(w.recv), c_size_t(1), cn.TYPES["float32"], 0)
    assert nccl.result("AllReduce", *arguments, grouped, w.stream) == cn.INVALID_USAGE
    nccl.call("CommAbort", grouped)
    nccl.call("CommDestroy", None)


def check_bad_arguments_are_refused_with_a_sentence() -> None:
    w = World()
    comm = c_void_p(5)
    for size, rank in [(0, 0), (4, 4), (4, -1)]:
        assert w.nccl.result("CommInitRank", byref(comm), size, ANY_ID, rank) == cn.INVALID_ARGUMENT
        assert f"rank {rank} of {size}" in w.nccl.last_error()
    bad = cn.Config.make(magic=1)
    assert w.nccl.result("CommInitRankConfig", byref(comm), 2, ANY_ID, 0, byref(bad)) == cn.INVALID_ARGUMENT
    good = cn.Config.make(size=72, blocking=0)  # as of 2.27
    w.nccl.call("CommInitRankConfig", byref(comm), 2, ANY_ID, 0, byref(good))
    arguments = (c_void_p(w.send), c_void_p(w.recv), c_size_t(1))
    stale = c_void_p(0x1234)
    for call in [
        ("AllReduce", *arguments, 7, 5, w.comm, w.stream),  # an operator that nobody made
        ("AllReduce", *arguments, 12, 0, w.comm, w.stream),  # no such type
        ("Broadcast", *arguments, 7, 8, w.comm, w.stream),  # no such root
        ("Send", c_void_p(w.send), c_size_t(1), 7, 8, w.comm, w.stream),
        ("AllReduce", None, *arguments[1:], 7, 0, w.comm, w.stream),
        ("AllReduce", *arguments, 7, 0, stale, w.stream),
        ("AllReduce", *arguments, 7, 0, None, w.stream),
    ]:
        assert w.nccl.result(*call) == cn.INVALID_ARGUMENT, call
        assert w.nccl.last_error()


def check_memory_and_registration() -> None:
    w = World()
    memory, handle, window = c_void_p(), c_void_p(9), c_void_p(9)
    w.nccl.call("MemAlloc", byref(memory), c_size_t(4096))
    assert memory.value
    w.cuda.write(memory.value, np.arange(1024, dtype=np.float32))
    w.nccl.call("CommRegister", w.comm, memory, c_size_t(4096), byref(handle))
    assert handle.value is None
    w.nccl.call("CommDeregister", w.comm, handle)
    w.nccl.call("CommWindowRegister", w.comm, memory, c_size_t(4096), byref(window), 1)
    assert window.value is None
    w.nccl.call("CommWindowDeregister", w.comm, window)
    w.nccl.call("MemFree", memory)
    w.nccl.call("MemFree", None)


def check_user_operators_live_with_their_communicator() -> None:
    w = World()
    op, scalar = c_int(), ctypes.c_float(0.5)
    w.nccl.call("RedOpCreatePreMulSum", byref(op), byref(scalar), cn.TYPES["float32"], 1, w.comm)
    assert op.value >= 5
    w.op("AllReduce", op.value)
    assert np.array_equal(w.result(), w.own())
    wrong = w.nccl.result("AllReduce", c_void_p(w.send), c_void_p(w.recv), c_size_t(1), 8, op, w.comm, w.stream)
    assert wrong == cn.INVALID_ARGUMENT
    w.nccl.call("RedOpDestroy", op, w.comm)
    assert w.nccl.result("RedOpDestroy", op, w.comm) == cn.INVALID_ARGUMENT


def check_own_driver_calls_count_as_communication() -> None:
    w = World()
    counters = w.cuda.lib.softcuda_counters

    def allocations(owner: int) -> int:
        values = (ctypes.c_uint64 * 6)()
        assert counters(owner, values) == 0
        return int(values[5])

    before = allocations(0), allocations(1)
    memory = c_void_p()
    w.nccl.call("MemAlloc", byref(memory), c_size_t(4096))
    assert (allocations(0), allocations(1)) == (before[0], before[1] + 1)
    w.cuda.alloc(4096)
    assert (allocations(0), allocations(1)) == (before[0] + 1, before[1] + 1)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
    print(f"{sys.argv[1]} holds")
