# SPDX-License-Identifier: Apache-2.0
"""This build's two sides against what those of each version of the protocol said, kept as bytes in ``kept``.

``record_messages.py`` recorded them from real daemons and clients: ``v1`` with a build that spoke version 1 alone.
"""

import os
import socket
import threading
import time
import typing
from contextlib import closing
from pathlib import Path

import msgpack
import msgspec
import pytest
import zmq

from foundryd.daemon import client as daemon_client
from foundryd.daemon import messages, wire
from foundryd.daemon.client import ControlClient
from foundryd.daemon.messages import NEWEST, OLDEST
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.sealed import Sealed
from foundryd.errors import ArchiveDigestError, NotInArchiveError, ProtocolError
from foundryd.session import report
from foundryd.session.client import attach

KEPT = Path(__file__).with_name("kept")
VERSIONS = sorted(int(folder.name[1:]) for folder in KEPT.iterdir())
FILES = sorted(KEPT.glob("*/*.msgpack"))
DECODERS = {"client": messages.decode_request, "daemon": messages.decode_answer}
SPOKEN = [version for version in VERSIONS if OLDEST <= version <= NEWEST]


def kept(version: int, name: str) -> bytes:
    return (KEPT / f"v{version}" / f"{name}.msgpack").read_bytes()


def kept_of(version: int, kind: str) -> list[dict]:
    """The kept messages of a side, or of a side and a type."""
    return [msgpack.unpackb(path.read_bytes()) for path in sorted((KEPT / f"v{version}").glob(f"{kind}*.msgpack"))]


def edited(data: bytes, **changes: object) -> bytes:
    """The same message with another value in fields that it has."""
    value = msgpack.unpackb(data)
    assert changes.keys() <= value.keys()
    return msgpack.packb(value | changes)


def missing(now: object, then: object, where: str) -> list[str]:
    """Places where ``now`` lacks a field of ``then`` or has another type: what stops a peer that reads ``then``."""
    if isinstance(then, dict):
        if not isinstance(now, dict):
            return [where]
        lacks = [f"{where}.{key}" for key in then.keys() - now.keys()]
        return lacks + [
            place for key in then.keys() & now.keys() for place in missing(now[key], then[key], f"{where}.{key}")
        ]
    if isinstance(then, list):
        if not isinstance(now, list):
            return [where]
        return [place for item in now for place in missing(item, then[0], f"{where}[]")] if then else []
    return [where] if then is not None and now is not None and type(now) is not type(then) else []


def understood(version: int, side: str, data: bytes) -> None:
    """Fails unless a peer of ``version`` can read this message of ``side``: it ignores what it does not know."""
    value = msgpack.unpackb(data)
    same = [m for m in kept_of(version, side) if m["type"] == value["type"] and m.get("kind") == value.get("kind")]
    assert same, f"version {version} has no {value['type']} {value.get('kind', '')}"
    places = [missing(value, m, value["type"]) for m in same]
    assert [] in places, places


# --- the bytes themselves ---------------------------------------------------------------------------------------------


def test_every_version_that_is_spoken_is_kept_whole() -> None:
    assert set(range(OLDEST, NEWEST + 1)) == set(VERSIONS)
    names = {path.stem for path in (KEPT / f"v{NEWEST}").iterdir()}
    for side, union in (("client", messages.FromClient), ("daemon", messages.FromDaemon)):
        for kind in typing.get_args(union):
            tag = str(kind.__struct_config__.tag)
            assert any(name.startswith(f"{side}-{tag}") for name in names), f"record a {tag}"
    assert {f"daemon-event-{kind}" for kind in typing.get_args(messages.EventKind)} <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_what_was_said_is_read_and_none_of_it_is_lost(path: Path) -> None:
    side, tag = path.stem.split("-")[:2]
    message = DECODERS[side](path.read_bytes())
    assert message.__struct_config__.tag == tag
    then, now = msgpack.unpackb(path.read_bytes()), msgpack.unpackb(messages.encode(message))
    assert missing(now, then, tag) == []
    assert {key: now[key] for key in then if not isinstance(then[key], dict | list)} == {
        key: value for key, value in then.items() if not isinstance(value, dict | list)
    }


@pytest.mark.parametrize("version", SPOKEN)
def test_nothing_that_an_older_peer_reads_has_another_value(version: int) -> None:
    """A new kind of event, state or outcome is a new version: an older reader refuses the whole message."""
    kinds = {m["kind"] for m in kept_of(version, "daemon-event")}
    assert set(typing.get_args(messages.EventKind)) == kinds
    states = typing.get_args(typing.get_type_hints(messages.ArchiveState)["state"])
    said = {a["state"] for m in kept_of(version, "daemon-event") for a in [m["archive"]] if a}
    assert set(states) == said


