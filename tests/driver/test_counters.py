# SPDX-License-Identifier: Apache-2.0
"""Calls are counted by who made them."""

from __future__ import annotations

from typing import Any

WORK = """
    start(); module = load(); stream = ok(cu.cuStreamCreate(1))
    target = int(ok(cu.cuMemAlloc(64)))
    f = function(module, "increment")
    def work():
        ok(launch(f, stream, target))
        ok(cu.cuStreamBeginCapture(stream, THREAD)); ok(launch(f, stream, target))
        graph = ok(cu.cuStreamEndCapture(stream))
        executable = ok(cu.cuGraphInstantiate(graph, 0))
        ok(cu.cuGraphLaunch(executable, stream)); ok(cu.cuGraphLaunch(executable, stream))
        ok(cu.cuStreamSynchronize(stream)); ok(cu.cuMemFree(ok(cu.cuMemAlloc(4))))
    def since(before, owner):
        return {name: value - before[name] for name, value in counters(owner).items() if value != before[name]}
"""
DONE = {"launches": 2, "captures": 1, "graph_launches": 2, "instantiations": 1, "allocations": 1}


def test_calls_count_for_the_owner_of_the_thread(program: Any) -> None:
    source = (
        WORK
        + """
    import threading
    before = counters(0), counters(1)
    work()
    engine = since(before[0], 0), since(before[1], 1)
    before = counters(0), counters(1)
    library().softcuda_set_owner(1)
    work()
    context = ok(cu.cuCtxGetCurrent())
    thread = threading.Thread(target=lambda: (ok(cu.cuCtxSetCurrent(context)), work()))
    thread.start(); thread.join(20)
    library().softcuda_set_owner(0)
    both = since(before[0], 0), since(before[1], 1)
    answer([*engine, *both])
    """
    )
    assert program(source) == [DONE, {}, DONE, DONE]


def test_refused_calls_do_not_count(program: Any) -> None:
    source = (
        WORK
        + """
    before = counters(0)
    cu.cuMemAlloc(0); cu.cuModuleLoadData(b"nothing to load here" * 4)
    cu.cuLaunchKernel(f, 0, 1, 1, 1, 1, 1, 0, stream, ((target,), (ctypes.c_void_p,)), 0)
    cu.cuStreamBeginCapture(cu.CUstream(1), THREAD)
    answer([since(before, 0), library().softcuda_counters(2, None), library().softcuda_counters(0, None)])
    """
    )
    assert program(source) == [{}, 1, 1]


def test_page_faults_inside_of_calls_are_counted_for_the_thread_when_asked(program: Any) -> None:
    source = """
    import mmap, threading
    start(); graph = ok(cu.cuGraphCreate(0)); faults = library().softcuda_faults; faults.restype = ctypes.c_uint64
    def nodes():
        for _ in range(20000):
            ok(cu.cuGraphAddEmptyNode(graph, None, 0))
    def touched():
        memory = mmap.mmap(-1, 1000 * 4096)
        for page in range(1000):
            memory[page * 4096] = 1
    def counted(work):
        before = faults(); work(); found.append(faults() - before)
    found = []
    counted(nodes)
    library().softcuda_count_faults(1)
    counted(touched)
    thread = threading.Thread(target=counted, args=(nodes,)); counted(lambda: (thread.start(), thread.join(20)))
    counted(nodes)
    library().softcuda_count_faults(0)
    counted(nodes)
    answer(found)
    """
    off, outside, in_thread, of_thread, inside, off_again = program(source)
    assert (off, outside, of_thread, off_again) == (0, 0, 0, 0)
    # A node takes more than 100 bytes.
    assert in_thread > 400
    assert inside > 400
