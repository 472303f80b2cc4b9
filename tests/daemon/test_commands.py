# SPDX-License-Identifier: Apache-2.0
"""The commands, as a person runs them."""

import json
import subprocess
import sys

import pytest

from foundryd.daemon.runtime import RuntimeDir

APP = """
import sys, typer
from foundryd.cli import {name} as module
from foundryd.errors import FoundrydError
app = typer.Typer()
app.command()(module.{name})
try:
    app(standalone_mode=False)
except FoundrydError as error:
    print(error, file=sys.stderr)
    sys.exit(1)
"""


@pytest.fixture
def run(runtime_dir):
    def command(name, *arguments, timeout=60):
        line = [sys.executable, "-P", "-c", APP.format(name=name), "--runtime-dir", str(runtime_dir), *arguments]
        return subprocess.run(line, capture_output=True, text=True, timeout=timeout)

    return command


def test_start_status_stop(run, runtime_dir):
    started = run("start")
    assert started.returncode == 0, started.stderr
    assert str(RuntimeDir(runtime_dir).door) in started.stdout
    again = run("start")
    assert again.returncode == 1
    assert "already serves" in again.stderr
    status = json.loads(run("status", "--json").stdout)
    assert status["ready"] is True
    assert (status["archives"], status["clients"]) == ([], [])
    assert f"pid {status['pid']}" in started.stdout
    assert "no rank is attached" in run("status").stdout
    assert "the daemon holds no archive" in run("ls").stdout
    stopped = run("stop")
    assert stopped.returncode == 0
    assert f"foundryd (pid {status['pid']}) stopped after" in stopped.stdout
    log = run("logs")
    assert f"serving {runtime_dir} as pid {status['pid']}" in log.stdout
    assert "the daemon was asked to stop" in log.stdout
    assert json.loads(run("logs", "--json", "-n", "1").stdout)["level"] == "info"


@pytest.mark.parametrize("name", ["stop", "status", "ls"])
def test_without_a_daemon_one_sentence_says_what_to_do(run, name, runtime_dir):
    result = run(name)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"foundryd start --runtime-dir {runtime_dir} ARCHIVE" in result.stderr


def test_logs_of_nothing_is_an_error(run):
    result = run("logs")
    assert result.returncode == 1
    assert "cannot be read" in result.stderr


def test_status_and_ls_show_archives_and_ranks(run, start, archive, join):
    started = start(archive)
    join(3, group="replica-0")
    status = json.loads(run("status", "--json").stdout)
    (one,) = status["archives"]
    assert (one["name"], one["bytes"], one["resident"]) == ("model", 65536, True)
    assert len(one["digest"]) == 64
    (client,) = status["clients"]
    assert (client["group"], client["rank"], client["variant"]) == ("replica-0", 3, "ep=8")
    assert status["pid"] == started.process.pid
    assert status["uptime_ms"] > 0
    people = run("status").stdout
    assert "replica-0" in people
    assert "ep=8 (8 of 8 ranks)" in people
    assert [a["name"] for a in json.loads(run("ls", "--json").stdout)] == ["model"]
    assert "ep=4,tp=2" in run("ls").stdout


def test_foreground_is_the_daemon_itself(run, runtime_dir, spawn, eventually):
    line = [sys.executable, "-P", "-c", APP.format(name="start"), "--runtime-dir", str(runtime_dir), "--foreground"]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    try:
        eventually(RuntimeDir(runtime_dir).answering, "it answers")
        assert json.loads(run("status", "--json").stdout)["pid"] == process.pid
        assert run("stop").returncode == 0
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()


def test_bad_options_are_named(run):
    assert "there is no group 'nosuchgroup'" in run("start", "--group", "nosuchgroup").stderr
    assert "the log level is 'loud'" in run("start", "--log-level", "loud").stderr
