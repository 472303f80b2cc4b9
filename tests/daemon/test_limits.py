# SPDX-License-Identifier: Apache-2.0
"""An archive that does not fit is refused before a byte is copied."""

import os
import resource
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from foundryd.daemon import limits
from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import start_daemon, stop_daemon
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store
from foundryd.errors import DaemonError, LimitReached, NotEnoughMemory
from foundryd.session.client import attach

MIB = 1 << 20


def system(root, *, free=4096, groups="", mounts="", files=None):
    """A /proc and /sys of this content below ``root``."""
    texts = {
        "proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {free * 1024} kB\n",
        "proc/self/cgroup": groups,
        "proc/self/mountinfo": mounts,
        **(files or {}),
    }
    for name, text in texts.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2 = "30 20 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = "31 20 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"


def test_without_groups_the_machine_is_the_limit(folder):
    assert limits.available(system(folder, free=100)) == (100 * MIB, "the machine's free memory")


def test_the_tightest_group_above_the_process_counts(folder):
    root = system(
        folder,
        groups="0::/a/b\n",
        mounts=V2,
        files={
            "sys/fs/cgroup/a/memory.max": str(300 * MIB),
            "sys/fs/cgroup/a/memory.current": str(280 * MIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {30 * MIB}\nactive_file {10 * MIB}\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/b/memory.current": "5",
        },
    )
    room, limit = limits.available(root)
    assert room == 60 * MIB
    assert limit == f"the limit of {300 * MIB} bytes of the control group {root}/sys/fs/cgroup/a"


def test_the_old_interface_counts_too(folder):
    root = system(
        folder,
        groups="4:memory:/pod/x\n0::/\n",
        mounts=V1,
        files={
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/pod/x/memory.limit_in_bytes": str(64 * MIB),
            "sys/fs/cgroup/memory/pod/x/memory.usage_in_bytes": str(24 * MIB),
        },
    )
    assert limits.available(root)[0] == 40 * MIB


def test_a_container_that_sees_only_its_own_group(folder):
    root = system(
        folder,
        groups="4:memory:/docker/abc\n",
        mounts="31 20 0:27 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n",
        files={
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(50 * MIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(10 * MIB),
        },
    )
    assert limits.available(root)[0] == 40 * MIB


def test_this_machine_has_room():
    room, limit = limits.available()
    assert room > 0
    assert limit


def test_a_large_archive_is_refused_before_anything_is_copied(folder, tiny):
    copied = []
    from dataclasses import replace

    tools = replace(tiny.TOOLS, inflate=lambda reader, fd: copied.append(fd))
    store = Store(tools, room=lambda: (100 * MIB, "the limit of the test"))
    path = tiny.write(folder / "large.foundry", bytes=80 * MIB)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotEnoughMemory, match=r"large.foundry needs \d+ bytes .* limit of the test leaves"):
        store.load(path)
    assert copied == []
    assert store.residents() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_daemon_refuses_what_does_not_fit_and_goes_on(start, archive, folder, tiny, control, join):
    start(archive)
    with pytest.raises(NotEnoughMemory, match=r"needs \d+ bytes of memory"):
        control().load(tiny.write(folder / "huge.foundry", bytes=1 << 50))
    assert join(0).rank == 0


def test_a_daemon_has_no_more_clients_archives_and_bytes_than_it_may(
    start, archive, folder, tiny, control, join, monkeypatch, eventually
):
    monkeypatch.setenv("FOUNDRYD_MAX_CLIENTS", "2")
    monkeypatch.setenv("FOUNDRYD_MAX_ARCHIVES", "2")
    monkeypatch.setenv("FOUNDRYD_MAX_BYTES", "100000")
    start(archive)
    client = control()
    with pytest.raises(NotEnoughMemory, match=r"needs 65536 bytes .* 65536 of other archives leave 34464 of"):
        client.load(tiny.write(folder / "second.foundry"))
    client.load(tiny.write(folder / "small.foundry", bytes=8192))
    with pytest.raises(LimitReached, match=r"holds 2 archives and may hold 2: unload one"):
        client.load(tiny.write(folder / "third.foundry", bytes=4096))
    first = join(0, archive="model")
    join(1, archive="small", group="other")
    with pytest.raises(LimitReached, match=r"has 2 leases and may have 2: end a rank"):
        join(2, archive="model")
    first.close()

    def has_room():
        with suppress(LimitReached):
            return join(2, archive="model").rank == 2

    eventually(has_room, "the place is given back")  # the daemon learns of the end a moment later
    assert len(client.status().leases) == 2


def test_memory_that_cannot_be_written_is_a_typed_error():
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(NotEnoughMemory, match=r"10000 bytes of .* cannot be written \(File too large"):
            Sealed.from_bytes("x", b"x" * 10000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == before


FEW = """
import os, resource, sys
from pathlib import Path
from foundryd.errors import FoundrydError
from foundryd.session.client import attach
attach(runtime_dir=Path(sys.argv[1]), rank=1, variant="ep=8", timeout=20).close()
used = len(os.listdir("/proc/self/fd")) - 1
for more in range(12):
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, 4096))
    try:
        a = attach(runtime_dir=Path(sys.argv[1]), rank=1, group=str(more), variant="ep=8", timeout=20)
        a.close()
        print("attached", flush=True)
    except FoundrydError as error:
        print(error.reason, flush=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 4096))
    assert len(os.listdir("/proc/self/fd")) - 1 == used, more
"""


def test_a_rank_without_descriptors_gets_a_typed_error_at_every_step(start, archive, runtime_dir, spawn, join):
    start(archive)
    said = spawn(FEW, runtime_dir).communicate(timeout=30)[0].split()
    assert len(said) == 12
    assert set(said) == {"attached", "daemon"}
    assert said == sorted(said, key=["daemon", "attached"].index)  # whoever has enough of them attaches
    assert join(1).rank == 1


def test_a_daemon_without_descriptors_goes_on_when_there_are_some_again(archive, runtime_dir, tiny, monkeypatch):
    code = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40)); "
    code += f"sys.argv.pop(0); sys.argv.insert(0, 'x'); runpy.run_path({tiny.__file__!r}, run_name='__main__')"
    started = start_daemon(runtime_dir, [str(archive)], program=("-c", code), timeout=20)
    attached = []
    try:
        with suppress(DaemonError):
            for number in range(40):
                one = attach(runtime_dir=runtime_dir, rank=number % 8, group=str(number), variant="ep=8", timeout=3)
                attached.append(one)
        assert len(attached) < 40
        assert len(attached) > 8
        assert not any(one.lost for one in attached)
        while len(attached) > 4:
            attached.pop().close()
        with attach(runtime_dir=runtime_dir, rank=7, group="late", variant="ep=8", timeout=20) as late:
            assert bytes(late.plan) == b"model ep=8 7"
        assert started.process.poll() is None
    finally:
        for one in attached:
            one.close()
        started.process.kill()
        started.process.wait()


