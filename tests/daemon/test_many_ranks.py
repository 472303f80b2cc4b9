# SPDX-License-Identifier: Apache-2.0
"""Sixty-four rank processes at once, one daemon, one copy."""

import json
import os
import statistics

RANKS = 64

# Forked after the imports, so that what is measured is the daemon and not the interpreter; each attaches by itself.
PROGRAM = """
import json, os, sys, time
from pathlib import Path
from foundryd.session.client import attach
run, count = Path(sys.argv[1]), int(sys.argv[2])
go, done, rest = os.pipe(), os.pipe(), os.pipe()
for rank in range(count):
    if os.fork() == 0:
        os.close(go[1])
        os.close(rest[1])
        os.read(go[0], 1)  # until the parent closes its end
        begin = time.monotonic()
        a = attach(runtime_dir=run, rank=rank, variant="ep=64", timeout=60)
        ms = (time.monotonic() - begin) * 1000
        os.write(done[1], b".")
        os.read(rest[0], 1)  # nobody takes time for anything else before all are attached
        with open("/proc/self/maps") as maps:
            inodes = sorted({line.split()[4] for line in maps if "memfd:foundryd:model" in line})
        line = json.dumps({"ms": ms, "inodes": inodes, "plan": bytes(a.plan).decode()})
        os.write(1, line.encode() + b"\\n")
        sys.stdin.read()
        os._exit(0)
os.close(go[0]); os.close(go[1])
for _ in range(count):
    os.read(done[0], 1)
os.close(rest[1])
sys.stdin.read()
for _ in range(count):
    os.wait()
"""


def test_they_share_one_copy_and_all_come_back_after_a_restart(
    start, folder, tiny, spawn, runtime_dir, control, eventually, capsys
):
    path = tiny.write(folder / "model.foundry", variants={"ep=64": RANKS}, bytes=8 << 20)
    first = start(path)
    parent = spawn(PROGRAM, runtime_dir, RANKS)
    said = [json.loads(parent.stdout.readline()) for _ in range(RANKS)]
    assert {s["plan"] for s in said} == {f"model ep=64 {rank}" for rank in range(RANKS)}
    assert len({inode for s in said for inode in s["inodes"]}) == 1
    client = control()
    assert sorted(x.rank for x in client.status().leases) == list(range(RANKS))
    times = sorted(s["ms"] for s in said)

    first.process.kill()
    first.process.wait()
    second = start(path)
    begin = second.status.uptime_ms
    client = control()
    eventually(lambda: len(client.status().leases) == RANKS, "all ranks are back", 30)
    status = client.status()
    assert [a.source for a in status.archives] == ["rank"]
    assert not any(x.own_memory for x in status.leases)
    with open(f"/proc/{second.process.pid}/maps") as maps:
        mapped = {line.split()[4] for line in maps if "memfd:foundryd:model" in line}
    assert mapped == set(said[0]["inodes"])
    with capsys.disabled():
        print(
            f"\n{RANKS} ranks on {os.cpu_count()} cores: attach and plan {statistics.median(times):.0f} ms in the "
            f"median, {times[-1]:.0f} ms at most; after a restart ready in {begin:.0f} ms, "
            f"all back {status.uptime_ms:.0f} ms after its start"
        )
