# SPDX-License-Identifier: Apache-2.0
"""Rows about memory between processes: descriptors, and where a peer's memory is mapped."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench import GRANULE, Bench, CallFailed, code, cu, ok, row

ARENAS, STRIDE = 0x6000_0000_0000, 256 << 30
WINDOWS, FIRST_WINDOW = 64, ARENAS + 6 * STRIDE
KIND = cu.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

DEADLINE = 15.0  # seconds for one answer, within those of a row

# Another process: one line in, one line out, a socket for descriptors.  Windows are reserved whole, as they are in use:
# a small reservation need not come out where it is wished.
CHILD = """
import ctypes, json, os, socket, sys
from bench import GRANULE, code, cu, ok
from rows_sharing import KIND, STRIDE, access, properties

ok(cu.cuInit(0))
context = ok(cu.cuDevicePrimaryCtxRetain(0))
ok(cu.cuCtxSetCurrent(context))
door = socket.socket(fileno=int(sys.argv[1]))

def reserve(place):
    got = int(ok(cu.cuMemAddressReserve(STRIDE if place else GRANULE, 0, place, 0)))
    assert place in (0, got), f"{place:#x} came out at {got:#x}"
    return got

def place_memory(base, memory):
    ok(cu.cuMemMap(base, GRANULE, 0, memory, 0))
    ok(cu.cuMemSetAccess(base, GRANULE, [access()], 1))
    ok(cu.cuMemRelease(memory))

def receive(place):
    global base
    base = reserve(place)
    _, files, _, _ = socket.recv_fds(door, 1, 1)
    place_memory(base, ok(cu.cuMemImportFromShareableHandle(files[0], KIND)))
    os.close(files[0])
    return base == place

def send(value):
    global base
    base = reserve(0)
    memory = ok(cu.cuMemCreate(GRANULE, properties(), 0))
    file = int(ok(cu.cuMemExportToShareableHandle(memory, KIND, 0)))
    place_memory(base, memory)
    write(value)
    socket.send_fds(door, [b"x"], [file])

def read():
    out = (ctypes.c_uint32 * 1)()
    ok(cu.cuMemcpyDtoH(ctypes.addressof(out), base, 4))
    return out[0]

def write(value):
    ok(cu.cuMemsetD32(base, value, GRANULE // 4))
    ok(cu.cuCtxSynchronize())

for line in sys.stdin:
    name, *arguments = json.loads(line)
    try:
        answer = {"is": globals()[name](*arguments)}
    except Exception as error:
        answer = {"failed": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), flush=True)
"""


def properties() -> Any:
    """Memory of device 0 that can be exported."""
    made = cu.CUmemAllocationProp()
    made.type = cu.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    made.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = 0
    made.requestedHandleTypes = KIND
    return made


def access() -> Any:
    """Device 0 reads and writes."""
    made = cu.CUmemAccessDesc()
    made.location.type = cu.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    made.location.id = 0
    made.flags = cu.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    return made


class Other:
    """The other process."""

    def __init__(self) -> None:
        self.door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), *sys.path]))
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", CHILD, str(theirs.fileno())],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self.told = ""

    def tell(self, *command: Any) -> None:
        """Starts a command; ``answer`` waits for its end."""
        assert self.process.stdin is not None
        self.told = str(command[0])
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """What it returned; raises with the reason if it failed, ended or does not answer."""
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        if not select.select([self.process.stdout], [], [], DEADLINE)[0]:
            raise CallFailed(f"the other process has not answered '{self.told}' for {DEADLINE:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            code, log = self.process.wait(DEADLINE), self.process.stderr.read()
            raise CallFailed(f"the other process ended with {code} in '{self.told}': {log.strip()[-400:]}")
        answer = json.loads(line)
        if "failed" in answer:
            raise CallFailed(f"the other process failed in '{self.told}': {answer['failed']}")
        return answer["is"]

    def does(self, *command: Any) -> Any:
        self.tell(*command)
        return self.answer()

    def give(self, memory: Any) -> None:
        """Sends a descriptor of memory, and closes it here."""
        file = int(ok(cu.cuMemExportToShareableHandle(memory, KIND, 0)))
        socket.send_fds(self.door, [b"x"], [file])
        os.close(file)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10)
        self.door.close()


@contextlib.contextmanager
def other(x: Bench) -> Iterator[Other]:
    peer = Other()
    x.later.callback(peer.end)
    yield peer
    peer.end()


@row("share.both_ways")
def both_ways(x: Bench) -> Any:
    """Two processes see each other's writes, the importer at a fixed place."""
    with other(x) as peer, x.mapped() as (base, memory):
        x.clear(base, 1, 11)
        peer.tell("receive", FIRST_WINDOW)
        peer.give(memory)
        placed = peer.answer()
        seen = peer.does("read")
        peer.does("write", 22)
        return [placed, seen, x.read(base)]


@row("share.outlives_the_exporters_mapping")
def outlives_mapping(x: Bench) -> Any:
    """The importer keeps what the exporter has unmapped and released, whatever the exporter allocates next."""
    with other(x) as peer:
        with x.mapped() as (base, memory):
            x.clear(base, GRANULE // 4, 33)
            peer.tell("receive", 0)
            peer.give(memory)
            peer.answer()
        with x.mapped() as (base, _):
            x.clear(base, GRANULE // 4, 44)
            return [peer.does("read"), x.read(base)]


@row("share.outlives_the_exporter")
def outlives_exporter(x: Bench) -> Any:
    """So it does when the exporter is killed."""
    with other(x) as peer:
        peer.tell("send", 55)
        _, files, _, _ = socket.recv_fds(peer.door, 1, 1)
        peer.answer()
        memory = ok(cu.cuMemImportFromShareableHandle(files[0], KIND))
        os.close(files[0])
        with x.reserved(GRANULE) as base, x.at(base, GRANULE, memory):
            ok(cu.cuMemRelease(memory))
            before = x.read(base)
            peer.end()
            return [before, x.read(base)]


@row("share.exported_by_its_address")
def by_address(x: Bench) -> Any:
    """Memory whose handle was released is exported from a thread without a context; what it was mapped from is one."""
    with x.reserved(GRANULE) as base, x.memory() as memory, x.at(base, GRANULE, memory):

        def work() -> Any:
            ok(cu.cuCtxSetCurrent(0))
            retained = ok(cu.cuMemRetainAllocationHandle(base))
            exported = cu.cuMemExportToShareableHandle(retained, KIND, 0)
            released = code(cu.cuMemRelease(retained))
            if code(exported) == "SUCCESS":
                os.close(int(exported[1]))
            return [code(exported), released]

        return x.elsewhere(work)


@row("share.every_window")
def every_window(x: Bench) -> Any:
    """The arenas, and sixty-four windows behind them, come out where they must, each reserved on its own."""
    with contextlib.ExitStack() as stack:
        bases = [stack.enter_context(x.reserved(5 * STRIDE, ARENAS)) - ARENAS]
        places = [FIRST_WINDOW + i * STRIDE for i in range(WINDOWS)]
        bases += [stack.enter_context(x.reserved(STRIDE, place)) - place for place in places]
        memory = stack.enter_context(x.memory())
        fills = []
        for place in (places[0], places[-1] + STRIDE - GRANULE):
            with x.at(place, GRANULE, memory):
                fills.append(code(cu.cuMemsetD8(place, 1, GRANULE)))
                ok(cu.cuCtxSynchronize())
        return [sum(distance == 0 for distance in bases), fills]
