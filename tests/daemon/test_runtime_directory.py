# SPDX-License-Identifier: Apache-2.0
"""The runtime directory belongs to one user and one daemon."""

import os
import stat

import pytest

from foundryd.daemon.runtime import Info, Lock, RuntimeDir
from foundryd.errors import DaemonAlreadyRunning, UsageError

INFO = Info(pid=os.getpid(), started=0.0, build="test", instance="x")


def test_it_is_made_for_this_user_only(folder):
    runtime = RuntimeDir(folder / "a" / "b")
    runtime.prepare()
    assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o700


def test_a_group_may_pass_and_later_not_any_more(folder):
    runtime = RuntimeDir(folder / "run")
    runtime.prepare(os.getgid())
    assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o750
    runtime.lock.touch()
    runtime.prepare()
    assert stat.S_IMODE(runtime.path.stat().st_mode) == 0o700


def test_somebodys_folder_with_things_in_it_is_refused_and_not_changed(folder):
    (folder / "precious").touch()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match=r"has mode 0755, not 0700, and holds other files, 'precious'"):
        RuntimeDir(folder).prepare()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def test_a_link_or_a_file_is_refused(folder):
    (folder / "real").mkdir()
    (folder / "link").symlink_to("real")
    (folder / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(UsageError, match="cannot be used"):
            RuntimeDir(folder / name).prepare()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_is_refused(folder):
    other = folder / "run"
    other.mkdir()
    os.chown(other, 65534, 65534)
    with pytest.raises(UsageError, match=r"belongs to user 65534 and this is user 0"):
        RuntimeDir(other).prepare()


def test_a_path_too_long_for_a_socket_is_an_error_that_says_so(folder):
    long = folder / ("x" * 120)
    with pytest.raises(UsageError, match=r"has a path of \d+ bytes and the system allows 107: choose a shorter"):
        RuntimeDir(long)
    longest = folder / ("x" * (107 - len(os.fsencode(folder)) - len("//control")))
    assert len(os.fsencode(RuntimeDir(longest).control)) == 107


def test_the_longest_path_works(start, archive, folder, join):
    longest = folder / ("x" * (107 - len(os.fsencode(folder)) - len("//control")))
    start(archive, directory=longest)
    assert join(0, runtime_dir=longest).rank == 0


def test_the_lock_says_who_is_the_daemon_not_the_files(folder):
    runtime = RuntimeDir(folder)
    for path in (runtime.door, runtime.control):
        path.touch()
    lock = Lock.acquire(runtime)
    lock.write(INFO)
    assert not runtime.door.exists()
    assert runtime.locked()
    with pytest.raises(DaemonAlreadyRunning, match=rf"pid {os.getpid()}\) already serves"):
        Lock.acquire(runtime, patience=0.1)
    lock.release()
    assert not runtime.locked()
    assert runtime.lock.exists()
    Lock.acquire(runtime, patience=0.1).release()


def test_a_removed_lock_file_is_noticed_and_the_new_ones_sockets_are_left_alone(folder):
    runtime = RuntimeDir(folder)
    old = Lock.acquire(runtime)
    runtime.lock.unlink()
    assert not old.ours
    new = Lock.acquire(runtime)
    runtime.door.touch()
    old.release()
    assert runtime.door.exists()
    assert new.ours
    new.release()


def test_refusals_leave_no_descriptor_open(folder):
    runtime = RuntimeDir(folder)
    lock = Lock.acquire(runtime)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(DaemonAlreadyRunning):
            Lock.acquire(runtime, patience=0.05)
        assert runtime.locked()
    assert len(os.listdir("/proc/self/fd")) == before
    lock.release()
