# SPDX-License-Identifier: Apache-2.0
"""Rows about single nodes: parameters and attributes."""

from __future__ import annotations

import ctypes
from typing import Any

from bench import Bench, code, cu, fill, handle, ok, raw, row
from rows_graph import IDS, kernel_node
from rows_module import Extra

NODE_ATTRIBUTES = (
    "ACCESS_POLICY_WINDOW",
    "COOPERATIVE",
    "SYNCHRONIZATION_POLICY",
    "CLUSTER_DIMENSION",
    "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
    "PROGRAMMATIC_STREAM_SERIALIZATION",
    "PROGRAMMATIC_EVENT",
    "PRIORITY",
    "MEM_SYNC_DOMAIN_MAP",
    "MEM_SYNC_DOMAIN",
    "PREFERRED_CLUSTER_DIMENSION",
    "LAUNCH_COMPLETION_EVENT",
    "DEVICE_UPDATABLE_KERNEL_NODE",
    "PREFERRED_SHARED_MEMORY_CARVEOUT",
    "NVLINK_UTIL_CENTRIC_SCHEDULING",
)


@row("graph.kernel_params")
def kernel_params(x: Bench) -> Any:
    """Parameters are copied in, and given back from memory of the node's own."""
    graph = x.graph()
    node = kernel_node(x, graph, value=9)
    params = ok(cu.cuGraphKernelNodeGetParams(node))
    array = (ctypes.c_void_p * 3).from_address(int(params.kernelParams))
    values = [
        ctypes.c_uint64.from_address(array[0]).value == x.words,
        ctypes.c_uint32.from_address(array[1]).value,
        ctypes.c_uint32.from_address(array[2]).value,
    ]
    again = ok(cu.cuGraphKernelNodeGetParams(node))
    offsets = [array[i] - array[0] for i in range(3)]
    return {
        "values": values,
        "same_memory": int(again.kernelParams) == int(params.kernelParams),
        "packed": offsets,
        "extra": int(params.extra or 0) == 0,
        "func": int(params.func) == int(x.function("add_value")),
        "kern": int(params.kern) == 0,
        "ctx": "null" if int(params.ctx) == 0 else "context" if int(params.ctx) == int(x.context) else "other",
        "shape": [params.gridDimX, params.blockDimX, params.sharedMemBytes],
    }


@row("graph.kernel_params_none")
def kernel_params_none(x: Bench) -> Any:
    """A kernel without parameters: what the parameter list is."""
    graph = x.captured(lambda s: ok(cu.cuLaunchKernel(x.function("no_parameters"), 1, 1, 1, 1, 1, 1, 0, s, 0, 0)))
    params = ok(cu.cuGraphKernelNodeGetParams(x.only(graph, "KERNEL")))
    return [int(params.kernelParams or 0) == 0, int(params.extra or 0) == 0]


@row("graph.kernel_by_kern")
def kernel_by_kern(x: Bench) -> Any:
    """A node made with `kern` alone."""
    graph = x.graph()
    kernel = x.kernel("add_value")
    node = ok(cu.cuGraphAddKernelNode(graph, [], 0, x.kernel_params(kernel=kernel)))
    params = ok(cu.cuGraphKernelNodeGetParams(node))
    own = ok(cu.cuKernelGetFunction(kernel))
    func = "null" if int(params.func) == 0 else "function" if int(params.func) == int(own) else "other"
    kern = "null" if int(params.kern) == 0 else "kernel" if int(params.kern) == int(kernel) else "other"
    target = x.buffer(64)
    moved = x.kernel_params(kernel=kernel, value=4, address=target)
    set_again = code(cu.cuGraphKernelNodeSetParams(node, moved))
    x.run(graph)
    return [func, kern, set_again, x.read(target)]


@row("kernel_neither.added")
def kernel_neither(x: Bench) -> Any:
    params = x.kernel_params()
    params.func = cu.CUfunction(0)
    return code(cu.cuGraphAddKernelNode(x.graph(), [], 0, params))


