# SPDX-License-Identifier: Apache-2.0
"""Work runs asynchronously and in order; what waits, blocks."""

from __future__ import annotations

from typing import Any

import pytest


def test_a_first_use_of_a_library_waits_for_the_context(program: Any) -> None:
    """Bringing its code into the context synchronises."""
    source = """
        import threading
        start(); module = load(); context = ok(cu.cuCtxGetCurrent())
        library = ok(cu.cuLibraryLoadData(_native.image("driver_tests").read_bytes(), [], [], 0, [], [], 0))
        never_loaded = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(library, b"never_loaded"))))
        stream, other = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        target = int(ok(cu.cuMemAlloc(64)))
        ok(cu.cuFuncLoad(function(module, "gate"))); ok(cu.cuFuncLoad(function(module, "increment")))
        gate = Gate(module, stream)
        ok(launch(function(module, "increment"), other, target))
        done = threading.Event()
        def first_use():
            ok(cu.cuCtxSetCurrent(context))
            ok(launch(never_loaded, other, target))
            done.set()
        thread = threading.Thread(target=first_use); thread.start()
        held = not done.wait(0.3)
        gate.open()
        thread.join(20)
        answer([held, done.is_set()])
    """
    assert program(source) == [True, True]


@pytest.mark.parametrize("loading", ["LAZY", "EAGER"])
def test_a_function_of_a_module_is_loaded_beside_work(program: Any, loading: str) -> None:
    """The module is in the context, so its functions wait for nobody, or were loaded with it."""
    source = """
        start(); module = load()
        stream, other = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        target = int(ok(cu.cuMemAlloc(64)))
        gate = Gate(module, stream)
        launched = code(launch(function(module, "never_loaded"), other, target))
        ok(cu.cuStreamSynchronize(other))
        still = code(cu.cuStreamQuery(stream))
        gate.open(); ok(cu.cuCtxSynchronize())
        answer([launched, still, words(target, 1)])
    """
    assert program(source, CUDA_MODULE_LOADING=loading) == ["SUCCESS", "NOT_READY", [9]]


def test_launches_wait_while_code_comes_into_the_context(program: Any) -> None:
    source = """
        import threading
        start(); module = load(); context = ok(cu.cuCtxGetCurrent())
        stream, other = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        target = int(ok(cu.cuMemAlloc(64))); ok(cu.cuMemsetD32(target, 0, 16))
        increment = function(module, "increment")
        gate = Gate(module, stream)
        loaded, launched = threading.Event(), threading.Event()
        def work(call, done):
            ok(cu.cuCtxSetCurrent(context))
            call(); done.set()
        threads = [threading.Thread(target=work, args=(load, loaded))]
        threads[0].start()
        early = [loaded.wait(0.3)]
        threads.append(threading.Thread(target=work, args=(lambda: ok(launch(increment, other, target)), launched)))
        threads[1].start()
        early.append(launched.wait(0.3))
        gate.open()
        for thread in threads: thread.join(20)
        ok(cu.cuCtxSynchronize())
        answer([early, loaded.is_set(), launched.is_set(), words(target, 1)])
    """
    assert program(source) == [[False, False], True, True, [1]]


def test_waiting_takes_no_processor(program: Any) -> None:
    source = """
        import threading, time
        start(); module = load()
        first, second = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        event = ok(cu.cuEventCreate(2))
        gate = Gate(module, first)
        ok(cu.cuEventRecord(event, first)); ok(cu.cuStreamWaitEvent(second, event, 0))
        before = time.process_time()
        opener = threading.Timer(1.0, gate.open); opener.start()
        ok(cu.cuStreamSynchronize(second))
        answer(time.process_time() - before)
    """
    assert program(source) < 0.5


