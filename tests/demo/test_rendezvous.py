# SPDX-License-Identifier: Apache-2.0
"""The store blocks until a key is there, and never for ever."""

from __future__ import annotations

import socket
import struct
import threading
from pathlib import Path

import pytest

from foundryd.demo.rendezvous import MAX_FIELD, FakeStore, SocketStore, StoreServer
from foundryd.errors import DeadlineExceeded, UsageError


def test_a_get_waits_for_the_set_of_another_client(tmp_path: Path) -> None:
    with StoreServer(tmp_path / "store"):
        got: list[bytes] = []
        reader = SocketStore(tmp_path / "store")
        thread = threading.Thread(target=lambda: got.append(reader.get("key", 20)))
        thread.start()
        writer = SocketStore(tmp_path / "store")
        writer.set("other", b"no")
        writer.set("key", b"\0value")
        thread.join(20)
        assert got == [b"\0value"]
        assert writer.get("key", 0) == b"\0value"
        reader.close()
        writer.close()


def test_a_key_that_nobody_sets_is_a_timeout(tmp_path: Path) -> None:
    with StoreServer(tmp_path / "store"):
        store = SocketStore(tmp_path / "store")
        with pytest.raises(TimeoutError, match=r"nobody set missing in 0\.05 s"):
            store.get("missing", 0.05)
        store.set("after", b"1")
        assert store.get("after", 1) == b"1"
        store.close()


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DeadlineExceeded, match="was not there"):
        SocketStore(tmp_path / "nothing", timeout=0.1)


def test_a_server_that_ends_frees_those_who_wait(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with StoreServer(tmp_path / "store"):
        store = SocketStore(tmp_path / "store")
        asked = threading.Event()

        def wait() -> None:
            asked.set()
            try:
                store.get("never", 60)
            except (DeadlineExceeded, TimeoutError) as error:
                failures.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        assert asked.wait(10)
    thread.join(20)
    assert not thread.is_alive()
    assert len(failures) == 1
    assert not (tmp_path / "store").exists()
    store.close()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "nonsense",
    [
        b"X" + struct.pack("<I", 1) + b"k" + struct.pack("<I", 0),
        b"S" + struct.pack("<I", MAX_FIELD + 1),
        b"G" + struct.pack("<I", 1) + b"k" + struct.pack("<I", 1) + b"1",
        b"S" + struct.pack("<I", 1) + b"\xff" + struct.pack("<I", 0),
    ],
)
def test_a_client_that_sends_nonsense_loses_its_connection_alone(tmp_path: Path, nonsense: bytes) -> None:
    with StoreServer(tmp_path / "store"):
        good = SocketStore(tmp_path / "store")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as bad:
            bad.settimeout(20)
            bad.connect(str(tmp_path / "store"))
            bad.sendall(nonsense)
            assert bad.recv(1) == b""
        good.set("key", b"1")
        assert good.get("key", 1) == b"1"
        good.close()


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="more than 107 bytes"):
        StoreServer(tmp_path / ("x" * 107))


def test_the_store_of_a_lone_rank_answers_at_once() -> None:
    store = FakeStore()
    first, second = store.get("nccl/ep/0", 0), store.get("nccl/ep/0", 0)
    assert len(first) == 128
    assert first != second
