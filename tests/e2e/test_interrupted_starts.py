# SPDX-License-Identifier: Apache-2.0
"""A command that is told to stop amid the start of a process takes that process along."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# The signal comes when the process is there and its starter does not know it yet.
AMID = """
import os, signal, subprocess, sys
from pathlib import Path

class Popen(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        print("started", self.pid, flush=True)
        os.kill(os.getpid(), int(sys.argv[1]))

subprocess.Popen = Popen
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
signal.signal(signal.SIGINT, signal.default_int_handler)
sleeps = [sys.executable, "-c", "import time; time.sleep(600)"]
"""

STARTS = {
    "ranks of the demo": """
from foundryd.demo.config import DemoConfig
from foundryd.demo.launch import launch_ranks
from foundryd.rankpatch.mesh import Mesh
launch_ranks(DemoConfig(mesh=Mesh.parse("ep=2")), dict(os.environ), command=lambda store: sleeps)
""",
    "a daemon": """
from foundryd.daemon.launch import start_daemon
start_daemon(Path(sys.argv[2]) / "run", [], program=("-c", "import time; time.sleep(600)"), timeout=60)
""",
    "a capture": """
from foundryd.capture.orchestrate import capture
from foundryd.capture.runs import CaptureSpec
capture(Path(sys.argv[2]) / "out.foundry", CaptureSpec("tp=1", sleeps), progress=print)
""",
    "captures side by side": """
from foundryd.capture.orchestrate import capture
from foundryd.capture.runs import CaptureSpec
capture(Path(sys.argv[2]) / "out.foundry", CaptureSpec("ep=2", sleeps, jobs=2), progress=print)
""",
}


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("what", STARTS)
def test_nothing_outlives_it(e2e, folder, traces, what, how):
    line = [sys.executable, "-P", "-c", AMID + STARTS[what], str(int(how)), str(folder)]
    env = e2e.changed(e2e.clean_environment(), traces.env)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode in (-how, 1, 3, 128 + how), done
    assert "started" in done.stdout, done
    assert traces.nothing_is_left()


def test_a_signal_that_another_thread_took_ends_captures_side_by_side(e2e, folder, traces):
    elsewhere = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
class Popen(Popen):
    def __init__(self, *arguments, **options):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        super().__init__(*arguments, **options)
subprocess.Popen = Popen
"""
    source = AMID + elsewhere + STARTS["captures side by side"]
    line = [sys.executable, "-P", "-c", source, str(int(signal.SIGTERM)), str(folder)]
    env = e2e.changed(e2e.clean_environment(), traces.env)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3, done
    assert "started" in done.stdout, done
    assert traces.nothing_is_left()


# Asks at every line of the main thread that follows the start of a process, and again at lines that follow that.
TWICE = """
import faulthandler, gc, linecache, os, signal, subprocess, sys, threading
from pathlib import Path
from foundryd.capture.orchestrate import capture
from foundryd.capture.runs import CaptureSpec

signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
sleeps = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
starts = subprocess.Popen
running, when, line = [], [], 0

def Popen(*arguments, **options):
    process = starts(*arguments, **options)
    running.append(process)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return process

def ask(*_):
    global line
    if when:
        del when[0]
        line = 0
        os.kill(os.getpid(), signal.SIGTERM)

def trace(frame, event, _):
    global line
    name = frame.f_code.co_filename
    if not ("/foundryd/capture/" in name or "/concurrent/futures/" in name or name.endswith("/foundryd/interrupts.py")):
        return None
    # Python calls no handler between a lock's with line and the lock, while a trace function may well raise there.
    if event == "line" and running and not linecache.getline(name, frame.f_lineno).strip().startswith("with "):
        line += 1
        if when and line >= when[0]:
            ask()
    return trace

subprocess.Popen = Popen
signal.signal(signal.SIGALRM, ask)  # when the thread waits before it comes to that line
folder, jobs = Path(sys.argv[1]), int(sys.argv[2])
count = 0
for first in range(1, 60, 5):
    for second in (1, 2, 4, 8, 16, 32):
        faulthandler.dump_traceback_later(20, exit=True)
        running.clear()
        when[:], line = [first, second], 0
        sys.settrace(trace)
        try:
            capture(folder / "out.foundry", CaptureSpec("ep=2", sleeps, jobs=jobs))
        except BaseException as error:
            sys.settrace(None)
            assert isinstance(error, SystemExit), repr(error)
        else:
            raise AssertionError("nobody asked")
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert running and all(process.wait(10) == -signal.SIGKILL for process in running), (first, second)
        gc.collect()  # the threads of an executor that nothing refers to end
        for thread in threading.enumerate()[1:]:
            thread.join(10)
        assert threading.active_count() == 1, threading.enumerate()
        count += not when
print(count)
"""


@pytest.mark.parametrize("jobs", [1, 2, 3])
def test_a_capture_that_is_asked_twice_at_any_moment(e2e, folder, traces, jobs):
    line = [sys.executable, "-P", "-c", TWICE, str(folder), str(jobs)]
    env = e2e.changed(e2e.clean_environment(), traces.env)
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 50
    assert traces.nothing_is_left()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_waits_for_the_end_of_the_block_and_handlers_are_back(how):
    source = f"""
import os, signal, sys, threading
from foundryd.interrupts import uninterrupted
signal.signal({int(how)}, lambda *_: sys.exit(5))
before = signal.getsignal({int(how)})
said = []
def other():
    with uninterrupted():
        said.append("thread")
thread = threading.Thread(target=other)
thread.start()
thread.join()
try:
    with uninterrupted():
        os.kill(os.getpid(), {int(how)})
        with uninterrupted():
            os.kill(os.getpid(), {int(how)})
        said.append("inside")
    said.append("behind")
finally:
    assert signal.getsignal({int(how)}) is before
    print(said)
"""
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=30)
    assert (done.returncode, done.stdout) == (5, "['thread', 'inside']\n"), done


def test_a_handler_that_raises_while_others_are_put_back_takes_none_along():
    source = """
import signal
from foundryd.interrupts import ANY, uninterrupted
said, put_back = [], signal.signal
numbers = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)

def handle(number, _):
    said.append(signal.Signals(number).name)
    if number == signal.SIGUSR1:
        raise KeyboardInterrupt

def raising(number, handler):
    put_back(number, handler)
    if number == signal.SIGUSR1:
        signal.raise_signal(number)

for number in numbers:
    signal.signal(number, handle)
try:
    with uninterrupted(ANY):
        for number in numbers[1:]:
            signal.raise_signal(number)
        said.append("inside")
        signal.signal = raising
except KeyboardInterrupt:
    said.append("raised")
for number in numbers[1:]:
    signal.raise_signal(number)
print(said)
"""
    done = subprocess.run([sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=30)
    said = ["inside", "SIGUSR1", "SIGUSR2", "SIGALRM", "raised", "SIGUSR2", "SIGALRM"]
    assert (done.returncode, done.stdout) == (0, f"{said}\n"), done
