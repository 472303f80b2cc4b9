# SPDX-License-Identifier: Apache-2.0
"""Ranks say how their restore ended; whoever is older, hangs or lies disturbs nobody."""

import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time

import msgpack
import pytest

from foundryd.daemon import messages, wire
from foundryd.daemon.door import MAX_REPORTS
from foundryd.daemon.messages import Attach, Ended, Granted, Hello, Refused, Report, Welcome
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonNotRunning, LayoutDiverged, ProtocolError, RankTaken
from foundryd.session import report
from foundryd.session.client import attach
from foundryd.settings import Settings

PHASES = {"attach": 10.0, "layout": 1.0, "graphs": 250.0}


def restored(**changes):
    fields = {"outcome": "restored", "attach_id": "abc", "group": "default", "rank": 0, "phases": PHASES}
    return Report(**(fields | changes))


def greeted(runtime_dir, newest=2):
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.settimeout(20)
    sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
    wire.send(sock, messages.encode(Hello(1, newest, "test")))
    welcome = messages.decode_answer(wire.receive(sock).payload)
    assert isinstance(welcome, Welcome)
    assert welcome.protocol == newest
    return sock


def leased(runtime_dir, newest=2, rank=1):
    sock = greeted(runtime_dir, newest)
    wire.send(sock, messages.encode(Attach("", "default", rank, "ep=8")))
    with wire.receive(sock, 2) as packet:
        assert isinstance(messages.decode_answer(packet.payload), Granted)
    return sock


def heard(sock):
    try:
        packet = wire.receive(sock)
    except ConnectionResetError:
        packet = wire.receive(sock)
    return None if packet is None else messages.decode_answer(packet.payload)


def log_lines(runtime_dir):
    return [json.loads(line) for line in RuntimeDir(runtime_dir).log.read_text().splitlines()]


def test_a_rank_s_report_is_in_the_status_and_the_lease_stays(start, archive, join, control, eventually):
    start(archive)
    client = control()
    attachment = join(3)
    (lease,) = client.status().leases
    assert (lease.outcome, lease.attach_id) == ("", attachment.attach_id)
    report.over_lease(attachment, restored(rank=3, attach_id=attachment.attach_id))
    eventually(lambda: client.status().leases[0].outcome == "restored", "it is noted")
    assert client.status().leases[0].restore_ms == pytest.approx(261.0)
    fallback = report.of_fallback(Settings(rank=3), attachment.attach_id, LayoutDiverged("x"), {})
    report.over_lease(attachment, fallback)
    eventually(lambda: client.status().leases[0].reason == "layout_diverged", "it is noted")
    assert not attachment.lost
    attachment.close()
    eventually(lambda: not client.status().leases, "the lease is gone")


def test_one_id_is_in_the_lines_of_rank_and_daemon(start, archive, join, runtime_dir, eventually):
    start(archive)
    attachment = join(2, attach_id="0123abcd")
    assert attachment.attach_id == "0123abcd"
    report.over_lease(attachment, restored(rank=2, attach_id="0123abcd"))
    eventually(lambda: any("restored in 261 ms" in e["message"] for e in log_lines(runtime_dir)), "it is logged")
    attachment.close()
    eventually(lambda: any("ended: closed" in e["message"] for e in log_lines(runtime_dir)), "it is logged")
    mine = [e["message"] for e in log_lines(runtime_dir) if e.get("attach") == "0123abcd"]
    assert [text.split(":")[0] for text in mine] == [
        "lease 1",
        f"rank 2 of default (pid {os.getpid()}) restored in 261 ms",
        "lease 1 of rank 2 of default ended",
    ]
    assert not [e for e in log_lines(runtime_dir) if e["message"].startswith("ready") and "attach" in e]


def test_two_attaches_have_two_ids_and_an_old_client_gets_one(start, archive, join, runtime_dir, control):
    start(archive)
    join(0), join(1)
    sock = leased(runtime_dir, newest=1, rank=2)
    ids = [lease.attach_id for lease in control().status().leases]
    assert len(set(ids)) == 3
    assert all(ids)
    sock.close()