# --- an older client and this daemon ----------------------------------------------------------------------------------


@pytest.fixture
def served(start, folder, tiny):
    """A daemon with the archive that the kept messages speak of."""
    path = tiny.write(folder / "model.foundry", variants={"ep=8": 8, "ep=4,tp=2": 8}, delay=1.0)
    start(path)
    return path


@pytest.fixture
def door(runtime_dir):
    """Opens connections to the door that say nothing by themselves."""
    open_ones = []

    def begin() -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        open_ones.append(sock)
        sock.settimeout(20)
        sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
        return sock

    yield begin
    for sock in open_ones:
        sock.close()


def asked(sock: socket.socket, data: bytes, descriptors: int = 0) -> tuple[bytes, list[int]]:
    wire.send(sock, data)
    with wire.receive(sock, descriptors) as packet:
        return packet.payload, [packet.take() for _ in range(packet.count)]


@pytest.mark.parametrize("version", SPOKEN)
def test_a_kept_client_gets_its_lease_and_is_told_when_it_ends(served, door, control, version):
    sock = door()
    welcome, _ = asked(sock, kept(version, "client-hello"))
    assert msgpack.unpackb(welcome)["protocol"] == version
    understood(version, "daemon", welcome)
    granted, fds = asked(sock, kept(version, "client-attach"), 2)
    understood(version, "daemon", granted)
    expected = msgpack.unpackb(kept(version, "daemon-granted"))
    assert msgpack.unpackb(granted)["generation"] > expected["generation"]  # no daemon gives one twice
    assert msgpack.unpackb(granted) | {"lease": 1, "generation": expected["generation"]} == expected
    with closing(Sealed.adopt(fds[0], 65536)) as archive, archive.map() as mapping:
        assert bytes(mapping).rstrip(b"\0") == served.read_bytes()
    with closing(Sealed.adopt(fds[1], 12)) as plan, plan.map() as mapping:
        assert bytes(mapping) == b"model ep=8 2"
    refused, _ = asked(second := door(), kept(version, "client-hello"))
    refused, _ = asked(second, edited(kept(version, "client-attach"), archive="none"))
    understood(version, "daemon", refused)
    assert msgpack.unpackb(refused)["reason"] == "not_in_archive"
    control().stop()
    with wire.receive(sock) as packet:
        understood(version, "daemon", packet.payload)
        assert msgpack.unpackb(packet.payload)["type"] == "ended"


@pytest.mark.parametrize("version", SPOKEN)
def test_a_kept_client_is_answered_over_control(served, runtime_dir, folder, tiny, door, context, join, version):
    other = tiny.write(folder / "other.foundry")
    damaged = tiny.write(folder / "damaged.foundry")
    damaged.write_bytes(b"0" * 64 + damaged.read_bytes()[64:])
    asker, subscriber = (context.socket(zmq.DEALER) for _ in range(2))
    heard = []

    def ask(request: str, answer: str, /, dealer: typing.Any = asker, **changes: object) -> None:
        dealer.send(edited(kept(version, f"client-{request}"), **changes))
        while True:
            assert dealer.poll(20_000), f"no answer to {request}"
            data = dealer.recv()
            understood(version, "daemon", data)
            if msgpack.unpackb(data)["type"] == answer:
                return

    try:
        for dealer in (asker, subscriber):
            dealer.linger = 0
            dealer.connect(f"ipc://{RuntimeDir(runtime_dir).control}")
        ask("subscribe", "status", dealer=subscriber)
        join(2).close()
        ask("getstatus", "status")
        ask("listarchives", "archives")
        ask("loadarchive", "done", path=str(other))
        ask("unloadarchive", "done")
        ask("loadarchive", "refused", path=str(damaged), name="damaged")
        ask("stop", "done")
        while "stopping" not in heard:
            assert subscriber.poll(20_000), heard
            data = subscriber.recv()
            understood(version, "daemon", data)
            heard.append(msgpack.unpackb(data).get("kind", "tick"))
    finally:
        asker.close()
        subscriber.close()
    loading = ["archive_loading", "archive_loaded", "archive_unloaded", "archive_loading", "archive_failed"]
    assert [k for k in heard if k != "tick"] == ["lease_taken", "lease_ended", *loading, "stopping"]


