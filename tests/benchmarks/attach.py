# SPDX-License-Identifier: Apache-2.0
"""How long attaching takes when every rank of a node does so at once, and what a plan costs.

    python tests/benchmarks/attach.py model.foundry                    # 64 processes, five runs
    python tests/benchmarks/attach.py model.foundry --ranks 8 --json
    python tests/benchmarks/attach.py --rules 100000 --ahead 0         # a made archive; no plan before it is asked for

The ranks are processes of their own with everything imported, which wait at one gate; what is timed is ``attach``: from
the call until archive and plan are mapped and the lease is there.  No rank does anything else before all are attached.
CPU time is given beside it, since with few cores wall time is mostly that, and what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from foundryd.archive.reader import ArchiveReader
from foundryd.daemon.launch import start_daemon
from foundryd.daemon.loop import Loop
from foundryd.daemon.plans import Plans
from foundryd.daemon.store import Store
from foundryd.daemon.worker import Worker

RANK = """
import json, os, sys, time
from pathlib import Path
from foundryd.session.client import attach
from foundryd.settings import settings
settings()
run, rank, variant, gate, rest = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5])
os.write(1, b"ready\\n")
os.read(gate, 1)  # until the parent closes its end
begin, used = time.monotonic(), time.process_time()
a = attach(runtime_dir=run, rank=rank, variant=variant, timeout=60)
ms, cpu = (time.monotonic() - begin) * 1000, (time.process_time() - used) * 1000
os.write(1, b"attached\\n")
os.read(rest, 1)
print(json.dumps({"ms": ms, "cpu_ms": cpu, "plan": len(a.plan)}), flush=True)
"""


def made(path: Path, rules: int) -> Path:
    """An archive of 512 graphs for 64 ranks with about so many rules."""
    sys.path.insert(0, str(Path(__file__).parent))
    from synthetic import Decoder, Shape

    return Decoder(Shape(affine=rules // Shape.graphs - 1, tables=1)).write(path)


def cpu_ms(pid: int) -> float:
    """CPU time of all threads of a process so far."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e6


def at_once(run: Path, daemon: int, ranks: Sequence[int], variant: str) -> tuple[list[dict[str, Any]], float]:
    """What each rank says after all attached at one moment, and the CPU time of the daemon with that pid meanwhile."""
    with ExitStack() as stack:
        gate, rest = os.pipe(), os.pipe()
        children = []
        for rank in ranks:
            line = [sys.executable, "-P", "-c", RANK, str(run), str(rank), variant, str(gate[0]), str(rest[0])]
            child = subprocess.Popen(line, stdout=subprocess.PIPE, pass_fds=(gate[0], rest[0]))
            stack.callback(child.wait)
            stack.callback(child.kill)
            children.append(child)
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"ready\n"
        time.sleep(0.3)
        used = cpu_ms(daemon)
        os.close(gate[1])
        for child in children:
            assert child.stdout is not None
            assert child.stdout.readline() == b"attached\n", "not all ranks attached in time"
        used = cpu_ms(daemon) - used
        os.close(rest[1])
        said = [json.loads(child.communicate(timeout=60)[0]) for child in children]
        os.close(gate[0])
        os.close(rest[0])
        return said, used


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least ``share`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def plan_times(archive: Path, variant: str, ranks: Sequence[int]) -> tuple[list[float], list[float]]:
    """Milliseconds until each rank's plan is there, and again when it is kept, as the daemon's loop sees it."""
    store, loop = Store(), Loop()
    plans = Plans(store, Worker(loop))
    resident = store.load(archive)
    arrived: list[float] = []

    def request(rank: int) -> float:
        begin = time.monotonic()
        plans.request(resident, variant, rank, lambda plan: arrived.append(time.monotonic()))
        while not arrived:
            loop.turn()
        return (arrived.pop() - begin) * 1000

    times = [request(rank) for rank in ranks], [request(rank) for rank in ranks]
    plans.close()
    store.close()
    return times


def run_once(archive: Path, ranks: Sequence[int], variant: str) -> dict[str, float]:
    """Figures of one daemon's life."""
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as folder:
        daemon = start_daemon(Path(folder) / "run", [str(archive)], timeout=60)
        try:
            said, daemon_cpu = at_once(Path(folder) / "run", daemon.process.pid, ranks, variant)
        finally:
            daemon.process.kill()
            daemon.process.wait()
    times = [rank["ms"] for rank in said]
    return {
        "median_ms": percentile(times, 0.5),
        "p99_ms": percentile(times, 0.99),
        "rank_cpu_ms": sum(rank["cpu_ms"] for rank in said) / len(said),
        "daemon_cpu_ms": daemon_cpu,
        "plan_bytes": said[0]["plan"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path, nargs="?")
    parser.add_argument("--rules", type=int, help="instead of an archive: make one with about so many")
    parser.add_argument("--ranks", type=int, help="how many, by default the variant's world")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--ahead", type=int, help="FOUNDRYD_PLANS_AHEAD of the daemon, in bytes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.archive is None) == (options.rules is None):
        parser.error("give an archive or --rules")
    if options.ahead is not None:
        os.environ["FOUNDRYD_PLANS_AHEAD"] = str(options.ahead)
    with tempfile.TemporaryDirectory(prefix="fdy-") as folder:
        archive = options.archive or made(Path(folder) / "made.foundry", options.rules)
        with ArchiveReader.open(archive) as reader:
            variant = reader.index.variants[0]
        ranks = variant.rank_class.ranks[: options.ranks]
        plans, kept = plan_times(archive, variant.name, ranks)
        runs = [run_once(archive, ranks, variant.name) for _ in range(options.runs)]
    figures = {
        "ranks": len(ranks), "cores": len(os.sched_getaffinity(0)), "runs": runs,
        "plan_first_ms": plans[0], "plan_ms": percentile(plans, 0.5), "plan_p99_ms": percentile(plans, 0.99),
        "kept_plan_p99_ms": percentile(kept, 0.99),
    }  # fmt: skip
    if options.json:
        print(json.dumps(figures))
        return
    print(
        "{ranks} ranks on {cores} cores; a plan {plan_first_ms:.2f} ms at first, {plan_ms:.2f} median, "
        "{plan_p99_ms:.2f} p99; kept {kept_plan_p99_ms:.3f} p99".format(**figures)
    )
    for run in runs:
        print(
            "attach {median_ms:6.1f} ms median {p99_ms:6.1f} ms p99; CPU {rank_cpu_ms:.2f} ms a rank, "
            "{daemon_cpu_ms:.0f} ms daemon; plans of {plan_bytes} bytes".format(**run)
        )


if __name__ == "__main__":
    main()
