# SPDX-License-Identifier: Apache-2.0
"""Rows about updates of executables to graphs whose kernels have other attributes: taken or not, what runs then."""

from __future__ import annotations

import ctypes
from typing import Any

from bench import Bench, code, cu, fill, ok, row
from rows_exec import IDS, PRIORITIES, update

AS_TORCH = PRIORITIES | 1  # what PyTorch instantiates with: the second is AUTO_FREE_ON_LAUNCH
TOLD = 6  # words that tell_launch writes
REMOTE = cu.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE
DYNAMIC = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

Attributes = dict[str, dict[str, Any]]


def cluster(x: int, y: int = 1, z: int = 1) -> Attributes:
    return {"CLUSTER_DIMENSION": {"clusterDim": {"x": x, "y": y, "z": z}}}


def telling(x: Bench, out: int, grid: tuple[int, int] = (8, 1), block: int = 32, shared: int = 0) -> Any:
    """Parameters of a kernel that tells how it was launched."""
    params = cu.CUDA_KERNEL_NODE_PARAMS()
    params.func = x.function("tell_launch")
    params.gridDimX, params.gridDimY, params.gridDimZ = *grid, 1
    params.blockDimX, params.blockDimY, params.blockDimZ = block, 1, 1
    params.sharedMemBytes = shared
    params.kernelParams = ((out,), (ctypes.c_void_p,))
    return params


def chain_of(x: Bench, kernels: list[tuple[Any, Attributes]]) -> Any:
    """A chain of kernels with these attributes each."""
    graph, before = x.graph(), []
    for params, attributes in kernels:
        before = [ok(cu.cuGraphAddKernelNode(graph, before, len(before), params))]
        for name, fields in attributes.items():
            value = cu.CUkernelNodeAttrValue()
            fill(value, fields)
            ok(cu.cuGraphKernelNodeSetAttribute(before[0], getattr(IDS, f"CU_LAUNCH_ATTRIBUTE_{name}"), value))
    return graph


def there_and_back(x: Bench, first: Any, second: Any, out: int, words: int, flags: int = AS_TORCH) -> Any:
    """What an executable of ``first`` does, then after an update to ``second``, and after another one back."""

    def launched() -> list[int]:
        x.clear(out, words)
        x.launch(executable)
        return x.read(out, words)

    executable = ok(cu.cuGraphInstantiate(first, flags))
    seen: list[Any] = [launched()]
    for graph in (second, first):
        seen += [update(executable, graph)[:2], launched()]
    ok(cu.cuGraphExecDestroy(executable))
    return seen


@row("exec.update_cluster")
def update_cluster(x: Bench) -> Any:
    """Cluster shapes that come, go and change, as the kernel itself sees them."""
    out = x.buffer(TOLD)

    def attempt(first: Attributes, second: Attributes, grid: tuple[int, int] = (8, 1), flags: int = AS_TORCH) -> Any:
        before, after = (
            chain_of(x, [(x.kernel_params(), {}), (telling(x, out, shape), attributes), (x.kernel_params(), {})])
            for shape, attributes in (((8, 4), first), (grid, second))
        )
        return there_and_back(x, before, after, out, TOLD, flags)

    return {
        "comes": attempt({}, cluster(2)),
        "comes_plain_flags": attempt({}, cluster(2), flags=0),
        "goes": attempt(cluster(4), {}),
        "grows": attempt(cluster(2), cluster(8)),
        "shrinks": attempt(cluster(8), cluster(2)),
        "other_axis": attempt(cluster(2), cluster(1, 2), grid=(8, 2)),
        "grid_that_the_first_does_not_divide": attempt(cluster(4), {}, grid=(7, 1)),
        "three": attempt(cluster(4), cluster(3), grid=(9, 1)),
    }


@row("exec.update_cluster_before_launch")
def update_cluster_before_launch(x: Bench) -> Any:
    """The same for an executable that was never launched, or only uploaded."""
    out = x.buffer(TOLD)

    def attempt(first: Attributes, second: Attributes, upload: bool) -> Any:
        before, after = (chain_of(x, [(telling(x, out), attributes)]) for attributes in (first, second))
        executable = ok(cu.cuGraphInstantiate(before, AS_TORCH))
        if upload:
            ok(cu.cuGraphUpload(executable, x.stream()))
        seen: list[Any] = [update(executable, after)[:2]]
        for _ in range(2):
            x.clear(out, TOLD)
            x.launch(executable)
            seen.append(x.read(out, TOLD))
        ok(cu.cuGraphExecDestroy(executable))
        return seen

    pairs = {"comes": ({}, cluster(2)), "goes": (cluster(4), {}), "grows": (cluster(2), cluster(8))}
    return {
        name: {"made": attempt(*pair, upload=False), "uploaded": attempt(*pair, upload=True)}
        for name, pair in pairs.items()
    }


@row("exec.update_cluster_in_flight")
def update_cluster_in_flight(x: Bench) -> Any:
    """An update that changes a cluster does not reach launches that are already enqueued."""
    outs = [x.buffer(TOLD) for _ in range(2)]
    first, second = (chain_of(x, [(telling(x, out), cluster(shape))]) for out, shape in zip(outs, (2, 4), strict=True))
    executable = ok(cu.cuGraphInstantiate(first, AS_TORCH))
    stream = x.stream()
    x.busy(stream)
    ok(cu.cuGraphLaunch(executable, stream))
    got = update(executable, second)[:2]
    ok(cu.cuGraphLaunch(executable, stream))
    ok(cu.cuStreamSynchronize(stream))
    return [got, *(x.read(out, TOLD) for out in outs)]


