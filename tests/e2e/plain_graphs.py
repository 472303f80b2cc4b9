# SPDX-License-Identifier: Apache-2.0
"""An engine whose graphs have no kernel: nothing at all, fills, copies, both; the last line is JSON.

It prints what each graph makes of two buffers, and in a restore what a closed set of graphs and a second one do.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd.errors import FoundrydError
from foundryd.session.arena import arena
from foundryd.session.arrays import DeviceArray
from foundryd.session.driver import call
from foundryd.session.graphset import GraphSet

WORDS = 1024

graphs = GraphSet.from_env()
call("cuInit", 0)
call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
stream = driver.CUstream(int(call("cuStreamCreate", 1)))
with arena("io"):
    buffers = [int(call("cuMemAlloc", 4 * WORDS)) for _ in range(2)]


def fill(value: int, buffer: int = 0, count: int = 16) -> DeviceArray:
    call("cuMemsetD32Async", buffers[buffer], value, count, stream)
    return DeviceArray(buffers[buffer], (count,), "<u4")


def copy(size: int) -> DeviceArray:
    call("cuMemcpyDtoDAsync", buffers[1], buffers[0], size, stream)
    return DeviceArray(buffers[1], (size,), "|u1")


WHAT: dict[Hashable, Callable[[], Any]] = {
    "nothing": lambda: None,
    "nothing again": lambda: None,
    ("fill", 1): lambda: fill(1),
    ("fill", 7): lambda: fill(7),
    ("fill", 5, "all"): lambda: fill(5, 1, WORDS),
    ("copy", 64): lambda: copy(64),
    ("copy", 1): lambda: copy(1),
    "both": lambda: (fill(9), copy(32)),
}


def ask(some: GraphSet) -> dict[Hashable, Any]:
    return {key: some.capture_or_restore(key, what, stream=int(stream)) for key, what in WHAT.items()}


def made_of(graph: Any) -> str:
    """What a replay makes of the two buffers."""
    for place, buffer in enumerate(buffers):
        call("cuMemsetD32", buffer, 0x11111111 * (place + 1), WORDS)
    call("cuCtxSynchronize")
    graph.replay(int(stream))
    call("cuStreamSynchronize", stream)
    found = np.zeros((2, WORDS), np.uint32)
    for row, buffer in zip(found, buffers, strict=True):
        call("cuMemcpyDtoH", row.ctypes.data, buffer, row.nbytes)
    return hashlib.sha256(found.tobytes()).hexdigest()


made = ask(graphs)
graphs.finish()
graphs.wait(20)
result: dict[str, Any] = {"restored": graphs.restored}
# Backwards too, so that graphs take each other's executables.
for name, order in (("made", list(made)), ("again", list(made)[::-1])):
    result[name] = {repr(key): [made_of(made[key][0]), repr(made[key][1])] for key in order}
restored = graphs.restored
graphs.close()
if restored:
    try:
        made["both"][0].replay(int(stream))
    except FoundrydError as error:
        result["closed"] = [type(error).__name__, str(error)]
    second = GraphSet.from_env()
    result["second"] = type(second.fallback).__name__
    result["natively"] = {repr(key): [made_of(graph), repr(out)] for key, (graph, out) in ask(second).items()}
    second.finish()
    second.close()
print(json.dumps(result), flush=True)
sys.exit(0)
