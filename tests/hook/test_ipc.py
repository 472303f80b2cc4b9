# SPDX-License-Identifier: Apache-2.0
"""Peers open each other's arena memory through legacy IPC handles, at addresses that do not depend on the rank."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BASE = int(os.environ.get("SANITIZER_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(os.environ.get("SANITIZER_ARENA_STRIDE", 256 << 30))
FIRST_WINDOW = BASE + 6 * STRIDE
DEFAULT, WEIGHTS, KV, IO, GRAPH, HOST = range(6)
EIGHTHS = {DEFAULT: 0, WEIGHTS: 2, KV: 4, IO: 6, GRAPH: 7}
MIB = 1 << 20
DEADLINE = 40.0  # seconds for one answer
Ranks = tuple[Any, Any]


def window(rank: int, arena: int, offset: int = 0) -> int:
    return FIRST_WINDOW + rank * STRIDE + EIGHTHS[arena] * (STRIDE // 8) + offset


@pytest.fixture
def ranks(run_rank: Any) -> Iterator[Ranks]:
    """Ranks 0 and 1 of a group that restores, each with a context."""
    with run_rank(0, "restore") as first, run_rank(1, "restore") as second:
        first.send("start")
        second.start()
        first.answer()
        yield first, second


def test_each_rank_reads_what_the_other_writes(ranks: Ranks) -> None:
    own = {rank: rank.malloc(8 * MIB) for rank in ranks}
    assert set(own.values()) == {BASE}
    for here, there, mark in ((*ranks, "aabbccdd"), (*reversed(ranks), "01020304")):
        seen = here.open_handle(there.get(own[there]))
        there.write(BASE + 4096, mark)
        assert here.read(seen + 4096, 4) == mark
        here.write(BASE, "ffff")  # its own memory, at the address that the peer's has over there
        here.write(seen + 8 * MIB - 4, mark)
        assert there.read(BASE + 8 * MIB - 4, 4) == mark
        assert here.read(seen, 2) == there.read(BASE, 2)


def test_every_rank_sees_each_ranks_memory_at_the_same_address(ranks: Ranks) -> None:
    """Its own, too, through a second mapping of the same memory."""
    handles: dict[tuple[int, int], str] = {}
    for number, rank in enumerate(ranks):
        for arena in EIGHTHS:
            rank.malloc(3 * MIB, arena)
            handles[number, arena] = rank.get(rank.malloc(2 * MIB, arena))
    for rank in ranks:
        for (number, arena), handle in handles.items():
            assert rank.open_handle(handle) == window(number, arena, 4 * MIB)
    assert ranks[0].windows() == ranks[1].windows()
    assert sorted({w[0] for w in ranks[0].windows()}) == [0, 1]
    own = BASE + 4 * MIB
    ranks[1].write(own, "5566")
    assert [rank.read(window(1, DEFAULT, 4 * MIB), 2) for rank in ranks] == ["5566", "5566"]


def test_small_allocations_share_a_mapping_and_keep_bounds_of_their_own(ranks: Ranks) -> None:
    exporter, importer = ranks
    small = [exporter.malloc(1000), exporter.malloc(3000)]
    opened = [importer.open_handle(exporter.get(a)) for a in small]
    assert [a - window(0, DEFAULT) for a in opened] == [a - BASE for a in small]
    assert importer.address_range(opened[0] + 999) == [opened[0], 1000, opened[0], opened[0], 1000]
    assert importer.address_range(opened[1] + 8) == [opened[1], 3000, opened[1], opened[1], 3000]
    assert importer.buffer_id(opened[0]) != importer.buffer_id(opened[1])
    assert importer.close(opened[0]) == "CUDA_SUCCESS"
    assert importer.readable(opened[1])
    assert importer.close(opened[1]) == "CUDA_SUCCESS"
    assert not importer.readable(opened[1])


def test_a_handle_of_an_address_inside_opens_its_allocation(ranks: Ranks) -> None:
    exporter, importer = ranks
    address = exporter.malloc(4 * MIB)
    assert importer.open_handle(exporter.get(address + 12345)) == window(0, DEFAULT)


def test_memory_opened_twice_stays_until_it_is_closed_twice(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    at = importer.open_handle(handle)
    assert importer.open_handle(handle) == at
    assert importer.close(at) == "CUDA_SUCCESS"
    assert importer.readable(at)
    assert importer.close(at) == "CUDA_SUCCESS"
    assert not importer.readable(at)
    assert importer.close(at) == "CUDA_ERROR_INVALID_VALUE"
    assert importer.open_handle(handle) == at
    assert importer.readable(at)


def test_a_window_never_shows_freed_memory_for_a_new_allocation(ranks: Ranks) -> None:
    exporter, importer = ranks
    address = exporter.malloc(4 * MIB)
    old = exporter.get(address)
    at = importer.open_handle(old)
    exporter.free(address)
    assert exporter.malloc(4 * MIB) == address
    new = exporter.get(address)
    code, message, _ = importer.refused(new)
    assert code == "CUDA_ERROR_UNKNOWN"
    assert "has freed" in message
    assert "close it first" in message
    importer.close(at)
    assert importer.open_handle(new) == at
    importer.close(at)
    code, message, _ = importer.refused(old)
    assert code == "CUDA_ERROR_INVALID_VALUE"
    assert "freed there" in message


def test_a_thousand_cycles_leave_nothing_behind(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    importer.close(importer.open_handle(handle))
    before, free = exporter.descriptors(), exporter.free_memory_now()
    assert importer.cycles(handle, 1000) == [0, 0, 0]
    assert exporter.free_memory_now() == free
    # The exporter closes its end of a connection when it finds that the importer has.
    deadline = time.monotonic() + 10
    while (after := exporter.descriptors()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert after <= before


def test_threads_may_open_at_once(ranks: Ranks) -> None:
    exporter, importer = ranks
    addresses = importer.open_from_threads(exporter.get(exporter.malloc(4 * MIB)), 16)
    assert addresses == [window(0, DEFAULT)] * 16
    assert importer.windows() == []


def test_a_dead_exporter_is_an_error_at_once_and_its_open_memory_stays(ranks: Ranks) -> None:
    exporter, importer = ranks
    kept, lost = exporter.malloc(4 * MIB), exporter.malloc(4 * MIB)
    exporter.write(kept, "0badcafe")
    handles = exporter.get(kept), exporter.get(lost)
    at = importer.open_handle(handles[0])
    pid = exporter.process.pid
    exporter.process.kill()
    exporter.process.wait(DEADLINE)
    code, message, seconds = importer.refused(handles[1])
    assert code == "CUDA_ERROR_MAP_FAILED"
    assert f"rank 0 (process {pid})" in message
    assert "has ended" in message
    assert seconds < 5
    assert importer.read(at, 4) == "0badcafe"
    assert "has ended" in importer.end()


def test_a_forked_child_of_a_dead_exporter_does_not_keep_peers_waiting(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    child = exporter.fork_and_stay()
    try:
        exporter.process.kill()
        exporter.process.wait(DEADLINE)
        code, _, seconds = importer.refused(handle)
        assert code == "CUDA_ERROR_MAP_FAILED"
        assert seconds < 5
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.slow
def test_an_exporter_that_hangs_costs_its_peer_a_deadline(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    exporter.process.send_signal(signal.SIGSTOP)
    stopped = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
    deadline = time.monotonic() + DEADLINE
    while os.waitid(os.P_PID, exporter.process.pid, stopped) is None:  # until then, its threads may still answer
        assert time.monotonic() < deadline, "the exporter does not stop"
        time.sleep(0.01)
    code, message, seconds = importer.refused(handle)
    exporter.process.send_signal(signal.SIGCONT)
    assert code == "CUDA_ERROR_MAP_FAILED"
    assert "did not answer" in message
    assert 9 < seconds < 30
    assert importer.open_handle(handle) == window(0, DEFAULT)


def test_a_peer_of_another_group_is_refused(run_rank: Any, ranks: Ranks) -> None:
    exporter, _ = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    with run_rank(1, "restore", FOUNDRYD_GROUP="replica-2") as other:
        other.start()
        code, message, _ = other.refused(handle)
    assert code == "CUDA_ERROR_NOT_PERMITTED"
    assert "FOUNDRYD_GROUP" in message


# Where the fields of a handle lie.
PROCESS, SECRET, GROUP, PID, RANK, ADDRESS, BYTES, SERIAL = 8, 16, 24, 32, 36, 40, 48, 56


def changed(handle: str, offset: int, value: int, width: int = 8) -> str:
    data = bytearray.fromhex(handle)
    data[offset : offset + width] = value.to_bytes(width, "little")
    return data.hex()


def test_a_handle_with_another_secret_gets_nothing(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    code, message, _ = importer.refused(changed(handle, SECRET, 1))
    assert code == "CUDA_ERROR_NOT_PERMITTED"
    assert "it refuses" in message
    assert importer.windows() == []


@pytest.mark.parametrize(
    ("offset", "value", "width"),
    [(ADDRESS, BASE + MIB, 8), (BYTES, 1 << 62, 8), (SERIAL, 999, 8), (RANK, 2, 4), (RANK, 64, 4), (PROCESS, 5, 8)],
    ids=["address", "bytes", "serial", "rank", "no_window", "process"],
)
def test_a_damaged_handle_is_refused_and_maps_nothing(ranks: Ranks, offset: int, value: int, width: int) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    code, _, _ = importer.refused(changed(handle, offset, value, width))
    assert code != "CUDA_SUCCESS"
    assert importer.windows() == []
    assert importer.open_handle(handle) == window(0, DEFAULT)


def ask(handle: str, message: bytes | None = None) -> tuple[int, list[int]]:
    """Connects to the exporter as the importer does: the verdict and the descriptors of the answer."""
    process = struct.unpack_from("<Q", bytes.fromhex(handle), PROCESS)[0]
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as peer:
        peer.settimeout(DEADLINE)
        peer.connect(f"\0foundryd-ipc-{process:016x}")
        with contextlib.suppress(BrokenPipeError):  # it answers another user without having been asked
            peer.send(bytes.fromhex(handle) if message is None else message)
        try:
            data, files, _, _ = socket.recv_fds(peer, 4096, 4)
        except ConnectionResetError:  # it did not read the question
            data, files, _, _ = socket.recv_fds(peer, 4096, 4)
    for file in files:
        os.close(file)
    return struct.unpack_from("<I", data, 8)[0] if data else -1, files


def test_only_the_same_user_gets_a_descriptor(ranks: Ranks) -> None:
    exporter, _ = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    verdict, files = ask(handle)
    assert (verdict, len(files)) == (0, 1)
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    source = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_ipc
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
print(*test_ipc.ask({handle!r}))
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", source], capture_output=True, text=True, timeout=DEADLINE, check=True
    )
    assert done.stdout == "1 []\n"


def test_peers_that_say_nothing_or_nonsense_hold_nobody_up(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    for message in (b"x", b"\0" * 64, b"y" * 4096):
        assert ask(handle, message) == (1, [])
    process = struct.unpack_from("<Q", bytes.fromhex(handle), PROCESS)[0]
    mute = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(20)]
    try:
        for peer in mute:
            peer.settimeout(DEADLINE)
            peer.connect(f"\0foundryd-ipc-{process:016x}")
        assert importer.open_handle(handle) == window(0, DEFAULT)
        assert mute[0].recv(1) == b""  # given up on
    finally:
        for peer in mute:
            peer.close()


@pytest.mark.skipif("SANITIZER_PRELOAD" in os.environ, reason="a sanitizer needs descriptors of its own")
def test_an_importer_without_descriptors_left_fails_and_recovers(ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    importer.take_descriptors(1)  # all but one for the socket, which leaves none for the memory
    code, message, _ = importer.refused(handle)
    assert code == "CUDA_ERROR_OPERATING_SYSTEM"
    assert "rank 0" in message
    assert importer.windows() == []
    importer.free_descriptors()
    assert importer.open_handle(handle) == window(0, DEFAULT)


def test_two_processes_of_one_rank_are_told_so(run_rank: Any, ranks: Ranks) -> None:
    exporter, _ = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    with run_rank(None, "restore") as other:
        other.start()
        code, message, _ = other.refused(handle)
        assert code == "CUDA_ERROR_INVALID_VALUE"
        assert "set RANK" in message
    with run_rank(None, "restore") as other:
        other.start()
        other.set_rank(5)
        assert other.open_handle(handle) == window(0, DEFAULT)
        other.send("set_rank", 6)
        with pytest.raises(AssertionError, match="now said to be rank 6"):
            other.answer()


def test_memory_beyond_what_a_window_shows_is_an_error(run_rank: Any) -> None:
    small = {"FOUNDRYD_ARENA_STRIDE": str(64 * MIB)}  # a window shows 16 MiB of it
    with run_rank(0, "restore", **small) as exporter, run_rank(1, "restore", **small) as importer:
        exporter.start()
        importer.start()
        near, far = exporter.malloc(10 * MIB), exporter.malloc(10 * MIB)
        assert importer.open_handle(exporter.get(near)) == BASE + 6 * 64 * MIB
        code, message, _ = importer.refused(exporter.get(far))
    assert code == "CUDA_ERROR_NOT_SUPPORTED"
    assert "beyond the first" in message


def test_a_window_whose_place_is_taken_is_an_error(hooked: Any, ranks: Ranks) -> None:
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    importer.occupy(window(0, WEIGHTS))
    code, message, _ = importer.refused(handle)
    assert code == "CUDA_ERROR_MAP_FAILED"
    assert "the window of rank 0 came out at" in message
    assert hex(window(0, DEFAULT)) in message


# ---- capture ----------------------------------------------------------------------------------------------------


def test_a_capture_without_peers_has_every_rank_at_its_window(run_rank: Any) -> None:
    """Their memory is a zero-filled stand-in; the own rank's is its memory."""
    with run_rank(3, "capture") as alone:
        alone.start()
        address = alone.malloc(4 * MIB)
        alone.write(address, "77")
        own = alone.get(address)
        handles = [own if rank == 3 else alone.peer_handle(own, rank) for rank in (0, 3, 63)]
        opened = [alone.open_handle(h) for h in handles]
        assert opened == [window(rank, DEFAULT) for rank in (0, 3, 63)]
        assert [alone.read(a, 1) for a in opened] == ["00", "77", "00"]
        assert alone.read(opened[0] + 4 * MIB - 64, 64) == "00" * 64
        alone.write(opened[0], "11")
        assert [alone.read(a, 1) for a in [address, *opened]] == ["77", "11", "77", "00"]
        assert alone.windows() == [[rank, window(rank, DEFAULT), 4 * MIB, BASE] for rank in (0, 3, 63)]
        assert [a for a in alone.threads() if "foundryd" in a] == []
        assert alone.close(opened[0]) == "CUDA_SUCCESS"
        assert not alone.readable(opened[0])


