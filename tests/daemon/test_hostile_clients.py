# SPDX-License-Identifier: Apache-2.0
"""A client that misbehaves loses what it has; the healthy ones notice nothing."""

import array
import itertools
import os
import pickle
import random
import socket
import threading
import time
from contextlib import suppress

import msgpack
import pytest
import zmq

from foundryd.daemon import messages, wire
from foundryd.daemon.messages import Attach, Ended, Granted, Hello, Refused, Welcome
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonNotRunning, PermissionRefused

NONSENSE = [
    b"\x00",
    b"\xc1",
    b"GET / HTTP/1.1\r\n\r\n",
    pickle.dumps(ValueError("x")),
    b"\x91" * 60000 + b"\xc0",
    b"\x81\xa4type" * 10000,
    b"\xdf\xff\xff\xff\xff",
    b"x" * wire.MAX_PACKET,
    msgpack.packb({"type": "attach", "archive": 7}),
    msgpack.packb({"type": "granted"}),
    msgpack.packb({"type": "__import__('os').system('true')"}),
    random.Random(1).randbytes(3000),
]


@pytest.fixture
def healthy(start, archive, join, control):
    """A daemon with a healthy rank and a healthy control client, both still well at the end."""
    started = start(archive)
    attachment = join(0)
    client = control()
    yield started
    assert started.process.poll() is None
    assert not attachment.lost
    assert client.status().ready
    assert bytes(join(7).plan) == b"model ep=8 7"
    assert {lease.rank for lease in client.status().leases} >= {0, 7}


@pytest.fixture
def knock(runtime_dir):
    """Raw connections to the door."""
    socks = []

    def connect():
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(20)
        sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
        socks.append(sock)
        return sock

    yield connect
    for sock in socks:
        sock.close()


def ask(sock, message):
    wire.send(sock, messages.encode(message))
    return heard(sock)


def heard(sock):
    """The next message; a reset comes before the daemon's last word."""
    try:
        packet = wire.receive(sock, 2)
    except ConnectionResetError:
        packet = wire.receive(sock, 2)
    if packet is None:
        return None
    with packet:
        return messages.decode_answer(packet.payload)


def leased(knock, rank=1):
    sock = knock()
    assert isinstance(ask(sock, Hello(1, 1, "test")), Welcome)
    assert isinstance(ask(sock, Attach("", "default", rank, "ep=8")), Granted)
    return sock


def test_nonsense_at_the_door_closes_that_connection(healthy, knock, control):
    for data in NONSENSE:
        for sock in (knock(), leased(knock)):
            wire.send(sock, data)
            answer = heard(sock)
            assert isinstance(answer, Refused | Ended), data[:20]
            assert answer.reason == "protocol"
            assert heard(sock) is None
    assert [lease.rank for lease in control().status().leases] == [0]


def test_messages_out_of_turn_close_the_connection(healthy, knock):
    sent = (Hello(1, 1, "x"), Attach("", "default", 2, "ep=8"), messages.Stop(1, 1))
    for state, message in itertools.product(["new", "greeted", "leased"], sent):
        if (state, type(message)) in (("new", Hello), ("greeted", Attach)):
            continue
        sock = leased(knock) if state == "leased" else knock()
        if state == "greeted":
            ask(sock, Hello(1, 1, "x"))
        answer = ask(sock, message)
        assert answer.reason == "protocol"
        assert f"the door got {type(message).__name__} where it expects" in answer.message


def descriptors_of(pid):
    """What a process has open, by number, a socket with the path that it was reached by.

    Connections to the control socket are left out, which the library behind it accepts and closes when it likes, and
    plans, which a daemon makes when there is time.
    """
    sockets = {line.split()[6]: line.split()[7] for line in unix_sockets() if len(line.split()) > 7}
    found = {}
    for name in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            path = sockets.get(target[8:-1], "")
            if not path.endswith("/control") and "foundryd:plan" not in target:
                found[int(name)] = f"{target} {path}".strip()
    return found


def unix_sockets():
    with open("/proc/net/unix") as table:
        return table.read().splitlines()[1:]


def test_oversized_packets_and_uninvited_descriptors_close_the_connection(healthy, knock, eventually):
    before = descriptors_of(healthy.process.pid)
    for _ in range(5):
        sock = knock()
        sock.send(b"x" * (wire.MAX_PACKET + 1))
        assert heard(sock).reason == "protocol"
        sock = knock()
        hello = messages.encode(Hello(1, 1, "x"))
        sock.sendmsg([hello], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0] * 100))])
        assert heard(sock).reason == "protocol"
    try:
        eventually(lambda: len(descriptors_of(healthy.process.pid)) <= len(before), "no descriptor is left")
    except AssertionError as error:
        raise AssertionError(f"{before} became {descriptors_of(healthy.process.pid)}") from error


