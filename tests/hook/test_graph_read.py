# SPDX-License-Identifier: Apache-2.0
"""Captured graphs as arrays: the same in every process, and nothing that another process could not use."""

from __future__ import annotations

import base64
import textwrap
from typing import Any

import numpy as np
import pytest

from foundryd._native import _hook

# A graph of every supported kind of node, on two streams, with ties that only creation order can break.
EVERYTHING = """
    ok(cu.cuInit(0))
    start()
    module, library = Module(), Module(library=True)
    with_arena = malloc(4096)
    write_words(with_arena, list(range(64)))
    pinned = int(ok(cu.cuMemHostAlloc(4096, 0)))

    def cell(i):
        return with_arena + 8 * i

    inner = capture(lambda s: [launch(module.function("mad"), s, u64(cell(40), 3, i)) for i in range(3)])

    def body(s):
        side = stream()
        launch(module.function("mad"), s, u64(cell(0), 2, 1))
        with forked(s, side):
            for i in range(4):
                launch(library.function("mad"), side, u64(cell(i + 1), 5, 7))
            ok(cu.cuMemsetD32Async(cell(10), 9, 4, side))
            ok(cu.cuMemcpyDtoDAsync(cell(12), cell(10), 16, side))
            ok(cu.cuMemcpyHtoDAsync(cell(14), pinned, 64, side))
        launch_extra(module.function("gaps"), s, struct.pack("<B7xdH6xQ", 1, 2.0, 3, cell(9)), grid=(2, 3, 4))
        launch(module.function("join"), s, u64(cell(0), cell(4), cell(5)))
        status, _, graph, nodes, _, count = ok(cu.cuStreamGetCaptureInfo(s))
        child = ok(cu.cuGraphAddChildGraphNode(graph, nodes, count, inner))
        empty = ok(cu.cuGraphAddEmptyNode(graph, [child], 1))
        ok(cu.cuStreamUpdateCaptureDependencies(
            s, [empty], None, 1, cu.CUstreamUpdateCaptureDependencies_flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES))
        launch(module.function("mad"), s, u64(cell(5), 3, 1))

    graph = capture(body)
"""


def nodes_of(read: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(read["nodes"]), _hook.node_dtype)


def edges_of(read: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(base64.b64decode(read["edges"]), _hook.edge_dtype)


def params_of(read: dict[str, Any], place: int) -> bytes:
    node = nodes_of(read)[place]
    data = base64.b64decode(read["params"])
    return data[node["param_offset"] :][: node["param_bytes"]]


def test_the_same_program_reads_the_same_in_every_process(hooked: Any) -> None:
    """Although the driver shuffles nodes and edges, and puts everything outside the arenas elsewhere."""
    seen = [
        hooked.graphs(EVERYTHING + "\n    answer([plain(hook.read_graph(int(graph))) for _ in range(2)])")
        for _ in range(3)
    ]
    first = seen[0][0]
    assert all(read == first for reads in seen for read in reads)
    types = nodes_of(first)["type"].tolist()
    assert {int(t) for t in types} == {0, 1, 2, 3, 4}
    edges = edges_of(first)
    assert (edges["from"] < edges["to"]).all()
    assert len(first["children"]) == 1
    assert nodes_of(first["children"][0])["type"].tolist() == [0, 0, 0]


def test_a_graph_nobody_saw_being_made_reads_the_same_too(hooked: Any) -> None:
    """Built by hand, so creation order is unknown: shape and neighbours decide."""
    program = """
        start()
        module, memory = Module(), malloc(4096)
        mad, join = module.function("mad"), module.function("join")
        graph = ok(cu.cuGraphCreate(0))
        def add(function, *arguments, after=()):
            params = cu.CUDA_KERNEL_NODE_PARAMS()
            params.func, params.gridDimX, params.gridDimY, params.gridDimZ = function, 1, 1, 1
            params.blockDimX = params.blockDimY = params.blockDimZ = 1
            params.kernelParams = (arguments, (c.c_uint64,) * len(arguments))
            return ok(cu.cuGraphAddKernelNode(graph, list(after), len(after), params))
        roots = [add(mad, memory + 8 * i, 2, i) for i in range(6)]
        joins = [add(join, memory + 8 * i, memory + 8 * (i + 1), memory + 256 + 8 * i, after=roots[i:i + 2])
                 for i in range(5)]
        add(join, memory, memory, memory, after=joins)
        answer(plain(hook.read_graph(int(graph))))
    """
    first, *others = [hooked.graphs(program) for _ in range(3)]
    assert all(other == first for other in others)
    assert len(edges_of(first)) == 15


def test_parameters_are_the_bytes_of_the_launch_with_gaps_zeroed(hooked: Any) -> None:
    read = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(8)
        gaps = module.function("gaps")
        def body(s):
            launch(gaps, s, [(1, c.c_uint8), (2.0, c.c_double), (3, c.c_uint16), (77, c.c_uint64)])
            launch_extra(gaps, s, bytes([1]) + b"\\xaa" * 7 + struct.pack("<dH", 2.0, 3) + b"\\xbb" * 6 +
                         struct.pack("<Q", 77))
            launch(module.function("touch"), s, [])
        answer(plain(hook.read_graph(int(capture(body)))))
        """
    )
    nodes = nodes_of(read)
    assert nodes["param_kind"].tolist() == [1, 2, 0]
    assert nodes["param_bytes"].tolist() == [32, 32, 0]
    expected = bytes([1]) + bytes(7) + np.float64(2).tobytes() + bytes([3, 0]) + bytes(6) + (77).to_bytes(8, "little")
    assert params_of(read, 0) == params_of(read, 1) == expected


def test_launch_dimensions_and_shared_bytes_are_kept(hooked: Any) -> None:
    read = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(64)
        answer(plain(hook.read_graph(int(capture(
            lambda s: launch(module.function("shape"), s, u64(out), grid=(2, 3, 4), block=(5, 6, 1), shared=777))))))
        """
    )
    node = nodes_of(read)[0]
    assert (node["grid"].tolist(), node["block"].tolist(), int(node["shared_bytes"])) == ([2, 3, 4], [5, 6, 1], 777)


