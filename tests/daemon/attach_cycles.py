# SPDX-License-Identifier: Apache-2.0
"""Attaches and leaves, over and over, and looks at what daemon and rank have then.

    python tests/daemon/attach_cycles.py --cycles 10000

A cycle takes a lease, reads archive and plan, reports and leaves; every tenth one is refused as well, and every
hundredth is a process that is killed with its lease.  Looks are taken when no lease is left.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import tempfile
import time
from pathlib import Path

import tiny

from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import start_daemon
from foundryd.daemon.messages import Report
from foundryd.errors import NotInArchiveError
from foundryd.session import report
from foundryd.session.client import attach

VARIANTS = ("ep=8", "ep=4,tp=2")
WARM_UP = 1000  # cycles before the first look: allocators and caches have their size then
LOOKS = 10


def look(pid: int) -> dict[str, int]:
    """What a process has."""
    threads = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Threads"))
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return {
        "private_kib": sum(
            int(line.split()[1]) for line in rollup if line.startswith(("Private_Clean", "Private_Dirty"))
        ),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(threads.split()[1]),
        "mappings": sum(line.split()[4] != "0" for line in Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def settle(pid: int, most: int) -> None:
    """Gives a daemon the time to close what its clients left, which it sees some time after they are gone."""
    deadline = time.monotonic() + 2
    while look(pid)["descriptors"] > most and time.monotonic() < deadline:
        time.sleep(0.05)


def cycle(run: Path, number: int) -> None:
    variant, rank = VARIANTS[number % 2], number % 8
    if number % 100 == 99 and (child := os.fork()) == 0:
        attach(runtime_dir=run, rank=rank, variant=variant, group="killed", timeout=60)
        os.kill(os.getpid(), signal.SIGKILL)
    elif number % 100 == 99:
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    with attach(runtime_dir=run, rank=rank, variant=variant, group=variant, timeout=60) as attachment:
        assert bytes(attachment.plan) == f"model {variant} {rank}".encode()
        assert attachment.archive[0]
        report.over_lease(attachment, Report("restored", attachment.attach_id, variant, rank, phases={"attach": 1.0}))
    if number % 10 == 9:
        try:
            attach(runtime_dir=run, rank=99, variant=variant, timeout=60)
        except NotInArchiveError:
            return
        raise AssertionError("there is no rank 99")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cycles", type=int, default=10000)
    options = parser.parse_args()
    looks = []
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as folder:
        run = Path(folder) / "run"
        archive = tiny.write(Path(folder) / "model.foundry", variants={"ep=8": 8, "ep=4,tp=2": 8})
        daemon = start_daemon(run, [str(archive)], timeout=60, log_level="warning", program=(tiny.__file__,)).process
        try:
            begin = time.monotonic()
            with ControlClient(run, 60) as client:
                for number in range(WARM_UP + options.cycles):
                    cycle(run, number)
                    done = number + 1 - WARM_UP
                    if done >= 0 and done % (options.cycles // LOOKS) == 0:
                        while client.status().leases:
                            time.sleep(0.01)
                        gc.collect()
                        settle(daemon.pid, looks[0]["daemon"]["descriptors"] if looks else 0)
                        looks.append({"cycles": done, "daemon": look(daemon.pid), "rank": look(os.getpid())})
            seconds = time.monotonic() - begin
        finally:
            daemon.kill()
            daemon.wait()
    print(json.dumps({"seconds": seconds, "looks": looks}))


if __name__ == "__main__":
    main()
