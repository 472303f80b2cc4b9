# SPDX-License-Identifier: Apache-2.0
"""Whatever dies, fails or hangs at a fault point: nothing is to be cleaned up by hand, and the next attach works."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from foundryd.daemon.client import ControlClient
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonError, FoundrydError, InjectedFault
from foundryd.settings import settings

ACTIONS = ("kill", "error", "hang")

RANK = """
import sys
from pathlib import Path
from foundryd.errors import FoundrydError
from foundryd.session.client import attach
try:
    a = attach(runtime_dir=Path(sys.argv[1]), rank=int(sys.argv[2]), variant="ep=8", timeout=20)
    print("attached", flush=True)
    for line in sys.stdin:
        print("lost" if a.lost else "back" if a.lease.returned else "held", flush=True)
    a.close()
    print("closed", flush=True)
except FoundrydError as error:
    print(error.reason, flush=True)
"""


def facts(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status.split("Threads:")[1].split()[0]),
    }


def status_json(runtime_dir):
    line = [sys.executable, "-P", "-m", "foundryd.cli", "status", "--json", "--runtime-dir", str(runtime_dir)]
    return json.loads(subprocess.run(line, check=True, capture_output=True, timeout=30).stdout)


@pytest.fixture(autouse=True)
def plans_when_asked_for(monkeypatch):
    """A plan is computed when a rank asks, so that it meets the fault; before that: ``test_plans_ahead.py``."""
    monkeypatch.setenv("FOUNDRYD_PLANS_AHEAD", "0")


@pytest.fixture
def armed(monkeypatch, start):
    """Starts a daemon with a fault armed; this process is not."""
    settings()

    def begin(fault, *archives, **options):
        monkeypatch.setenv("FOUNDRYD_FAULT", fault)
        try:
            return start(*archives, **options)
        finally:
            monkeypatch.delenv("FOUNDRYD_FAULT")

    return begin


@pytest.fixture
def serve_everybody(join, runtime_dir, eventually, copies, settled):
    """All ranks attach and leave; returns what the daemon has then."""
    return lambda pid: _serve_everybody(pid, join, runtime_dir, eventually, copies, settled)


def _serve_everybody(pid, join, runtime_dir, eventually, copies, settled):
    taken = [join(rank) for rank in range(8)]
    assert [bytes(one.plan) for one in taken] == [f"model ep=8 {rank}".encode() for rank in range(8)]
    assert len(copies(pid, os.getpid())) == 1
    with ControlClient(runtime_dir, 20) as client:
        now = client.status()
        assert now.ready
        assert [(a.name, a.state) for a in now.archives] == [("model", "resident")]
        assert sorted(lease.rank for lease in now.leases) == list(range(8))
        for one in taken:
            one.close()
        eventually(lambda: not client.status().leases, "the leases end")
    return settled(lambda: facts(pid))


@pytest.fixture(scope="module")
def clean():
    return {}


@pytest.fixture
def healthy(clean, start, archive, serve_everybody):
    """Descriptors and threads of a daemon that nothing happened to."""
    if not clean:
        started = start(archive)
        clean.update(serve_everybody(started.process.pid))
        started.process.kill()
        started.process.wait()
    return clean


def dead_or_killed(started):
    with suppress(ProcessLookupError):
        started.process.kill()
    started.process.wait()


# --- the daemon ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", ["publish", "map"])
def test_a_daemon_that_fails_while_it_loads(
    healthy, serve_everybody, armed, start, archive, runtime_dir, point, action
):
    with pytest.raises(FoundrydError) as failed:
        armed(f"{point}:{action}", archive, timeout=20 if action == "error" else 2.5)
    assert type(failed.value) is (InjectedFault if action == "error" else DaemonError)
    assert not RuntimeDir(runtime_dir).locked()
    assert serve_everybody(start(archive).process.pid) == healthy


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", ["attach", "plan", "detach"])
def test_a_daemon_that_fails_while_it_serves(
    healthy, serve_everybody, armed, start, archive, join, runtime_dir, point, action, eventually
):
    daemon = armed(f"{point}:{action}:2", archive)
    witness = join(7)
    if point == "detach":
        join(6).close()
        join(5).close()
    else:
        with pytest.raises(DaemonError if action != "error" else InjectedFault):
            join(6, timeout=20 if action == "error" else 1)
    if action == "error":
        assert not witness.lost
    else:
        dead_or_killed(daemon)
        daemon = start(archive)
        eventually(lambda: witness.lease.returned == 1, "the witness is back")
    assert bytes(witness.plan) == b"model ep=8 7"
    assert not witness.lease.own_memory
    now = status_json(runtime_dir)
    assert ([c["rank"] for c in now["clients"]], now["own_memory"]) == ([7], 0)
    witness.close()
    assert serve_everybody(daemon.process.pid) == healthy


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", ["reattach", "restore"])
def test_a_daemon_that_fails_while_a_rank_comes_back(
    healthy, serve_everybody, armed, start, archive, join, runtime_dir, point, action, eventually
):
    dead = start(archive)
    rank = join(3)
    dead_or_killed(dead)
    if action == "error":
        daemon = armed(f"{point}:error", archive)
    else:
        with pytest.raises(DaemonError):
            armed(f"{point}:{action}", archive, timeout=2.5)
        daemon = start(archive)
    eventually(lambda: rank.lease.returned, "the rank is back")
    assert bytes(rank.plan) == b"model ep=8 3"
    now = status_json(runtime_dir)
    assert ([a["source"] for a in now["archives"]], now["own_memory"]) == (["rank"], 0)
    rank.close()
    assert serve_everybody(daemon.process.pid) == healthy


# --- a rank ----------------------------------------------------------------------------------------------------------


def outcome(child, action):
    """Ends a rank that met its fault, after checking that it is what was armed."""
    if action == "kill":
        assert child.wait(20) == -9
    elif action == "error":
        assert child.stdout.readline() == "injected\n"
        assert child.wait(20) == 0
    else:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.5)
        child.kill()
        child.wait()


@pytest.mark.parametrize("action", ACTIONS)
def test_a_rank_that_fails_while_it_has_a_daemon(
    healthy, serve_everybody, start, archive, runtime_dir, spawn, action, eventually
):
    daemon = start(archive)
    serve_everybody(daemon.process.pid)
    for point in ("attach", "map", "plan", "detach"):
        child = spawn(RANK, runtime_dir, 2, env={**os.environ, "FOUNDRYD_FAULT": f"{point}:{action}"})
        if point == "detach":
            assert child.stdout.readline() == "attached\n"
            child.stdin.close()
        outcome(child, action)
        with ControlClient(runtime_dir, 20) as client:
            eventually(lambda client=client: not client.status().leases, "the lease ended with the rank")
        assert serve_everybody(daemon.process.pid) == healthy, point


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("point", ["reattach", "publish"])
def test_a_rank_that_fails_while_it_comes_back(
    healthy, serve_everybody, start, archive, runtime_dir, spawn, point, action, eventually
):
    dead = start(archive)
    child = spawn(RANK, runtime_dir, 2, env={**os.environ, "FOUNDRYD_FAULT": f"{point}:{action}"})
    assert child.stdout.readline() == "attached\n"
    dead_or_killed(dead)
    daemon = start(archive)

    def says():
        child.stdin.write("?\n")
        child.stdin.flush()
        return child.stdout.readline()

    if action == "kill":
        assert child.wait(20) == -9
    elif action == "error":
        eventually(lambda: says() == "back\n", "it tried again")
    else:
        assert says() == "lost\n"  # and its own work goes on
    if action != "kill":
        child.stdin.close()
        assert child.stdout.readline() == "closed\n"
        assert child.wait(20) == 0
    with ControlClient(runtime_dir, 20) as client:
        eventually(lambda: not client.status().leases, "no lease is left")
    assert serve_everybody(daemon.process.pid) == healthy


@pytest.mark.parametrize("text", ["attach", "attach:explode", "nowhere:kill", "attach:kill:x", ":", "attach:kill:-1"])
def test_a_fault_that_cannot_be_is_an_error_of_the_start(armed, archive, text):
    with pytest.raises(FoundrydError, match="FOUNDRYD_FAULT"):
        armed(text, archive)
