# SPDX-License-Identifier: Apache-2.0
"""Daemon and engine in namespaces of their own, as two containers are: they share the runtime directory alone."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import foundryd
from foundryd.demo.launch import mismatches

USER = 10001
RUNTIME = "/run/foundryd/node"
# Mounts of the container, made by the root of its user namespace; then a user without privileges in one more.
CONTAINER = """
set -e
mount -t tmpfs tmpfs /run
mkdir /run/foundryd /run/kept
mount --bind {shared} /run/foundryd
{keep}
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /dev/shm
{restore}
cd /
exec unshare --user --map-user={user} --map-group={user} --kill-child --fork -- "$@"
"""
NAMESPACES = ("user", "mnt", "pid", "ipc", "net", "uts")

# A whole world of the demo; argv: flags of its configuration.
ENGINE = (
    f"NAMESPACES = {NAMESPACES}"
    + """
import argparse, json, os
from foundryd.demo.config import add_arguments, from_args
from foundryd.demo.launch import launch_ranks
parser = argparse.ArgumentParser()
add_arguments(parser)
config = from_args(parser.parse_args(), world=2)
print(json.dumps({
    "user": os.getuid(),
    "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES},
    "archive": os.path.exists(os.environ["ARCHIVE_PATH"]),
    "processes": sum(name.isdigit() for name in os.listdir("/proc")),
    "ranks": launch_ranks(config, os.environ, timeout=60.0),
}))
"""
)


def container(shared: Path, keep: Mapping[Path, None]) -> list[str]:
    """The command line before a program that puts it into a container with the folder ``shared``."""
    hidden = [shlex.quote(str(path)) for path in keep if path.is_relative_to("/tmp")]
    script = CONTAINER.format(
        shared=shlex.quote(str(shared)),
        keep="\n".join(f"mkdir /run/kept/{i}; mount --rbind {path} /run/kept/{i}" for i, path in enumerate(hidden)),
        restore="\n".join(f"mkdir -p {path}; mount --rbind /run/kept/{i} {path}" for i, path in enumerate(hidden)),
        user=USER,
    )
    line = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    return [*line, "--ipc", "--net", "--uts", "--", "sh", "-c", script, "sh"]


@pytest.fixture(scope="module")
def interpreter() -> dict[Path, None]:
    """Folders that a container needs to run this installation."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare (util-linux) to make namespaces with")
    kept = dict.fromkeys(Path(p).absolute() for p in (sys.prefix, sys.base_prefix, *foundryd.__path__))
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as shared:
        line = [*container(Path(shared), kept), sys.executable, "-P", "-c", "import foundryd"]
        tried = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    if "unshare" in tried.stderr or "mount:" in tried.stderr:
        pytest.skip(f"this system gives no namespaces of one's own: {tried.stderr.strip()}")
    assert tried.returncode == 0, tried.stderr
    return kept


@pytest.fixture
def shared(folder: Path) -> Path:
    """What both containers see: a volume."""
    return folder


@pytest.fixture
def daemon(shared: Path, pair: Any, e2e: Any, interpreter: dict[Path, None]) -> Iterator[subprocess.Popen[str]]:
    """A daemon in the foreground, as the container recipe starts it; only it sees the archive."""
    line = [*container(shared, interpreter | {pair.path.parent: None}), sys.executable, "-P", "-m", "foundryd.cli"]
    line += ["start", "--foreground", f"model={pair.path}"]
    env = e2e.clean_environment() | {"FOUNDRYD_RUNTIME_DIR": RUNTIME}
    process = subprocess.Popen(line, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)
    yield process
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def inside(line: list[str], env: Mapping[str, str], *, timeout: float = 90.0) -> Any:
    """What a program in a container prints."""
    done = subprocess.run(line, env=dict(env), capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def status(shared: Path, interpreter: dict[Path, None], env: Mapping[str, str]) -> Any:
    line = [*container(shared, interpreter), sys.executable, "-P", "-m", "foundryd.cli", "status", "--json"]
    return inside(line, env)


@pytest.mark.slow
def test_an_engine_restores_from_a_daemon_in_another_container(
    daemon: subprocess.Popen[str], shared: Path, pair: Any, e2e: Any, interpreter: dict[Path, None]
) -> None:
    env = pair.env("model", FOUNDRYD_RUNTIME_DIR=RUNTIME, ARCHIVE_PATH=str(pair.path))
    end = time.monotonic() + 60
    while not (shared / "node/door").exists() and time.monotonic() < end:
        assert daemon.poll() is None, daemon.communicate()
        time.sleep(0.05)
    line = [*container(shared, interpreter), sys.executable, "-P", "-c", ENGINE, *pair.config.to_args()]
    said = inside(line, env)
    assert said["user"] == USER
    assert said["archive"] is not pair.path.is_relative_to("/tmp")
    assert said["processes"] == 2  # unshare and the program
    assert said["namespaces"].keys() == set(NAMESPACES)
    ranks = said["ranks"]
    assert [rank["fallback"] for rank in ranks] == [None, None]
    assert [rank["restored"] for rank in ranks] == [True, True]
    assert mismatches(pair.config, ranks, e2e.tokens_of(pair.config)) == []
    # The daemon is a process of namespaces that the engine is not in, and served it.
    for name, link in said["namespaces"].items():
        assert link != os.readlink(f"/proc/self/ns/{name}")
        assert link != os.readlink(f"/proc/{served_by(daemon.pid)}/ns/{name}")
    known = status(shared, interpreter, env)
    assert known["archives"][0]["name"] == "model"


def served_by(pid: int) -> int:
    """The last of the only children below a process: what runs in its container."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return served_by(int(children[0])) if children else pid
