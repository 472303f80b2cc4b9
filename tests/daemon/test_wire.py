# SPDX-License-Identifier: Apache-2.0
"""Packets keep their bounds, and no path leaves a descriptor behind."""

import array
import os
import signal
import socket
import threading
import time

import pytest

from foundryd.daemon import wire
from foundryd.errors import ProtocolError


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield ends
    for end in ends:
        end.close()


@pytest.fixture
def files():
    """Five open descriptors."""
    fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(5)]
    yield fds
    for fd in fds:
        os.close(fd)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def send_raw(sock, payload, fds):
    sock.sendmsg([payload], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


def test_packets_and_descriptors_arrive_whole_and_in_order(pair, files):
    a, b = pair
    wire.send(a, b"one", files[:2])
    wire.send(a, b"x" * wire.MAX_PACKET)
    with wire.receive(b, 2) as packet:
        assert packet.payload == b"one"
        taken = [packet.take(), packet.take()]
    assert all(os.get_inheritable(fd) is False for fd in taken)
    assert all(os.path.samestat(os.fstat(fd), os.fstat(files[0])) for fd in taken)
    for fd in taken:
        os.close(fd)
    assert len(wire.receive(b).payload) == wire.MAX_PACKET


def test_what_is_not_taken_is_closed(pair, files):
    a, b = pair
    before = descriptors()
    wire.send(a, b"two", files[:2])
    with wire.receive(b, 2) as packet:
        os.close(packet.take())
    assert descriptors() == before


@pytest.mark.parametrize(("sent", "allowed"), [(1, 0), (2, 1), (3, 2), (5, 2), (5, 4), (2, 0)])
def test_more_descriptors_than_asked_for_are_refused_and_closed(pair, files, sent, allowed):
    a, b = pair
    before = descriptors()
    send_raw(a, b"many", files[:sent])
    with pytest.raises(ProtocolError, match=f"more than {allowed} descriptors"):
        wire.receive(b, allowed)
    assert descriptors() == before


def test_a_larger_packet_is_refused_with_its_descriptors(pair, files):
    a, b = pair
    before = descriptors()
    send_raw(a, b"x" * (wire.MAX_PACKET + 1), files[:2])
    with pytest.raises(ProtocolError, match="larger than 65536 bytes"):
        wire.receive(b, 2)
    assert descriptors() == before
    with pytest.raises(ProtocolError, match="exceeds the limits"):
        wire.send(a, b"x" * (wire.MAX_PACKET + 1))
    with pytest.raises(ProtocolError, match="exceeds the limits"):
        wire.send(a, b"x", files)


def test_an_empty_packet_with_descriptors_counts_as_gone_and_leaks_nothing(pair, files):
    a, b = pair
    before = descriptors()
    send_raw(a, b"", files[:1])
    assert wire.receive(b, 1) is None
    assert descriptors() == before


def test_sending_to_a_peer_that_is_gone_is_an_error_not_a_signal(pair, files):
    a, b = pair
    b.close()
    before = descriptors()
    with pytest.raises(BrokenPipeError):
        wire.send(a, b"x", files[:1])
    assert wire.receive(a) is None
    assert descriptors() == before


def test_a_signal_does_not_break_a_receive(pair):
    a, b = pair
    seen = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        main = threading.main_thread().ident

        def disturb():
            for _ in range(3):
                time.sleep(0.05)
                signal.pthread_kill(main, signal.SIGUSR1)
            wire.send(a, b"late")

        thread = threading.Thread(target=disturb)
        thread.start()
        b.settimeout(20)
        assert wire.receive(b).payload == b"late"
        thread.join()
        assert seen
    finally:
        signal.signal(signal.SIGUSR1, old)
