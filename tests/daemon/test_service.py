# SPDX-License-Identifier: Apache-2.0
"""The service unit's own command line under a manager that listens, and what the daemon says to it."""

from __future__ import annotations

import configparser
import grp
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from foundryd.daemon.notify import Notifier

CLUSTER = Path(__file__).parents[2] / "cluster"
UNIT = CLUSTER / "systemd/foundryd.service"


def service() -> dict[str, str]:
    """The unit's [Service] section."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(UNIT.read_text())
    return dict(parser["Service"])


@pytest.fixture
def manager(folder: Path) -> Iterator[socket.socket]:
    """What stands behind ``NOTIFY_SOCKET``."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(folder / "notify"))
        sock.settimeout(30)
        yield sock


def hear(manager: socket.socket, word: str, said: list[str]) -> None:
    """Waits until a message has ``word``; collects messages in ``said``."""
    while not any(word in message.split("\n") for message in said):
        said.append(manager.recv(4096).decode())


def test_the_unit_starts_a_daemon_that_says_what_the_unit_waits_for(
    folder: Path, runtime_dir: Path, manager: socket.socket
) -> None:
    unit = service()
    assert (unit["Type"], unit["NotifyAccess"]) == ("notify", "main")
    program, *arguments = shlex.split(unit["ExecStart"])
    assert Path(program).name == "foundryd"
    group = grp.getgrgid(os.getegid()).gr_name
    here = {"/run/foundryd": str(runtime_dir), "foundryd": group, "$ARCHIVES": ""}
    line = [sys.executable, "-P", "-m", "foundryd.cli", *filter(None, (here.get(word, word) for word in arguments))]
    environment = {
        **os.environ,
        "NOTIFY_SOCKET": str(folder / "notify"),
        "WATCHDOG_USEC": "400000",
    }
    process = subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL)
    try:
        said: list[str] = []
        hear(manager, "READY=1", said)
        began = time.monotonic()
        for _ in range(4):
            said.clear()
            hear(manager, "WATCHDOG=1", said)
        assert time.monotonic() - began < 30
        # The main process speaks, not a child: NotifyAccess=main hears nobody else.
        manager.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        said.clear()
        speaker = 0
        while not speaker:
            _, ancillary, _, _ = manager.recvmsg(4096, socket.CMSG_SPACE(12))
            for _, kind, data in ancillary:
                if kind == socket.SCM_CREDENTIALS:
                    speaker = int.from_bytes(data[:4], sys.byteorder)
        assert speaker == process.pid
        process.send_signal(signal.SIGTERM)
        hear(manager, "STOPPING=1", said)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()


def test_a_daemon_that_hangs_is_silent(archive: Path, folder: Path, runtime_dir: Path, manager, tiny) -> None:
    """The watchdog is fed by the event loop alone, so a loop that stands still is noticed."""
    code = (
        "import runpy, sys, time, threading\n"
        "from foundryd.daemon import server\n"
        "tick, count = server.Daemon._tick, [0]\n"
        "def stuck(self, lock):\n"
        "    count[0] += 1\n"
        "    if count[0] == 2: time.sleep(30)\n"
        "    tick(self, lock)\n"
        "server.Daemon._tick = stuck\n"
        f"sys.argv[0] = {tiny.__file__!r}\n"
        f"runpy.run_path({tiny.__file__!r}, run_name='__main__')\n"
    )
    environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "200000"}
    line = [sys.executable, "-P", "-c", code, "--runtime-dir", str(runtime_dir), "--", str(archive)]
    process = subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL)
    try:
        said: list[str] = []
        hear(manager, "WATCHDOG=1", said)
        manager.settimeout(2.0)  # ten times as long as the manager would wait
        with pytest.raises(TimeoutError):
            hear(manager, "STOPPING=1", said)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000"}, 15.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "soon"}, None),
        ({"NOTIFY_SOCKET": "/x"}, None),
        ({"WATCHDOG_USEC": "30000000"}, None),
        ({}, None),
    ],
)
def test_a_watchdog_is_fed_twice_as_often_as_it_asks(environment: dict[str, str], seconds: float | None) -> None:
    kept = dict(environment, OTHER="stays")
    assert Notifier(kept).watchdog == seconds
    assert kept == {"OTHER": "stays"}  # no child speaks for the daemon


def test_an_abstract_socket_hears_too() -> None:
    name = f"foundryd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0{name}")
        sock.settimeout(10)
        Notifier({"NOTIFY_SOCKET": f"@{name}"}).send("WATCHDOG=1")
        assert sock.recv(100) == b"WATCHDOG=1"
    Notifier({"NOTIFY_SOCKET": f"@{name}"}).send("WATCHDOG=1")  # nobody listens: no error


def test_the_unit_is_one_that_systemd_reads(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / "foundryd.service"
    unit.write_text(UNIT.read_text().replace("/opt/foundryd/bin/foundryd", "/bin/true"))
    done = subprocess.run([analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_container_and_the_unit_agree_with_the_command() -> None:
    recipe = (CLUSTER / "container/Dockerfile").read_text()
    stage = recipe.rpartition("\nFROM ")[2]
    assert re.search(r"^USER foundryd$", stage, re.MULTILINE), "the daemon does not run as root"
    assert "FOUNDRYD_RUNTIME_DIR=/run/foundryd/node" in stage
    for text in (recipe, (CLUSTER / "container/compose.yaml").read_text()):
        assert '"start", "--foreground", "--group", "foundryd"' in text
    unit = service()
    assert unit["User"] != "root"
    assert unit["NoNewPrivileges"] == "yes"
    assert unit["CapabilityBoundingSet"] == ""
