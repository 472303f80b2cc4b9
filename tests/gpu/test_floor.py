# SPDX-License-Identifier: Apache-2.0
"""The driver's floor builds what it read, keeps what it says it keeps, and leaves nothing; on the software driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundryd import _native

PROGRAMS = Path(__file__).parent / "programs"

PROGRAM = """
import ctypes, json, sys
from dataclasses import asdict

sys.path.insert(0, sys.argv[1])
import floor
from cuda.bindings import driver as cu
from foundryd import _native
from foundryd.session.driver import call

call("cuInit", 0)
call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
module = call("cuModuleLoadData", _native.image("conformance").read_bytes())
function = call("cuModuleGetFunction", module, b"tell_launch")
out = int(call("cuMemAlloc", 4096))
stream = call("cuStreamCreate", 1)
mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def captured(kernels):
    call("cuStreamBeginCapture", stream, mode)
    call("cuMemsetD32Async", out, 7, 8, stream)
    for i in range(kernels):
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = 8, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = 32, 1, 1
        config.hStream = stream
        cluster, early = cu.CUlaunchAttribute(), cu.CUlaunchAttribute()
        cluster.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 4, 1, 1
        early.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = i % 2
        config.attrs, config.numAttrs = [cluster, early], 2
        call("cuLaunchKernelEx", config, function, ((out,), (ctypes.c_void_p,)), 0)
    return call("cuStreamEndCapture", stream)


calls, living, most, built = {}, set(), {}, []
makers = {"cuGraphCreate": "cuGraph", "cuGraphInstantiate": "cuGraphExec"}


def watched(name, *arguments):
    made = call(name, *arguments)
    calls[name] = calls.get(name, 0) + 1
    if name in makers:
        living.add((makers[name], int(made)))
    if name.endswith("Destroy"):
        living.remove((name.removesuffix("Destroy"), int(arguments[0])))
    for kind in makers.values():
        most[kind] = max(most.get(kind, 0), sum(one == kind for one, _ in living))
    if name == "cuGraphInstantiate":
        call("cuGraphLaunch", made, stream)
        call("cuStreamSynchronize", stream)
        told = (ctypes.c_uint32 * 4)()
        call("cuMemcpyDtoH", ctypes.addressof(told), out, 16)
        built.append(list(told))
        call("cuMemsetD32", out, 0, 8)
        call("cuCtxSynchronize")
    return made


graphs = {kernels: captured(kernels) for kernels in (1, 5, 40)}
readings = {kernels: floor.read(int(graph)) for kernels, graph in graphs.items()}
floor.call = watched
if sys.argv[2] == "keep":
    costs = floor.keep(readings)
else:
    costs = {kernels: floor.cost(reading) for kernels, reading in readings.items()}
print(json.dumps({
    "costs": {kernels: asdict(cost) for kernels, cost in costs.items()},
    "calls": calls, "living": len(living), "most": most, "built": built,
}))
"""


@pytest.mark.parametrize(("way", "most"), [("cost", 1), ("keep", 3)])
def test_a_floor_has_as_many_graphs_at_a_time_as_it_says_and_leaves_none(way, most):
    environment = dict(os.environ, LD_LIBRARY_PATH=str(_native.soft_folder()))
    command = [sys.executable, "-P", "-c", PROGRAM, str(PROGRAMS), way]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["most"] == {"cuGraph": most, "cuGraphExec": most}
    assert found["living"] == 0
    # Each kernel once and with its attributes: it saw its cluster and its grid.
    assert found["built"] == [[4, 1, 1, 8]] * 3
    assert found["calls"]["cuGraphAddKernelNode"] == found["calls"]["cuGraphKernelNodeCopyAttributes"] == 46
    for kernels, cost in found["costs"].items():
        assert (cost["nodes"], cost["edges"]) == (int(kernels) + 1, int(kernels))
        assert min(cost["build_ms"], cost["instantiate_ms"]) > 0
        if way == "keep":
            assert cost["kernels"] == int(kernels)
            assert 0 < cost["copy_attributes_ms"] < cost["build_ms"]
            assert cost["copy_attributes_ms"] + cost["add_kernels_ms"] < cost["build_ms"]
