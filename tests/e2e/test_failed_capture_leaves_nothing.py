# SPDX-License-Identifier: Apache-2.0
"""A capture that fails says why in its first line, and leaves no archive, process, shared memory or folder."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

WORKER = "import sys; from foundryd.demo import worker; from foundryd.session.graphset import GraphSet\n"
ENGINES = {
    "exits": "import sys, subprocess; subprocess.Popen(['sleep', '600']); print('no luck today'); sys.exit(3)",
    "hangs": "import subprocess, time; subprocess.Popen(['sleep', '600']); print('thinking', flush=True); "
    "time.sleep(600)",
    "never finishes": WORKER + "GraphSet.finish = lambda self, **_: None\nsys.exit(worker.main(sys.argv[1:]))",
    "breaks in the middle": WORKER
    + """
add = GraphSet.capture_or_restore
def once(self, key, fn, *, stream):
    if self._natives:
        raise RuntimeError("the second graph broke")
    return add(self, key, fn, stream=stream)
GraphSet.capture_or_restore = once
sys.exit(worker.main(sys.argv[1:]))
""",
    "does not repeat itself": WORKER
    + """
import dataclasses, random
from foundryd.demo.config import DemoConfig
scales = DemoConfig.scales.fget
DemoConfig.scales = property(lambda self: dataclasses.replace(scales(self), attention=random.random()))
sys.exit(worker.main(sys.argv[1:]))
""",
}
SAID = {
    "exits": ("capturing rank 0 ended with exit code 3", "no luck today"),
    "hangs": ("capturing rank 0 took more than 2 s", "--deadline", "thinking"),
    "never finishes": ("capturing rank 0 ended without a recording", "finish()"),
    "breaks in the middle": ("capturing rank 0 ended with exit code 1", "the second graph broke"),
    "does not repeat itself": ("(add_residual) of graph ('decode', ", "parameter 3 byte "),
}


def engine(e2e, what, config):
    return [sys.executable, "-P", "-c", ENGINES[what], *config.to_args()]


@pytest.mark.parametrize("what", SAID)
def test_an_engine_that_fails(e2e, foundryd, traces, tmp_path, what):
    config = e2e.config_of("ep=2")
    out = tmp_path / "out.foundry"
    done = foundryd(
        "capture", "-o", out, "--variant", "ep=2", "--driver", "soft", *(["--deadline", "2"] * (what == "hangs")),
        "--", *engine(e2e, what, config), env=traces.env,
    )  # fmt: skip
    assert done.code == 1
    assert "Traceback" not in done.err.split("its output", 1)[0]
    for words in SAID[what]:
        assert words in done.err
    assert list(tmp_path.iterdir()) == []
    assert traces.nothing_is_left()


def test_a_failed_append_keeps_the_archive(e2e, foundryd, traces, pair, tmp_path):
    out = tmp_path / "kept.foundry"
    out.write_bytes(pair.path.read_bytes())
    done = foundryd(
        "capture", "-o", out, "--variant", "tp=2", "--driver", "soft", "--append",
        "--", *engine(e2e, "exits", e2e.config_of("tp=2")), env=traces.env,
    )  # fmt: skip
    assert done.code == 1
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == pair.path.read_bytes()
    assert traces.nothing_is_left()


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--variant", "ep=2", "--world-size", "4"], "the variant ep=2 has 2 ranks and --world-size is 4"),
        (["--variant", "ep=2", "--sample", "zero"], "--sample is 'zero'"),
        (["--variant", "ep=8", "--sample", "0,9"], "rank 9 is not in the mesh ep=8"),
        (["--variant", "xp=2"], "the variant 'xp=2' has 'xp=2'"),
        (["--variant", "ep=2", "--driver", "fast"], "the driver 'fast' is not known"),
    ],
)
def test_a_request_that_cannot_be(foundryd, traces, tmp_path, options, what):
    done = foundryd(
        "capture", "-o", tmp_path / "out.foundry", "--driver", "soft", *options, "--", "true", env=traces.env
    )
    assert done.code == 1
    assert what in done.err
    assert list(tmp_path.iterdir()) == []
    assert traces.nothing_is_left()


def listen_to_interrupts():
    """In the child: what a shell runs in the background inherits an ignored SIGINT, what a person runs does not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_capture_that_is_told_to_stop(e2e, traces, tmp_path, how):
    command = [sys.executable, "-P", "-m", "foundryd.cli", "capture", "-o", str(tmp_path / "out.foundry")]
    command += ["--variant", "ep=2", "--driver", "soft", "--", *engine(e2e, "hangs", e2e.config_of("ep=2"))]
    env = e2e.changed(e2e.clean_environment(), traces.env)
    process = subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=listen_to_interrupts
    )
    try:
        end = time.monotonic() + 30
        while not any("sleep 600" in line for line in traces.processes().values()):
            assert time.monotonic() < end
            time.sleep(0.02)
        process.send_signal(how)
        assert process.wait(20) != 0
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []
    assert traces.nothing_is_left()


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_told_to_stop_while_ranks_restore(e2e, traces, how):
    command = [sys.executable, "-P", "-m", "foundryd.cli", "demo", "--driver", "soft", "--ranks", "2", "--layers", "1"]
    env = e2e.changed(e2e.clean_environment(), traces.env)
    process = subprocess.Popen(
        [*command, "--batch-sizes", "1"], env=env, stderr=subprocess.PIPE, text=True, preexec_fn=listen_to_interrupts
    )
    try:
        while not (line := process.stderr.readline()).startswith("restoring and decoding"):
            assert line, "the demo ended before it was told to stop"
        end = time.monotonic() + 30
        while sum("foundryd.demo.worker" in line for line in traces.processes().values()) < 2:
            assert time.monotonic() < end
            time.sleep(0.005)
        assert any("foundryd.daemon" in line for line in traces.processes().values())
        process.send_signal(how)
        process.communicate(timeout=30)
        assert process.returncode != 0
    finally:
        process.kill()
        process.wait()
    assert traces.nothing_is_left()
