# SPDX-License-Identifier: Apache-2.0
"""Memory crosses processes by descriptor and by legacy handle, and outlives the one that made it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXPORT = """
    import socket
    start()
    handle = ok(cu.cuMemCreate(2 << 20, properties(), 0))
    other = ok(cu.cuMemCreate(4 << 20, properties(), 0))
    base = map_memory(handle)
    ok(cu.cuMemsetD32(base, 77, 16)); ok(cu.cuCtxSynchronize())
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    fds = [int(ok(cu.cuMemExportToShareableHandle(h, kind, 0))) for h in (handle, other)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
        s.connect(sys.argv[1])
        socket.send_fds(s, [b"x"], fds)
        s.recv(1)
        answer(words(base, 2))
        s.send(b"y")
"""

IMPORT = """
    import socket
    start()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(sys.argv[1]); listener.listen(1)
        print("listening", flush=True)
        peer, _ = listener.accept()
    _, fds, _, _ = socket.recv_fds(peer, 1, 2)
    kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    before = descriptors()
    handle = ok(cu.cuMemImportFromShareableHandle(fds[0], kind))
    second = ok(cu.cuMemImportFromShareableHandle(fds[1], kind))
    base = map_memory(handle)
    far = map_memory(second, 4 << 20)
    seen = words(base, 2)
    ok(cu.cuMemsetD32(base, 88, 16)); ok(cu.cuCtxSynchronize())
    peer.send(b"x"); peer.recv(1)
    while peer.recv(1):
        pass
    kept = words(base, 2)
    unmap(base); unmap(far, 4 << 20)
    ok(cu.cuMemRelease(handle)); ok(cu.cuMemRelease(second))
    answer([seen, kept, descriptors() - before])
"""


def test_a_descriptor_carries_memory_to_another_process(start_program: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    importer = start_program(IMPORT, path)
    assert importer.stdout.readline() == "listening\n"
    exporter = start_program(EXPORT, path)
    assert exporter.stdout.readline() == "[88, 88]\n"
    assert exporter.wait(20) == 0
    # The exporter is gone; its memory is not.
    assert importer.stdout.readline() == "[[77, 77], [88, 88], 0]\n"
    assert importer.wait(20) == 0


def test_a_legacy_handle_carries_memory_to_another_process(start_program: Any) -> None:
    owner = start_program("""
        start()
        address = int(ok(cu.cuMemAlloc(100000)))
        ok(cu.cuMemsetD32(address, 5, 25000)); ok(cu.cuCtxSynchronize())
        ticket = Ticket()
        assert library().cuIpcGetMemHandle(ctypes.byref(ticket), ctypes.c_uint64(address)) == 0
        print(bytes(ticket).hex(), flush=True)
        sys.stdin.readline()
        answer(words(address, 1) + words(address + 99996, 1))
    """)
    ticket = owner.stdout.readline().strip()
    user = start_program(
        """
        start()
        pointer = ctypes.c_uint64()
        ticket = Ticket.from_buffer_copy(bytes.fromhex(sys.argv[1]))
        assert library().cuIpcOpenMemHandle_v2(ctypes.byref(pointer), ticket, 1) == 0
        address = pointer.value
        size = ok(cu.cuMemGetAddressRange(address))[1]
        ok(cu.cuMemsetD32(address + 99996, 6, 1)); ok(cu.cuCtxSynchronize())
        seen = words(address, 1)
        out = [size, seen, code(cu.cuMemFree(address)), code(cu.cuIpcCloseMemHandle(address)),
               code(cu.cuIpcCloseMemHandle(address))]
        answer(out)
        """,
        ticket,
    )
    assert user.stdout.readline() == '[100000, [5], "INVALID_VALUE", "SUCCESS", "INVALID_VALUE"]\n'
    owner.stdin.write("\n")
    owner.stdin.flush()
    assert owner.stdout.readline() == "[5, 6]\n"


def test_nothing_leaks_over_many_allocations(program: Any) -> None:
    source = """
        start()
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        def round():
            plain = [ok(cu.cuMemAlloc(70000)) for _ in range(8)]
            handle = ok(cu.cuMemCreate(2 << 20, properties(), 0))
            base = map_memory(handle)
            os.close(int(ok(cu.cuMemExportToShareableHandle(handle, kind, 0))))
            unmap(base); ok(cu.cuMemRelease(handle))
            for address in plain:
                ok(cu.cuMemFree(address))
            host = ok(cu.cuMemHostAlloc(5000, 0)); ok(cu.cuMemFreeHost(host))
        def state():
            with open("/proc/self/maps") as maps:
                return [descriptors(), sum(1 for _ in maps), ok(cu.cuMemGetInfo())[0]]
        for _ in range(5):
            round()
        before = state()
        for _ in range(200):
            round()
        after = state()
        answer([after[0] - before[0], after[1] - before[1] < 20, after[2] - before[2]])
    """
    assert program(source) == [0, True, 0]


def test_a_failed_call_leaves_nothing_behind(program: Any) -> None:
    source = """
        start()
        kind = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        reading, writing = os.pipe()
        def state():
            return [descriptors(), ok(cu.cuMemGetInfo())[0]]
        before = state()
        for _ in range(50):
            assert code(cu.cuMemAlloc(1 << 50)) == "OUT_OF_MEMORY"
            assert code(cu.cuMemCreate(1 << 50, properties(), 0)) == "OUT_OF_MEMORY"
            assert code(cu.cuMemImportFromShareableHandle(reading, kind)) == "UNKNOWN"
            assert code(cu.cuModuleLoadData(b"no image at all, nothing" * 4)) == "INVALID_IMAGE"
        after = state()
        answer([a - b for a, b in zip(after, before)])
    """
    assert program(source) == [0, 0]


def test_a_context_takes_its_memory_with_it(program: Any) -> None:
    source = """
        start()
        free = ok(cu.cuMemGetInfo())[0]
        for _ in range(4):
            ok(cu.cuMemAlloc(1 << 20)); ok(cu.cuMemHostAlloc(4096, 0))
        used = free - ok(cu.cuMemGetInfo())[0]
        ok(cu.cuDevicePrimaryCtxReset(0)); start()
        answer([used >= 4 << 20, free - ok(cu.cuMemGetInfo())[0]])
    """
    assert program(source) == [True, 0]