@pytest.mark.parametrize("version", [version for version in SPOKEN if version >= 2])
def test_a_kept_client_comes_back_and_reports(served, start, runtime_dir, door, join, control, eventually, version):
    runtime = RuntimeDir(runtime_dir)
    join(5, keep=False)  # the next daemon finds written down that a rank had the archive, and waits for it
    control().stop()
    eventually(lambda: not runtime.answering(), "the first daemon is gone")
    starter = threading.Thread(target=start, args=(served,))
    starter.start()
    eventually(runtime.answering, "the second daemon listens")
    sock = door()
    asked(sock, kept(version, "client-hello"))
    wanted, _ = asked(sock, kept(version, "client-reattach"))
    understood(version, "daemon", wanted)
    assert wanted == kept(version, "daemon-wanted")
    # What the daemon would have inflated; the kept device and inode are of other memory.
    with closing(Sealed.from_bytes("x", served.read_bytes().ljust(65536, b"\0"))) as memory:
        wire.send(sock, kept(version, "client-offer"), (memory.fd,))
    with wire.receive(sock) as packet:
        understood(version, "daemon", packet.payload)
        assert packet.payload == edited(kept(version, "daemon-resumed"), own_memory=True)
    wire.send(sock, kept(version, "client-report"))
    client = control()
    eventually(lambda: client.status().leases[0].outcome == "fallback", "the report was read")
    assert client.status().leases[0].reason == "layout_diverged"
    assert [a.source for a in client.archives()] == ["rank"]
    starter.join()


@pytest.mark.parametrize("version", VERSIONS)
def test_a_kept_client_that_moved_on_is_refused_with_both_ranges(served, door, version):
    newer = NEWEST + 1
    hello = edited(kept(version, "client-hello"), oldest=newer, newest=newer, build="foundryd 9.9")
    refused, _ = asked(door(), hello)
    understood(version, "daemon", refused)
    message = msgpack.unpackb(refused)["message"]
    assert f"9.9 speaks protocol versions {newer} to {newer} and this daemon" in message
    assert f"speaks {OLDEST} to {NEWEST}" in message


# --- this client and an older daemon ----------------------------------------------------------------------------------


