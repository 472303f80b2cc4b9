# SPDX-License-Identifier: Apache-2.0
"""Forked children neither hang nor see their parent's arenas as theirs."""

from __future__ import annotations

import os
from typing import Any

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))


def test_a_child_forked_before_the_first_context_has_arenas_of_its_own(hooked: Any) -> None:
    child, parent = hooked.python(
        """
        import os, fdyhook as fdy, soft
        read, write = os.pipe()
        if os.fork() == 0:
            soft.start()
            os.write(write, str(soft.malloc(4096)).encode())
            os._exit(0)
        os.close(write)
        soft.start()
        fdy.answer([int(os.fdopen(read).read()), soft.malloc(4096)])
        """,
        "capture",
    )
    assert child == parent == BASE


def test_a_child_of_a_process_with_a_context_gets_the_drivers_own_answer(hooked: Any) -> None:
    source = """
    import os, fdyhook as fdy, soft
    soft.start()
    address = soft.malloc(4096)
    read, write = os.pipe()
    if os.fork() == 0:
        codes = [soft.cu.cuMemAlloc(4096)[0].name, soft.cu.cuMemFree(address)[0].name, soft.cu.cuInit(0)[0].name]
        os.write(write, " ".join(codes).encode())
        os._exit(0)
    os.close(write)
    codes = os.fdopen(read).read().split()
    fdy.answer([codes, soft.cu.cuMemFree(address)[0].name])
    """
    without_mode = hooked.python(source, None)
    assert hooked.python(source, "capture")[0][0] == without_mode[0][0]
    assert without_mode[1] == hooked.python(source, "capture")[1] == "CUDA_SUCCESS"


def test_forking_while_threads_allocate_hangs_no_child(hooked: Any) -> None:
    codes = hooked.python(
        """
        import os, signal, threading, fdyhook as fdy, soft
        context = soft.start()
        stop = threading.Event()

        def work():
            soft.ok(soft.cu.cuCtxSetCurrent(context))
            while not stop.is_set():
                soft.free(soft.malloc(4096))

        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        codes = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a child that hangs dies of it
                fdy.report()
                refused = 0
                for call in (fdy.allocations, fdy.divergence, fdy.map_held, fdy.windows):
                    try:
                        call()
                    except fdy.HookError as error:
                        refused += error.status == "state"
                failed = soft.cu.cuMemAlloc(4096)[0] != soft.SUCCESS
                os._exit(0 if refused == 4 and failed else 1)
            codes.append(os.waitpid(child, 0)[1])
        stop.set()
        [t.join() for t in threads]
        fdy.answer(codes)
        """,
        "capture",
    )
    assert codes == [0] * 20


def test_forking_while_threads_open_handles_hangs_no_child(hooked: Any) -> None:
    """And the parent goes on serving its memory."""
    codes = hooked.python(
        """
        import os, signal, threading, fdyhook as fdy, soft
        from ipcpeer import close, get, open_handle
        context = soft.start()
        handle = get(soft.malloc(4 << 20))
        stop = threading.Event()

        def work():
            soft.ok(soft.cu.cuCtxSetCurrent(context))
            while not stop.is_set():
                close(open_handle(handle))

        threads = [threading.Thread(target=work) for _ in range(3)]
        [t.start() for t in threads]
        codes = []
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(20)  # a child that hangs dies of it
                refused = 0
                try:
                    fdy.windows()
                except fdy.HookError as error:
                    refused += error.status == "state"
                failed = soft.cu.cuIpcOpenMemHandle(soft.cu.CUipcMemHandle(), 1)[0] != soft.SUCCESS
                os._exit(0 if refused and failed else 1)
            codes.append(os.waitpid(child, 0)[1])
        stop.set()
        [t.join() for t in threads]
        fdy.answer([codes, open_handle(handle)])
        """,
        "restore",
    )
    assert codes == [[0] * 20, BASE + 6 * STRIDE]
