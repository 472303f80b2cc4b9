# SPDX-License-Identifier: Apache-2.0
"""A rank that dies, fails or hangs while it restores: the daemon forgets it, and the next one restores."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import start_daemon


@pytest.fixture
def served(solo):
    """A daemon that serves the world of one; killed at the end."""
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as folder:
        runtime = Path(folder) / "run"
        daemon = start_daemon(runtime, [str(solo.path)], timeout=60).process
        try:
            yield runtime
            assert daemon.poll() is None
        finally:
            daemon.kill()
            daemon.wait()


def leases(runtime, count):
    """Whether the daemon has so many within its deadline."""
    with ControlClient(runtime, 20) as client:
        end = time.monotonic() + 20
        while len(client.status().leases) != count and time.monotonic() < end:
            time.sleep(0.02)
        return len(client.status().leases) == count


def test_nothing_is_left_of_a_rank_that_does_not_get_through_its_restore(e2e, worlds, solo, served):
    env = solo.env("solo", FOUNDRYD_RUNTIME_DIR=str(served))
    every = e2e.Change(env={"FOUNDRYD_FAULT": "restore:kill"})
    (dead,) = worlds.run(solo.config, env, every=every)
    assert dead.code == -signal.SIGKILL
    assert leases(served, 0)

    (failed,) = worlds.run(solo.config, env, every=e2e.Change(env={"FOUNDRYD_FAULT": "restore:error"}))
    assert e2e.right_tokens(solo.config, [failed])
    assert failed.result["restored"] is False
    assert "capturing natively (injected)" in failed.err
    assert leases(served, 0)

    line = e2e.worker_command(solo.config)
    hanging = subprocess.Popen(
        line, env={**e2e.rank_environment(env, 0, 1), "FOUNDRYD_FAULT": "restore:hang"}, start_new_session=True
    )
    try:
        assert leases(served, 1)
        with pytest.raises(subprocess.TimeoutExpired):
            hanging.wait(3)
    finally:
        os.killpg(hanging.pid, signal.SIGKILL)
        hanging.wait()
    assert leases(served, 0)

    (restored,) = worlds.run(solo.config, env)
    assert e2e.right_tokens(solo.config, [restored])
    assert restored.result["restored"] is True