def test_attributes_that_differ_from_the_default_are_kept(hooked: Any) -> None:
    read = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(8)
        ids = cu.CUlaunchAttributeID
        def attribute(which, **values):
            a = cu.CUlaunchAttribute()
            a.id = which
            for name, value in values.items():
                setattr(a.value, name, value)
            return a
        domain = cu.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE
        def body(s):
            launch_with(module.function("mad"), s, u64(out, 1, 1),
                        [attribute(ids.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, memSyncDomain=domain),
                         attribute(ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, cooperative=1)])
            launch(module.function("mad"), s, u64(out, 1, 1))
        answer(plain(hook.read_graph(int(capture(body)))))
        """
    )
    attributes = np.frombuffer(base64.b64decode(read["attributes"]), _hook.attribute_dtype)
    nodes = nodes_of(read)
    assert nodes["attribute_count"].tolist() == [2, 0]
    assert attributes["id"].tolist() == [2, 10], attributes
    assert attributes["value"].tolist() == [[1] + [0] * 63] * 2


def test_a_programmatic_edge_keeps_its_port_and_type(hooked: Any) -> None:
    read = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(8)
        a = cu.CUlaunchAttribute()
        a.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        a.value.programmaticStreamSerializationAllowed = 1
        def body(s):
            for attributes in ([], [a], []):
                launch_with(module.function("mad"), s, u64(out, 1, 1), attributes)
        answer(plain(hook.read_graph(int(capture(body)))))
        """
    )
    edges = edges_of(read)
    assert edges[["from", "to"]].tolist() == [(0, 1), (1, 2)]
    assert edges["type"].tolist() == [1, 0]
    assert edges["from_port"].tolist() == [1, 0]


