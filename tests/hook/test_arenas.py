# SPDX-License-Identifier: Apache-2.0
"""Allocations of a recorded program lie where the same program's allocations lie in every process."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
GRANULE = 2 << 20


def test_each_arena_is_a_sequence_of_its_own(hooked: Any) -> None:
    """What happens in one arena moves nothing in another."""
    source = """
    import fdyhook as fdy, soft
    soft.start()
    for i in range(fdy.given()):
        with fdy.arena(fdy.IO):
            soft.malloc(700 * i + 1)
        soft.malloc(3 << 20)
    kv = []
    for which in (fdy.WEIGHTS, fdy.KV):
        with fdy.arena(which):
            kv += [soft.malloc(1000), soft.malloc(5 << 20), soft.malloc(1000)]
    fdy.answer(kv)
    """
    few, many = (hooked.python(source, "capture", given=n) for n in (0, 9))
    assert few == many
    weights, kv = BASE + STRIDE, BASE + 2 * STRIDE
    assert few == [b + o for b in (weights, kv) for o in (0, GRANULE, 1024)]


def test_addresses_do_not_depend_on_the_process(hooked: Any) -> None:
    source = """
    import random, fdyhook as fdy, soft
    from cuda.bindings import driver as cu
    soft.start()
    draw, live = random.Random(7), []
    stream = soft.ok(cu.cuStreamCreate(1))
    for _ in range(300):
        if live and draw.random() < 0.4:
            address, ordered = live.pop(draw.randrange(len(live)))
            soft.ok(cu.cuMemFreeAsync(address, stream)) if ordered else soft.free(address)
            continue
        size = int(2 ** draw.uniform(0, 24))
        with fdy.arena(draw.choice((fdy.DEFAULT, fdy.WEIGHTS, fdy.KV, fdy.IO, fdy.GRAPH))):
            ordered = draw.random() < 0.3
            address = int(soft.ok(cu.cuMemAllocAsync(size, stream))) if ordered else soft.malloc(size)
        live.append((address, ordered))
    fdy.answer([fdy.allocations(), soft.malloc(64)])
    """
    first = hooked.python(source, "capture")
    assert first == hooked.python(source, "capture")
    recorded = first[0]
    assert [(r[0], r[1]) for r in recorded] == sorted((r[0], r[1]) for r in recorded)
    live = sorted((r[2], r[2] + r[3]) for r in recorded if r[4])
    assert all(a[1] <= b[0] for a, b in pairwise(live))
    assert all(
        address % 512 == 0 and (size <= 1 << 20 or address % GRANULE == 0) for _, _, address, size, _ in recorded
    )


def test_the_choice_of_an_arena_nests_and_belongs_to_the_thread(hooked: Any) -> None:
    arenas, errors = hooked.python(
        """
        import threading, fdyhook as fdy, soft
        context = soft.start()
        seen, errors = [], []

        def allocate():
            soft.ok(soft.cu.cuCtxSetCurrent(context))
            seen.append((soft.malloc(64) - fdy.BASE) // fdy.STRIDE)

        def other():
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()

        with fdy.arena(fdy.KV):
            allocate()
            with fdy.arena(fdy.WEIGHTS):
                allocate()
                other()
            with fdy.arena(fdy.HOST):  # says nothing about device memory
                allocate()
            allocate()
        allocate()
        for wrong in (fdy.pop, lambda: fdy.push(6)):
            try:
                wrong()
            except fdy.HookError as error:
                errors.append([error.status, str(error)])
        fdy.answer([seen, errors])
        """,
        "capture",
    )
    assert arenas == [2, 1, 0, 2, 2, 0]
    assert [e[0] for e in errors] == ["state", "invalid"]
    assert "no arena 6" in errors[1][1]


def test_freed_space_is_used_again_and_memory_given_back(hooked: Any) -> None:
    small, again, joined, large, large_again, memory = hooked.python(
        """
        import fdyhook as fdy, soft
        soft.start()
        a, b, c = (soft.malloc(512) for _ in range(3))
        soft.free(b)
        again = soft.malloc(100)
        soft.free(a), soft.free(again)
        joined = soft.malloc(1024)
        before = soft.free_memory()
        large = soft.malloc(10 << 20)
        during = soft.free_memory()
        soft.free(large)
        after = soft.free_memory()
        large_again = soft.malloc(9 << 20)
        soft.free(c), soft.free(joined)
        empty = soft.free_memory()
        fdy.answer([[a, b, c], again, joined, large, large_again, [before, during, after, empty]])
        """,
        "capture",
    )
    assert small == [BASE, BASE + 512, BASE + 1024]
    assert again == small[1]
    assert joined == small[0]
    assert large == large_again == BASE + GRANULE
    before, during, after, empty = memory
    assert (before - during, after) == (10 << 20, before)
    assert empty == before + GRANULE - (10 << 20)  # the chunk of small ones went too


def test_queries_report_the_allocation_and_not_the_mapping(hooked: Any) -> None:
    seen = hooked.python(
        """
        import ctypes, fdyhook as fdy, soft
        cu = soft.cu
        soft.start()
        first, second, large = soft.malloc(100), soft.malloc(3000), soft.malloc(3 << 20)
        A = cu.CUpointer_attribute
        names = ("RANGE_START_ADDR", "RANGE_SIZE", "BUFFER_ID")
        wanted = [getattr(A, "CU_POINTER_ATTRIBUTE_" + name) for name in names]
        out = []
        for base, inside in ((first, first + 99), (second, second + 7), (large, large + (3 << 20) - 1)):
            one = [int(soft.ok(cu.cuPointerGetAttribute(w, inside))) for w in wanted]
            several = [int(v) for v in soft.ok(cu.cuPointerGetAttributes(3, wanted, inside))]
            address, size = soft.ok(cu.cuMemGetAddressRange(inside))
            kind = int(soft.ok(cu.cuPointerGetAttribute(A.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, inside)))
            out.append([base, one, several, [int(address), size], kind])
        past = first + 100
        gone = [r[0].name for r in (cu.cuMemGetAddressRange(past), cu.cuPointerGetAttribute(wanted[0], past))]
        soft.free(first)
        gone.append(cu.cuMemGetAddressRange(first)[0].name)
        fdy.answer([out, gone])
        """,
        "capture",
    )
    found, gone = seen
    for (base, one, several, span, kind), size in zip(found, (100, 3000, 3 << 20), strict=True):
        assert one[:2] == span == [base, size]
        assert several == one
        assert kind == 2  # device memory
    assert len({one[2] for _, one, _, _, _ in found}) == 3
    assert gone == ["CUDA_ERROR_NOT_FOUND", "CUDA_ERROR_INVALID_VALUE", "CUDA_ERROR_NOT_FOUND"]


def test_wrong_frees_and_sizes_are_refused_and_change_nothing(hooked: Any) -> None:
    codes, next_address = hooked.python(
        """
        import fdyhook as fdy, soft
        cu = soft.cu
        soft.start()
        a, b = soft.malloc(4096), soft.malloc(4096)
        codes = [cu.cuMemFree(a + 512)[0], cu.cuMemFree(b + 4096)[0]]
        soft.free(a)
        codes += [cu.cuMemFree(a)[0], cu.cuMemAlloc(0)[0], cu.cuMemAlloc(1 << 50)[0]]
        codes += [cu.cuMemAlloc(200 << 30)[0]]  # fits the arena, not the device
        fdy.answer([[c.name for c in codes], soft.malloc(4096)])
        """,
        "capture",
    )
    invalid = "CUDA_ERROR_INVALID_VALUE"
    assert codes[:4] == [invalid] * 4
    assert codes[4:] == ["CUDA_ERROR_OUT_OF_MEMORY"] * 2
    assert next_address == BASE


def test_pitched_memory_lies_in_the_arena(hooked: Any) -> None:
    address, pitch, size = hooked.python(
        """
        import fdyhook as fdy, soft
        soft.start()
        address, pitch = soft.ok(soft.cu.cuMemAllocPitch(1000, 7, 4))
        soft.ok(soft.cu.cuMemsetD8(address, 1, pitch * 7))
        fdy.answer([int(address), pitch, fdy.allocations()[0].bytes])
        """,
        "capture",
    )
    assert (address, pitch, size) == (BASE, 1024, 7 * 1024)


def test_managed_memory_is_the_drivers_affair(hooked: Any) -> None:
    source = """
    import fdyhook as fdy, soft
    soft.start()
    code, address = soft.cu.cuMemAllocManaged(4096, 1)
    fdy.answer([code.name, fdy.BASE <= int(address or 0) < fdy.BASE + (6 << 38)])
    """
    assert hooked.python(source, "capture") == hooked.python(source, None)


def test_memory_freed_on_a_stream_is_not_given_out_before_the_stream_is_there(hooked: Any) -> None:
    same, order = hooked.python(
        """
        import ctypes, threading, fdyhook as fdy, soft
        cu = soft.cu
        soft.start()
        stream = soft.ok(cu.cuStreamCreate(1))
        order, entered, go = [], threading.Event(), threading.Event()

        @ctypes.CFUNCTYPE(None, ctypes.c_void_p)
        def stand_still(_):
            entered.set()
            go.wait(30)
            order.append("stream moved on")

        def let_go():
            entered.wait(30)
            go.wait(0.3)
            go.set()

        threading.Thread(target=let_go).start()
        address = int(soft.ok(cu.cuMemAllocAsync(4096, stream)))
        soft.ok(cu.cuLaunchHostFunc(stream, cu.CUhostFn(ctypes.cast(stand_still, ctypes.c_void_p).value), 0))
        soft.ok(cu.cuMemFreeAsync(address, stream))
        again = soft.malloc(4096)
        order.append("given out")
        fdy.answer([again == address, order])
        """,
        "capture",
    )
    assert same
    assert order == ["stream moved on", "given out"]


CAPTURE = """
import fdyhook as fdy, soft
cu = soft.cu
soft.start()
stream = soft.ok(cu.cuStreamCreate(1))
soft.malloc(64)
soft.ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode(fdy.given())))
first = int(soft.ok(cu.cuMemAllocAsync(4096, stream)))
second = int(soft.ok(cu.cuMemAllocAsync(3 << 20, stream)))
soft.ok(cu.cuMemFreeAsync(first, stream))
third = int(soft.ok(cu.cuMemAllocAsync(4096, stream)))
outside = cu.cuMemFreeAsync(fdy.BASE, stream)[0].name
graph = soft.ok(cu.cuStreamEndCapture(stream))
nodes = soft.ok(cu.cuGraphGetNodes(graph, 0))[1]
soft.ok(cu.cuMemFreeAsync(second, stream))
soft.ok(cu.cuMemFreeAsync(second, stream))
soft.ok(cu.cuMemsetD8(second, 1, 3 << 20))
fdy.answer([first, second, third, outside, nodes, [a for a in fdy.allocations() if a.arena == fdy.GRAPH]])
"""


def test_memory_allocated_under_capture_comes_from_the_graph_arena_without_a_node(hooked: Any) -> None:
    graph_arena = BASE + 4 * STRIDE
    for capture_mode in (0, 1, 2):
        first, second, third, outside, nodes, recorded = hooked.python(CAPTURE, "capture", given=capture_mode)
        # What a graph uses it uses at every replay: nothing is given out twice, and a free leaves it in place.
        assert [first, second, third] == [graph_arena, graph_arena + GRANULE, graph_arena + 4096]
        assert outside == "CUDA_ERROR_INVALID_VALUE"
        assert nodes == 0
        assert [r[4] for r in recorded] == [1, 1, 1]


def test_a_free_during_a_capture_waits_for_its_end_and_does_not_disturb_it(hooked: Any) -> None:
    """Freeing means waiting for the device, which no capture survives."""
    during, after, again = hooked.python(
        """
        import fdyhook as fdy, soft
        cu = soft.cu
        soft.start()
        stream = soft.ok(cu.cuStreamCreate(1))
        small, large = soft.malloc(4096), soft.malloc(3 << 20)
        soft.ok(cu.cuStreamBeginCapture(stream, cu.CUstreamCaptureMode(0)))
        soft.free(small), soft.free(large)
        during = [soft.malloc(4096) == small, soft.malloc(3 << 20) == large, cu.cuMemFree(small)[0].name]
        soft.ok(cu.cuGraphDestroy(soft.ok(cu.cuStreamEndCapture(stream))))
        memory = soft.free_memory()
        after = [soft.malloc(4096) == small, soft.malloc(4 << 20) == large]
        fdy.answer([during, after, memory == soft.free_memory()])
        """,
        "capture",
    )
    assert during == [False, False, "CUDA_ERROR_INVALID_VALUE"]
    assert after == [True, True]
    assert again  # 4 MiB came, 4 MiB went


def test_an_address_that_is_taken_stops_a_capture_with_a_reason(hooked: Any) -> None:
    source = """
    import ctypes, fdyhook as fdy, soft
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    taken = fdy.BASE + fdy.given() * fdy.STRIDE + (1 << 30)
    assert libc.mmap(taken, 4096, 0, 0x100022, -1, 0) == taken
    soft.start()
    code, address = soft.cu.cuMemAlloc(4096)
    reason = fdy.last_error()
    try:
        fdy.divergence()
        status = "none"
    except fdy.HookError as error:
        status = error.status
    fdy.answer([code.name, reason, status, fdy.report().arena_base])
    """
    for arena in (0, 5):
        code, reason, status, base = hooked.python(source, "capture", given=arena)
        assert (code, status) == ("CUDA_ERROR_MAP_FAILED", "state")
        assert "FOUNDRYD_ARENA_BASE" in reason
        assert base == 0


def test_base_and_stride_come_from_the_environment(hooked: Any) -> None:
    source = """
    import fdyhook as fdy, soft
    soft.start()
    with fdy.arena(fdy.KV):
        code, address = soft.cu.cuMemAlloc(4096)
    r = fdy.report()
    counts = [r.contexts, r.engine.allocations]
    fdy.answer([code.name, address and int(address), r.arena_base, r.arena_stride, *counts])
    """
    env = {"FOUNDRYD_ARENA_BASE": "0x500000000000", "FOUNDRYD_ARENA_STRIDE": str(1 << 30)}
    seen = hooked.python(source, "capture", env=env)
    assert seen == ["CUDA_SUCCESS", 0x500000000000 + (2 << 30), 0x500000000000, 1 << 30, 1, 1]
    for wrong in ({"FOUNDRYD_ARENA_BASE": "12345"}, {"FOUNDRYD_ARENA_STRIDE": "much"}):
        assert hooked.python(source, "capture", env=wrong)[0] == "CUDA_ERROR_INVALID_VALUE"


def test_another_device_than_the_sessions_is_left_to_the_driver(hooked: Any) -> None:
    addresses = hooked.python(
        """
        import fdyhook as fdy, soft
        out = []
        for device in (1, 0, 1):
            soft.start(device)
            out.append(soft.malloc(4096))
        soft.free(out[1]), soft.free(out[2])
        fdy.answer(out)
        """,
        "capture",
        env={"SOFTCUDA_DEVICES": "2"},
    )
    assert [BASE <= a < BASE + 6 * STRIDE for a in addresses] == [True, False, True]


def test_threads_share_the_arena(hooked: Any) -> None:
    recorded = hooked.python(
        """
        import threading, fdyhook as fdy, soft
        context = soft.start()

        def work(seed):
            soft.ok(soft.cu.cuCtxSetCurrent(context))
            for i in range(200):
                a, b = soft.malloc(512 + seed), soft.malloc((2 << 20) + seed)
                soft.free(a if i % 2 else b)
                if i % 2:
                    soft.free(b)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        [t.start() for t in threads], [t.join() for t in threads]
        fdy.answer([a for a in fdy.allocations()])
        """,
        "capture",
    )
    assert [r[1] for r in recorded] == list(range(1600))
    live = sorted((r[2], r[2] + r[3]) for r in recorded if r[4])
    assert len(live) == 400
    assert all(a[1] <= b[0] for a, b in pairwise(live))
