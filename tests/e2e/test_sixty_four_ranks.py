# SPDX-License-Identifier: Apache-2.0
"""Sixty-four rank processes of one world at once: one daemon, one archive, one copy of it, and what a rank pays.

Memory is counted where nothing of ours is needed to see it: in ``/proc/self/smaps_rollup`` of each rank, when it has
decoded everything; once with foundryd (hook preloaded, attached, restored) and once without (no hook, native capture).
Both are the same program with as many modules imported.  Private memory is ``Private_Clean`` + ``Private_Dirty``: pages
of archive and plan are shared with the daemon and are not in it.  Of the difference the mappings of the software driver
(memfds ``softcuda``: device memory, images) are taken off; what it has on the heap counts against the rank.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import Started, start_daemon

WORLD = 64
PRIVATE = 2 << 20  # bytes that a rank may have for itself

# The worker, which says at its end what it has for itself.
WORKER = """
import gc, sys
from foundryd.archive.dtypes import records
from foundryd.demo import worker

records()  # a restore imports what names the kinds of rules

def private(path):
    total, driver, drivers = 0, 0, False
    for line in open(path):
        first = line.split(None, 1)[0]
        if not first.endswith(":"):
            drivers = "memfd:softcuda" in line
        elif first in ("Private_Clean:", "Private_Dirty:"):
            total += int(line.split()[1]) << 10
            driver += (int(line.split()[1]) << 10) * drivers
    return total, driver

run = worker.run
def measured(args):
    result = run(args)
    gc.collect()
    result["private"] = private("/proc/self/smaps_rollup")[0]
    result["driver"] = private("/proc/self/smaps")[1]
    result["modules"] = len(sys.modules)
    return result
worker.run = measured
sys.exit(worker.main())
"""


@pytest.fixture
def runtime_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("r") / "run"


@pytest.fixture
def daemon(runtime_dir: Path, archive: Any) -> Iterator[Started]:
    started = start_daemon(runtime_dir, [str(archive.path)], timeout=60)
    yield started
    started.process.kill()
    started.process.wait()


@pytest.fixture(scope="module")
def archive(e2e: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    config = e2e.config_of(f"ep={WORLD}", experts=WORLD)
    path = tmp_path_factory.mktemp("a") / f"model-ep={WORLD}.foundry"
    return e2e.capture_archive(path, config, "--jobs", str(os.cpu_count()), timeout=150)


def most_leases(runtime_dir: Path, done: threading.Event, seen: list[Any]) -> None:
    """Notes the fullest state of the daemon until ``done``."""
    with ControlClient(runtime_dir, 20) as client:
        while not done.wait(0.2):
            leases = client.status().leases
            if not seen or len(leases) >= len(seen[0]):
                seen[:] = [leases]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_they_restore_from_one_copy_and_have_little_for_themselves(
    e2e: Any, worlds: Any, archive: Any, daemon: Started, runtime_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker = e2e.Change(program=WORKER, flags=("--timeout", "100"))
    seen: list[Any] = []
    done = threading.Event()
    watcher = threading.Thread(target=most_leases, args=(runtime_dir, done, seen))
    watcher.start()
    try:
        env = archive.env(archive.path.stem, FOUNDRYD_RUNTIME_DIR=str(runtime_dir), FOUNDRYD_NCCL_TIMEOUT="100")
        restored = worlds.run(archive.config, env, every=worker, timeout=120)
    finally:
        done.set()
        watcher.join(30)
    assert e2e.right_tokens(archive.config, restored)
    assert [rank.result["restored"] for rank in restored] == [True] * WORLD

    # All were attached at one time, each as itself.
    assert sorted(lease.rank for lease in seen[0]) == list(range(WORLD))
    assert len({lease.pid for lease in seen[0]}) == WORLD
    with open(f"/proc/{daemon.process.pid}/maps") as maps:
        resident = {":".join(line.split()[3:5]) for line in maps if "memfd:foundryd:model" in line}
    assert len(resident) == 1
    assert {rank.result["restore"]["archive_memory"] for rank in restored} == resident

    without = worlds.run(archive.config, e2e.clean_environment(), every=worker, timeout=120)
    assert e2e.right_tokens(archive.config, without)
    assert {rank.result["mode"] for rank in without} == {"off"}
    assert {rank.result["modules"] for rank in without} == {rank.result["modules"] for rank in restored}
    more = [a.result["private"] - b.result["private"] for a, b in zip(restored, without, strict=True)]
    own = [m - a.result["driver"] + b.result["driver"] for m, a, b in zip(more, restored, without, strict=True)]
    with capsys.disabled():
        print(f"\n{WORLD} ranks: at most {max(own) >> 10} KiB of private memory, {max(more) >> 10} with the driver's")
    assert max(own) <= PRIVATE
