# SPDX-License-Identifier: Apache-2.0
"""Starting, finding, stopping; and what a dead daemon leaves behind."""

import os
import shutil
import signal
import socket
import subprocess
import sys

import pytest

from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import stop_daemon
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import (
    ArchiveDigestError,
    ArchiveError,
    DaemonAlreadyRunning,
    DaemonError,
    DaemonNotRunning,
    UsageError,
)


def gone(runtime_dir):
    runtime = RuntimeDir(runtime_dir)
    return not runtime.locked() and not runtime.door.exists() and not runtime.control.exists()


def test_start_returns_when_every_archive_is_resident(start, folder, tiny):
    status = start(
        tiny.write(folder / "one.foundry", delay=0.3), f"two={tiny.write(folder / 'x.foundry', bytes=8192)}"
    ).status
    assert status.ready
    assert [(a.name, a.state, a.bytes) for a in status.archives] == [
        ("one", "resident", 65536),
        ("two", "resident", 8192),
    ]


def test_ready_is_not_said_while_an_archive_is_loading(start, folder, tiny, runtime_dir, eventually):
    with pytest.raises(DaemonError, match=r"not ready within 4 s \(it is still loading slow\)"):
        start(tiny.write(folder / "slow.foundry", delay=60), timeout=4)
    eventually(lambda: not RuntimeDir(runtime_dir).locked(), "the late daemon is ended")


def test_the_daemon_is_detached_from_its_starter(start, archive):
    process = start(archive).process
    assert os.getsid(process.pid) == process.pid
    assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
    assert os.readlink(f"/proc/{process.pid}/fd/0") == "/dev/null"


def test_a_second_daemon_is_refused_and_the_first_unharmed(start, archive, join, control):
    first = start(archive)
    attachment = join(0)
    client = control()
    inode = RuntimeDir(client.runtime.path).door.stat().st_ino
    with pytest.raises(DaemonAlreadyRunning, match=rf"pid {first.process.pid}\) already serves"):
        start(archive)
    assert not attachment.lost
    assert client.status().pid == first.process.pid
    assert RuntimeDir(client.runtime.path).door.stat().st_ino == inode
    assert bytes(join(1).plan) == b"model ep=8 1"


def test_a_live_daemon_whose_lock_file_was_removed_is_not_replaced(start, archive, runtime_dir):
    first = start(archive)
    # It looks every second; stopped, it cannot, and still listens.
    os.kill(first.process.pid, signal.SIGSTOP)
    RuntimeDir(runtime_dir).lock.unlink()
    with pytest.raises(DaemonAlreadyRunning):
        start(archive)


def test_a_killed_daemon_is_replaced(start, archive, join, runtime_dir, eventually):
    first = start(archive)
    attachment = join(3, keep=False)
    first.process.kill()
    first.process.wait()
    runtime = RuntimeDir(runtime_dir)
    assert runtime.door.exists()
    with pytest.raises(DaemonNotRunning, match=rf"the last one, pid {first.process.pid}, is gone"):
        ControlClient(runtime_dir)
    second = start(archive)
    assert second.status.pid != first.process.pid
    eventually(lambda: attachment.lost, "the old lease is lost")
    assert bytes(join(3).plan) == bytes(attachment.plan)


def test_stop_asks_waits_and_cleans_up(start, archive, join, runtime_dir):
    started = start(archive)
    join(0)
    stopped = stop_daemon(runtime_dir)
    assert (stopped.pid, stopped.leases) == (started.process.pid, 1)
    assert started.process.wait(10) == 0
    assert gone(runtime_dir)
    with pytest.raises(DaemonNotRunning):
        stop_daemon(runtime_dir)


def test_stop_has_a_deadline(start, archive, runtime_dir):
    started = start(archive)
    os.kill(started.process.pid, signal.SIGSTOP)
    with pytest.raises(DaemonError, match=rf"pid {started.process.pid}\) did not answer in time"):
        stop_daemon(runtime_dir, timeout=0.3)
    os.kill(started.process.pid, signal.SIGCONT)
    assert stop_daemon(runtime_dir).pid == started.process.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(start, archive, join, runtime_dir, number):
    started = start(archive)
    join(0)
    os.kill(started.process.pid, number)
    assert started.process.wait(10) == 0
    assert gone(runtime_dir)


def test_a_signal_while_an_archive_is_loading_ends_it(folder, tiny, spawn, runtime_dir, eventually):
    slow = tiny.write(folder / "slow.foundry", delay=60)
    line = [sys.executable, "-P", tiny.__file__, "--runtime-dir", str(runtime_dir), "--", str(slow)]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    try:
        eventually(RuntimeDir(runtime_dir).answering, "it answers")
        process.terminate()
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_a_bad_archive_ends_the_start_with_its_own_error(start, folder, tiny, runtime_dir, archive):
    bad = tiny.write(folder / "bad.foundry")
    bad.write_bytes(bad.read_bytes().replace(b"65536", b"65537"))
    with pytest.raises(ArchiveDigestError, match="not those that were written"):
        start(archive, bad)
    assert gone(runtime_dir)
    with pytest.raises(ArchiveError, match=r"missing.foundry cannot be opened \(No such file or directory\)"):
        start(folder / "missing.foundry")
    assert start(archive).status.ready


