# SPDX-License-Identifier: Apache-2.0
"""Daemons and ranks start, end, freeze and die in any order; whoever is left has what is its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import Started, start_daemon, stop_daemon
from foundryd.errors import DaemonAlreadyRunning

# Forks a rank for every connection, which attaches and then says what it has whenever it is asked.
NURSERY = """
import json, os, signal, socket, sys
from pathlib import Path
from foundryd.errors import FoundrydError
from foundryd.session.client import attach
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen(8)
print("ready", flush=True)
while True:
    peer, _ = listener.accept()
    if os.fork() == 0:
        break
    peer.close()
listener.close()
lines = peer.makefile("rw")
def say(what):
    lines.write(json.dumps(what) + "\\n")
    lines.flush()
want = json.loads(lines.readline())
try:
    a = attach(runtime_dir=Path(sys.argv[1]), timeout=20, **want)
except FoundrydError as error:
    say({"error": type(error).__name__})
    os._exit(1)
first = bytes(a.archive)
say({"pid": os.getpid(), "generation": a.generation})
for line in lines:
    with open("/proc/self/maps") as maps:
        inodes = sorted({row.split()[4] for row in maps if f"memfd:foundryd:{a.name}" in row})
    same = bytes(a.archive) == first and bytes(a.plan).decode() == f"{a.name} ep=8 {a.rank}"
    say({"same": same, "lost": a.lost, "own_memory": a.lease.own_memory, "inodes": inodes})
