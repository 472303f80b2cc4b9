# SPDX-License-Identifier: Apache-2.0
"""Two processes open each other's arena memory on real GPUs: both on the first, and one on each of two."""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from foundryd import _native
from foundryd.cli.environment import device_answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not device_answers(), reason="no CUDA driver answers with a device"),
]

CHILD = Path(__file__).parents[1] / "hook" / "child"
FIRST_WINDOW, STRIDE = 0x600000000000 + 6 * (256 << 30), 256 << 30
MIB = 1 << 20
DEADLINE = 120.0  # seconds for one answer
CYCLES = 1000
# Device memory is given out in pages of 4 KiB at least, so a cycle that loses any loses this much in a thousand. The
# driver's own tables grow by some 64 KiB meanwhile, once: so it did on an H200.
LOST = CYCLES * 4096


class Rank:
    """A process that runs ``child/ipcpeer.py``; its functions are called by name."""

    def __init__(self, number, process):
        self.number = number
        self.process = process

    def __getattr__(self, name):
        def call(*arguments):
            self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
            self.process.stdin.flush()
            asked = f"rank {self.number}: {name}{arguments}"
            if not select.select([self.process.stdout], [], [], DEADLINE)[0]:
                pytest.fail(f"{asked} did not end within {DEADLINE:.0f} s")
            line = self.process.stdout.readline()
            if not line:
                pytest.fail(f"{asked} ended the process with {self.process.wait(60)}: {self.process.stderr.read()}")
            answer = json.loads(line)
            if "failed" in answer:
                reason = self.last_error() if name != "last_error" else ""
                pytest.fail(f"{asked}: {answer['failed']}; the hook's last error: '{reason}'")
            return answer["is"]

        return call


@contextlib.contextmanager
def run_rank(rank, mode, device=0):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FOUNDRYD_")}
    environment |= {"LD_PRELOAD": str(_native.hook_library()), "PYTHONPATH": str(CHILD), "RANK": str(rank)}
    if mode:
        environment["FOUNDRYD_MODE"] = mode
    pipe = subprocess.PIPE
    command = [sys.executable, "-P", "-m", "ipcpeer"]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            made = Rank(rank, process)
            if made.devices() <= device:
                pytest.skip(f"{made.devices()} GPU, and each of two ranks needs its own")
            made.start(device)
            yield made
        finally:
            process.kill()


@pytest.fixture(params=[0, 1], ids=["one GPU", "two GPUs"])
def ranks(request):
    with run_rank(0, "restore") as first, run_rank(1, "restore", request.param) as second:
        yield first, second


def assert_sees(reader, at, content, writer, written):
    """The reader has at one address what the writer wrote to another; else with all that tells late from never."""
    length = len(content) // 2
    seen = reader.read(at, length)
    if seen == content:
        return
    time.sleep(0.5)
    pytest.fail(
        f"rank {writer.number} wrote {content} to {written:#x}, and rank {reader.number} read {seen} at {at:#x}; half "
        f"a second later it reads {reader.read(at, length)}, and the writer {writer.read(written, length)} at its own; "
        f"windows of the reader: {reader.windows()}"
    )


def test_each_sees_what_the_other_writes_at_one_address(ranks):
    own = [rank.malloc(64 * MIB) for rank in ranks]
    assert own[0] == own[1]
    handles = [rank.get(own[0]) for rank in ranks]
    for rank in ranks:
        opened = [rank.open_handle(handle) for handle in handles]
        assert opened == [FIRST_WINDOW, FIRST_WINDOW + STRIDE]
        assert rank.address_range(opened[0] + 99) == [opened[0], 64 * MIB, opened[0], opened[0], 64 * MIB]
    assert ranks[0].windows() == ranks[1].windows()
    for number, (here, there) in enumerate((ranks, ranks[::-1])):
        at = FIRST_WINDOW + (1 - number) * STRIDE  # of `there`
        first, last = 4096, 64 * MIB - 4
        there.write(own[0] + first, "aabbccdd")
        assert_sees(here, at + first, "aabbccdd", there, own[0] + first)
        here.write(at + last, "01020304")
        assert_sees(there, own[0] + last, "01020304", here, at + last)
        assert_sees(there, at + last, "01020304", here, at + last)  # through its own window
        here.write(at, "00" * 4)