def test_two_archives_of_one_name_are_refused(start, folder, tiny):
    (folder / "other").mkdir()
    a, b = tiny.write(folder / "m.foundry"), tiny.write(folder / "other" / "m.foundry")
    with pytest.raises(UsageError, match=rf"would both be named 'm': write one of them as NAME={b}"):
        start(a, b)


def test_a_name_may_have_the_sign_that_ends_it(start, folder, tiny, join):
    """Archives are called after their configuration, and the sign may be in a folder's name, too."""
    (folder / "d=1").mkdir()
    paths = [tiny.write(folder / "model-ep=8.foundry"), tiny.write(folder / "d=1" / "b.foundry", bytes=8192)]
    status = start(*paths, f"c=d={paths[0]}").status
    assert {a.name: a.path for a in status.archives} == {
        "model-ep=8": str(paths[0]), "b": str(paths[1]), "c=d": str(paths[0]),
    }  # fmt: skip
    assert bytes(join(3, archive="model-ep=8").plan) == b"model-ep=8 ep=8 3"


def test_a_daemon_that_dies_at_once_is_reported_with_its_last_words(folder, runtime_dir):
    from foundryd.daemon.launch import start_daemon

    program = folder / "broken.py"
    program.write_text("import sys; sys.exit('no such luck')")
    with pytest.raises(DaemonError, match=r"ended with status 1 before it was ready \(its last line: no such luck\)"):
        start_daemon(runtime_dir, program=(str(program),), timeout=10)


def test_a_removed_runtime_directory_ends_the_daemon(start, archive, runtime_dir):
    started = start(archive)
    shutil.rmtree(runtime_dir)
    assert started.process.wait(10) == 1


def test_load_and_unload(start, folder, tiny, archive, control, join):
    start(archive)
    client = control()
    other = tiny.write(folder / "other.foundry", bytes=4096)
    client.load(other)
    attachment = join(0, archive="other")
    with pytest.raises(DaemonError, match=rf"other has 1 leases, of pid {os.getpid()}"):
        client.unload("other")
    client.load(other, "alias")
    client.unload("alias")
    assert bytes(join(1, archive="other").plan) == b"other ep=8 1"
    with pytest.raises(DaemonError, match="no archive 'alias' is loaded"):
        client.unload("alias")
    with pytest.raises(UsageError, match="the name 'model' already stands for"):
        client.load(other, "model")
    with pytest.raises(ArchiveError, match="cannot be opened"):
        client.load(folder / "missing.foundry")
    assert [a.name for a in client.archives()] == ["model", "other"]
    assert not attachment.lost


def test_unloaded_memory_goes_with_its_last_rank(start, archive, control, join, eventually):
    started = start(archive)
    client = control()
    attachment = join(0)
    attachment.lease.close()
    eventually(lambda: not client.status().leases, "the lease is gone")
    client.unload("model")

    def mapped():
        with open(f"/proc/{started.process.pid}/maps") as maps:
            return "foundryd:" in maps.read() or any(
                "foundryd:" in os.readlink(f"/proc/{started.process.pid}/fd/{fd}")
                for fd in os.listdir(f"/proc/{started.process.pid}/fd")
            )

    eventually(lambda: not mapped(), "the daemon has let the memory go")
    assert bytes(attachment.plan) == b"model ep=8 0"


def test_the_same_content_is_held_once(start, archive, folder, join):
    copy = folder / "copy.foundry"
    shutil.copy(archive, copy)
    start(archive, copy)
    join(0, group="a", archive="model")
    join(0, group="b", archive="copy")
    with open("/proc/self/maps") as maps:
        assert len({tuple(line.split()[3:5]) for line in maps if "memfd:foundryd:model" in line}) == 1


def test_foreground_tells_the_service_manager(archive, folder, runtime_dir, tiny):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(folder / "notify"))
        manager.settimeout(20)
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify"), "WATCHDOG_USEC": "200000"}
        line = [sys.executable, "-P", tiny.__file__, "--runtime-dir", str(runtime_dir), "--", str(archive)]
        process = subprocess.Popen(line, env=environment, stderr=subprocess.DEVNULL)
        try:
            said = ""
            while "READY=1" not in said or said.count("WATCHDOG=1") < 3:
                said += manager.recv(4096).decode() + "\n"
            assert "STATUS=serving model" in said
            process.terminate()
            while "STOPPING=1" not in said:
                said += manager.recv(4096).decode() + "\n"
            assert process.wait(10) == 0
        finally:
            process.kill()
            process.wait()