def test_a_rank_without_a_lease_reports_over_a_connection_of_its_own(start, archive, join, runtime_dir, eventually):
    start(archive)
    error = RankTaken("rank 0 is held")
    config = Settings(rank=4, group="replica", archive="model", runtime_dir=runtime_dir)
    report.without_lease(config, report.of_fallback(config, "feed", error, {}), error)
    line = f"rank 4 of replica (pid {os.getpid()}) captures natively (rank_taken): rank 0 is held"
    eventually(
        lambda: any(e["message"] == line and e["attach"] == "feed" for e in log_lines(runtime_dir)), "it is logged"
    )


@pytest.mark.parametrize("newest", [1, 2])
def test_old_ranks_are_served_as_ever_and_may_not_report(start, archive, runtime_dir, newest):
    start(archive)
    sock = leased(runtime_dir, newest)
    wire.send(sock, messages.encode(restored()))
    if newest == 1:
        answer = heard(sock)
        assert isinstance(answer, Ended)
        assert "the door got Report where it expects nothing" in answer.message
    else:
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            wire.receive(sock)
    sock.close()


@pytest.fixture
def old_daemon(folder):
    """A daemon of version 1 as far as a lease goes; ``said`` is what the client sent after it."""
    from foundryd.daemon.sealed import Sealed

    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(os.fspath(RuntimeDir(folder).door))
    listener.listen()
    listener.settimeout(20)
    said, asked = [], []

    def serve():
        for _ in range(2):
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            with sock:
                sock.settimeout(20)
                hello = messages.decode_request(wire.receive(sock).payload)
                asked.append((hello.oldest, hello.newest))
                wire.send(sock, messages.encode(Welcome(1, "foundryd 0.0.9", os.getpid(), "x")))
                packet = wire.receive(sock)
                if packet is None:
                    said.append(None)
                    continue
                fields = msgpack.unpackb(packet.payload)
                assert {"archive", "group", "rank", "variant"} <= fields.keys()
                fds = [Sealed.from_bytes("x", b"0123456789").fd for _ in range(2)]
                granted = Granted(1, "m", "d" * 64, 10, 10, "default", 0, "ep=8", 1)
                wire.send(sock, messages.encode(granted), fds)
                packet = wire.receive(sock)
                said.append(packet and packet.payload)

    thread = threading.Thread(target=serve)
    thread.start()
    yield folder, said, asked
    listener.close()
    thread.join(30)
    assert not thread.is_alive()


def test_an_old_daemon_hears_nothing_that_it_does_not_know(old_daemon, eventually):
    folder, said, asked = old_daemon
    attachment = attach(runtime_dir=folder)
    report.over_lease(attachment, restored())
    assert not attachment.lost
    attachment.close()
    eventually(lambda: said == [None], "the connection ends with nothing said")
    config = Settings(archive="model", runtime_dir=folder)
    error = LayoutDiverged("x")
    report.without_lease(config, report.of_fallback(config, "a", error, {}), error)
    eventually(lambda: said == [None, None], "nor over a connection of its own")
    assert asked == [(1, 2), (1, 2)]


@pytest.mark.parametrize("failure", ["nobody", "silent", "closed", "file"])
def test_a_report_that_cannot_be_made_disturbs_nobody(folder, failure, caplog):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    error = LayoutDiverged("x")
    if failure in ("silent", "closed"):
        listener.bind(os.fspath(RuntimeDir(folder).door))
        listener.listen()
    if failure == "closed":
        threading.Thread(target=lambda: listener.accept()[0].close()).start()
    config = Settings(archive="/x/model.foundry" if failure == "file" else "model", runtime_dir=folder)
    begin = time.monotonic()
    with caplog.at_level(logging.INFO), listener:
        report.without_lease(config, report.of_fallback(config, "a", error, {}), error)
    assert time.monotonic() - begin < report.DEADLINE + 2
    assert caplog.records == []


