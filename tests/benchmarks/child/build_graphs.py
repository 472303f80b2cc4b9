# SPDX-License-Identifier: Apache-2.0
"""A rank that builds the graphs of an archive; run with the hook in restore mode.  The last line is JSON.

Milliseconds of this thread's CPU time for each graph, so that other work on the machine counts little: ``block`` from
template to patched bytes, ``build`` of the driver's graph by the hook, ``instantiate``, and ``member`` for all that is
not ``instantiate``.  With ``clock``, also ``own``: what of ``member`` is outside the driver, and ``calls`` of it.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from foundryd._native import _hook
from foundryd.archive.reader import ArchiveReader
from foundryd.rankpatch.plan import compute_plan
from foundryd.session.driver import call, driver_ms, time_calls
from foundryd.session.executables import Member
from foundryd.session.materialize import Materializer
from foundryd.session.policy import RestorePolicy


class Timed:
    """The hook, and how long its last ``build_graph`` took."""

    def __init__(self) -> None:
        self._hook = _hook.Hook()
        self.build_ms = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    def build_graph(self, *arguments: Any) -> int:
        begin = time.thread_time()
        try:
            return self._hook.build_graph(*arguments)
        finally:
            self.build_ms = (time.thread_time() - begin) * 1e3


def main(path: str, rank: int, count: int, clock: bool) -> None:
    hook: Any = Timed()
    reader = ArchiveReader.open(path)
    variant = reader.index.variants[0]
    plan = compute_plan(reader, variant.name, rank)
    hook.set_layout(variant.arena_base, variant.arena_stride, reader.array(variant.allocations, _hook.allocation_dtype))
    call("cuInit", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", 0)))
    materializer = Materializer(hook, reader, variant, plan)
    hook.map_held()
    phases: dict[str, float] = {}

    def phase(name: str, step: Any, *arguments: Any, **more: Any) -> None:
        begin = time.thread_time()
        step(*arguments, **more)
        phases[name] = (time.thread_time() - begin) * 1e3

    # All first, so that no function is loaded while graphs are built.
    phase("arrange", materializer.arrange, RestorePolicy(first="all"), extra={})
    phase("modules", materializer.load_modules)
    phase("functions", materializer.bind_functions)
    phase("content", materializer.upload_content)
    if clock:
        time_calls(_hook.Hook())
    living = []  # as in an engine, where memory that a graph gave back is not found again by the next
    rows: dict[str, list[float]] = {"block": [], "build": [], "instantiate": [], "member": []} | (
        {"own": [], "calls": []} if clock else {}
    )
    for place, entry in list(enumerate(variant.members))[:count]:
        member = Member(place, entry.key, entry.template, None)
        before, calls = driver_ms(), hook.report().driver_calls
        begin = time.thread_time()
        built = materializer._build(member)
        after = time.thread_time()
        spent, calls = driver_ms() - before, hook.report().driver_calls - calls
        resumed = time.thread_time()
        built.instantiate()
        done = time.thread_time()
        living.append(built)
        whole = (after - begin) * 1e3
        for name, value in (
            ("block", whole - hook.build_ms),
            ("build", hook.build_ms),
            ("instantiate", (done - resumed) * 1e3),
            ("member", whole),
            *((("own", whole - spent), ("calls", calls)) if clock else ()),
        ):
            rows[name].append(value)
    print(json.dumps({"phases": phases, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), "clock" in sys.argv[4:])