UNSUPPORTED = {
    "host": "ok(cu.cuLaunchHostFunc(s, c.cast(callback, c.c_void_p).value, 0))",
    "external event record": (
        "ok(cu.cuEventRecordWithFlags(event(), s, cu.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL))"
    ),
    "external event wait": "ok(cu.cuStreamWaitEvent(s, recorded_event, cu.CUevent_wait_flags.CU_EVENT_WAIT_EXTERNAL))",
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_a_node_that_cannot_be_restored_is_named_with_its_place(hooked: Any, kind: str) -> None:
    error, text = hooked.graphs(
        f"""
        start()
        module, out = Module(), malloc(64)
        callback = c.CFUNCTYPE(None, c.c_void_p)(lambda _: None)
        recorded_event = event()
        ok(cu.cuEventRecord(recorded_event, stream()))
        def body(s):
            launch(module.function("touch"), s, [])
            {UNSUPPORTED[kind]}
            launch(module.function("mad"), s, u64(out, 1, 1))
        graph = capture(body)
        answer(refusal(lambda: hook.read_graph(int(graph))))
        """
    )
    assert error == "UnsupportedNode"
    assert f"type {kind}" in text
    assert "of 3 " in text
    if kind != "external event wait":  # a root beside the first kernel, or after it
        assert "node 1 of 3 (after kernel touch)" in text


def test_an_unsupported_node_inside_a_child_is_named(hooked: Any) -> None:
    error, text = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(64)
        callback = c.CFUNCTYPE(None, c.c_void_p)(lambda _: None)
        inner = capture(lambda s: ok(cu.cuLaunchHostFunc(s, c.cast(callback, c.c_void_p).value, 0)))
        graph = ok(cu.cuGraphCreate(0))
        ok(cu.cuGraphAddChildGraphNode(graph, [], 0, inner))
        answer(refusal(lambda: hook.read_graph(int(graph))))
        """
    )
    assert error == "UnsupportedNode"
    assert "type host" in text
    assert "node 0 of 1 (at the start)" in text


ADDED_BY_HAND = {
    "memory allocation": """
        params = cu.CUDA_MEM_ALLOC_NODE_PARAMS()
        params.poolProps.allocType = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        params.poolProps.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        params.bytesize = 4096
        ok(cu.cuGraphAddMemAllocNode(graph, [], 0, params))
        """,
    "batch memory operation": """
        write = cu.CUstreamBatchMemOpParams()
        write.operation = write.writeValue.operation = cu.CUstreamBatchMemOpType.CU_STREAM_MEM_OP_WRITE_VALUE_32
        write.writeValue.address, write.writeValue.value = malloc(64), 1
        params = cu.CUDA_BATCH_MEM_OP_NODE_PARAMS()
        params.ctx, params.count, params.paramArray = ok(cu.cuCtxGetCurrent()), 1, [write]
        ok(cu.cuGraphAddBatchMemOpNode(graph, [], 0, params))
        """,
    "conditional": """
        context = ok(cu.cuCtxGetCurrent())
        params = cu.CUgraphNodeParams()
        params.type = cu.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
        params.conditional.handle = ok(cu.cuGraphConditionalHandleCreate(graph, context, 0, 0))
        params.conditional.type = cu.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_IF
        params.conditional.size, params.conditional.ctx = 1, context
        ok(cu.cuGraphAddNode(graph, [], None, 0, params))
        """,
}


@pytest.mark.parametrize("kind", ADDED_BY_HAND)
def test_nodes_of_other_kinds_are_named(hooked: Any, kind: str) -> None:
    error, text = hooked.graphs(
        f"""
        start()
        graph = ok(cu.cuGraphCreate(0))
        {ADDED_BY_HAND[kind].strip()}
        answer(refusal(lambda: hook.read_graph(int(graph))))
        """
    )
    assert error == "UnsupportedNode"
    assert kind in text


def test_host_memory_outside_the_arena_is_refused_by_address(hooked: Any) -> None:
    address, there, back = hooked.graphs(
        """
        start()
        out, outside = malloc(4096), np.zeros(64, np.uint8)
        where = int(outside.ctypes.data)
        ok(cu.cuMemHostRegister(where, 64, 0))
        def read(body):
            graph = capture(body)
            return refusal(lambda: hook.read_graph(int(graph)))
        answer([hex(where), read(lambda s: ok(cu.cuMemcpyHtoDAsync(out, where, 64, s))),
                read(lambda s: ok(cu.cuMemcpyDtoHAsync(where, out, 64, s)))])
        """
    )
    for (error, text), side in ((there, "source"), (back, "destination")):
        assert error == "UnsupportedNode"
        assert f"the {side} {address}" in text
        assert "host arena" in text


def test_managed_memory_is_refused_by_address(hooked: Any, compile_c: Any) -> None:
    """The software driver has none, so a library in front of it says that some memory is managed."""
    managed = compile_c(
        "managed.so",
        """
        #include <dlfcn.h>
        #include <stddef.h>
        typedef int (*alloc)(unsigned long long *, size_t);
        int cuMemAllocManaged(unsigned long long *address, size_t bytes, unsigned flags) {
          return ((alloc)dlsym(dlopen("libcuda.so.1", RTLD_NOW), "cuMemAlloc_v2"))(address, bytes);
        }
        """,
    )
    address, *refusals = hooked.graphs(
        """
        start()
        module, out, where = Module(), malloc(4096), c.c_uint64()
        assert c.CDLL(None).cuMemAllocManaged(c.byref(where), c.c_size_t(4096), 1) == 0
        managed = where.value
        def read(body):
            graph = capture(body)
            return refusal(lambda: hook.read_graph(int(graph)))
        answer([
            managed,
            read(lambda s: launch(module.function("join"), s, u64(out, managed + 8, out))),
            read(lambda s: ok(cu.cuMemsetD8Async(managed, 1, 16, s))),
            read(lambda s: ok(cu.cuMemcpyDtoDAsync(out, managed, 16, s))),
            read(lambda s: ok(cu.cuMemcpyDtoDAsync(managed, out, 16, s))),
            read(lambda s: launch_extra(
                module.function("gaps"), s, struct.pack("<B7xdH6xQ", 1, 1.0, 1, managed + 4088))),
            read(lambda s: launch(module.function("join"), s, u64(out, managed + 4096, out))),
        ])
        """,
        preload=[managed],
    )
    assert refusals.pop()[0] == "nothing"  # right behind it
    assert [error for error, _ in refusals] == ["UnsupportedNode"] * 5
    assert all("cuMemAllocManaged" in text and text.startswith("node 0 of 1") for _, text in refusals)
    kernel, fill, source, destination, packed = (text for _, text in refusals)
    assert f"parameter 1 of kernel join holds the address {hex(address + 8)}" in kernel
    assert f"the destination {hex(address)} of a memset node" in fill
    assert f"the source {hex(address)} of a memcpy node" in source
    assert f"the destination {hex(address)} of a memcpy node" in destination
    assert f"parameter 3 of kernel gaps holds the address {hex(address + 4088)}" in packed


REFUSED = """
    def read(body):
        graph = capture(body)
        return refusal(lambda: hook.read_graph(int(graph)))
    def all_ways(address):
        odd = struct.pack("<BQ", 1, address)
        return [
            read(lambda s: launch(module.function("join"), s, u64(out, address + 8, out))),
            read(lambda s: launch_extra(module.function("sum_block"), s, odd.ljust(4096, b"\\0") + u64_bytes(out))),
            read(lambda s: ok(cu.cuMemsetD8Async(address, 1, 16, s))),
            read(lambda s: ok(cu.cuMemcpyDtoDAsync(out, address, 16, s))),
            read(lambda s: ok(cu.cuMemcpyDtoDAsync(address, out, 16, s))),
        ]
    def u64_bytes(value):
        return struct.pack("<Q", value)
    start()
    module, out = Module(), malloc(4096)
"""


def test_memory_of_another_device_is_refused_by_address(hooked: Any) -> None:
    """Every process may have it at the same address, and only what lies in arenas is restored there."""
    memory, pitched, ordered, freed = hooked.graphs(
        textwrap.dedent(REFUSED)
        + textwrap.dedent("""
        def on_the_other(call):
            context = ok(cu.cuDevicePrimaryCtxRetain(1))
            ok(cu.cuCtxPushCurrent(context))
            try:
                return int(call())
            finally:
                ok(cu.cuCtxPopCurrent())
        memory = on_the_other(lambda: malloc(4096))
        pitched = on_the_other(lambda: ok(cu.cuMemAllocPitch(100, 8, 4))[0])
        ordered = on_the_other(lambda: ok(cu.cuMemAllocAsync(4096, stream())))
        found = [all_ways(address) for address in (memory, pitched, ordered)]
        for address in (memory, pitched, ordered):
            on_the_other(lambda: free(address) or 0)
        freed = [read(lambda s: launch(module.function("join"), s, u64(out, a, out)))
                 for a in (memory, pitched, ordered)]
        answer([*found, freed])
        """),
        env={"SOFTCUDA_DEVICES": "2"},
    )
    for ways in (memory, pitched, ordered):
        assert [kind for kind, _ in ways] == ["UnsupportedNode"] * 5
        assert all("memory of another device" in text for _, text in ways)
        assert "parameter 1 of kernel join" in ways[0][1]
        assert "parameter 0 of kernel sum_block" in ways[1][1]
    assert [kind for kind, _ in freed] == ["nothing"] * 3


def test_a_kernel_of_another_device_is_refused(hooked: Any) -> None:
    kind, text = hooked.graphs(
        """
        start(1)
        module = Module()
        graph = capture(lambda s: launch(module.function("touch"), s, []))
        start(0)
        answer(refusal(lambda: hook.read_graph(int(graph))))
        """,
        env={"SOFTCUDA_DEVICES": "2"},
    )
    assert kind == "UnsupportedNode"
    assert "kernel touch runs on device 1 in a graph that is read on device 0" in text


def test_host_memory_that_the_program_registered_is_refused_in_kernels_too(hooked: Any) -> None:
    while_registered, after = hooked.graphs(
        textwrap.dedent(REFUSED)
        + textwrap.dedent("""
        import mmap
        pages = mmap.mmap(-1, 8192)
        address = c.addressof(c.c_char.from_buffer(pages))
        ok(cu.cuMemHostRegister(address, 8192, 2))
        there = int(ok(cu.cuMemHostGetDevicePointer(address, 0)))
        assert there == address
        kernel = lambda s: launch(module.function("join"), s, u64(out, address + 4096, out))
        while_registered = read(kernel)
        graph = capture(kernel)
        ok(cu.cuMemHostUnregister(address))
        answer([while_registered, refusal(lambda: hook.read_graph(int(graph)))])
        """)
    )
    assert while_registered[0] == "UnsupportedNode"
    assert "cuMemHostRegister" in while_registered[1]
    assert after[0] == "nothing"


def test_texture_and_surface_objects_are_refused(hooked: Any, compile_c: Any) -> None:
    """The software driver has none, so a library in front of it gives the numbers."""
    textures = compile_c(
        "textures.so",
        """
        int cuTexObjectCreate(unsigned long long *object, const void *a, const void *b, const void *c) {
          *object = 7;
          return 0;
        }
        int cuSurfObjectCreate(unsigned long long *object, const void *a) { *object = 8; return 0; }
        int cuTexObjectDestroy(unsigned long long object) { return 0; }
        int cuSurfObjectDestroy(unsigned long long object) { return 0; }
        """,
    )
    before, texture, surface, other, after = hooked.graphs(
        """
        start()
        module, out = Module(), malloc(4096)
        driver, made = c.CDLL(None), [c.c_uint64(), c.c_uint64()]
        def read(number):
            graph = capture(lambda s: launch(module.function("mad"), s, u64(out, 1, number)))
            return refusal(lambda: hook.read_graph(int(graph)))
        before = read(7)
        assert driver.cuTexObjectCreate(c.byref(made[0]), None, None, None) == 0
        assert driver.cuSurfObjectCreate(c.byref(made[1]), None) == 0
        found = [read(7), read(8), read(9)]
        assert driver.cuTexObjectDestroy(made[0]) == 0 and driver.cuSurfObjectDestroy(made[1]) == 0
        answer([before, *found, [read(7), read(8)]])
        """,
        preload=[textures],
    )
    assert [kind for kind, _ in (before, other, *after)] == ["nothing"] * 4
    for number, (kind, text) in ((7, texture), (8, surface)):
        assert kind == "UnsupportedNode"
        assert f"parameter 2 of kernel mad holds {number}, the number of a texture or surface object" in text


def test_a_record_ends_with_its_graph(hooked: Any) -> None:
    """A new graph under an old handle does not inherit anything."""
    found = hooked.graphs(
        """
        start()
        module, memory = Module(), malloc(4096)
        mad = module.function("mad")
        seen = set()
        for i in range(20):
            def body(s):
                side = stream()
                launch(mad, s, u64(memory, 1, 1))
                with forked(s, side):
                    launch(mad, side, u64(memory + 8, 1, 1))
                launch(mad, s, u64(memory + 16, 1, 1))
            graph = capture(body)
            read = hook.read_graph(int(graph))
            seen.add((read.params.tobytes(), read.edges.tobytes(), read.nodes.tobytes()))
            ok(cu.cuGraphDestroy(graph))
        answer(len(seen))
        """
    )
    assert found == 1