def test_half_open_clients_are_closed_in_time_and_hinder_nobody(healthy, knock, join):
    silent = [knock() for _ in range(600)]
    for rank in (1, 2, 3):
        assert join(rank).rank == rank
    greeted = knock()
    ask(greeted, Hello(1, 1, "x"))
    for sock in (*silent, greeted):
        assert heard(sock) is None


def test_a_client_that_never_reads_is_dropped_not_waited_for(healthy, knock, join):
    for _ in range(50):
        sock = knock()
        for _ in range(50):
            try:
                sock.send(messages.encode(Hello(1, 1, "x")), socket.MSG_DONTWAIT)
            except OSError:
                break
    assert join(4).rank == 4


@pytest.mark.parametrize("keep", [0, 900, 100000])
def test_a_flood_at_the_door_does_not_starve_others(healthy, runtime_dir, join, spawn, keep):
    """Connections that talk nonsense and close, that are held for a while, that are held for ever."""
    flood = """
import socket, sys
keep, held = int(sys.argv[2]), []
while True:
    try:
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.connect(sys.argv[1] + "/door")
        held.append(s)
        if not keep:
            s.send(b"\\x91" * 1000)
        while len(held) > keep:
            held.pop(0).close()
    except OSError:
        pass
"""
    child = spawn(flood, runtime_dir, keep)
    for rank in range(1, 6):
        assert join(rank).rank == rank
    assert child.poll() is None
    child.kill()


@pytest.fixture
def dealer(context, runtime_dir):
    """Raw DEALER sockets to control."""
    socks = []

    def connect():
        sock = context.socket(zmq.DEALER)
        sock.linger = 0
        sock.rcvtimeo = 20000
        sock.connect(f"ipc://{RuntimeDir(runtime_dir).control}")
        socks.append(sock)
        return sock

    yield connect
    for sock in socks:
        sock.close()


def test_nonsense_on_control_is_refused(healthy, dealer):
    sock = dealer()
    for data in (*NONSENSE, b""):
        sock.send(data)
        answer = messages.decode_answer(sock.recv())
        assert isinstance(answer, Refused), data[:20]
        assert answer.reason == "protocol"
        # The same peer can still ask something sensible.
        sock.send(messages.encode(messages.GetStatus(5, 1)))
        assert messages.decode_answer(sock.recv()).id == 5


def test_several_frames_and_door_messages_on_control_are_refused(healthy, dealer):
    sock = dealer()
    sock.send_multipart([messages.encode(messages.GetStatus(5, 1))] * 2)
    assert "has 2 frames instead of one" in messages.decode_answer(sock.recv()).message
    sock.send(messages.encode(Hello(1, 1, "x")))
    assert "belongs to the door" in messages.decode_answer(sock.recv()).message


def test_an_oversized_message_on_control_costs_the_connection(healthy, dealer):
    sock = dealer()
    sock.send(b"x" * (messages.MAX_REQUEST + 1))
    sock.rcvtimeo = 500
    with pytest.raises(zmq.Again):
        sock.recv()


def test_bytes_that_are_not_zeromq_hinder_nobody(healthy, runtime_dir):
    socks = []
    try:
        for data in (b"", b"\xff" * 10, b"GET / HTTP/1.0\r\n\r\n", random.Random(2).randbytes(70000)):
            for _ in range(20):
                sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.settimeout(5)
                sock.connect(os.fspath(RuntimeDir(runtime_dir).control))
                socks.append(sock)
                with suppress(OSError):
                    sock.sendall(data)
    finally:
        for sock in socks:
            sock.close()


def test_a_flood_on_control_does_not_starve_others(healthy, dealer, control, join):
    sock = dealer()
    sock.setsockopt(zmq.SNDHWM, 100000)
    stop = threading.Event()

    def flood():
        data = messages.encode(messages.GetStatus(1, 1))
        while not stop.is_set():
            try:
                sock.send(data, zmq.NOBLOCK)
            except zmq.Again:
                time.sleep(0.001)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        client = control()
        for rank in range(1, 4):
            assert client.status().ready
            assert join(rank).rank == rank
    finally:
        stop.set()
        thread.join()