def test_a_free_waits_for_work_that_may_use_the_memory(program: Any) -> None:
    source = """
        import threading
        start(); module = load()
        stream = ok(cu.cuStreamCreate(1)); target = int(ok(cu.cuMemAlloc(64)))
        ok(cu.cuFuncLoad(function(module, "increment")))
        gate = Gate(module, stream)
        ok(launch(function(module, "increment"), stream, target))
        opened = []
        threading.Timer(0.2, lambda: (opened.append(1), gate.open())).start()
        ok(cu.cuMemFree(target))
        answer(len(opened))
    """
    assert program(source) == 1


def test_per_thread_streams_do_not_wait_for_each_other(program: Any) -> None:
    source = """
        import threading
        start(); module = load(); context = ok(cu.cuCtxGetCurrent())
        target = int(ok(cu.cuMemAlloc(64))); ok(cu.cuMemsetD32(target, 0, 16)); ok(cu.cuCtxSynchronize())
        for name in ("gate", "increment"):
            ok(cu.cuFuncLoad(function(module, name)))
        per_thread = cu.CUstream(2)
        gate = Gate(module, per_thread)
        out = []
        def other():
            ok(cu.cuCtxSetCurrent(context))
            ok(launch(function(module, "increment"), per_thread, target))
            ok(cu.cuStreamSynchronize(per_thread))
            out.append(True)
        thread = threading.Thread(target=other); thread.start(); thread.join(20)
        mine = code(cu.cuStreamQuery(per_thread))
        gate.open(); ok(cu.cuCtxSynchronize())
        answer([out, mine, words(target, 1)])
    """
    assert program(source) == [[True], "NOT_READY", [1]]


def test_values_are_written_and_awaited_in_stream_order(program: Any) -> None:
    source = """
        start(); module = load()
        first, second = ok(cu.cuStreamCreate(1)), ok(cu.cuStreamCreate(1))
        flag = int(ok(cu.cuMemAlloc(64))); ok(cu.cuMemsetD32(flag, 0, 16)); ok(cu.cuCtxSynchronize())
        gate = Gate(module, first)
        ok(cu.cuStreamWriteValue32(first, flag, 5, 0))
        ok(cu.cuStreamWaitValue32(second, flag, 5, 0))
        ok(cu.cuStreamWriteValue64(second, flag + 8, 1 << 40, 0))
        before = code(cu.cuStreamQuery(second))
        gate.open(); ok(cu.cuStreamSynchronize(second))
        answer([before, words(flag, 4)])
    """
    assert program(source) == ["NOT_READY", [5, 0, 0, 256]]


def test_a_failing_kernel_ends_the_context_and_nothing_else(program: Any) -> None:
    source = """
        start(); module = load()
        stream = ok(cu.cuStreamCreate(1))
        ok(cu.cuLaunchKernel(function(module, "fail"), 1, 1, 1, 1, 1, 1, 0, stream, ((1,), (ctypes.c_uint32,)), 0))
        out = [code(cu.cuStreamSynchronize(stream)), code(cu.cuMemAlloc(4)), code(cu.cuStreamCreate(1))]
        ok(cu.cuDevicePrimaryCtxReset(0))
        start()
        answer([*out, code(cu.cuMemAlloc(4))])
    """
    assert program(source) == ["LAUNCH_FAILED", "LAUNCH_FAILED", "LAUNCH_FAILED", "SUCCESS"]


def test_a_block_sees_its_launch_and_poisoned_shared_memory(program: Any) -> None:
    source = """
        start(); module = load()
        out = int(ok(cu.cuMemAlloc(4 * 4 * 12)))
        arguments = ((out,), (ctypes.c_void_p,))
        ok(cu.cuLaunchKernel(function(module, "look"), 3, 2, 2, 8, 4, 2, 64, 0, arguments, 0))
        ok(cu.cuCtxSynchronize())
        seen = words(out, 48)
        answer([sorted(set(seen[i::4])) for i in range(4)])
    """
    assert program(source) == [[64], [64], [0xCBCBCBCB], [1]]


def test_a_program_may_end_while_work_is_in_flight(program: Any) -> None:
    source = """
        start(); module = load()
        gate = Gate(module, ok(cu.cuStreamCreate(1)))
        answer("over")
    """
    assert program(source) == "over"
