# SPDX-License-Identifier: Apache-2.0
"""Checks of the soft library: ``python -P soft_program.py check rank size unique_id folder``, one process a rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from ctypes import byref, c_float, c_int, c_size_t, c_void_p, create_string_buffer
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))  # -P left it out

import cuda_nccl as cn
import reference
from soft_world import (
    ALL,
    FOLDER,
    RANK,
    SIZE,
    SLICED_SEND,
    TOTAL,
    UNIQUE_ID,
    Captured,
    World,
    descriptors,
    fails,
    wait_for_file,
)


def check_collectives_equal_numpy() -> None:
    w = World()
    seed = 0
    # 100003 float32 elements are several steps of a stage, and odd
    for name in ALL:
        for count in [1, 7, 1000, 100003 if name not in SLICED_SEND else 30011]:
            for dtype in ["float32", "bfloat16"] if count > 1000 else ["int8", "int64", "float32", "bfloat16"]:
                seed += 1
                w.run(name, dtype, "sum", count, seed % SIZE, seed, in_place=seed % 2 == 0)


def check_reductions_equal_numpy_in_every_type_and_operator() -> None:
    w = World()
    seed = 0
    for dtype in cn.TYPES:
        for op in cn.OPS:
            for name in ["AllReduce", "ReduceScatter", "Reduce"]:
                seed += 1
                w.run(name, dtype, op, [1, 513, 4099][seed % 3], seed % SIZE, seed, in_place=False)


def check_special_floats_are_rounded_like_numpy() -> None:
    w = World()
    halves = np.arange(65536, dtype=np.uint16)
    finite = halves[np.isfinite(halves.view(np.float16))].view(np.float16)
    for dtype, mine in [("float16", finite), ("bfloat16", halves[np.isfinite(reference.widen_bfloat16(halves))])]:
        inputs = [np.roll(mine, rank * 977) if rank < 2 else np.zeros_like(mine) for rank in range(SIZE)]
        for op in ["sum", "prod", "avg"] if dtype == "float16" else ["sum", "avg"]:
            memory = w.cuda.upload(inputs[RANK])
            w.nccl.all_reduce(memory, memory, mine.size, dtype, op, w.comm, w.stream)
            w.cuda.synchronize(w.stream)
            got = w.cuda.read(memory, mine.size, mine.dtype)
            with np.errstate(all="ignore"):
                expected = reference.reduce(dtype, op, inputs)
            if dtype == "bfloat16":
                ok = np.isfinite(reference.widen_bfloat16(expected))
                assert np.array_equal(got[ok], expected[ok]), op
            else:
                assert got.tobytes() == expected.tobytes(), op


def check_a_scaled_sum_multiplies_each_ranks_input() -> None:
    w = World()
    values = [reference.random("float32", 1001, rank) for rank in range(SIZE)]
    factors = [np.float32(rank + 0.25) for rank in range(SIZE)]
    expected = reference.reduce("float32", "sum", [v * f for v, f in zip(values, factors, strict=True)])
    on_device = w.cuda.upload(np.array([factors[RANK]], np.float32))
    for residence in (0, 1):
        op, scalar = c_int(), c_float(factors[RANK])
        where = c_void_p(on_device) if residence == 0 else byref(scalar)
        w.nccl.call("RedOpCreatePreMulSum", byref(op), where, cn.TYPES["float32"], residence, w.comm)
        memory = w.cuda.upload(values[RANK])
        w.nccl.all_reduce(memory, memory, 1001, "float32", op.value, w.comm, w.stream)
        w.cuda.synchronize(w.stream)
        assert w.cuda.read(memory, 1001, np.float32).tobytes() == expected.tobytes()
        w.nccl.call("RedOpDestroy", op, w.comm)


def check_captured_calls_replay_among_eager_ones() -> None:
    w = World()
    mixing = os.environ.get("NCCL_GRAPH_MIXING_SUPPORT") != "0"
    captured = [Captured(w, name, 257) for name in ["AllReduce", "AllGather", "AlltoAll", "ReduceScatter"]]
    executables = []
    for one in captured:
        assert w.cuda.kinds(one.graph) == (["kernel", "record", "wait"] if mixing else ["kernel"])
        executables.append(w.cuda.instantiate(one.graph))
        w.cuda.call("cuGraphDestroy", one.graph)
    for turn in range(50):
        one = captured[turn % len(captured)]
        w.cuda.write(one.send, one.inputs(turn)[RANK])
        w.cuda.launch(executables[turn % len(captured)], w.stream)
        assert w.sum_of_ranks() == TOTAL
        one.check(turn)


def check_a_captured_call_replays_from_other_graphs() -> None:
    """Put into hand-built graphs as a child graph, and as a copy of its kernel node: what a restore does."""
    w = World()
    memory = w.cuda.alloc(4 * 100)
    small = w.cuda.capture(w.stream, lambda: w.call("AllReduce", memory, memory, 100, "float32", "sum", 0))
    kernel = next(n for n in w.cuda.nodes(small) if w.cuda.kind(n) == "kernel")
    params = create_string_buffer(256)  # CUDA_KERNEL_NODE_PARAMS, which has 72 bytes
    w.cuda.call("cuGraphKernelNodeGetParams_v2", kernel, params)
    executables = []
    for as_child in (True, False):
        graph, last = c_void_p(), c_void_p()
        w.cuda.call("cuGraphCreate", byref(graph), 0)
        for _ in range(3):
            before = (c_void_p * 1)(last.value), c_size_t(0 if last.value is None else 1)
            node = c_void_p()
            if as_child:
                w.cuda.call("cuGraphAddChildGraphNode", byref(node), graph, *before, small)
            else:
                w.cuda.call("cuGraphAddKernelNode_v2", byref(node), graph, *before, params)
                w.cuda.call("cuGraphKernelNodeCopyAttributes", node, kernel)
            last = node
        executables.append(w.cuda.instantiate(graph))
        w.cuda.call("cuGraphDestroy", graph)
    for turn in range(20):
        w.cuda.write(memory, np.full(100, RANK + 1, np.float32))
        w.cuda.launch(executables[turn % 2], w.stream)
        assert w.sum_of_ranks() == TOTAL
        assert np.all(w.cuda.read(memory, 100, np.float32) == TOTAL * SIZE**2), turn


def check_nodes_of_a_communicator_are_chained_and_followers_need_the_kernel_only() -> None:
    w = World()
    memory = w.cuda.upload(np.full(64, RANK + 1, np.float32))

    def fill() -> None:
        for _ in range(2):
            w.nccl.all_reduce(memory, memory, 64, "float32", "sum", w.comm, w.stream)
        w.cuda.call("cuMemsetD8Async", c_void_p(memory), 0, c_size_t(4), w.stream)

    graph = w.cuda.capture(w.stream, fill)
    assert w.cuda.kinds(graph) == ["kernel", "kernel", "memset", "record", "record", "wait"]
    nodes = w.cuda.nodes(graph)
    by_kind = {
        kind: [n.value for n in nodes if w.cuda.kind(n) == kind] for kind in ("kernel", "record", "wait", "memset")
    }
    before = {n.value: set(w.cuda.dependencies(n)) for n in nodes}
    first = next(k for k in by_kind["kernel"] if before[k] == set(by_kind["wait"]))
    second = next(k for k in by_kind["kernel"] if k != first)
    record = next(r for r in by_kind["record"] if before[r] == {first})
    assert before[second] == {first, record}
    assert before[by_kind["memset"][0]] == {second}
    executable = w.cuda.instantiate(graph)
    w.cuda.launch(executable, w.stream)
    w.cuda.synchronize(w.stream)
    assert np.all(w.cuda.read(memory, 64, np.float32)[1:] == TOTAL * SIZE)


def check_a_group_is_one_kernel_however_large() -> None:
    w = World()
    for count in (3, 300):  # inlined in the parameter, and beside it
        memory = w.cuda.upload(np.arange(count, dtype=np.float32) + RANK)

        def fill(memory: int = memory, count: int = count) -> None:
            with w.nccl.group():
                for i in range(count):
                    w.nccl.all_reduce(memory + 4 * i, memory + 4 * i, 1, "float32", "sum", w.comm, w.stream)

        expected = SIZE * np.arange(count) + TOTAL - SIZE
        fill()
        w.cuda.synchronize(w.stream)
        assert np.array_equal(w.cuda.read(memory, count, np.float32), expected)
        graph = w.cuda.capture(w.stream, fill)
        assert w.cuda.kinds(graph) == ["kernel", "record", "wait"]
        executable = w.cuda.instantiate(graph)
        w.cuda.call("cuGraphDestroy", graph)
        for _ in range(3):
            w.cuda.write(memory, np.arange(count, dtype=np.float32) + RANK)
            w.cuda.launch(executable, w.stream)
            w.cuda.synchronize(w.stream)
            assert np.array_equal(w.cuda.read(memory, count, np.float32), expected)


def check_two_communicators_do_not_wait_for_each_other() -> None:
    w = World()
    other = w.nccl.split(w.comm, 0, SIZE - RANK)  # the ranks in reverse
    assert w.nccl.size_and_rank(other) == (SIZE, SIZE - 1 - RANK)
    streams = [w.stream, w.cuda.stream()]
    memory = [w.cuda.upload(np.full(50000, RANK + 1, np.float32)) for _ in range(2)]
    order = [0, 1] if RANK % 2 == 0 else [1, 0]  # each rank in its own order
    for _ in range(10):
        for i in order:
            w.nccl.all_reduce(memory[i], memory[i], 50000, "float32", "max", [w.comm, other][i], streams[i])
    for stream in streams:
        w.cuda.synchronize(stream)
    for address in memory:
        assert np.all(w.cuda.read(address, 50000, np.float32) == SIZE)


def check_splits_group_by_colour_and_order_by_key() -> None:
    w = World()
    half = w.nccl.split(w.comm, RANK % 2, -RANK)
    members = [r for r in reversed(range(SIZE)) if r % 2 == RANK % 2]
    assert w.nccl.size_and_rank(half) == (len(members), members.index(RANK))
    assert w.sum_of_ranks(half) == sum(r + 1 for r in members)
    none = w.nccl.split(w.comm, -1 if RANK == 0 else 3, 0)
    assert (none.value is None) == (RANK == 0)
    if RANK != 0:
        assert w.sum_of_ranks(none) == TOTAL - 1
    gathered, send, recv = len(members), w.cuda.upload(np.array([RANK], np.int32)), w.cuda.alloc(4 * len(members))
    w.nccl.all_gather(send, recv, 1, "int32", half, w.stream)
    w.cuda.synchronize(w.stream)
    assert w.cuda.read(recv, gathered, np.int32).tolist() == members
    assert w.nccl.lib.foundryd_nccl_declare(half, len(members), members.index(RANK)) == 0
    assert w.nccl.lib.foundryd_nccl_declare(half, len(members) + 1, 0) == cn.INVALID_ARGUMENT
    assert w.sum_of_ranks() == TOTAL


def check_shrinking_leaves_the_excluded_ranks_out() -> None:
    w = World()
    if RANK == 1:
        return  # as if it were lost
    child, excluded = c_void_p(), (c_int * 1)(1)
    w.nccl.call("CommShrink", w.comm, excluded, 1, byref(child), None, 1)
    assert w.nccl.size_and_rank(child) == (SIZE - 1, RANK - (RANK > 1))
    assert w.sum_of_ranks(child) == TOTAL - 2


def check_sends_and_receives() -> None:
    w = World()
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    for dtype, count in [("int8", 1), ("float32", 12345), ("int64", 200001)]:
        data = [reference.random(dtype, count, rank) for rank in range(SIZE)]
        send, recv = w.cuda.upload(data[RANK]), w.cuda.alloc(data[0].nbytes)
        with w.nccl.group():
            w.nccl.send(send, count, dtype, right, w.comm, w.stream)
            w.nccl.recv(recv, count, dtype, left, w.comm, w.stream)
        w.cuda.synchronize(w.stream)
        assert w.cuda.read(recv, count, dtype).tobytes() == data[left].tobytes(), (dtype, count)
        w.cuda.free(send)
        w.cuda.free(recv)
    # everybody with everybody, itself included, with counts that differ; then a chain outside of groups
    counts = np.array([[(3 * a + 5 * b) % 11 * 700 for b in range(SIZE)] for a in range(SIZE)])
    sends = [w.cuda.upload(np.full(counts[RANK][p], RANK * SIZE + p, np.int32)) for p in range(SIZE)]
    recvs = [w.cuda.alloc(4 * int(counts[p][RANK])) for p in range(SIZE)]
    with w.nccl.group():
        for peer in range(SIZE):
            w.nccl.recv(recvs[peer], int(counts[peer][RANK]), "int32", peer, w.comm, w.stream)
        for peer in reversed(range(SIZE)):
            w.nccl.send(sends[peer], int(counts[RANK][peer]), "int32", peer, w.comm, w.stream)
    w.cuda.synchronize(w.stream)
    for peer in range(SIZE):
        assert np.all(w.cuda.read(recvs[peer], int(counts[peer][RANK]), np.int32) == peer * SIZE + RANK)
    token = w.cuda.upload(np.array([7], np.int32))
    if RANK > 0:
        w.nccl.recv(token, 1, "int32", RANK - 1, w.comm, w.stream)
    if RANK < SIZE - 1:
        w.nccl.send(token, 1, "int32", RANK + 1, w.comm, w.stream)
    assert w.sum_of_ranks() == TOTAL  # behind, on the same stream
    assert w.cuda.read(token, 1, np.int32)[0] == 7


def check_captured_sends_replay() -> None:
    w = World()
    right, left = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    send, recv = w.cuda.alloc(400), w.cuda.alloc(400)

    def fill() -> None:
        with w.nccl.group():
            w.nccl.send(send, 100, "int32", right, w.comm, w.stream)
            w.nccl.recv(recv, 100, "int32", left, w.comm, w.stream)

    graph = w.cuda.capture(w.stream, fill)
    executable = w.cuda.instantiate(graph)
    for turn in range(50):
        w.cuda.write(send, np.full(100, turn * SIZE + RANK, np.int32))
        w.cuda.launch(executable, w.stream)
        if turn % 5 == 0:
            fill()
        w.cuda.synchronize(w.stream)
        assert np.all(w.cuda.read(recv, 100, np.int32) == turn * SIZE + left)


def check_init_in_a_group_and_for_all_devices() -> None:
    w = World(connect=False)
    ids = [w.nccl.unique_id() for _ in range(2)]
    comms = [c_void_p() for _ in range(4)]
    with w.nccl.group():  # two communicators of two ranks, all four in this process
        for i, comm in enumerate(comms):
            w.nccl.call("CommInitRank", byref(comm), 2, ids[i % 2], i // 2)
    everyone = (c_void_p * 2)()
    w.nccl.call("CommInitAll", everyone, 2, None)
    devices = []
    for comm in everyone:
        out = c_int()
        w.nccl.call("CommCuDevice", c_void_p(comm), byref(out))
        devices.append(out.value)
    assert devices == [0, 1]
    repeated = (c_int * 2)(0, 0)
    assert w.nccl.result("CommInitAll", everyone, 2, repeated) == cn.INVALID_USAGE
    streams = [w.cuda.stream() for _ in comms]
    memory = [w.cuda.upload(np.full(3, i + 1, np.float32)) for i in range(4)]
    with w.nccl.group():
        for i in range(4):
            w.nccl.all_reduce(memory[i], memory[i], 3, "float32", "sum", comms[i], streams[i])
    for stream in streams:
        w.cuda.synchronize(stream)
    assert [float(w.cuda.read(m, 1, np.float32)[0]) for m in memory] == [4, 6, 4, 6]


def check_graph_usage_mode_of_the_configuration_is_obeyed() -> None:
    w = World(connect=False)
    w.comm = w.nccl.init(SIZE, UNIQUE_ID, RANK, cn.Config.make(graph_usage_mode=1))
    memory = w.cuda.upload(np.full(4, RANK + 1, np.float32))
    graph = w.cuda.capture(w.stream, lambda: w.nccl.all_reduce(memory, memory, 4, "float32", "sum", w.comm, w.stream))
    assert w.cuda.kinds(graph) == ["kernel"]
    assert w.nccl.split(w.comm, 0, RANK).value  # inherits it


def check_a_killed_peer_is_an_error_and_not_a_hang() -> None:
    w = World()
    assert w.sum_of_ranks() == TOTAL
    if RANK == SIZE - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    fails(w, w.sum_of_ranks)
    assert w.nccl.async_error(w.comm) == cn.REMOTE
    message = w.nccl.last_error(w.comm)
    assert f"rank {RANK} waits in all-reduce for rank" in message, message
    assert "has died" in message or "has left" in message, message
    assert w.nccl.result("AllReduce", c_void_p(1), c_void_p(1), c_size_t(1), 7, 0, w.comm, w.stream) == cn.REMOTE
    w.nccl.call("CommAbort", w.comm)


def check_a_peer_that_does_not_come_is_an_error_after_the_deadline() -> None:
    w = World()
    assert w.sum_of_ranks() == TOTAL
    if RANK == 0:
        fails(w, w.sum_of_ranks)
        assert w.nccl.async_error(w.comm) == cn.REMOTE
        message = w.nccl.last_error(w.comm)
        assert "in all-reduce for rank 1, which did not come" in message, message
        assert "FOUNDRYD_NCCL_TIMEOUT" in message
        (FOLDER / "done").touch()
    else:
        wait_for_file("done")


def check_a_receive_without_sender_is_an_error_after_the_deadline() -> None:
    w = World()
    if RANK == 0:
        memory = w.cuda.alloc(4)
        fails(w, lambda: w.nccl.recv(memory, 1, "int32", 1, w.comm, w.stream))
        assert "in recv for rank 1" in w.nccl.last_error(w.comm)
        (FOLDER / "done").touch()
    else:
        wait_for_file("done")


def check_abort_ends_a_waiting_kernel_without_a_cuda_error() -> None:
    w = World()
    assert w.sum_of_ranks() == TOTAL
    if RANK != 0:
        wait_for_file("aborted")
        fails(w, w.sum_of_ranks)
        assert "rank 0, which has left" in w.nccl.last_error(w.comm)
        return
    memory = w.cuda.alloc(4)
    w.nccl.recv(memory, 1, "int32", 1, w.comm, w.stream)  # nobody sends
    results: list[int] = []
    thread = threading.Thread(target=lambda: results.append(w.nccl.result("CommAbort", w.comm)))
    thread.start()
    w.cuda.synchronize(w.stream)
    thread.join(30)
    assert results == [0]
    (FOLDER / "aborted").touch()
    alone = w.nccl.init(1, w.nccl.unique_id(), 0)  # the process goes on
    assert w.sum_of_ranks(alone) == RANK + 1


def check_calls_that_differ_between_ranks_are_an_error_that_names_both() -> None:
    w = World()
    memory = w.cuda.alloc(400)
    fails(w, lambda: w.nccl.all_reduce(memory, memory, 10 + RANK, "float32", "sum", w.comm, w.stream))
    assert w.nccl.async_error(w.comm) == cn.INVALID_USAGE
    message = w.nccl.last_error(w.comm)
    assert "count 10)" in message, message
    assert "count 11)" in message, message


def check_messages_that_differ_in_size_are_an_error() -> None:
    w = World()
    memory = w.cuda.alloc(400)
    if RANK == 0:
        w.nccl.send(memory, 10, "int32", 1, w.comm, w.stream)
        w.cuda.synchronize(w.stream)  # it fits in the channel
        wait_for_file("done")
    else:
        fails(w, lambda: w.nccl.recv(memory, 11, "int32", 0, w.comm, w.stream))
        assert w.nccl.async_error(w.comm) == cn.INVALID_USAGE
        assert "receives 44 bytes" in w.nccl.last_error(w.comm)
        (FOLDER / "done").touch()


def check_a_rank_that_never_joins_is_an_error_after_the_deadline() -> None:
    w = World(connect=False)
    if RANK == 1:
        return
    w.nccl.call("CommDestroy", w.nccl.init(1, w.nccl.unique_id(), 0))  # the kernel's image is loaded now
    comm = c_void_p(1)
    before = descriptors()
    assert w.nccl.result("CommInitRank", byref(comm), SIZE, UNIQUE_ID, RANK) == cn.REMOTE
    assert comm.value is None
    assert "ranks 1 of" in w.nccl.last_error(), w.nccl.last_error()
    assert descriptors() == before


def check_a_rank_waits_until_it_is_killed() -> None:
    (FOLDER / f"waiting{RANK}").touch()
    World()


def check_a_communicator_of_one() -> None:
    assert World().sum_of_ranks() == TOTAL


def check_ranks_that_disagree_on_the_size_are_told() -> None:
    w = World(connect=False)
    comm = c_void_p(1)
    result = w.nccl.result("CommInitRank", byref(comm), SIZE + RANK, UNIQUE_ID, RANK)
    assert result in {cn.INVALID_USAGE, cn.REMOTE}
    (FOLDER / f"result{RANK}").write_text(str(result))
    wait_for_file(f"result{1 - RANK}")
    assert result == cn.INVALID_USAGE or (FOLDER / f"result{1 - RANK}").read_text() == str(cn.INVALID_USAGE)


def check_a_replay_after_the_communicator_is_destroyed_is_an_error() -> None:
    w = World()
    memory = w.cuda.upload(np.full(4, RANK + 1, np.float32))
    graph = w.cuda.capture(w.stream, lambda: w.nccl.all_reduce(memory, memory, 4, "float32", "sum", w.comm, w.stream))
    executable = w.cuda.instantiate(graph)
    w.cuda.launch(executable, w.stream)
    w.cuda.synchronize(w.stream)
    w.nccl.call("CommDestroy", w.comm)
    fails(w, lambda: w.cuda.launch(executable, w.stream))


def check_nothing_is_left_after_communicators_and_graphs() -> None:
    w = World()
    memory = w.cuda.upload(np.zeros(4, np.float32))

    def once() -> None:
        child = w.nccl.split(w.comm, 0, RANK)
        graph = w.cuda.capture(
            w.stream, lambda: w.nccl.all_reduce(memory, memory, 4, "float32", "sum", child, w.stream)
        )
        executable = w.cuda.instantiate(graph)
        w.cuda.launch(executable, w.stream)
        w.cuda.synchronize(w.stream)
        w.cuda.call("cuGraphExecDestroy", executable)
        w.cuda.call("cuGraphDestroy", graph)
        w.nccl.call("CommDestroy", child)

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("foundryd-nccl-")

    once()
    before = descriptors(), mapped()  # perhaps with what the first turn has not let go yet
    for _ in range(10):
        once()
    end = time.monotonic() + 30  # user objects are let go behind the driver's back
    while descriptors() > before[0] or mapped() > before[1]:
        assert time.monotonic() < end, f"{(descriptors(), mapped())} descriptors and mappings, {before} at first"
        time.sleep(0.01)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
