# SPDX-License-Identifier: Apache-2.0
"""Daemons and clients in processes of their own, all gone at the end of a test whatever happened."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import zmq

from foundryd.daemon import limits
from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import Started, start_daemon
from foundryd.session.client import Attachment, attach

TINY = Path(__file__).with_name("tiny.py")


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tiny", TINY)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def runtime_dir(folder: Path) -> Iterator[Path]:
    path = folder / "run"
    yield path
    # Whoever serves the directory, however it was started, does not outlive the test.
    with suppress(OSError, ValueError):
        from foundryd.daemon.runtime import RuntimeDir

        runtime = RuntimeDir(path)
        info = runtime.info()
        if runtime.locked() and info is not None:
            os.kill(info.pid, signal.SIGKILL)


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts ``python -P -c code arguments`` with pipes; killed at the end."""
    children: list[subprocess.Popen[str]] = []

    def start(code: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
        line = [sys.executable, "-P", "-c", code, *map(str, arguments)]
        child = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()


Start = Callable[..., Started]


@pytest.fixture
def start(runtime_dir: Path) -> Iterator[Start]:
    """Starts a daemon that serves tiny archives; killed at the end."""
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*archives: object, directory: Path = runtime_dir, **options: Any) -> Started:
        options.setdefault("timeout", 20.0)
        started = start_daemon(directory, [str(a) for a in archives], program=(str(TINY),), **options)
        processes.append(started.process)
        return started

    yield begin
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.wait()


@pytest.fixture
def archive(folder: Path, tiny: ModuleType) -> Path:
    """An archive named ``model`` with the variants ep=8 and tp=2,ep=4."""
    path: Path = tiny.write(folder / "model.foundry", variants={"ep=8": 8, "ep=4,tp=2": 8})
    return path


@pytest.fixture
def join(runtime_dir: Path) -> Iterator[Callable[..., Attachment]]:
    """Attaches this process; closed at the end."""
    open_ones: list[Attachment] = []

    def begin(rank: int = 0, **options: Any) -> Attachment:
        options = {"runtime_dir": runtime_dir, "variant": "ep=8", "timeout": 20.0, **options}
        attachment = attach(rank=rank, **options)
        open_ones.append(attachment)
        return attachment

    yield begin
    for attachment in open_ones:
        attachment.close()


@pytest.fixture
def control(runtime_dir: Path) -> Iterator[Callable[[], ControlClient]]:
    """Opens a control client; closed at the end."""
    clients: list[ControlClient] = []

    def begin() -> ControlClient:
        clients.append(ControlClient(runtime_dir, 20.0))
        return clients[-1]

    yield begin
    for client in clients:
        client.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    """A ZeroMQ context whose end has a deadline: a socket that a test left open fails it."""
    context = zmq.Context()
    yield context
    ender = threading.Thread(target=context.term, daemon=True)
    ender.start()
    ender.join(10)
    assert not ender.is_alive(), "a ZeroMQ socket was left open"


@pytest.fixture
def copies() -> Callable[..., set[tuple[str, ...]]]:
    """(device, inode) of every archive memory that the processes with these pids map."""

    def find(*pids: int) -> set[tuple[str, ...]]:
        found = set()
        for pid in pids:
            with open(f"/proc/{pid}/maps") as maps:
                found |= {tuple(line.split()[3:5]) for line in maps if "memfd:foundryd:model" in line}
        return found

    return find


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Waits until a condition holds, with a deadline."""

    def wait(condition: Callable[[], object], what: str, seconds: float = 15.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
            time.sleep(0.01)

    return wait


@pytest.fixture
def settled() -> Callable[[Callable[[], dict[str, int]]], dict[str, int]]:
    """What a look at a process finds once that has closed what its clients left, which it sees a little later."""

    def wait(look: Callable[[], dict[str, int]]) -> dict[str, int]:
        seen = [look()]
        while len(seen) < 10 or seen[-1]["descriptors"] > min(one["descriptors"] for one in seen):
            assert len(seen) < 500, seen[-10:]
            time.sleep(0.02)
            seen.append(look())
        return seen[-1]

    return wait


INSIDE = """
import os, runpy, sys
open(sys.argv.pop(1) + "/cgroup.procs", "w").write(str(os.getpid()))
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Group:
    """A memory control group of either interface."""

    folder: Path

    def program(self, script: str) -> tuple[str, ...]:
        """Arguments of a Python that enters the group before it allocates anything, and then is ``script``."""
        return ("-c", INSIDE, str(self.folder), script)

    def limit(self, size: int) -> None:
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (self.folder / name).exists():
                (self.folder / name).write_text(str(size))
        with suppress(OSError):  # where swap is counted, there is none
            (self.folder / "memory.swap.max").write_text("0")

    @property
    def used(self) -> int:
        names = (self.folder / "memory.current", self.folder / "memory.usage_in_bytes")
        return next(int(name.read_text()) for name in names if name.exists())

    @property
    def kills(self) -> int:
        names = (self.folder / "memory.events", self.folder / "memory.oom_control")
        text = next(name.read_text() for name in names if name.exists())
        return int(dict(line.split() for line in text.splitlines())["oom_kill"])


@pytest.fixture
def group() -> Iterator[Group]:
    """A group below this process's own, or beside it; gone at the end, once nobody is inside."""
    own = next(iter(limits.group_folders(Path("/"))), None)
    for parent in (own, own.parent) if own else ():
        folder = parent / f"foundryd-test-{os.getpid()}"
        try:
            folder.mkdir()
        except OSError:
            continue
        made = Group(folder)
        try:
            if any((folder / name).exists() for name in ("memory.max", "memory.limit_in_bytes")):
                yield made
                return
        finally:
            for _ in range(200):
                with suppress(OSError):
                    folder.rmdir()
                    break
                time.sleep(0.02)
            else:
                pytest.fail(f"{folder} cannot be removed: {(folder / 'cgroup.procs').read_text().split()} are inside")
    pytest.skip("no memory control group can be made here")
