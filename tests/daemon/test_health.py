# SPDX-License-Identifier: Apache-2.0
"""Health and metrics say what is so, and no HTTP client can hurt the daemon."""

import http.client
import json
import os
import random
import socket
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foundryd.daemon import http as daemon_http
from foundryd.daemon import messages, wire
from foundryd.daemon.launch import command, stop_daemon
from foundryd.daemon.messages import Attach, Hello, Report, Welcome
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import NotInArchiveError, UsageError


def get(port, path, method="GET"):
    """(status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def samples(port):
    """Every sample as {(name, sorted labels): value}, and the type of every family."""
    status, headers, body = get(port, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(body.decode()))
    values = {(s.name, tuple(sorted(s.labels.items()))): s.value for f in families for s in f.samples}
    return values, {f.name: f.type for f in families}


def value(port, name, **labels):
    return samples(port)[0].get((name, tuple(sorted(labels.items()))))


def tcp_sockets():
    """The kernel's table: local address in field 1, state in field 3, inode in field 9."""
    return [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]


@pytest.fixture(autouse=True)
def plans_when_asked_for(monkeypatch):
    monkeypatch.setenv("FOUNDRYD_PLANS_AHEAD", "0")


@pytest.fixture
def port(start, archive):
    return start(archive, http=0).status.http_port


def test_nothing_listens_unless_asked_for(start, archive):
    started = start(archive)
    assert started.status.http_port == 0
    inodes = {
        os.readlink(f"/proc/{started.process.pid}/fd/{fd}") for fd in os.listdir(f"/proc/{started.process.pid}/fd")
    }
    tcp = tcp_sockets()
    assert not [fields for fields in tcp if f"socket:[{fields[9]}]" in inodes]


def test_it_listens_on_loopback_only(port):
    tcp = tcp_sockets()
    assert {f[1] for f in tcp if f[3] == "0A" and f[1].endswith(f":{port:04X}")} == {f"0100007F:{port:04X}"}


def test_a_taken_port_is_refused_with_what_to_do(start, archive, runtime_dir):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {number} of 127.0.0.1 cannot be had .*: give --http another"):
            start(archive, http=number)
    assert not RuntimeDir(runtime_dir).locked()
    assert start(archive, http=number).status.http_port == number


def test_alive_while_loading_and_ready_only_when_every_archive_is_resident(
    folder, tiny, runtime_dir, spawn, archive, eventually, control
):
    slow = tiny.write(folder / "slow.foundry", delay=3)
    line = command(runtime_dir, [str(archive), str(slow)], http=0, program=(tiny.__file__,))
    spawn("import os, sys; os.execv(sys.argv[1], sys.argv[1:])", *line, stderr=-3)
    eventually(lambda: RuntimeDir(runtime_dir).answering(), "it answers")
    client = control()
    port = client.status().http_port
    eventually(lambda: [a.name for a in client.archives() if a.state == "resident"] == ["model"], "one is resident")
    assert get(port, "/livez")[::2] == (200, b"ok\n")
    status, _, body = get(port, "/readyz")
    assert (status, json.loads(body)) == (503, {"ready": False, "missing": [{"archive": "slow", "state": "loading"}]})
    assert value(port, "foundryd_archives", state="loading") == 1
    assert value(port, "foundryd_ready") == 0
    eventually(lambda: get(port, "/readyz")[0] == 200, "it is ready")
    assert json.loads(get(port, "/readyz")[2]) == {"ready": True, "missing": []}
    assert value(port, "foundryd_archives", state="loading") == 0
    assert value(port, "foundryd_archives", state="resident") == 2
    assert value(port, "foundryd_resident_bytes") == 2 * 65536


def test_an_archive_that_is_loaded_later_counts_too(port, folder, tiny, control, eventually):
    slow = tiny.write(folder / "slow.foundry", delay=1)
    client = control()
    thread = threading.Thread(target=lambda: client.load(slow))
    thread.start()
    try:
        eventually(lambda: get(port, "/readyz")[0] == 503, "what is missing is said")
    finally:
        thread.join(20)
    assert get(port, "/readyz")[0] == 200


