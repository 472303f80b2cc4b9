# SPDX-License-Identifier: Apache-2.0
"""A daemon in a control group that limits its memory refuses what does not fit; the kernel never has to kill it."""

from __future__ import annotations

import pytest

from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import start_daemon
from foundryd.errors import FoundrydError, NotEnoughMemory
from foundryd.session.client import attach

MIB = 1 << 20
LIMIT = 256 * MIB


@pytest.fixture
def limited(group, runtime_dir, tiny):
    """A daemon inside the group, without archives."""
    group.limit(LIMIT)
    started = start_daemon(runtime_dir, [], program=group.program(tiny.__file__), timeout=20)
    counted = group.used
    if counted > MIB:
        yield group
    else:
        started.process.kill()
        started.process.wait()
        pytest.skip(f"a control group here counts {counted} bytes for a daemon")
    assert started.process.poll() is None, "the daemon was killed"
    started.process.kill()
    started.process.wait()


def test_an_archive_beyond_the_group_is_refused_up_front(limited, folder, tiny, runtime_dir):
    fits = tiny.write(folder / "fits.foundry", bytes=100 * MIB)
    large = tiny.write(folder / "large.foundry", bytes=120 * MIB)
    with ControlClient(runtime_dir, 20) as client:
        client.load(fits)
        before = limited.used
        assert before > 100 * MIB
        for _ in range(3):
            with pytest.raises(NotEnoughMemory, match=rf"large.foundry needs .* limit of {LIMIT} bytes of the control"):
                client.load(large)
        assert limited.used < before + 8 * MIB  # nothing was copied
        client.unload("fits")
        client.load(large)
        client.load(tiny.write(folder / "small.foundry", bytes=MIB))
    assert limited.kills == 0


@pytest.mark.parametrize("ahead", [True, False])
def test_plans_beyond_the_group_are_refused(limited, folder, tiny, runtime_dir, ahead):
    """Ranks get plans until the group is full, and then a typed error; those that have one keep it."""
    # Plans that nobody asked for may take an eighth of what is free, so that one of these is too large for that.
    size = 3 * MIB if ahead else 24 * MIB
    path = tiny.write(folder / "model.foundry", variants={"ep=64": 64}, bytes=100 * MIB, plan_bytes=size)
    with ControlClient(runtime_dir, 20) as client:
        client.load(path)
    served, refused = [], []
    try:
        for rank in range(64):
            try:
                served.append(attach(runtime_dir=runtime_dir, rank=rank, variant="ep=64", timeout=20))
            except FoundrydError as error:
                refused.append((rank, error))
        assert 3 <= len(served) < 64
        assert len(refused) == 64 - len(served)
        for rank, error in refused:
            assert isinstance(error, NotEnoughMemory), error
            assert f"the plan of rank {rank} of ep=64 in the archive model needs" in str(error)
            assert str(limited.folder) in str(error)
        assert all(bytes(one.plan[:11]) == b"model ep=64" for one in served)
        assert not any(one.lost for one in served)
        # What a rank takes of it is charged to who wrote it, so the daemon has counted all of it.
        assert limited.used <= LIMIT
    finally:
        for one in served:
            one.close()
    assert limited.kills == 0
