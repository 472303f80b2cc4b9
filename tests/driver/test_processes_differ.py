# SPDX-License-Identifier: Apache-2.0
"""What may differ between two processes does, and nothing else."""

from __future__ import annotations

from typing import Any

ADDRESSES = """
    start()
    out = [int(ok(cu.cuMemAlloc(1 << n))) for n in (4, 12, 22)]
    out += [int(ok(cu.cuMemAddressReserve(2 << 20, 0, 0, 0))), int(ok(cu.cuMemHostAlloc(100, 0)))]
    answer(out)
"""

ORDER = """
    start()
    graph = ok(cu.cuGraphCreate(0))
    made = [int(ok(cu.cuGraphAddEmptyNode(graph, [], 0))) for _ in range(12)]
    nodes, count = ok(cu.cuGraphGetNodes(graph, 12))
    answer([made.index(int(n)) for n in nodes])
"""


def test_addresses_differ_and_leave_fixed_ranges_alone(program: Any) -> None:
    first, second = program(ADDRESSES), program(ADDRESSES)
    assert not set(first) & set(second)
    assert all(address < 0x6000_0000_0000 for address in first + second)


def test_a_seed_fixes_addresses(program: Any) -> None:
    assert program(ADDRESSES, SOFTCUDA_SEED="7") == program(ADDRESSES, SOFTCUDA_SEED="7")
    assert program(ADDRESSES, SOFTCUDA_SEED="7") != program(ADDRESSES, SOFTCUDA_SEED="8")


def test_the_order_of_nodes_is_arbitrary(program: Any) -> None:
    orders = [program(ORDER, SOFTCUDA_SEED=str(seed)) for seed in (1, 2)]
    assert orders[0] == program(ORDER, SOFTCUDA_SEED="1")
    assert orders[0] != orders[1]
    assert all(sorted(order) == list(range(12)) for order in orders)
    assert list(range(12)) not in orders


FRESH = """
    start()
    plain = int(ok(cu.cuMemAlloc(100000)))
    handle = ok(cu.cuMemCreate(4 << 20, properties(), 0))
    base = map_memory(handle, 4 << 20)
    seen = set(words(plain, 25000)) | set(words(base, 1024)) | set(words(base + (2 << 20), 1024))
    answer(sorted(seen))
"""


def test_fresh_memory_is_poisoned(program: Any) -> None:
    assert program(FRESH) == [0xCBCBCBCB]
    assert program(FRESH, SOFTCUDA_POISON="0x11") == [0x11111111]
    assert program(FRESH, SOFTCUDA_POISON="off") == [0]


def test_memory_that_was_freed_does_not_come_back_as_it_was(program: Any) -> None:
    source = """
        start()
        for _ in range(20):
            address = int(ok(cu.cuMemAlloc(4096)))
            if set(words(address, 1024)) != {0xCBCBCBCB}:
                raise SystemExit("stale")
            ok(cu.cuMemsetD32(address, 5, 1024))
            ok(cu.cuMemFree(address))
        answer("fresh")
    """
    assert program(source) == "fresh"


def test_padding_of_results_is_noise(program: Any) -> None:
    source = """
        start()
        address = int(ok(cu.cuMemAlloc(4096)))
        copy = cu.CUDA_MEMCPY3D()
        copy.srcMemoryType = copy.dstMemoryType = cu.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.dstDevice = address, address + 2048
        copy.WidthInBytes, copy.Height, copy.Depth = 64, 1, 1
        graph = ok(cu.cuGraphCreate(0))
        node = ok(cu.cuGraphAddMemcpyNode(graph, [], 0, copy, ok(cu.cuCtxGetCurrent())))
        def read():
            out = (ctypes.c_uint8 * 200)()
            assert library().cuGraphMemcpyNodeGetParams(ctypes.c_void_p(int(node)), out) == 0
            return bytes(out)
        first, second = read(), read()
        answer([i for i in range(200) if first[i] != second[i]])
    """
    padding = program(source)
    # Behind srcMemoryType at 32 and dstMemoryType at 120, four bytes each; a byte may repeat by chance.
    assert set(padding) <= {*range(36, 40), *range(124, 128)}
    assert len(padding) >= 4


def test_a_forked_child_of_a_fresh_process_works(program: Any) -> None:
    source = """
        child = os.fork()
        if child == 0:
            start()
            os._exit(0 if code(cu.cuMemAlloc(64)) == "SUCCESS" else 1)
        first = os.waitpid(child, 0)[1]
        start()
        answer([first, code(cu.cuMemAlloc(64))])
    """
    assert program(source) == [0, "SUCCESS"]