def test_leases_refusals_and_plans_are_counted(port, join, eventually):
    before = value(port, "foundryd_resident_bytes")
    join(0)
    join(5)
    for rank in (8, 9):
        with pytest.raises(NotInArchiveError):
            join(rank)
    assert value(port, "foundryd_clients") == 2
    assert value(port, "foundryd_attach_total", result="granted", reason="none") == 2
    assert value(port, "foundryd_attach_total", result="refused", reason="not_in_archive") == 2
    assert value(port, "foundryd_plan_seconds_count") == 2
    assert value(port, "foundryd_plan_seconds_sum") > 0
    assert value(port, "foundryd_resident_bytes") == before + 2 * len(b"model ep=8 0")
    join(0, group="other").close()
    assert value(port, "foundryd_plan_seconds_count") == 2
    eventually(lambda: value(port, "foundryd_clients") == 2, "the lease is gone")


def test_every_metric_has_its_type_and_the_build_is_told(port):
    values, types = samples(port)
    assert {name: kind for name, kind in types.items() if name.startswith("foundryd_")} == {
        "foundryd_archives": "gauge",
        "foundryd_ready": "gauge",
        "foundryd_resident_bytes": "gauge",
        "foundryd_clients": "gauge",
        "foundryd_build_info": "gauge",
        "foundryd_attach": "counter",
        "foundryd_restore_seconds": "histogram",
        "foundryd_fallback": "counter",
        "foundryd_plan_seconds": "histogram",
    }
    ((labels, one),) = [(dict(k[1]), v) for k, v in values.items() if k[0] == "foundryd_build_info"]
    assert one == 1
    assert labels == {"version": messages.BUILD.split()[1], "protocol_oldest": "1", "protocol_newest": "2"}


def test_a_client_that_left_before_its_lease_is_told_apart(start, folder, tiny, runtime_dir, eventually):
    port = start(tiny.write(folder / "model.foundry", plan_delay=1), http=0).status.http_port
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
        wire.send(sock, messages.encode(Hello(1, 2, "x")))
        assert isinstance(messages.decode_answer(wire.receive(sock).payload), Welcome)
        wire.send(sock, messages.encode(Attach("", "default", 0, "ep=8")))
    eventually(lambda: value(port, "foundryd_attach_total", result="abandoned", reason="none") == 1, "it is counted")


def test_labels_come_from_fixed_lists_whatever_a_rank_reports(port, runtime_dir, eventually):
    for number in range(30):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
            wire.send(sock, messages.encode(Hello(1, 2, "x")))
            wire.receive(sock)
            outcome = "restored" if number % 2 else "fallback"
            report = Report(outcome, "x", "g", 0, f"reason{number}", "", {f"phase{number}": 5.0})
            wire.send(sock, messages.encode(report))
            assert wire.receive(sock) is None
    values, _ = samples(port)
    assert value(port, "foundryd_fallback_total", reason="other") == 15
    assert value(port, "foundryd_restore_seconds_count", phase="other") == 15
    assert not [key for key in values if "phase1" in str(key) or "reason1" in str(key)]


# --- hostile clients -------------------------------------------------------------------------------------------------


@pytest.fixture
def connect(port):
    """Raw connections."""
    with ExitStack() as stack:

        def begin(data=b""):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            with suppress(OSError):
                sock.sendall(data)
            return sock

        yield begin


