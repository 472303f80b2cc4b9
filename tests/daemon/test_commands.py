# SPDX-License-Identifier: Apache-2.0
"""The commands, as a person runs them."""

import json
import os
import pty
import signal
import subprocess
import sys
import threading
import urllib.request
from contextlib import suppress

import pytest

from foundryd.daemon.messages import Report
from foundryd.daemon.runtime import RuntimeDir
from foundryd.session.report import over_lease

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
    assert "the log format is 'xml'" in run("start", "--log-format", "xml").stderr
    assert "--http is '99999', not a port from 0 to 65535 or 'off'" in run("start", "--http", "99999").stderr


def test_start_tells_the_port_and_the_status_too(run):
    started = run("start", "--http", "0")
    assert started.returncode == 0, started.stderr
    status = json.loads(run("status", "--json").stdout)
    url = f"http://127.0.0.1:{status['http_port']}"
    assert url in started.stdout
    assert url in run("status").stdout
    with urllib.request.urlopen(f"{url}/readyz", timeout=20) as answer:
        assert json.load(answer) == {"ready": True, "missing": []}


def test_without_http_the_status_has_no_port(run, monkeypatch):
    monkeypatch.setenv("FOUNDRYD_HTTP", "0")
    assert run("start", "--http", "off").returncode == 0
    assert json.loads(run("status", "--json").stdout)["http_port"] is None


def test_the_status_says_how_each_restore_ended(run, start, archive, join, control, eventually, monkeypatch):
    start(archive)
    one, two, _ = (join(rank) for rank in (3, 4, 5))
    over_lease(one, Report("restored", "a", "default", 3, phases={"layout": 12.0}))
    over_lease(two, Report("fallback", "b", "default", 4, "layout_diverged", "x"))
    eventually(lambda: sum(x.outcome != "" for x in control().status().leases) == 2, "they are noted")
    clients = {c["rank"]: c for c in json.loads(run("status", "--json").stdout)["clients"]}
    assert (clients[3]["outcome"], clients[3]["restore_ms"]) == ("restored", 12.0)
    assert (clients[4]["outcome"], clients[4]["reason"]) == ("fallback", "layout_diverged")
    assert (clients[5]["outcome"], clients[5]["attach_id"] != "") == ("", True)
    monkeypatch.setenv("COLUMNS", "200")
    people = run("status").stdout
    assert "12 ms" in people
    assert "captured natively (layout_diverged)" in people
    assert "not yet" in people


def test_watch_shows_what_changes_and_survives_the_daemon(run, start, archive, join, runtime_dir):
    first = start(archive)
    line = [sys.executable, "-P", "-c", APP.format(name="status"), "--runtime-dir", str(runtime_dir)]
    line += ["--watch", "--json", "--interval", "0.1"]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    killer = threading.Timer(60, process.kill)
    killer.start()
    try:

        def shown(condition):
            return next(value for value in map(json.loads, process.stdout) if condition(value))

        assert shown(lambda value: "pid" in value)["clients"] == []
        join(3)
        assert shown(lambda value: value.get("clients"))["clients"][0]["rank"] == 3
        first.process.kill()
        first.process.wait()
        assert shown(lambda value: "error" in value)["reason"] in {"daemon_not_running", "daemon"}
        second = start(archive)
        assert shown(lambda value: "pid" in value)["pid"] == second.process.pid
        process.send_signal(signal.SIGINT)
        assert process.wait(20) in (0, 1, 130)
        assert "Traceback" not in process.stderr.read()
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def test_watch_for_people_prints_tables_into_a_pipe(run, start, archive, runtime_dir):
    start(archive)
    line = [sys.executable, "-P", "-c", APP.format(name="status"), "--runtime-dir", str(runtime_dir)]
    process = subprocess.Popen([*line, "--watch", "--interval", "0.1"], stdout=subprocess.PIPE, text=True)
    killer = threading.Timer(60, process.kill)
    killer.start()
    try:
        seen = ""
        while seen.count("no rank is attached") < 3:
            text = process.stdout.readline()
            assert text
            seen += text
        assert "model" in seen
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        process.stdout.close()


def test_watch_redraws_a_terminal_and_ends_with_an_interrupt(start, archive, runtime_dir):
    start(archive)
    ours, theirs = pty.openpty()
    line = [sys.executable, "-P", "-c", APP.format(name="status"), "--runtime-dir", str(runtime_dir)]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "30"}
    process = subprocess.Popen(
        [*line, "--watch", "--interval", "0.1"], stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    )
    os.close(theirs)
    killer = threading.Timer(60, process.kill)
    killer.start()
    seen = b""
    try:
        while seen.count(b"no rank is attached") < 3:
            seen += os.read(ours, 4096)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # the other end is closed
            while data := os.read(ours, 4096):
                seen += data
        process.wait(20)
    finally:
        killer.cancel()
        process.kill()
        process.wait()
        os.close(ours)
    assert b"\x1b[?1049h" in seen, "the table has a screen of its own"
    assert b"\x1b[?1049l" in seen, "and gives it back"
    assert b"Traceback" not in seen
