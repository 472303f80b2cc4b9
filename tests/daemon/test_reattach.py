# SPDX-License-Identifier: Apache-2.0
"""A daemon that is restarted serves the memory that ranks still hold, and gives them their leases back."""

import fcntl
import os
import signal
import socket
import threading
import time
from contextlib import closing
from dataclasses import replace

import pytest

from foundryd.daemon import messages, wire
from foundryd.daemon.launch import stop_daemon
from foundryd.daemon.messages import Attach, Granted, Hello, Offer, Reattach, Refused, Resumed, Wanted, Welcome
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.sealed import SEALS, Sealed
from foundryd.daemon.store import Store
from foundryd.errors import RankTaken

HOLDER = """
import sys
from pathlib import Path
from foundryd.session.client import attach
a = attach(runtime_dir=Path(sys.argv[1]), rank=int(sys.argv[2]), variant="ep=8", timeout=20)
print(a.generation, flush=True)
for line in sys.stdin:
    print(a.lost, a.lease.returned, a.lease.own_memory, bytes(a.plan).decode(), flush=True)
"""


def say(child):
    child.stdin.write("?\n")
    child.stdin.flush()
    return child.stdout.readline().split(maxsplit=3)


def kill(started):
    started.process.kill()
    started.process.wait()


@pytest.fixture
def hold(spawn, runtime_dir):
    """Ranks in processes of their own."""

    def begin(*ranks):
        children = [spawn(HOLDER, runtime_dir, rank) for rank in ranks]
        for child in children:
            assert int(child.stdout.readline()) > 0
        return children

    return begin


@pytest.fixture
def knock(runtime_dir):
    """Greeted connections to the door."""
    socks = []

    def connect(newest=messages.NEWEST):
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socks.append(sock)
        sock.settimeout(20)
        sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
        assert isinstance(ask(sock, Hello(1, newest, "test")), Welcome)
        return sock

    yield connect
    for sock in socks:
        sock.close()


def ask(sock, message, *fds):
    wire.send(sock, messages.encode(message), fds)
    return messages.decode_answer(wire.receive(sock).payload)


@pytest.fixture
def loading(folder, tiny, runtime_dir, start, eventually):
    """A daemon in another thread of starting, which loads ``model`` for a second."""
    path = tiny.write(folder / "model.foundry", variants={"ep=8": 8}, delay=1)
    begun = []
    starter = threading.Thread(target=lambda: begun.append(start(path)))
    starter.start()
    eventually(RuntimeDir(runtime_dir).answering, "it answers")
    yield path
    starter.join(30)
    assert begun[0].status.ready


def request(path, **change):
    data = path.read_bytes()
    values = {"archive": "model", "digest": data[:64].decode(), "archive_bytes": 65536, "device": 0, "inode": 0}
    values |= {"group": "default", "rank": 0, "variant": "ep=8", "generation": 1}
    return Reattach(**values | change)


def test_a_killed_daemons_memory_is_served_by_the_next_one(start, archive, hold, control, eventually, join, copies):
    first = start(archive)
    ranks, generations = hold(*range(5)), set()
    before = copies(*(r.pid for r in ranks))
    for _ in range(2):
        kill(first)
        first = start(archive)
        client = control()
        eventually(lambda client=client: len(client.status().leases) == 5, "every rank is back")
        status = client.status()
        assert [(a.state, a.source) for a in status.archives] == [("resident", "rank")]
        assert [(x.rank, x.pid, x.own_memory) for x in status.leases] == [
            (rank, child.pid, False) for rank, child in enumerate(ranks)
        ]
        generations.update(x.generation for x in status.leases)
    with pytest.raises(RankTaken):
        join(2)
    late = join(7)
    assert {late.generation} == generations
    assert copies(first.process.pid, os.getpid(), *(r.pid for r in ranks)) == before
    assert len(before) == 1
    for rank, child in enumerate(ranks):
        assert say(child) == ["False", "2", "False", f"model ep=8 {rank}\n"]


def test_a_stopped_daemons_memory_is_served_by_the_next_one(
    start, archive, hold, runtime_dir, control, eventually, copies
):
    start(archive)
    ranks = hold(0, 1)
    stop_daemon(runtime_dir)
    second = start(archive)
    eventually(lambda: len(control().status().leases) == 2, "both ranks are back")
    assert control().status().archives[0].source == "rank"
    assert len(copies(second.process.pid, *(r.pid for r in ranks))) == 1