def test_capture_and_restore_give_a_peer_the_same_address(run_rank: Any, ranks: Ranks) -> None:
    with run_rank(1, "capture") as alone:
        alone.start()
        own = alone.get(alone.malloc(4 * MIB, IO))
        captured = alone.open_handle(alone.peer_handle(own, 0))
    exporter, importer = ranks
    assert importer.open_handle(exporter.get(exporter.malloc(4 * MIB, IO))) == captured


def test_stand_ins_are_for_captures_only(run_rank: Any, ranks: Ranks) -> None:
    exporter, _ = ranks
    handle = exporter.get(exporter.malloc(4 * MIB))
    exporter.send("peer_handle", handle, 1)
    with pytest.raises(AssertionError, match="not capture"):
        exporter.answer()
    code, message, _ = exporter.refused(changed(handle, RANK, 1, 4))
    assert code == "CUDA_ERROR_UNKNOWN"
    assert "for a capture without peers" in message
    with run_rank(1, "capture") as alone:
        alone.start()
        code, message, _ = alone.refused(handle)
        assert code == "CUDA_ERROR_UNKNOWN"
        assert "ipc_peer_handle" in message


# ---- what is not ours -------------------------------------------------------------------------------------------


def test_handles_of_processes_without_foundryd_are_the_drivers(run_rank: Any, ranks: Ranks) -> None:
    _, importer = ranks
    with run_rank(7, None) as plain:
        plain.start()
        address = plain.malloc(4 * MIB)
        plain.write(address, "1234")
        at = importer.open_handle(plain.get(address))
        assert not FIRST_WINDOW <= at < FIRST_WINDOW + 64 * STRIDE
        assert importer.read(at, 2) == "1234"
        assert importer.windows() == []
        assert importer.close(at) == "CUDA_SUCCESS"


def test_host_memory_and_unknown_addresses_get_the_drivers_answer(ranks: Ranks) -> None:
    rank, _ = ranks
    assert rank.get_codes() == ["CUDA_ERROR_INVALID_VALUE"] * 3
