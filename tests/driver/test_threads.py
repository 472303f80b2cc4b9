# SPDX-License-Identifier: Apache-2.0
"""Many threads, one driver."""

from __future__ import annotations

from typing import Any

import pytest


def test_threads_share_the_driver(program: Any) -> None:
    source = """
        import threading
        context = start(); module = load()
        f = function(module, "increment"); ok(cu.cuFuncLoad(f))
        target = int(ok(cu.cuMemAlloc(64))); ok(cu.cuMemsetD32(target, 0, 16)); ok(cu.cuCtxSynchronize())
        errors = []
        def work(n):
            try:
                ok(cu.cuCtxSetCurrent(context))
                stream = ok(cu.cuStreamCreate(1)); event = ok(cu.cuEventCreate(2))
                for i in range(20):
                    own = ok(cu.cuMemAlloc(1000 + n))
                    ok(launch(f, stream, target))
                    ok(cu.cuStreamBeginCapture(stream, THREAD))
                    for _ in range(3):
                        ok(launch(f, stream, target))
                    graph = ok(cu.cuStreamEndCapture(stream))
                    executable = ok(cu.cuGraphInstantiate(graph, 0))
                    ok(cu.cuGraphLaunch(executable, stream)); ok(cu.cuEventRecord(event, stream))
                    ok(cu.cuEventSynchronize(event))
                    ok(cu.cuGraphExecDestroy(executable)); ok(cu.cuGraphDestroy(graph)); ok(cu.cuMemFree(own))
                ok(cu.cuStreamDestroy(stream))
            except Exception as error:
                errors.append(repr(error))
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join(50)
        answer([errors, words(target, 1)])
    """
    assert program(source) == [[], [8 * 20 * 4]]


def test_devices_have_contexts_and_memory_of_their_own(program: Any) -> None:
    source = """
        first, second = start(0), start(1)
        here = [ok(cu.cuDeviceGetCount()), int(ok(cu.cuCtxGetDevice())), first != second]
        module = load(); own = ok(cu.cuMemAlloc(1 << 20))
        used = ok(cu.cuMemGetInfo())
        ok(cu.cuCtxSetCurrent(first))
        other = ok(cu.cuMemGetInfo())
        stream = ok(cu.cuStreamCreate(1))
        foreign = code(launch(function(module, "increment"), stream, int(own)))
        answer([*here, other[0] - used[0], foreign, ok(cu.cuDeviceCanAccessPeer(0, 1)), code(cu.cuDeviceGet(2)),
                ok(cu.cuDeviceGetUuid(0)).bytes != ok(cu.cuDeviceGetUuid(1)).bytes])
    """
    assert program(source, SOFTCUDA_DEVICES="2") == [2, 1, True, 1 << 20, "INVALID_HANDLE", 1, "INVALID_DEVICE", True]


@pytest.mark.parametrize("devices", ["0"])
def test_no_device(program: Any, devices: str) -> None:
    assert program("answer(code(cu.cuInit(0)))", SOFTCUDA_DEVICES=devices) == "NO_DEVICE"