@row("extra_node.cooperative")
def extra_node(x: Bench) -> Any:
    """A node built with `extra`; then set to a parameter list; then made cooperative with `extra`."""
    graph = x.graph()
    target = x.buffer(64)
    block = Extra(target.to_bytes(8, "little") + (5).to_bytes(4, "little") + (64).to_bytes(4, "little"))
    params = x.kernel_params()
    params.kernelParams = 0
    params.extra = block.address()
    node = ok(cu.cuGraphAddKernelNode(graph, [], 0, params))
    got = ok(cu.cuGraphKernelNodeGetParams(node))
    out = [[int(got.kernelParams or 0) == 0, int(got.extra or 0) != 0]]
    x.run(graph)
    out.append(x.read(target))
    value = cu.CUkernelNodeAttrValue()
    value.cooperative = 1
    out.append(code(cu.cuGraphKernelNodeSetAttribute(node, IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value)))
    executable = cu.cuGraphInstantiate(graph, 0)
    out.append(code(executable))
    if code(executable) == "SUCCESS":
        x.launch(executable[1])
        out.append(x.read(target))
    ok(cu.cuGraphKernelNodeSetParams(node, x.kernel_params(value=1, address=target)))
    got = ok(cu.cuGraphKernelNodeGetParams(node))
    out.append([int(got.kernelParams or 0) != 0, int(got.extra or 0) == 0])
    return out


@row("extra_node.made_cooperative")
def made_cooperative(x: Bench) -> Any:
    """The other ways for a node to be cooperative and have `extra`."""
    block = Extra(x.words.to_bytes(8, "little") + (5).to_bytes(4, "little") + (64).to_bytes(4, "little"))
    value = cu.CUkernelNodeAttrValue()
    value.cooperative = 1
    graph = x.graph()
    plain = kernel_node(x, graph)
    ok(cu.cuGraphKernelNodeSetAttribute(plain, IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE, value))
    params = x.kernel_params()
    params.kernelParams = 0
    params.extra = block.address()
    node = ok(cu.cuGraphAddKernelNode(graph, [], 0, params))
    return {
        "copied": code(cu.cuGraphKernelNodeCopyAttributes(node, plain)),
        "set_params": code(cu.cuGraphKernelNodeSetParams(plain, params)),
    }


def attribute_bytes(node: Any, name: str, fill: int) -> tuple[str, bytes]:
    value = (ctypes.c_uint8 * 64)(*[fill] * 64)
    got = raw("cuGraphKernelNodeGetAttribute", handle(node), int(getattr(IDS, f"CU_LAUNCH_ATTRIBUTE_{name}")), value)
    return got, bytes(value)


@row("graph.attribute_defaults")
def attribute_defaults(x: Bench) -> Any:
    """Each attribute of a fresh node: code, and the bytes that the call writes."""
    node = kernel_node(x, x.graph())
    out = {}
    for name in NODE_ATTRIBUTES:
        got, first = attribute_bytes(node, name, 0xA5)
        _, second = attribute_bytes(node, name, 0x5A)
        written = [i for i in range(64) if first[i] == second[i]]
        out[name] = [got, len(written), bytes(first[i] for i in written).hex() if got == "SUCCESS" else ""]
    return out


@row("graph.attribute_set")
def attribute_set(x: Bench) -> Any:
    def attempt(name: str, **fields: Any) -> Any:
        node = kernel_node(x, x.graph())
        value = cu.CUkernelNodeAttrValue()
        fill(value, fields)
        identifier = getattr(IDS, f"CU_LAUNCH_ATTRIBUTE_{name}")
        got = code(cu.cuGraphKernelNodeSetAttribute(node, identifier, value))
        return [got, attribute_bytes(node, name, 0)[1][:12].hex() if got == "SUCCESS" else ""]

    return {
        "cooperative": attempt("COOPERATIVE", cooperative=1),
        "cooperative_two": attempt("COOPERATIVE", cooperative=2),
        "cluster": attempt("CLUSTER_DIMENSION", clusterDim={"x": 2, "y": 1, "z": 1}),
        "cluster_not_divisor": attempt("CLUSTER_DIMENSION", clusterDim={"x": 3, "y": 1, "z": 1}),
        "priority": attempt("PRIORITY", priority=-3),
        "priority_low": attempt("PRIORITY", priority=-100),
        "priority_high": attempt("PRIORITY", priority=100),
        "domain": attempt("MEM_SYNC_DOMAIN", memSyncDomain=cu.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE),
        "carveout": attempt("PREFERRED_SHARED_MEMORY_CARVEOUT", sharedMemCarveout=50),
        "scheduling": attempt(
            "CLUSTER_SCHEDULING_POLICY_PREFERENCE",
            clusterSchedulingPolicyPreference=cu.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_SPREAD,
        ),
        "serialization": attempt("PROGRAMMATIC_STREAM_SERIALIZATION", programmaticStreamSerializationAllowed=1),
        "ignore": attempt("IGNORE"),
    }


