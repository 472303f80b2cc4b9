# SPDX-License-Identifier: Apache-2.0
"""An engine whose graphs differ in their kernels' attributes; the last line is JSON.

Restored, it replays them as ``ORDER`` says, each with a note of what it cost, and compares what a kernel saw of its
launch with what graphs that are captured natively give.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd import _native
from foundryd.session import building
from foundryd.session.arena import arena
from foundryd.session.arrays import DeviceArray
from foundryd.session.driver import call
from foundryd.session.graphset import GraphSet

WORDS = 64
IDS = driver.CUlaunchAttributeID

graphs = GraphSet.from_env()
call("cuInit", 0)
call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
stream = driver.CUstream(int(call("cuStreamCreate", 1)))
module = call("cuModuleLoadData", _native.image("conformance").read_bytes())
tell, add = (call("cuModuleGetFunction", module, name) for name in (b"tell_launch", b"add_value"))
with arena("io"):
    out = int(call("cuMemAlloc", 4 * WORDS))


def cluster(size: int) -> Any:
    made = driver.CUlaunchAttribute()
    made.id = IDS.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    made.value.clusterDim.x, made.value.clusterDim.y, made.value.clusterDim.z = size, 1, 1
    return made


def remote_domain() -> Any:
    made = driver.CUlaunchAttribute()
    made.id = IDS.CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN
    made.value.memSyncDomain = driver.CUlaunchMemSyncDomain.CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE
    return made


def cooperative() -> Any:
    made = driver.CUlaunchAttribute()
    made.id = IDS.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    made.value.cooperative = 1
    return made


def launch(function: Any, arguments: Any, attributes: list[Any]) -> None:
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 8, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
    config.hStream = stream
    config.attrs, config.numAttrs = attributes, len(attributes)
    call("cuLaunchKernelEx", config, function, arguments, 0)


def work(value: int, attributes: list[Any], adds: int = 1) -> DeviceArray:
    """A kernel tells what it sees of its launch; others add to all words."""
    launch(tell, ((out,), (ctypes.c_void_p,)), attributes)
    for _ in range(adds):
        launch(add, ((out, value, WORDS), (ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32)), [])
    return DeviceArray(out, (WORDS,), "<u4")


# Of one template: those with the same attributes.  All but the one that adds twice could be updated to one another.
WHAT: dict[Hashable, tuple[int, list[Any], int]] = {
    "plain": (1, [], 1),
    "two": (2, [cluster(2)], 1),
    "two again": (3, [cluster(2)], 1),
    "four": (4, [cluster(4)], 1),
    "four elsewhere": (5, [cluster(4), remote_domain()], 1),
    "cooperative": (6, [cooperative()], 1),
    "longer": (7, [cluster(2)], 2),
}


def ask(some: GraphSet) -> dict[Hashable, Any]:
    return {
        key: some.capture_or_restore(key, lambda what=what: work(*what), stream=int(stream))
        for key, what in WHAT.items()
    }


def made_of(graph: Any) -> list[int]:
    """What a replay leaves in the first words."""
    call("cuMemsetD32", out, 100, WORDS)
    call("cuCtxSynchronize")
    graph.replay(int(stream))
    call("cuStreamSynchronize", stream)
    found = np.zeros(WORDS, np.uint32)
    call("cuMemcpyDtoH", found.ctypes.data, out, found.nbytes)
    return [int(word) for word in found[:8]]


calls: Counter[str] = Counter()


def counted(name: str, *arguments: Any) -> Any:
    calls[name] += 1
    return call(name, *arguments)


building.call = counted
made = ask(graphs)
graphs.finish()
graphs.wait(20)
restored = graphs.restored
result: dict[str, Any] = {"restored": restored, "templates": {}, "replays": [], "natively": {}}
if restored:
    for key in json.loads(os.environ["ORDER"]):
        before = Counter(calls)
        seen = made_of(made[key][0])
        spent = [calls[name] - before[name] for name in ("cuGraphExecUpdate", "cuGraphInstantiate")]
        ready = sorted(name for name, (graph, _) in made.items() if graph.ready)
        result["replays"].append([key, *spent, seen, ready])
    result["templates"] = {key: graph.member.template for key, (graph, _) in made.items()}
graphs.close()
if restored:
    second = GraphSet.from_env()
    result["natively"] = {key: made_of(graph) for key, (graph, _) in ask(second).items()}
    second.finish()
    second.close()
print(json.dumps(result), flush=True)
sys.exit(0)