def test_kernels_write_into_a_peer(ranks):
    """A fill runs on the device; the peer's copy shows that it went over."""
    exporter, importer = ranks
    own = exporter.malloc(8 * MIB)
    at = importer.open_handle(exporter.get(own))
    importer.fill(at, 0x5A, 8 * MIB)
    assert_sees(exporter, own + 8 * MIB - 8, "5a" * 8, importer, at + 8 * MIB - 8)


def test_a_thousand_cycles_leave_nothing_behind(ranks):
    """What is free on a device is for all its programs to change, so that the middle of three rounds counts."""
    exporter, importer = ranks
    handle = exporter.get(exporter.malloc(64 * MIB))
    importer.close(importer.open_handle(handle))
    files, rounds, exporters = exporter.descriptors(), [], []
    for _ in range(3):
        before = exporter.free_memory_now()
        rounds.append(importer.cycles(handle, CYCLES))
        exporters.append(exporter.free_memory_now() - before)
    descriptors, mappings, memory = zip(*rounds, strict=True)
    assert descriptors == (0, 0, 0)
    # The exporter closes its end of a connection when it finds that the importer has.
    deadline = time.monotonic() + 10
    while (left := exporter.descriptors()) > files and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left <= files
    assert all(more < 20 for more in mappings), f"mappings more after each round: {mappings}"
    for whose, change in (("importer", memory), ("exporter", exporters)):
        assert abs(statistics.median(change)) < LOST // 2, f"free memory of the {whose}'s device changed by {change}"


def test_what_was_freed_cannot_be_opened_and_what_was_open_stays(ranks):
    exporter, importer = ranks
    own = exporter.malloc(8 * MIB)
    exporter.write(own, "0badcafe")
    old = exporter.get(own)
    at = importer.open_handle(old)
    exporter.free(own)
    assert importer.read(at, 4) == "0badcafe"
    assert exporter.malloc(8 * MIB) == own
    new = exporter.get(own)
    assert "close it first" in importer.refused(new)[1]
    assert importer.close(at) == "CUDA_SUCCESS"
    assert importer.windows() == []
    assert importer.open_handle(new) == at
    assert importer.close(at) == "CUDA_SUCCESS"
    assert importer.refused(old)[0] == "CUDA_ERROR_INVALID_VALUE"


def test_a_killed_exporter_is_an_error_and_its_open_memory_stays(ranks):
    exporter, importer = ranks
    kept, lost = exporter.malloc(8 * MIB), exporter.malloc(8 * MIB)
    exporter.write(kept, "0badcafe")
    handles = exporter.get(kept), exporter.get(lost)
    at = importer.open_handle(handles[0])
    exporter.process.kill()
    exporter.process.wait(60)
    code, message, seconds = importer.refused(handles[1])
    assert code == "CUDA_ERROR_MAP_FAILED"
    assert "has ended" in message
    assert seconds < 5
    assert importer.read(at, 4) == "0badcafe"


def test_a_capture_without_peers_has_zeros_in_their_place():
    with run_rank(1, "capture") as alone:
        own = alone.malloc(8 * MIB)
        alone.write(own, "77")
        handles = [alone.peer_handle(alone.get(own), 0), alone.get(own), alone.peer_handle(alone.get(own), 63)]
        opened = [alone.open_handle(handle) for handle in handles]
        assert opened == [FIRST_WINDOW + rank * STRIDE for rank in (0, 1, 63)]
        assert [alone.read(at, 1) for at in opened] == ["00", "77", "00"]
        assert alone.read(opened[2] + 8 * MIB - 8, 8) == "00" * 8


def test_handles_of_a_process_without_foundryd_are_the_drivers():
    with run_rank(0, None) as plain, run_rank(1, "restore") as importer:
        address = plain.malloc(8 * MIB)
        plain.write(address, "1234")
        at = importer.open_handle(plain.get(address))
        assert importer.read(at, 2) == "1234"
        assert importer.windows() == []
        assert importer.close(at) == "CUDA_SUCCESS"