@row("graph.attribute_copy")
def attribute_copy(x: Bench) -> Any:
    graph = x.graph()
    a, b = kernel_node(x, graph), kernel_node(x, graph)
    fill = ok(cu.cuGraphAddMemsetNode(graph, [], 0, x.memset_params(), x.context))
    value = cu.CUkernelNodeAttrValue()
    value.priority = -2
    ok(cu.cuGraphKernelNodeSetAttribute(a, IDS.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))
    copied = code(cu.cuGraphKernelNodeCopyAttributes(b, a))
    return [
        copied,
        ok(cu.cuGraphKernelNodeGetAttribute(b, IDS.CU_LAUNCH_ATTRIBUTE_PRIORITY)).priority,
        code(cu.cuGraphKernelNodeCopyAttributes(b, fill)),
    ]


@row("graph.attributes_after_params")
def attributes_after_params(x: Bench) -> Any:
    """Setting parameters leaves attributes."""
    node = kernel_node(x, x.graph())
    value = cu.CUkernelNodeAttrValue()
    value.priority = -2
    ok(cu.cuGraphKernelNodeSetAttribute(node, IDS.CU_LAUNCH_ATTRIBUTE_PRIORITY, value))
    ok(cu.cuGraphKernelNodeSetParams(node, x.kernel_params(value=2)))
    return ok(cu.cuGraphKernelNodeGetAttribute(node, IDS.CU_LAUNCH_ATTRIBUTE_PRIORITY)).priority


@row("graph.wrong_type")
def wrong_type(x: Bench) -> Any:
    graph = x.graph()
    fill = ok(cu.cuGraphAddMemsetNode(graph, [], 0, x.memset_params(), x.context))
    return [
        code(cu.cuGraphKernelNodeGetParams(fill)),
        code(cu.cuGraphChildGraphNodeGetGraph(fill)),
        code(cu.cuGraphKernelNodeGetAttribute(fill, IDS.CU_LAUNCH_ATTRIBUTE_PRIORITY)),
        code(cu.cuGraphMemcpyNodeGetParams(fill)),
    ]


@row("graph.memset_limits")
def memset_limits(x: Bench) -> Any:
    def attempt(**fields: Any) -> str:
        params = x.memset_params()
        for name, value in fields.items():
            setattr(params, name, value)
        return code(cu.cuGraphAddMemsetNode(x.graph(), [], 0, params, x.context))

    return {
        "plain": attempt(),
        "element_3": attempt(elementSize=3),
        "no_width": attempt(width=0),
        "no_height": attempt(height=0),
        "rows": attempt(height=4, pitch=512),
        "small_pitch": attempt(height=4, pitch=8),
        "unknown_address": attempt(dst=0x1000),
        "no_context": code(cu.cuGraphAddMemsetNode(x.graph(), [], 0, x.memset_params(), 0)),
    }


@row("graph.memcpy_limits")
def memcpy_limits(x: Bench) -> Any:
    unknown = x.copy_params(0x1000, x.words, 64)
    flat = x.copy_params(x.words, x.words + 4096, 64)
    flat.Height = 0
    return {
        "unknown_target": code(cu.cuGraphAddMemcpyNode(x.graph(), [], 0, unknown, x.context)),
        "no_height": code(cu.cuGraphAddMemcpyNode(x.graph(), [], 0, flat, x.context)),
        "no_bytes": code(
            cu.cuGraphAddMemcpyNode(x.graph(), [], 0, x.copy_params(x.words, x.words + 4096, 0), x.context)
        ),
        "no_context": code(cu.cuGraphAddMemcpyNode(x.graph(), [], 0, x.copy_params(x.words, x.words + 4096, 64), 0)),
    }