def rest(sock):
    """Everything until the daemon closes; a reset counts as that."""
    out = b""
    with suppress(ConnectionResetError):
        while data := sock.recv(65536):
            out += data
    return out


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET /livez?a=b HTTP/1.0\r\n\r\n", 200),
        (b"GET /livez HTTP/1.1\r\nContent-Length: 9999999\r\n\r\nbody", 200),
        (b"HEAD /metrics HTTP/1.1\r\n\r\n", 200),
        (b"GET /../etc/passwd HTTP/1.1\r\n\r\n", 404),
        (b"GET http://elsewhere/livez HTTP/1.1\r\n\r\n", 404),
        (b"GET /\xff\xfe%00 HTTP/1.1\r\n\r\n", 404),
        (b"POST /livez HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
        (b"GET  /livez HTTP/1.1\r\n\r\n", 400),
        (b"GET /livez\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\r\n\r\n", 400),
        (random.Random(3).randbytes(3000) + b"\r\n\r\n", 400),
        (b"GET /livez HTTP/1.1\r\nX: " + b"x" * 20000, 431),
        (b"x" * 20000, 431),
    ],
)
def test_whatever_is_asked_gets_one_answer_and_the_end(connect, sent, status):
    answer = rest(connect(sent))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert b"Connection: close" in head
    if sent.startswith(b"HEAD"):
        assert body == b""
    else:
        assert f"Content-Length: {len(body)}".encode() in head
    assert (b"Allow: GET, HEAD" in head) == (status == 405)


def test_a_request_that_comes_byte_by_byte_is_served(connect):
    sock = connect()
    for byte in b"GET /livez HTTP/1.1\r\n\r\n":
        sock.sendall(bytes([byte]))
        time.sleep(0.001)
    assert rest(sock).endswith(b"ok\n")


def test_slow_and_half_open_clients_are_closed_in_time(connect, port):
    drip = connect(b"GET /livez HTTP/1.1\r\nX: ")
    silent = connect()
    begin = time.monotonic()

    def go_on():
        with suppress(OSError):
            for _ in range(200):
                drip.sendall(b"x")
                time.sleep(0.05)

    thread = threading.Thread(target=go_on)
    thread.start()
    assert rest(silent) == b""
    assert rest(drip) == b""
    taken = time.monotonic() - begin
    thread.join(20)
    assert daemon_http.DEADLINE - 1 < taken < daemon_http.DEADLINE + 5
    assert get(port, "/livez")[0] == 200


def test_one_that_sends_for_ever_after_its_request_is_closed(connect):
    sock = connect(b"GET /livez HTTP/1.1\r\n\r\n")
    with pytest.raises(OSError, match=r"reset|Broken pipe"):
        sock.sendall(b"x" * (64 << 20))


def test_a_flood_of_held_connections_keeps_nobody_out(connect, port, start, join, control):
    pid = control().status().pid
    for _ in range(400):
        connect(b"GET /metr")
    assert get(port, "/readyz")[0] == 200
    assert join(0).rank == 0
    sockets = [fd for fd in os.listdir(f"/proc/{pid}/fd") if "socket" in os.readlink(f"/proc/{pid}/fd/{fd}")]
    assert len(sockets) < daemon_http.MAX_CONNECTIONS + 20


def test_clients_that_never_read_or_reset_are_dropped(connect, port, control, eventually):
    pid = control().status().pid
    before = len(os.listdir(f"/proc/{pid}/fd"))
    for _ in range(20):
        sock = connect(b"GET /metrics HTTP/1.1\r\n\r\n")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
        connect(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert get(port, "/livez")[0] == 200
    eventually(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= before, "no descriptor is left")


def test_scrapes_all_at_once_starve_no_rank(port, join, control):
    stop = threading.Event()
    done = []

    def scrape():
        while not stop.is_set():
            with suppress(OSError, http.client.HTTPException):
                done.append(get(port, "/metrics")[0])

    threads = [threading.Thread(target=scrape) for _ in range(8)]
    for thread in threads:
        thread.start()
    try:
        client = control()
        for rank in range(5):
            assert client.status().ready
            assert join(rank).rank == rank
    finally:
        stop.set()
        for thread in threads:
            thread.join(20)
    assert 200 in done


def test_stopping_closes_what_is_open(connect, runtime_dir):
    sock = connect(b"GET /livez")
    stop_daemon(runtime_dir)
    assert rest(sock) == b""
