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
