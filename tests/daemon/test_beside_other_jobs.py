# SPDX-License-Identifier: Apache-2.0
"""Jobs on one machine do not meet: each runtime directory is a daemon's, and ``/dev/shm`` is nobody's."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from foundryd.daemon.client import ControlClient
from foundryd.errors import DaemonAlreadyRunning
from foundryd.session.client import attach


def test_two_jobs_with_directories_of_their_own_do_not_see_each_other(start, folder, tiny):
    """The same names, groups and ranks, and a port that the kernel picks."""
    began = []
    for job in ("a", "b"):
        (folder / job).mkdir()
        path = tiny.write(folder / job / "model.foundry", bytes=8192 if job == "a" else 65536)
        began.append(start(path, directory=folder / job / "run", http=0))
    ports = {s.status.http_port for s in began}
    assert len(ports) == 2
    runs = [folder / job / "run" for job in ("a", "b")]
    held = [attach(runtime_dir=run, rank=0, variant="ep=8", timeout=20) for run in runs]
    assert [len(a.archive) for a in held] == [8192, 65536]
    began[0].process.kill()
    began[0].process.wait()
    assert not held[1].lost
    with ControlClient(runs[1], 20) as client:
        assert [lease.pid for lease in client.status().leases] == [os.getpid()]
    with pytest.raises(DaemonAlreadyRunning, match=f"pid {began[1].process.pid}"):
        start(folder / "b" / "model.foundry", directory=runs[1])
    for attachment in held:
        attachment.close()


# In a mount namespace with a /dev/shm of its own, as in a container that was given no size for it.
SMALL = """
mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$0" -P -c "$1" "$2" "$3" "$4"
"""

SERVED = """
import json, os, sys
from pathlib import Path
from foundryd.daemon.launch import start_daemon
from foundryd.session.client import attach
started = start_daemon(Path(sys.argv[1]), [sys.argv[2]], program=(sys.argv[3],), timeout=30)
try:
    with attach(runtime_dir=Path(sys.argv[1]), rank=0, variant="ep=8", timeout=20) as a:
        space = os.statvfs("/dev/shm")
        total = sum(a.archive[place] == 0 for place in range(1 << 20, len(a.archive), 4096))
        print(json.dumps([len(a.archive), total, space.f_blocks * space.f_frsize, os.listdir("/dev/shm")]))
finally:
    started.process.kill()
    started.process.wait()
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="no mount namespace",
)
def test_an_archive_larger_than_dev_shm_is_served_without_it(folder, tiny):
    """It is a memfd: no limit of ``/dev/shm``, no error and no SIGBUS where that is small, and no file in it."""
    path = tiny.write(folder / "model.foundry", bytes=8 << 20)
    line = ["unshare", "-m", "sh", "-c", SMALL, sys.executable, SERVED, str(folder / "run"), str(path), tiny.__file__]
    done = subprocess.run(line, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [8 << 20, 7 * 256, 1 << 20, []]