os._exit(0)
"""

ARCHIVES = ("model", "other")


@dataclass(eq=False)
class Rank:
    """A process; ``sure`` is whether the daemon has to know it, ``slept`` whether it slept through its start."""

    pid: int
    archive: str
    group: str
    rank: int
    generation: int
    lines: Any
    frozen: bool = False
    sure: bool = True
    slept: bool = False

    @property
    def place(self) -> tuple[str, int]:
        return self.group, self.rank

    def ask(self) -> dict[str, Any]:
        self.lines.write("?\n")
        self.lines.flush()
        answer: dict[str, Any] = json.loads(self.lines.readline())
        return answer


@dataclass
class World:
    """What there is."""

    tiny: Any
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="fdy-", dir="/tmp")))
    daemon: Started | None = None
    loaded: set[str] = field(default_factory=set)
    started: set[str] = field(default_factory=set)  # with which archives the daemon was
    ranks: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run = self.folder / "run"
        self.files = {name: self.tiny.write(self.folder / f"{name}.foundry") for name in ARCHIVES}
        line = [sys.executable, "-P", "-c", NURSERY, str(self.run), str(self.folder / "nursery")]
        self.nursery = subprocess.Popen(line, stdout=subprocess.PIPE, text=True)
        assert self.nursery.stdout is not None
        assert self.nursery.stdout.readline() == "ready\n"

    def attach(self, archive: str, group: str, rank: int) -> Rank | str:
        """A rank, or the name of the error that it got."""
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(30)
        peer.connect(str(self.folder / "nursery"))
        lines = peer.makefile("rw")
        peer.close()
        lines.write(json.dumps({"archive": archive, "group": group, "rank": rank, "variant": "ep=8"}) + "\n")
        lines.flush()
        answer = json.loads(lines.readline())
        if "error" in answer:
            lines.close()
            return str(answer["error"])
        return Rank(answer["pid"], archive, group, rank, answer["generation"], lines)

    def close(self) -> None:
        for rank in self.ranks:
            with suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGKILL)
            rank.lines.close()
        if self.daemon is not None:
            self.daemon.process.kill()
            self.daemon.process.wait()
        self.nursery.kill()
        self.nursery.wait()
        assert self.nursery.stdout is not None
        self.nursery.stdout.close()
        shutil.rmtree(self.folder)


def wait(condition: Callable[[], object], what: Callable[[], object], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s: {what()}"
        time.sleep(0.01)


def machine(tiny: Any) -> type[RuleBasedStateMachine]:
    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.world = World(tiny)

        def teardown(self) -> None:
            try:
                self._all_end()
            finally:
                self.world.close()

        # --- the daemon ---

        @initialize()
        def begin(self) -> None:
            self.start(ARCHIVES)

        @precondition(lambda self: self.world.daemon is None)
        @rule(names=st.sampled_from([("model",), ARCHIVES]))
        def start(self, names: tuple[str, ...]) -> None:
            world = self.world
            # A frozen rank comes back when it is thawed.  Of a group that was made anew in its absence, whoever is
            # first keeps it.
            for rank in world.ranks:
                rank.sure = not rank.frozen and rank.archive in names and not self._rivals(rank)
                rank.slept = rank.frozen
            files = [str(world.files[name]) for name in names]
            world.daemon = start_daemon(world.run, files, program=(tiny.__file__,), timeout=20)
            world.loaded, world.started = set(names), set(names)

        @precondition(lambda self: self.world.daemon is not None)
        @rule()
        def start_another(self) -> None:
            with pytest.raises(DaemonAlreadyRunning):
                start_daemon(self.world.run, [], program=(tiny.__file__,), timeout=20)

        @precondition(lambda self: self.world.daemon is not None)
        @rule(kill=st.booleans())
        def end(self, kill: bool) -> None:
            world = self.world
            assert world.daemon is not None
            if kill:
                world.daemon.process.kill()
            else:
                stop_daemon(world.run)
            assert world.daemon.process.wait(10) == (-signal.SIGKILL if kill else 0)
            world.daemon, world.loaded, world.started = None, set(), set()
            for rank in world.ranks:
                rank.sure = False

        @precondition(lambda self: self.world.daemon is not None)
        @rule(kill=st.booleans(), names=st.sampled_from([ARCHIVES, ("model",)]))
        def replace(self, kill: bool, names: tuple[str, ...]) -> None:
            self.end(kill)
            self.start(names)

        @precondition(lambda self: "other" not in self.world.loaded and self.world.daemon is not None)
        @rule()
        def load(self) -> None:
            with ControlClient(self.world.run, 20) as client:
                client.load(self.world.files["other"])
            self.world.loaded.add("other")

        # --- ranks ---

        @precondition(lambda self: len(self.world.ranks) < 6)
        @rule(archive=st.sampled_from(ARCHIVES), group=st.sampled_from("ab"), rank=st.integers(0, 2))
        def attach(self, archive: str, group: str, rank: int) -> None:
            world = self.world
            got = world.attach(archive, group, rank)
            known = [r for r in world.ranks if r.sure]
            unsure = [r for r in world.ranks if not r.sure]
            if world.daemon is None:
                assert got == "DaemonNotRunning"
            elif archive not in world.loaded:
                assert got == "NotInArchiveError"
            elif any(r.place == (group, rank) for r in known):
                # In a group that runs another archive that is said first.
                assert got in ("RankTaken", "UsageError")
            elif any(r.group == group and r.archive != archive for r in known):
                assert got == "UsageError"
            elif isinstance(got, str):
                assert got in ("RankTaken", "UsageError")
                assert any(r.group == group for r in unsure), got
            if isinstance(got, Rank):
                world.ranks.append(got)

        @precondition(lambda self: self.world.ranks)
        @rule(data=st.data())
        def kill(self, data: st.DataObject) -> None:
            rank = data.draw(st.sampled_from(self.world.ranks))
            self._kill(rank)

        @precondition(lambda self: any(not r.frozen for r in self.world.ranks))
        @rule(data=st.data())
        def freeze(self, data: st.DataObject) -> None:
            rank = data.draw(st.sampled_from([r for r in self.world.ranks if not r.frozen]))
            os.kill(rank.pid, signal.SIGSTOP)
            rank.frozen = True

        @precondition(lambda self: any(r.frozen for r in self.world.ranks))
        @rule(data=st.data())
        def thaw(self, data: st.DataObject) -> None:
            rank = data.draw(st.sampled_from([r for r in self.world.ranks if r.frozen]))
            os.kill(rank.pid, signal.SIGCONT)
            rank.frozen = False
            # One that was awake and is not known was refused, and asks again much later.
            if rank.slept and rank.archive in self.world.started and not self._rivals(rank):
                rank.sure = True
            rank.slept = False

        def _rivals(self, rank: Rank) -> list[Rank]:
            """Ranks of another group of that name; places of one group are never given twice."""
            return [r for r in self.world.ranks if r.group == rank.group and r.generation != rank.generation]

        def _kill(self, rank: Rank) -> None:
            os.kill(rank.pid, signal.SIGKILL)
            rank.lines.close()
            self.world.ranks.remove(rank)

        # --- what holds ---

        @invariant()
        def everybody_has_what_is_its_own(self) -> None:
            world = self.world
            for rank in world.ranks:
                if not rank.frozen:
                    assert rank.ask()["same"], rank
            if world.daemon is None:
                return
            assert world.daemon.process.poll() is None
            alive = {r.pid: r for r in world.ranks}
            status: Any = None

            def right() -> bool:
                nonlocal status
                with ControlClient(world.run, 20) as client:
                    status = client.status()
                leases = {lease.pid: lease for lease in status.leases}
                return leases.keys() <= alive.keys() and all(r.pid in leases for r in world.ranks if r.sure)

            wait(right, lambda: (world.ranks, status))
            assert {a.name for a in status.archives} == world.loaded
            places = set()
            for lease in status.leases:
                rank = alive[lease.pid]
                assert (lease.group, lease.rank, lease.archive) == (rank.group, rank.rank, rank.archive)
                places.add(rank.place)
            assert len(places) == len(status.leases)
            for name in world.loaded:
                with open(f"/proc/{status.pid}/maps") as maps:
                    served = {row.split()[4] for row in maps if f"memfd:foundryd:{name}" in row}
                for lease in status.leases:
                    if lease.archive == name and not lease.own_memory and not alive[lease.pid].frozen:
                        assert set(alive[lease.pid].ask()["inodes"]) == served, (lease, served)

        def _all_end(self) -> None:
            world = self.world
            for rank in list(world.ranks):
                self._kill(rank)
            if world.daemon is None:
                self.start(("model",))
            assert world.daemon is not None
            with ControlClient(world.run, 20) as client:
                wait(lambda: not client.status().leases, client.status)
            stop_daemon(world.run)
            assert world.daemon.process.wait(10) == 0
            assert not [p for p in world.run.iterdir() if p.is_socket()]

    return Machine


@pytest.mark.slow
@pytest.mark.timeout(0 if "FOUNDRYD_TEST_ORDERS" in os.environ else 300)
def test_whoever_is_left_has_what_is_its_own(tiny):
    run_state_machine_as_test(
        lambda: machine(tiny)(),
        settings=settings(
            max_examples=int(os.environ.get("FOUNDRYD_TEST_ORDERS", "12")),
            stateful_step_count=14,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # to find the shortest order that fails would take many minutes
            print_blob=True,
        ),
    )