def test_a_rank_that_is_too_late_keeps_its_own_memory_and_is_counted(start, archive, hold, control, eventually, copies):
    kill_first = start(archive)
    (rank,) = hold(3)
    os.kill(rank.pid, signal.SIGSTOP)
    kill(kill_first)
    second = start(archive)
    assert second.status.archives[0].source == "file"
    os.kill(rank.pid, signal.SIGCONT)
    client = control()
    eventually(lambda: [x.own_memory for x in client.status().leases] == [True], "the rank is back")
    assert len(copies(second.process.pid, rank.pid)) == 2
    assert say(rank) == ["False", "1", "True", "model ep=8 3\n"]
    rank.kill()
    rank.wait()
    eventually(lambda: not client.status().leases, "the lease ended with the rank")


def test_without_ranks_a_restart_waits_for_nobody(start, archive, join, eventually, control):
    first = start(archive)
    join(0).close()
    eventually(lambda: not control().status().leases, "the lease ended")
    kill(first)
    assert start(archive).status.uptime_ms < 2000


def test_a_rank_of_a_group_that_was_made_anew_is_fenced(start, archive, control, join, knock):
    start(archive)
    assert join(5, group="g").generation > 4
    answer = ask(knock(), request(archive, group="g", generation=4))
    assert (answer.reason, "is of generation 4" in answer.message) == ("generation_fenced", True)
    assert [x.group for x in control().status().leases] == ["g"]
    back = knock()
    assert ask(back, request(archive, group="h", generation=4)) == Resumed(2, 4, True)
    assert join(1, group="h").generation == 4
    ahead = join(5, group="ahead").generation
    assert ask(knock(), request(archive, group="far", generation=ahead + 7)).generation == ahead + 7
    assert join(0, group="later").generation == ahead + 8


def test_a_rank_that_slept_through_a_restart_is_fenced_from_its_group_made_anew(
    start, archive, hold, control, join, eventually
):
    """Two daemons in a row give no group the same generation, even if no rank told the second of the first."""
    first = start(archive)
    (rank,) = hold(3)
    os.kill(rank.pid, signal.SIGSTOP)
    kill(first)
    start(archive)
    join(4)
    os.kill(rank.pid, signal.SIGCONT)
    eventually(lambda: say(rank)[0] == "True", "it lost its lease")
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert [x.rank for x in control().status().leases] == [4]
    assert say(rank) == ["True", "0", "False", "model ep=8 3\n"]


def inflated(path, change=lambda data: None):
    data = bytearray(path.read_bytes().ljust(65536, b"\0"))
    change(data)
    return data


def unsealed(data, seals=0):
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(fd, data)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def flip(data):
    data[data.index(b"delay")] ^= 1


def sparse(data):
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    os.write(fd, bytes(data).rstrip(b"\0"))
    os.ftruncate(fd, len(data))
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: unsealed(inflated(path)), "could change under this process"),
        (lambda path: unsealed(inflated(path), SEALS & ~fcntl.F_SEAL_WRITE), "could change under this process"),
        (lambda path: unsealed(inflated(path), SEALS & ~fcntl.F_SEAL_SHRINK), "could change under this process"),
        (lambda path: unsealed(inflated(path)[:-1], SEALS), "65535 bytes"),
        (lambda path: sparse(inflated(path)), "no reader may have to find the others"),
        (lambda path: os.open(path, os.O_RDONLY), "could change under this process"),
        (lambda path: unsealed(inflated(path, flip), SEALS), "copy of another archive"),
        (lambda path: unsealed(b"\0" * 65536, SEALS), "not an archive"),
    ],
)
def test_memory_that_is_not_the_archives_is_refused_and_the_file_is_used(
    loading, knock, make, message, control, eventually
):
    sock = knock()
    assert isinstance(ask(sock, request(loading)), Wanted)
    fd = make(loading)
    answer = ask(sock, Offer(), fd)
    os.close(fd)
    assert isinstance(answer, Refused)
    assert message in answer.message
    client = control()
    eventually(lambda: client.status().ready, "it is ready")
    assert [a.source for a in client.archives()] == ["file"]


def test_the_next_rank_is_asked_when_one_leaves_or_lies(loading, knock, control, eventually):
    leaver, liar, honest, waiting = knock(), knock(), knock(), knock()
    assert isinstance(ask(leaver, request(loading, rank=1)), Wanted)
    good = Sealed.from_bytes("x", inflated(loading))
    device, inode = good.inode
    for sock, rank in ((liar, 2), (honest, 3), (waiting, 4)):
        wire.send(sock, messages.encode(request(loading, rank=rank, device=device, inode=inode)))
    leaver.close()
    assert isinstance(messages.decode_answer(wire.receive(liar).payload), Wanted)
    bad = unsealed(inflated(loading, flip), SEALS)
    assert isinstance(ask(liar, Offer(), bad), Refused)
    os.close(bad)
    assert isinstance(messages.decode_answer(wire.receive(honest).payload), Wanted)
    assert ask(honest, Offer(), good.fd) == Resumed(1, 1, False)
    good.close()
    assert messages.decode_answer(wire.receive(waiting).payload) == Resumed(2, 1, False)
    client = control()
    eventually(lambda: client.status().ready, "it is ready")
    assert [a.source for a in client.archives()] == ["rank"]