@row("exec.update_priority")
def update_priority(x: Bench) -> Any:
    """Priorities, where the executable uses those of its nodes and where it does not; refused, it stays as it was."""
    out = x.buffer(TOLD)

    def attempt(first: int | None, second: int | None, flags: int) -> Any:
        before, after = (
            chain_of(x, [(telling(x, out, grid), {} if value is None else {"PRIORITY": {"priority": value}})])
            for grid, value in (((8, 1), first), ((4, 1), second))
        )
        return there_and_back(x, before, after, out, TOLD, flags)

    pairs = {"comes": (None, -2), "goes": (-2, None), "changes": (-2, -3), "zero": (None, 0), "same": (-2, -2)}
    return {
        name: {"used": attempt(*pair, AS_TORCH), "not_used": attempt(*pair, 1)} for name, pair in sorted(pairs.items())
    }


@row("exec.update_cooperative")
def update_cooperative(x: Bench) -> Any:
    """From a cooperative kernel to one that is not, the other way round, and between two of a kind."""
    out = x.buffer(TOLD)

    def attempt(first: int | None, second: int | None) -> Any:
        before, after = (
            chain_of(x, [(telling(x, out, grid), {} if value is None else {"COOPERATIVE": {"cooperative": value}})])
            for grid, value in (((8, 1), first), ((4, 1), second))
        )
        return there_and_back(x, before, after, out, TOLD)

    return {"comes": attempt(None, 1), "goes": attempt(1, None), "zero": attempt(None, 0), "same": attempt(1, 1)}


@row("exec.update_hints")
def update_hints(x: Bench) -> Any:
    """Attributes that no kernel can see: whether an update takes them, and whether the executable still works."""
    out = x.buffer(TOLD)
    spread = cu.CUclusterSchedulingPolicy.CU_CLUSTER_SCHEDULING_POLICY_SPREAD
    hints: dict[str, Attributes] = {
        "domain": {"MEM_SYNC_DOMAIN": {"memSyncDomain": REMOTE}},
        "domain_map": {"MEM_SYNC_DOMAIN_MAP": {"memSyncDomainMap": {"default_": 1, "remote": 0}}},
        "carveout": {"PREFERRED_SHARED_MEMORY_CARVEOUT": {"sharedMemCarveout": 50}},
        "scheduling": cluster(2)
        | {"CLUSTER_SCHEDULING_POLICY_PREFERENCE": {"clusterSchedulingPolicyPreference": spread}},
    }

    def attempt(first: Attributes, second: Attributes) -> Any:
        before, after = (
            chain_of(x, [(telling(x, out, grid), attributes)])
            for grid, attributes in (((8, 1), first), ((4, 1), second))
        )
        return there_and_back(x, before, after, out, TOLD)

    return {name: {"comes": attempt({}, hint), "goes": attempt(hint, {})} for name, hint in hints.items()}


@row("exec.update_function_and_attributes")
def update_function_and_attributes(x: Bench) -> Any:
    """A node that gets another function with other attributes, another shape and more shared memory at once."""
    out = x.buffer(64)  # as many words as add_value changes
    ok(cu.cuFuncSetAttribute(x.function("tell_launch"), DYNAMIC, 65536))
    adds = x.kernel_params(value=7, address=out)
    adds.gridDimX = 4
    domain: Attributes = {"MEM_SYNC_DOMAIN": {"memSyncDomain": REMOTE}}
    carveout: Attributes = {"PREFERRED_SHARED_MEMORY_CARVEOUT": {"sharedMemCarveout": 100}}
    tells = telling(x, out, (16, 1), 64, 65536)
    first = chain_of(x, [(adds, cluster(2) | domain), (telling(x, out + 4 * TOLD), {})])
    second = chain_of(x, [(tells, cluster(4) | carveout), (telling(x, out + 4 * TOLD, (4, 1)), cluster(2))])
    fewer = chain_of(x, [(tells, {}), (telling(x, out + 4 * TOLD), {})])
    return {
        "fewer": there_and_back(x, first, fewer, out, 2 * TOLD),
        "there": there_and_back(x, first, second, out, 2 * TOLD),
        "back": there_and_back(x, second, first, out, 2 * TOLD),
    }


@row("exec.update_many_attributes")
def update_many_attributes(x: Bench) -> Any:
    """A long chain in which every node changes its cluster; each must see its own, there and back."""
    count, shapes = 600, (1, 2, 4, 8)
    out = x.buffer(TOLD * count)

    def made(shift: int) -> tuple[Any, list[int]]:
        wanted = [shapes[(i + shift) % len(shapes)] for i in range(count)]
        told = [(telling(x, out + 4 * TOLD * i), cluster(n) if n > 1 else {}) for i, n in enumerate(wanted)]
        return chain_of(x, told), wanted

    (first, before), (second, after) = made(0), made(1)
    executable = ok(cu.cuGraphInstantiate(first, AS_TORCH))
    seen = []
    for graph, wanted in ((second, after), (first, before), (second, after)):
        got = code(cu.cuGraphExecUpdate(executable, graph))
        x.clear(out, TOLD * count)
        x.launch(executable)
        told = x.read(out, TOLD * count)[::TOLD]
        seen.append([got, sum(a == b for a, b in zip(told, wanted, strict=True))])
    return seen
