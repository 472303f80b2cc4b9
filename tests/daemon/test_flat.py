# SPDX-License-Identifier: Apache-2.0
"""A daemon that served two hundred ranks looks like one that served ten."""

import os
from pathlib import Path

from foundryd.session.client import attach


def facts(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = dict(line.split(":", 1) for line in lines if ":" in line)
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "rss": int(status["VmRSS"].split()[0]) * 1024,
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def test_attach_cycles_leave_nothing_behind(start, archive, runtime_dir, control, eventually):
    pid = start(archive).process.pid
    client = control()

    def cycles(count):
        for i in range(count):
            for variant in ("ep=8", "ep=4,tp=2"):
                with attach(runtime_dir=runtime_dir, rank=i % 8, variant=variant, group=variant, timeout=20) as it:
                    assert bytes(it.plan) == f"model {variant} {i % 8}".encode()
        eventually(lambda: not client.status().leases, "all leases ended")

    cycles(10)
    before, own = facts(pid), facts(os.getpid())
    cycles(100)
    after, own_after = facts(pid), facts(os.getpid())
    for name in ("descriptors", "threads", "mappings"):
        assert after[name] <= before[name], (name, before, after)
        assert own_after[name] <= own[name], (name, own, own_after)
    assert after["rss"] < before["rss"] + (2 << 20), (before, after)


def test_refused_attaches_leave_nothing_behind(start, archive, runtime_dir, control, eventually):
    import pytest

    from foundryd.errors import NotInArchiveError

    pid = start(archive).process.pid
    client = control()

    def cycles(count):
        for _ in range(count):
            with pytest.raises(NotInArchiveError):
                attach(runtime_dir=runtime_dir, rank=99, variant="ep=8", timeout=20)
        eventually(lambda: not client.status().leases, "no lease is left")

    cycles(5)
    before, own = facts(pid), facts(os.getpid())["descriptors"]
    cycles(50)
    assert facts(pid)["descriptors"] <= before["descriptors"]
    assert facts(os.getpid())["descriptors"] <= own