def test_what_nobody_asked_for_closes_the_connection(start, archive, knock):
    start(archive)
    memory = Sealed.from_bytes("x", b"x")
    for newest, message, fds in (
        (2, Offer(), (memory.fd,)),
        (2, Offer(), ()),
        (1, request(archive), ()),
    ):
        answer = ask(knock(newest), message, *fds)
        assert answer.reason == "protocol"
    answer = ask(knock(), request(archive, digest="0" * 64))
    assert answer.reason == "not_in_archive"
    sock = knock()
    assert ask(sock, request(archive)) == Resumed(1, 1, True)
    assert ask(sock, request(archive)).reason == "protocol"
    for generation in (0, -1, 1 << 60):
        assert ask(knock(), request(archive, rank=4, generation=generation)).reason == "usage"


def test_a_client_of_version_1_is_served_as_before(start, archive, knock):
    start(archive)
    sock = knock(1)
    wire.send(sock, messages.encode(Attach("", "default", 2, "ep=8")))
    with wire.receive(sock, 2) as packet:
        assert isinstance(messages.decode_answer(packet.payload), Granted)
        assert packet.count == 2


def test_a_daemon_of_version_1_gives_a_lease_and_the_rank_keeps_its_memory(folder, eventually):
    """The door of an older build, twice: it knows nothing of ``Reattach``."""
    from foundryd.session.client import attach

    heard = []
    granted = Granted(7, "m", "d" * 64, 10, 10, "default", 0, "ep=8", 1)

    def serve(listener):
        for _ in range(2):
            sock, _ = listener.accept()
            with sock, closing(Sealed.from_bytes("x", b"0123456789")) as memory:
                sock.settimeout(20)
                heard.append(messages.decode_request(wire.receive(sock).payload))
                wire.send(sock, messages.encode(Welcome(1, "foundryd 0", 1, "x")))
                heard.append(messages.decode_request(wire.receive(sock).payload))
                wire.send(sock, messages.encode(granted), (memory.fd, memory.fd))
                if len(heard) == 4:
                    wire.receive(sock)  # until the rank closes

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(RuntimeDir(folder).door))
        listener.listen()
        listener.settimeout(20)
        server = threading.Thread(target=serve, args=(listener,))
        server.start()
        before = len(os.listdir("/proc/self/fd"))
        with attach(runtime_dir=folder, timeout=20) as attachment:
            eventually(lambda: attachment.lease.returned == 1, "the lease is back")
            assert attachment.lease.own_memory
            assert not attachment.lost
            assert bytes(attachment.archive) == b"0123456789"
        server.join(20)
        assert heard[3] == Attach("d" * 64, "default", 0, "ep=8")
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_rank_waits_without_using_anything_and_closes_at_once(start, archive, join, eventually):
    first = start(archive)
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    attachment = join(0)
    kill(first)
    eventually(lambda: attachment.lost, "the lease is lost")
    begin = os.times()
    threading.Event().wait(3)
    end = os.times()
    assert end.user + end.system - begin.user - begin.system < 0.3
    attachment.close()
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_memory_that_comes_while_the_file_is_inflated_is_the_copy_that_stays(folder, tiny):
    path = tiny.write(folder / "model.foundry")
    memory = Sealed.from_bytes("x", inflated(path))
    inode = memory.inode

    def inflate(reader, fd):
        store.examine(memory, reader.digest, [path])
        tiny.TOOLS.inflate(reader, fd)

    before = len(os.listdir("/proc/self/fd"))
    store = Store(replace(tiny.TOOLS, inflate=inflate))
    resident = store.load(path)
    assert resident.memory.inode == inode
    assert resident.source == "rank"
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # its mapping
    late = Sealed.from_bytes("x", inflated(path))
    store.examine(late, resident.digest, [path])
    assert store.find("model").memory.inode == inode
    assert late.fd == -1
    store.close()
    assert memory.fd == -1


def test_ranks_that_come_back_keep_their_group_from_ranks_that_come_anew(loading, knock):
    new, old = knock(), knock()
    wire.send(new, messages.encode(Attach("model", "default", 7, "ep=8")))
    assert isinstance(ask(old, request(loading, generation=9)), Wanted)
    good = Sealed.from_bytes("x", inflated(loading))
    assert ask(old, Offer(), good.fd).generation == 9
    good.close()
    with wire.receive(new, 2) as packet:
        assert messages.decode_answer(packet.payload).generation == 9
