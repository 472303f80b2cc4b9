# SPDX-License-Identifier: Apache-2.0
"""An archive that does not fit is refused before a byte is copied."""

import os

import pytest

from foundryd.daemon import limits
from foundryd.daemon.store import Store
from foundryd.errors import NotEnoughMemory

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
    with pytest.raises(NotEnoughMemory, match=rf"large.foundry needs {80 * MIB} bytes .* limit of the test leaves"):
        store.load(path)
    assert copied == []
    assert store.residents() == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_daemon_refuses_what_does_not_fit_and_goes_on(start, archive, folder, tiny, control, join):
    start(archive)
    with pytest.raises(NotEnoughMemory, match=r"needs \d+ bytes of memory"):
        control().load(tiny.write(folder / "huge.foundry", bytes=1 << 50))
    assert join(0).rank == 0
