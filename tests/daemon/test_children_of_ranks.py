# SPDX-License-Identifier: Apache-2.0
"""A rank that has a lease, its thread and a ZeroMQ client may make children in every way: none hangs, aborts or keeps
the lease, and the rank goes on.
"""

import json

import pytest

# Each way runs ``child.py`` or a function of this process; a child that hangs dies of its alarm.
PROGRAM = '''
import json, multiprocessing, os, signal, subprocess, sys, threading, time
from pathlib import Path
from foundryd.daemon.client import ControlClient
from foundryd.session.client import attach

def own(code):
    return [sys.executable, "-P", "-c", code]

def in_child(run):
    signal.alarm(30)
    out = [HELD.lost, bytes(HELD.plan).decode()]
    HELD.close()
    with attach(runtime_dir=run, rank=5, variant="ep=8", group="child", timeout=20) as a, ControlClient(run, 20) as c:
        out += [bytes(a.plan).decode(), len(c.status().leases) >= 2]
    return out

def fork(run):
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            os.write(write, json.dumps(in_child(run)).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as stream:
        said = json.loads(stream.read())
    return said, os.wait()[1]

def multiprocessing_fork(run):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(in_child, (run,)), 0

FDS = """
import os
for name in os.listdir("/proc/self/fd"):
    try:
        print(os.readlink("/proc/self/fd/" + name))
    except OSError:
        pass
"""

def fork_exec(run):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, 1)
        os.execv(sys.executable, own(FDS))
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read().strip()
    return said, os.waitpid(child, 0)[1]

def posix_spawn(run):
    read, write = os.pipe()
    actions = [(os.POSIX_SPAWN_DUP2, write, 1)]
    child = os.posix_spawn(sys.executable, own(FDS), os.environ, file_actions=actions)
    os.close(write)
    with os.fdopen(read) as stream:
        said = stream.read().strip()
    return said, os.waitpid(child, 0)[1]

def vfork(run):  # what subprocess does where it may
    done = subprocess.run(own(FDS), stdout=subprocess.PIPE, text=True, timeout=30)
    return done.stdout.strip(), done.returncode

def while_threads_ask(run):
    stop = threading.Event()
    def ask():
        with ControlClient(run, 20) as client:
            while not stop.is_set():
                client.status()
    threads = [threading.Thread(target=ask) for _ in range(2)]
    [t.start() for t in threads]
    codes = []
    for _ in range(10):
        if os.fork() == 0:
            signal.alarm(20)
            os._exit(0 if HELD.lost else 1)
        codes.append(os.wait()[1])
    stop.set()
    [t.join() for t in threads]
    return codes, 0

signal.alarm(80)
run = Path(sys.argv[1])
HELD = attach(runtime_dir=run, rank=3, variant="ep=8", timeout=20)
client = ControlClient(run, 20)
client.subscribe()
said, status = globals()[sys.argv[2]](run)
leases = [lease.rank for lease in client.status().leases if lease.group == "default"]
print(json.dumps({"said": said, "status": status, "lost": HELD.lost, "leases": leases}), flush=True)
client.close()
HELD.close()
'''


@pytest.mark.parametrize("way", ["fork", "multiprocessing_fork"])
def test_a_forked_child_has_the_memory_and_may_attach_itself(start, archive, runtime_dir, spawn, way):
    start(archive)
    child = spawn(PROGRAM, runtime_dir, way)
    answer = json.loads(child.communicate(timeout=90)[0])
    assert answer["said"] == [True, "model ep=8 3", "model ep=8 5", True]
    assert (answer["status"], answer["lost"], answer["leases"]) == (0, False, [3])
    assert child.returncode == 0


@pytest.mark.parametrize("way", ["fork_exec", "posix_spawn", "vfork"])
def test_another_program_inherits_nothing_of_it(start, archive, runtime_dir, spawn, way):
    start(archive)
    child = spawn(PROGRAM, runtime_dir, way)
    answer = json.loads(child.communicate(timeout=90)[0])
    assert "pipe:" in answer["said"]
    assert "memfd:foundryd" not in answer["said"]
    assert "socket:" not in answer["said"]
    assert "eventfd" not in answer["said"]
    assert (answer["status"], answer["lost"], answer["leases"]) == (0, False, [3])
    assert child.returncode == 0


def test_forking_while_threads_ask_the_daemon_hangs_no_child(start, archive, runtime_dir, spawn):
    start(archive)
    child = spawn(PROGRAM, runtime_dir, "while_threads_ask")
    answer = json.loads(child.communicate(timeout=90)[0])
    assert answer["said"] == [0] * 10
    assert (answer["lost"], answer["leases"]) == (False, [3])
    assert child.returncode == 0
