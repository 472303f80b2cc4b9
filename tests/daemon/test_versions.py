# SPDX-License-Identifier: Apache-2.0
"""Two sides of different versions say so, whichever is the newer one."""

import os
import socket
import threading

import pytest

from foundryd.daemon import messages, wire
from foundryd.daemon.messages import Granted, Hello, Refused, Welcome
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonError, ProtocolError
from foundryd.session.client import attach


@pytest.fixture
def pretend(folder):
    """A daemon of another version: answers every packet with the next of the given ones."""
    threads, listeners = [], []

    def begin(*answers):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(os.fspath(RuntimeDir(folder).door))
        listener.listen()
        listener.settimeout(20)
        listeners.append(listener)

        def serve():
            sock, _ = listener.accept()
            with sock:
                sock.settimeout(20)
                for answer, fds in answers:
                    wire.receive(sock)
                    wire.send(sock, answer if isinstance(answer, bytes) else messages.encode(answer), fds)
                    for fd in fds:
                        os.close(fd)

        threads.append(threading.Thread(target=serve))
        threads[-1].start()
        return folder

    yield begin
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    for listener in listeners:
        listener.close()


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(("oldest", "newest"), [(3, 4), (0, 0)])
def test_the_daemon_refuses_a_client_of_other_versions_with_both_ranges(start, archive, runtime_dir, oldest, newest):
    start(archive)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
        wire.send(sock, messages.encode(Hello(oldest, newest, "foundryd 9.9")))
        answer = messages.decode_answer(wire.receive(sock).payload)
        assert isinstance(answer, Refused)
        assert (answer.oldest, answer.newest, answer.build) == (messages.OLDEST, messages.NEWEST, messages.BUILD)
        assert f"foundryd 9.9 speaks protocol versions {oldest} to {newest}" in answer.message
        assert wire.receive(sock) is None


@pytest.mark.parametrize(("newest", "version"), [(1, 1), (2, 2), (7, 2)])
def test_the_newest_common_version_is_spoken(start, archive, runtime_dir, newest, version):
    start(archive)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(os.fspath(RuntimeDir(runtime_dir).door))
        wire.send(sock, messages.encode(Hello(1, newest, "foundryd 9.9")))
        assert messages.decode_answer(wire.receive(sock).payload).protocol == version


@pytest.mark.parametrize(("oldest", "newest"), [(3, 4), (0, 0)])
def test_the_client_names_both_ranges_when_the_daemon_refuses(pretend, oldest, newest):
    refused = Refused("protocol", "no", oldest=oldest, newest=newest, build="foundryd 9.9")
    folder = pretend((refused, ()))
    with pytest.raises(ProtocolError, match=rf"9.9\) speaks protocol versions {oldest} to {newest} and .* 1 to 2"):
        attach(runtime_dir=folder)


def test_the_client_refuses_a_version_it_did_not_offer(pretend):
    folder = pretend((Welcome(7, "foundryd 9.9", 1, "x"), ()))
    with pytest.raises(ProtocolError, match="chose protocol version 7 and this process"):
        attach(runtime_dir=folder)


def test_the_client_refuses_nonsense(pretend):
    folder = pretend((b"\xc1nonsense", ()))
    with pytest.raises(ProtocolError, match="not msgpack"):
        attach(runtime_dir=folder)


GRANTED = Granted(1, "m", "d" * 64, 10, 10, "default", 0, "ep=8", 1)


@pytest.mark.parametrize(
    ("count", "seal", "kind", "message"),
    [
        (0, True, ProtocolError, "with 0 descriptors and not 2"),
        (1, True, ProtocolError, "with 1 descriptors and not 2"),
        (3, True, ProtocolError, "more than 2 descriptors"),
        (2, False, DaemonError, "could change under this process"),
    ],
)
def test_memory_that_is_not_as_agreed_is_refused_and_nothing_leaks(pretend, eventually, count, seal, kind, message):
    from foundryd.daemon.sealed import Sealed

    before = descriptors()
    fds = []
    for _ in range(count):
        if seal:
            fds.append(Sealed.from_bytes("x", b"0123456789").fd)
        else:
            fds.append(os.memfd_create("x", os.MFD_ALLOW_SEALING))
            os.ftruncate(fds[-1], 10)
    folder = pretend((Welcome(1, "x", 1, "x"), ()), (GRANTED, fds))
    listening = 1
    with pytest.raises(kind, match=message):
        attach(runtime_dir=folder)
    eventually(lambda: descriptors() == before + listening, "the pretended daemon has closed its own")


def test_a_daemon_that_hangs_up_is_an_error_with_what_to_do(pretend):
    folder = pretend((Welcome(1, "x", 1, "x"), ()))
    with pytest.raises(DaemonError, match="closed the connection without an answer"):
        attach(runtime_dir=folder)


def test_a_daemon_that_says_nothing_has_a_deadline(folder):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(RuntimeDir(folder).door))
        listener.listen()
        with pytest.raises(DaemonError, match="did not answer in time"):
            attach(runtime_dir=folder, timeout=0.2)
