# SPDX-License-Identifier: Apache-2.0
"""A daemon that served two hundred ranks looks like one that served ten, and so after thousands."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundryd.session.client import attach

CYCLES = Path(__file__).with_name("attach_cycles.py")


def facts(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "mappings": sum(line.split()[4] != "0" for line in Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def test_attach_cycles_leave_nothing_behind(start, archive, runtime_dir, control, eventually, settled):
    pid = start(archive).process.pid
    client = control()

    def cycles(count):
        for i in range(count):
            for variant in ("ep=8", "ep=4,tp=2"):
                with attach(runtime_dir=runtime_dir, rank=i % 8, variant=variant, group=variant, timeout=20) as it:
                    assert bytes(it.plan) == f"model {variant} {i % 8}".encode()
        eventually(lambda: not client.status().leases, "all leases ended")

    cycles(10)
    before, own = settled(lambda: facts(pid)), facts(os.getpid())
    cycles(100)
    eventually(lambda: facts(pid)["descriptors"] <= before["descriptors"], "no connection is left")
    after, own_after = facts(pid), facts(os.getpid())
    for name in ("descriptors", "threads", "mappings"):
        assert after[name] <= before[name], (name, before, after)
        assert own_after[name] <= own[name], (name, own, own_after)
    assert after["rss"] < before["rss"] + (2 << 20), (before, after)


def test_refused_attaches_leave_nothing_behind(start, archive, runtime_dir, control, eventually, settled):
    from foundryd.errors import NotInArchiveError

    pid = start(archive).process.pid
    client = control()

    def cycles(count):
        for _ in range(count):
            with pytest.raises(NotInArchiveError):
                attach(runtime_dir=runtime_dir, rank=99, variant="ep=8", timeout=20)
        eventually(lambda: not client.status().leases, "no lease is left")

    # All plans have to be made: each is a descriptor that the daemon keeps, and it makes them when there is time.
    for rank in range(8):
        for variant in ("ep=8", "ep=4,tp=2"):
            attach(runtime_dir=runtime_dir, rank=rank, variant=variant, group=variant, timeout=20).close()
    cycles(5)
    before, own = settled(lambda: facts(pid)), facts(os.getpid())["descriptors"]
    cycles(50)
    eventually(lambda: facts(pid)["descriptors"] <= before["descriptors"], "no connection is left")
    assert facts(os.getpid())["descriptors"] <= own


@pytest.mark.slow
def test_many_attach_cycles_leave_daemon_and_rank_as_they_were():
    line = [sys.executable, "-P", str(CYCLES), "--cycles", "1500"]
    env = {**os.environ, "PYTHONPATH": str(CYCLES.parent)}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    first, *_, last = json.loads(done.stdout)["looks"]
    assert (first["cycles"], last["cycles"]) == (0, 1500)
    for who in ("daemon", "rank"):
        for what in ("descriptors", "threads", "mappings"):
            assert last[who][what] <= first[who][what], (who, what, first, last)
        # A connection, a lease or a timer that each cycle left would be some hundred bytes each time.
        assert last[who]["private_kib"] <= first[who]["private_kib"] + 256, (who, first, last)