class OldDaemon:
    """Answers with what a daemon of one version said, and notes what it hears."""

    def __init__(self, folder: Path, version: int) -> None:
        self.heard: list[bytes] = []
        self.version = version
        runtime = RuntimeDir(folder)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(os.fspath(runtime.door))
        self._listener.listen()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{runtime.control}")
        self.end_leases = threading.Event()
        self.refuse: str | None = None
        self._closed = False
        self._threads = [threading.Thread(target=self._serve_door), threading.Thread(target=self._serve_control)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._closed = True
        self.end_leases.set()
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()
        self._listener.close()
        self._router.close()
        self._context.term()

    def said(self, kind: str) -> list[dict]:
        """What was heard of a type, or of all."""
        return [m for m in map(msgpack.unpackb, list(self.heard)) if m["type"] == kind]

    def _serve_door(self) -> None:
        self._listener.settimeout(0.05)
        connections: list[threading.Thread] = []
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            connections.append(threading.Thread(target=self._serve_one, args=(sock,)))
            connections[-1].start()
        for thread in connections:
            thread.join(30)

    def _serve_one(self, sock: socket.socket) -> None:
        with (
            sock,
            closing(Sealed.from_bytes("x", bytes(65536))) as archive,
            closing(Sealed.from_bytes("y", bytes(12))) as plan,
        ):
            fds = (archive.fd, plan.fd)
            answers = {"hello": "welcome", "attach": "granted", "reattach": "resumed"}
            sock.settimeout(0.05)
            leased = False
            while not self._closed and not (leased and self.end_leases.is_set()):
                try:
                    packet = wire.receive(sock)
                except TimeoutError:
                    continue
                if packet is None:
                    return
                self.heard.append(packet.payload)
                kind = msgpack.unpackb(packet.payload)["type"]
                if self.refuse is not None and kind == ("hello" if self.refuse == "versions" else "attach"):
                    wire.send(sock, kept(self.version, f"daemon-refused-{self.refuse}"))
                    return
                if kind in answers:
                    leased = kind != "hello"
                    wire.send(sock, kept(self.version, f"daemon-{answers[kind]}"), fds if kind == "attach" else ())
            if leased:
                wire.send(sock, kept(self.version, "daemon-ended"))

    def _serve_control(self) -> None:
        answers = {"getstatus": "status", "subscribe": "status", "listarchives": "archives"}
        while not self._closed:
            if not self._router.poll(50):
                continue
            peer, data = self._router.recv_multipart()
            self.heard.append(data)
            kind = msgpack.unpackb(data)["type"]
            answer = answers.get(kind, "done") if self.refuse is None else "refused-control"
            self._router.send_multipart([peer, kept(self.version, f"daemon-{answer}")])
            if kind == "subscribe":
                for path in sorted((KEPT / f"v{self.version}").glob("daemon-event-*.msgpack")):
                    self._router.send_multipart([peer, path.read_bytes()])
                self._router.send_multipart([peer, kept(self.version, "daemon-tick")])


@pytest.fixture
def old(folder):
    """Starts a daemon of a version in ``folder``."""
    daemons = []

    def begin(version: int) -> OldDaemon:
        daemons.append(OldDaemon(folder, version))
        return daemons[-1]

    yield begin
    for daemon in daemons:
        daemon.close()


@pytest.mark.parametrize("version", SPOKEN)
def test_this_rank_is_served_by_a_kept_daemon_and_comes_back_to_it(old, folder, eventually, version):
    daemon = old(version)
    granted = msgpack.unpackb(kept(version, "daemon-granted"))
    with attach(runtime_dir=folder, archive="model", rank=2, variant="ep=8", timeout=20) as attachment:
        assert (attachment.name, attachment.digest, attachment.rank) == ("model", granted["digest"], 2)
        assert (len(attachment.archive), len(attachment.plan)) == (65536, 12)
        assert attachment.daemon.protocol == version
        phases = report.Report("restored", "x1", "default", 2, phases=dict.fromkeys(messages.PHASES, 1.0))
        report.over_lease(attachment, phases)
        eventually(lambda: daemon.said("attach") and (version == 1 or daemon.said("report")), "all was heard")
        daemon.end_leases.set()
        eventually(lambda: attachment.lost, "the lease ended")
        daemon.end_leases.clear()
        eventually(lambda: attachment.lease.returned, "the lease is back")
    for data in daemon.heard:
        understood(version, "client", data)
    kinds = {m["type"] for m in map(msgpack.unpackb, daemon.heard)}
    assert kinds == ({"hello", "attach"} if version == 1 else {"hello", "attach", "report", "reattach"})


@pytest.mark.parametrize("version", SPOKEN)
def test_this_commands_requests_are_answered_by_a_kept_daemon(old, folder, version):
    daemon = old(version)

    def ask(what: typing.Callable[[ControlClient], typing.Any]) -> typing.Any:
        with ControlClient(folder, 20) as client:  # the kept answers are those to a client's first request
            return what(client)

    status = ask(ControlClient.status)
    assert (status.ready, status.protocol, len(status.archives), len(status.leases)) == (True, version, 1, 1)
    assert [v.name for v in ask(ControlClient.archives)[0].variants] == ["ep=8", "ep=4,tp=2"]
    assert ask(lambda client: client.load(folder / "other.foundry", "other")).pid == status.pid
    assert ask(lambda client: client.unload("other")).pid == status.pid
    with ControlClient(folder, 20) as client:
        assert client.subscribe().instance == status.instance
        pushed = [client.pushed(20) for _ in range(len(typing.get_args(messages.EventKind)) + 1)]
    assert {getattr(p, "kind", "tick") for p in pushed} == {*typing.get_args(messages.EventKind), "tick"}
    daemon.refuse = "control"
    with pytest.raises(ArchiveDigestError, match="are not those that were written"):
        ask(lambda client: client.load(folder / "damaged.foundry"))
    daemon.refuse = None
    ask(ControlClient.stop)
    for data in daemon.heard:
        understood(version, "client", data)
    assert {m["protocol"] for m in map(msgpack.unpackb, daemon.heard) if "protocol" in m} == {version}


@pytest.mark.parametrize("version", SPOKEN)
def test_a_kept_refusal_is_the_error_that_it_was(old, folder, version):
    old(version).refuse = "door"
    with pytest.raises(NotInArchiveError, match="holds no archive 'none' but model"):
        attach(runtime_dir=folder, archive="none", variant="ep=8", timeout=20)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_that_moved_on_names_both_ranges_when_a_kept_daemon_refuses(old, folder, monkeypatch, version):
    newer = version + 1
    monkeypatch.setattr(daemon_client, "OLDEST", newer)
    monkeypatch.setattr(daemon_client, "NEWEST", newer)
    daemon = old(version)
    daemon.refuse = "versions"
    pattern = rf"the daemon \(.*\) speaks protocol versions .* to {version} and this .* speaks {newer} to {newer}"
    begin = time.monotonic()
    with pytest.raises(ProtocolError, match=pattern):
        attach(runtime_dir=folder, variant="ep=8", timeout=20)
    with pytest.raises(ProtocolError, match=pattern):
        ControlClient(folder, 20)
    assert time.monotonic() - begin < 10
    assert daemon.said("attach") == []
    assert msgspec.msgpack.decode(daemon.heard[0], type=messages.Hello).newest == newer