# The clock on the wall goes a million seconds back or forth with every look at it.
JUMPING = """
import itertools, runpy, sys, time
jumps, real = itertools.cycle((1e6, -1e6, 3e6, 0.0)), time.time
time.time = lambda: real() + next(jumps)
sys.argv[0] = sys.argv.pop(1)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_jumps_of_the_wall_clock_shorten_and_lengthen_no_wait(archive, runtime_dir, tiny, monkeypatch):
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + (1e6 if os.urandom(1) > b"\x80" else -1e6))
    begin = time.monotonic()
    started = start_daemon(runtime_dir, [str(archive)], program=("-c", JUMPING, tiny.__file__), timeout=20)
    try:
        with (
            attach(runtime_dir=runtime_dir, rank=1, variant="ep=8", timeout=20) as one,
            ControlClient(runtime_dir, 20) as client,
        ):
            client.subscribe()
            ticks = [client.pushed(5) for _ in range(2)]
            assert None not in ticks
            assert not one.lost
            assert 0 < client.status().uptime_ms < 30_000
            slow = tiny.write(archive.with_name("slow.foundry"), delay=30)
            with pytest.raises(DaemonError, match="did not answer"):
                client.load(slow, timeout=0.5)
        stop_daemon(runtime_dir)
        assert started.process.wait(10) == 0
        assert time.monotonic() - begin < 30
    finally:
        started.process.kill()
        started.process.wait()


FULL = """
set -e
mount -t tmpfs -o size=64k none "$1"
exec "$2" -P -c "$3" "$1/run" "$4" "$5"
"""

IN_FULL = """
import sys
from pathlib import Path
from foundryd.daemon.launch import start_daemon
from foundryd.errors import FoundrydError
from foundryd.session.client import attach
run, archive, tiny = sys.argv[1:]
full = Path(run).parent / "filler"

def start():
    return start_daemon(Path(run), [archive], program=(tiny,), timeout=20)

def fill():
    with open(full, "wb", buffering=0) as filler:
        try:
            while True:
                filler.write(bytes(256))
        except OSError:
            pass

fill()
try:
    start()
except FoundrydError as error:
    print(type(error).__name__, error, flush=True)
full.unlink()
first = start()
a = attach(runtime_dir=Path(run), rank=0, variant="ep=8", timeout=20)
fill()
b = attach(runtime_dir=Path(run), rank=1, variant="ep=8", timeout=20)
print(bytes(b.plan).decode(), a.lost, flush=True)
first.process.kill()
first.process.wait()
last = start()
print(last.status.ready, flush=True)
last.process.kill()
"""


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0, reason="no mount namespace"
)
def test_a_full_file_system_under_the_runtime_directory_is_a_typed_error_and_no_lease_is_lost(folder, archive, tiny):
    place = folder / "tmpfs"
    place.mkdir()
    line = ["unshare", "-m", "sh", "-c", FULL, "sh", str(place), sys.executable, IN_FULL, str(archive), tiny.__file__]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    refused, served, restarted = done.stdout.splitlines()
    assert refused.startswith("DaemonError")
    assert "lock cannot be written (No space left on device): make room" in refused
    assert served == "model ep=8 1 False"
    assert restarted == "True"