def test_a_report_after_the_daemon_is_gone_or_full_disturbs_nobody(start, archive, join):
    started = start(archive)
    attachment = join(0)
    os.kill(started.process.pid, 19)
    begin = time.monotonic()
    for _ in range(2000):  # more than a socket's queue holds
        report.over_lease(attachment, restored(message="x" * 4000))
    assert time.monotonic() - begin < 20
    started.process.kill()
    started.process.wait()
    report.over_lease(attachment, restored())
    attachment.close()
    report.over_lease(attachment, restored())


def test_a_lost_daemon_is_no_reason_to_look_for_it_again(runtime_dir, monkeypatch):
    monkeypatch.setattr(report, "open_door", lambda *_: pytest.fail("it is known to be gone"))
    config = Settings(archive="model", runtime_dir=runtime_dir)
    report.without_lease(config, restored(), DaemonNotRunning("x"))


@pytest.mark.parametrize(
    "changes",
    [
        {"outcome": "perhaps"},
        {"phases": {"layout": math.nan}},
        {"phases": {"layout": math.inf}},
        {"phases": {"layout": -1.0}},
        {"phases": {str(i): 1.0 for i in range(33)}},
        {"phases": {"layout": "long"}},
        {"reason": "x" * 65},
        {"message": "x" * 4097},
        {"attach_id": "x" * 65},
        {"attach_id": "a\nb"},
        {"group": "x" * 257},
        {"rank": 1.5},
    ],
)
def test_a_report_has_limits(changes, start, archive, runtime_dir):
    value = {"type": "report", "outcome": "restored", "attach_id": "a", "group": "g", "rank": 0} | changes
    data = msgpack.packb(value)
    with pytest.raises(ProtocolError, match="does not fit"):
        messages.decode_request(data)
    start(archive)
    sock = greeted(runtime_dir)
    wire.send(sock, data)
    answer = heard(sock)
    assert isinstance(answer, Refused)
    assert answer.reason == "protocol"
    sock.close()


def test_more_reports_than_a_rank_can_have_are_not_looked_at(start, archive, runtime_dir, control, eventually):
    start(archive)
    sock = leased(runtime_dir)
    for _ in range(MAX_REPORTS):
        wire.send(sock, messages.encode(restored(phases={"layout": 1.0})))
    for _ in range(20):
        wire.send(sock, messages.encode(restored(phases={"layout": 999.0})))
    client = control()
    eventually(lambda: client.status().leases[0].restore_ms == 1.0, "the first ones are noted")
    time.sleep(0.2)
    assert client.status().leases[0].restore_ms == 1.0
    sock.close()


RANK = """
import logging, sys
from foundryd.logs import attach_field, set_up_rank
form, configured = sys.argv[1:]
if configured == "yes":
    logging.basicConfig(format="ENGINE %(attach)s %(message)s")
set_up_rank(form, "info")
set_up_rank(form, "info")
logging.getLogger("foundryd.session").warning("two\\nlines", extra=attach_field("feed"))
logging.getLogger("foundryd.session").info("quiet", extra=attach_field("feed"))
"""


def rank_lines(form, configured):
    line = [sys.executable, "-P", "-c", RANK, form, configured]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stderr.splitlines()


def test_a_rank_logs_in_the_format_that_is_asked_for():
    first, second = [json.loads(line) for line in rank_lines("json", "yes")]
    assert (first["level"], first["message"], first["attach"]) == ("warning", "two\nlines", "feed")
    assert (second["level"], second["message"]) == ("info", "quiet")
    lines = rank_lines("text", "no")
    assert len(lines) == 2
    assert lines[0].endswith(": two lines (attach feed)")


def test_without_a_format_the_engine_s_own_logging_holds():
    assert rank_lines("", "yes") == ["ENGINE feed two", "lines"]
    (line,) = rank_lines("", "no")
    assert line.endswith(": two lines (attach feed)")


def test_the_daemon_can_log_text(start, archive, join, runtime_dir, eventually):
    start(archive, log_format="text")
    join(0, attach_id="feed")
    log = RuntimeDir(runtime_dir).log
    eventually(lambda: log.read_text().count("(attach feed)") == 1, "the lease is logged")
    assert "info    foundryd.daemon.server[" in log.read_text()