AS_NOBODY = """
import os, sys
from pathlib import Path
os.setgroups([])
os.setgid(int(sys.argv[2])); os.setuid(65534)
from foundryd.session.client import attach
from foundryd.daemon.client import ControlClient
from foundryd.errors import FoundrydError
def tell(f):
    try:
        print("ok", f(), flush=True)
    except FoundrydError as error:
        print(type(error).__name__, error, flush=True)
tell(lambda: bytes(attach(runtime_dir=Path(sys.argv[1]), rank=5, variant="ep=8", timeout=10).plan).decode())
tell(lambda: ControlClient(Path(sys.argv[1]), 10).status().pid)
tell(lambda: ControlClient(Path(sys.argv[1]), 10).stop())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
class TestOtherUsers:
    def tell(self, spawn, runtime_dir, gid=65534):
        # The interpreter of a virtual environment may be out of another user's reach, so modules are loaded as root.
        code = AS_NOBODY.replace(
            "os.setgroups", "import foundryd.session.client, foundryd.daemon.client, encodings.idna\nos.setgroups", 1
        )
        child = spawn(code, runtime_dir, gid)
        return child.communicate(timeout=60)[0].splitlines()

    def test_the_directory_keeps_them_out(self, healthy, spawn, runtime_dir, folder):
        folder.chmod(0o755)
        answers = self.tell(spawn, runtime_dir)
        assert all(a.startswith("PermissionRefused") and "may not connect to" in a for a in answers), answers

    def test_the_kernels_word_keeps_them_out_where_the_directory_is_open(self, healthy, spawn, runtime_dir, folder):
        folder.chmod(0o755)
        runtime = RuntimeDir(runtime_dir)
        runtime.path.chmod(0o755)
        runtime.door.chmod(0o666)
        runtime.control.chmod(0o666)
        answers = self.tell(spawn, runtime_dir)
        expected = "PermissionRefused this daemon serves user 0 and user 65534 (pid "
        assert all(a.startswith(expected) for a in answers), answers

    def test_control_asks_the_kernel_too(self, healthy, spawn, runtime_dir, folder):
        folder.chmod(0o755)
        runtime = RuntimeDir(runtime_dir)
        runtime.path.chmod(0o755)
        runtime.control.chmod(0o666)
        code = """
import os, sys, zmq
os.setgroups([]); os.setgid(65534); os.setuid(65534)
from foundryd.daemon import messages
s = zmq.Context().socket(zmq.DEALER); s.linger = 0; s.rcvtimeo = 10000
s.connect("ipc://" + sys.argv[1])
for m in (messages.GetStatus(1, 1), messages.Stop(2, 1), messages.Subscribe(3, 1)):
    s.send(messages.encode(m)); print(messages.decode_answer(s.recv()), flush=True)
"""
        code = "import foundryd.daemon.messages\n" + code
        answers = spawn(code, runtime.control).communicate(timeout=60)[0].splitlines()
        assert len(answers) == 3
        assert all("reason='permission', message='user 65534 may not" in a for a in answers), answers

    def test_a_group_may_attach_and_look_but_not_stop(self, start, archive, spawn, runtime_dir, folder):
        folder.chmod(0o755)
        start(archive, group=12345)
        plan, pid, stop = self.tell(spawn, runtime_dir, 12345)
        assert plan == "ok model ep=8 5"
        assert pid.startswith("ok ")
        assert stop.startswith("PermissionRefused user 65534 may not ask for Stop")

    def test_a_member_of_another_group_may_not(self, start, archive, spawn, runtime_dir, folder):
        folder.chmod(0o755)
        start(archive, group=12345)
        assert all(a.startswith("PermissionRefused") for a in self.tell(spawn, runtime_dir, 54321))

    def test_a_daemon_of_a_stranger_is_not_trusted(self, folder, spawn):
        """Its memory would become code in this process."""
        folder.chmod(0o777)
        code = """
import os, socket, sys
os.setgid(65534); os.setuid(65534)
s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.bind(sys.argv[1] + "/door"); s.listen()
print(1, flush=True)
s.accept()[0].recv(1)
"""
        child = spawn(code, folder)
        assert child.stdout.readline()
        from foundryd.session.client import attach

        with pytest.raises(PermissionRefused, match="runs as user 65534, not as 0 or root"):
            attach(runtime_dir=folder)


def test_a_file_that_is_no_socket_is_nobody(folder):
    from foundryd.session.client import attach

    (folder / "door").touch()
    with pytest.raises(DaemonNotRunning):
        attach(runtime_dir=folder)
