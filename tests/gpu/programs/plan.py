# SPDX-License-Identifier: Apache-2.0
"""What a plan for one rank of 64 takes, computed and kept, for the archive of 512 graphs of ``tests/benchmarks``.

Needs no GPU.  The last line of standard output is the report.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from synthetic import Decoder, Shape

from foundryd.archive.reader import ArchiveReader
from foundryd.daemon.loop import Loop
from foundryd.daemon.plans import Plans
from foundryd.daemon.store import Store
from foundryd.daemon.worker import Worker
from foundryd.rankpatch.plan import compute_plan

WORLD = 64


def median_ms(action: Callable[[int], Any]) -> float:
    """Of one call for each rank."""
    times = []
    for rank in range(WORLD):
        began = time.perf_counter()
        action(rank)
        times.append((time.perf_counter() - began) * 1e3)
    return statistics.median(times)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="foundryd-plan-") as folder:
        path = Decoder(Shape(graphs=512, world=WORLD)).write(Path(folder) / "plan.foundry")
        with ArchiveReader.open(path) as reader:
            computed = median_ms(lambda rank: compute_plan(reader, f"ep={WORLD}", rank))
        store, loop = Store(), Loop()
        plans = Plans(store, Worker(loop))
        resident = store.load(path)
        arrived: list[Any] = []

        def all_there(plan: Any) -> None:
            arrived.append(plan)
            if len(arrived) == WORLD:
                loop.stop()

        for rank in range(WORLD):
            plans.request(resident, f"ep={WORLD}", rank, all_there)
        loop.later(60, loop.stop)
        loop.run()
        if len(arrived) != WORLD:
            raise SystemExit(f"{len(arrived)} of {WORLD} plans were computed in 60 s")
        kept = median_ms(lambda rank: plans.request(resident, f"ep={WORLD}", rank, arrived.append))
        plans.close()
        store.close()
        loop.close()
    print(json.dumps({"ranks": WORLD, "computed_ms": computed, "kept_ms": kept}), flush=True)


if __name__ == "__main__":
    main()
