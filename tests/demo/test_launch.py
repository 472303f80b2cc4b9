# SPDX-License-Identifier: Apache-2.0
"""A world ends together: with results, or with the one failure that explains it, and nobody left running."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from foundryd.demo.config import DemoConfig
from foundryd.demo.launch import WorkerFailed, choose_driver, driver_environment, launch_ranks, worker_command
from foundryd.errors import DeadlineExceeded, UsageError
from foundryd.rankpatch.mesh import Mesh

WORLD = DemoConfig(mesh=Mesh(ep=4))


def script(text: str) -> Callable[[Path], Sequence[str]]:
    """A command that runs ``text`` with ``rank`` and the rendezvous ``path`` at hand."""
    head = "import json, os, sys, time; rank = int(os.environ['RANK']); path = sys.argv[1]\n"
    return lambda store: [sys.executable, "-P", "-c", head + text, str(store)]


def alive(pid: int) -> bool:
    """Whether a process is there and not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_results_come_in_the_order_of_the_ranks() -> None:
    text = "time.sleep(0.2 * (3 - rank)); print('noise'); print(json.dumps(dict(os.environ)))"
    results = launch_ranks(WORLD, os.environ, command=script(text), timeout=60)
    assert [(r["RANK"], r["LOCAL_RANK"], r["WORLD_SIZE"]) for r in results] == [(str(i), str(i), "4") for i in range(4)]


def test_ranks_meet_in_the_store() -> None:
    text = """
from pathlib import Path
from foundryd.demo.rendezvous import SocketStore
store = SocketStore(Path(path))
store.set(f"from/{rank}", str(rank).encode())
print(json.dumps({"sum": sum(int(store.get(f"from/{other}", 30)) for other in range(4))}))
"""
    assert launch_ranks(WORLD, os.environ, command=script(text), timeout=60) == [{"sum": 6}] * 4


def test_one_failure_ends_all_and_is_the_one_reported(tmp_path: Path) -> None:
    text = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-P", "-c", "import time; time.sleep(600)"])
with open(f"{tmp_path}/{{rank}}.part", "w") as file:
    file.write(f"{{os.getpid()}} {{child.pid}}")
os.rename(f"{tmp_path}/{{rank}}.part", f"{tmp_path}/{{rank}}")
if rank == 2:
    while len([n for n in os.listdir("{tmp_path}") if n.isdigit()]) < 4:
        time.sleep(0.01)
    child.kill()
    print(json.dumps({{"error": {{"message": "the cause"}}}}))
    raise SystemExit(3)
time.sleep(600)
"""
    with pytest.raises(WorkerFailed, match="rank 2 ended with status 3: the cause"):
        launch_ranks(WORLD, os.environ, command=script(text), timeout=60)
    pids = [int(pid) for rank in range(4) for pid in (tmp_path / str(rank)).read_text().split()]
    end = time.monotonic() + 20
    while any(alive(pid) for pid in pids) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(alive(pid) for pid in pids)


def test_a_failure_without_a_result_shows_what_the_rank_said() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 ended with status 1: .*ValueError: no luck"):
        launch_ranks(DemoConfig(), os.environ, command=script("raise ValueError('no luck')"), timeout=60)


def test_a_success_without_a_result_is_a_failure() -> None:
    with pytest.raises(WorkerFailed, match="rank 0 ended without a result: it said nothing"):
        launch_ranks(DemoConfig(), os.environ, command=script(""), timeout=60)


def test_a_rank_that_hangs_is_named_and_killed() -> None:
    text = "print(json.dumps({}), flush=True)\nif rank == 1: time.sleep(600)"
    with pytest.raises(DeadlineExceeded, match=r"ranks 1 did not end in 5 s"):
        launch_ranks(WORLD, os.environ, command=script(text), timeout=5)


def test_the_worker_command_gives_every_dimension() -> None:
    command = worker_command(
        DemoConfig(hidden=96, mesh=Mesh(tp=2, ep=4)), store=Path("/x"), flags=["--late-bytes", "1"]
    )
    assert command[:4] == [sys.executable, "-P", "-m", "foundryd.demo.worker"]
    assert command[command.index("--hidden") + 1] == "96"
    assert command[command.index("--parallel") + 1] == "ep=4,tp=2"
    assert command[-4:] == ["--late-bytes", "1", "--store", "/x"]


def test_the_software_driver_goes_before_other_libraries() -> None:
    env = driver_environment("soft", {"LD_LIBRARY_PATH": "/elsewhere"})
    first, second = env["LD_LIBRARY_PATH"].split(":")
    assert (Path(first) / "libcuda.so.1").exists()
    assert (Path(first) / "libnccl.so.2").exists()
    assert second == "/elsewhere"


def test_an_unknown_driver_is_refused() -> None:
    with pytest.raises(UsageError, match="the driver is 'fast'"):
        choose_driver("fast")


def test_results_are_json(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="instead of a result"):
        launch_ranks(DemoConfig(), os.environ, command=script("print(json.dumps([1]))"), timeout=60)
