# SPDX-License-Identifier: Apache-2.0
"""A rank whose background builds the graphs of an archive; run with the hook in restore mode.  The last line is JSON.

With ``clock``: ``own_ms`` and ``driver_ms``, milliseconds of the background's time for a graph, outside the driver and
inside.  Without it page faults of the background's thread outside the driver, for each graph but the last: ``hook``
while the hook builds it, and ``session`` for everything else; ``driver`` are those inside, of all graphs.  ``kept`` is
how many pieces of memory for building are kept afterwards.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import resource
import sys
from typing import Any

from foundryd._native import _hook
from foundryd.archive.reader import ArchiveReader
from foundryd.rankpatch.plan import compute_plan
from foundryd.session.driver import call, time_calls
from foundryd.session.materialize import Materializer
from foundryd.session.policy import RestorePolicy


class Watched:
    """The hook, and the faults of the thread, the driver's left out, before and after each ``build_graph``."""

    def __init__(self) -> None:
        self._hook = _hook.Hook()
        self._inside = ctypes.CDLL("libcuda.so.1").softcuda_faults
        self._inside.restype = ctypes.c_uint64
        self.faults: list[tuple[int, int]] = []
        self.driver = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    def outside(self) -> int:
        return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - int(self._inside())

    def build_graph(self, *arguments: Any) -> int:
        before = self.outside()
        try:
            return self._hook.build_graph(*arguments)
        finally:
            self.faults.append((before, self.outside()))
            self.driver = int(self._inside())


def main(path: str, rank: int, clock: bool) -> None:
    hook: Any = _hook.Hook() if clock else Watched()
    with open(path, "rb") as file:
        # As a daemon serves it.
        reader = ArchiveReader(memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)), trusted=True)
    variant = reader.index.variants[0]
    hook.set_layout(variant.arena_base, variant.arena_stride, reader.array(variant.allocations, _hook.allocation_dtype))
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    materializer = Materializer(hook, reader, variant, compute_plan(reader, variant.name, rank))
    hook.map_held()
    materializer.arrange(RestorePolicy(), extra={})
    materializer.load_modules()
    materializer.bind_functions()
    materializer.upload_content()
    if clock:
        time_calls(hook)
    materializer.build_graphs()
    executables = materializer.executables
    assert executables is not None
    answer: dict[str, Any] = {}
    if not clock:
        ctypes.CDLL("libcuda.so.1").softcuda_count_faults(1)
        hook.faults.clear()
    executables.start()
    executables.wait(100.0)
    count = len(variant.members) - 1
    if clock:
        assert executables.background_ms is not None
        assert executables.background_driver_ms is not None
        answer["driver_ms"] = executables.background_driver_ms / count
        answer["own_ms"] = executables.background_ms / count - answer["driver_ms"]
    else:
        assert len(hook.faults) == count
        starts = [before for before, _ in hook.faults]
        answer["hook"] = [after - before for before, after in hook.faults[:-1]]
        answer["session"] = [
            later - earlier - inside for earlier, later, inside in zip(starts, starts[1:], answer["hook"], strict=False)
        ]
        answer["driver"] = hook.driver
    members = materializer._members
    turned = sum(template._near._memory.nbytes > 0 for template in members._templates.values())
    answer["kept"] = (
        (materializer._memory is not None) + (materializer._room is not None) + (members._memory.nbytes > 0) + turned
    )
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), "clock" in sys.argv[3:])
