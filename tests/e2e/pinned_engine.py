# SPDX-License-Identifier: Apache-2.0
"""An engine whose graph copies from a pinned buffer; beside it a launch makes others as it happens, as libraries do.

``before`` or ``behind``: where in the sequence the others come.  The last line is JSON: what the graph copied.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import sys
from pathlib import Path

import numpy as np
from cuda.bindings import driver

from foundryd.session.arena import arena
from foundryd.session.arrays import DeviceArray
from foundryd.session.driver import call
from foundryd.session.graphset import GraphSet

WORDS = 512
chance = random.SystemRandom()


def staged() -> list[int]:
    return [int(call("cuMemHostAlloc", chance.randrange(1, 20000), 0)) for _ in range(chance.randrange(1, 6))]


graphs = GraphSet.from_env()
call("cuInit", 0)
call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
stream = driver.CUstream(int(call("cuStreamCreate", 1)))
others = []
if sys.argv[1] == "before":
    # The recording of a control has a longer name than that of a rank.
    others = [int(call("cuMemHostAlloc", 4096 * len(Path(os.environ["FOUNDRYD_RECORDING"]).name), 0))]
pinned = int(call("cuMemHostAlloc", 4 * WORDS, 0))
if sys.argv[1] == "behind":
    others = staged()
with arena("io"):
    buffer = int(call("cuMemAlloc", 4 * WORDS))
values = np.ctypeslib.as_array((ctypes.c_uint32 * WORDS).from_address(pinned))
for other in others:
    ctypes.memset(other, chance.randrange(1, 256), 1)
call("cuMemFreeHost", others.pop())


def copy() -> DeviceArray:
    call("cuMemcpyHtoDAsync", buffer, pinned, 4 * WORDS, stream)
    return DeviceArray(buffer, (WORDS,), "<u4")


graph, out = graphs.capture_or_restore("copy", copy, stream=int(stream))
graphs.finish()
found = []
for turn in range(3):
    values[:] = np.arange(WORDS) + 1000 * turn
    graph.replay(int(stream))
    call("cuStreamSynchronize", stream)
    copied = np.zeros(WORDS, np.uint32)
    call("cuMemcpyDtoH", copied.ctypes.data, out.address, copied.nbytes)
    found.append(bool((copied == values).all()))
fallback = None if graphs.fallback is None else str(graphs.fallback)
print(json.dumps({"restored": graphs.restored, "copied": found, "fallback": fallback}))
graphs.close()
