# SPDX-License-Identifier: Apache-2.0
"""Keeps what the two sides of this build say to each other, as bytes: one file a message, in a folder of the version.

    python tests/daemon/record_messages.py tests/daemon/kept

A new version of the protocol gets a folder of its own; that of an older one never changes, for peers of it are out
there.  Everything is recorded in the client's process, from a real daemon with a tiny archive, and of several messages
of one kind the one that says most is kept.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import tiny

from foundryd.daemon import messages, wire
from foundryd.daemon.client import ControlClient
from foundryd.daemon.launch import start_daemon
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import FoundrydError
from foundryd.session.client import attach

PROGRAM = (os.fspath(Path(tiny.__file__).absolute()),)


class Tap:
    """Notes every message that this process encodes or decodes."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.refused_versions = False
        encode, decode = messages.encode, messages.decode_answer

        def encoding(message: messages.Message) -> bytes:
            data = encode(message)
            self._keep("client", message, data)
            return data

        def decoding(data: bytes) -> messages.FromDaemon:
            message = decode(data)
            self._keep("daemon", message, data)
            return message

        messages.encode, messages.decode_answer = encoding, decoding

    def _keep(self, side: str, message: messages.Message, data: bytes) -> None:
        name = f"{side}-{type(message).__name__.lower()}"
        if isinstance(message, messages.Event):
            name += f"-{message.kind}"
        if isinstance(message, messages.Refused):
            name += "-versions" if self.refused_versions else "-control" if message.id else "-door"
        if len(data) > len(self.kept.get(name, b"")):
            self.kept[name] = data


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "something did not happen in time"
        time.sleep(0.01)


def refused(step: Callable[[], object]) -> None:
    try:
        step()
    except FoundrydError:
        return
    raise AssertionError("this should have been refused")


def record(folder: Path, tap: Tap) -> None:
    run = folder / "run"

    def ask(what: Callable[[ControlClient], Any]) -> Any:
        # A client of its own for each: so every request is number 1, and every answer too.
        with ControlClient(run, 20) as client:
            return what(client)

    def drain(client: ControlClient, last: str) -> None:
        end = time.monotonic() + 20
        while (pushed := client.pushed(end - time.monotonic())) is not None:
            if getattr(pushed, "kind", "tick") == last:
                return
        raise AssertionError(f"no {last} came")

    model = tiny.write(folder / "model.foundry", variants={"ep=8": 8, "ep=4,tp=2": 8}, delay=1.0)
    damaged = tiny.write(folder / "damaged.foundry")
    damaged.write_bytes(b"0" * 64 + damaged.read_bytes()[64:])
    other = tiny.write(folder / "other.foundry")

    starter = threading.Thread(target=lambda: start_daemon(run, [str(model)], timeout=20, program=PROGRAM))
    starter.start()
    eventually(RuntimeDir(run).door.exists)
    watcher = ControlClient(run, 20)
    watcher.subscribe()
    drain(watcher, "ready")
    starter.join()

    held = attach(runtime_dir=run, archive="model", rank=2, variant="ep=8", timeout=20)
    ask(ControlClient.status)
    ask(ControlClient.archives)
    ask(lambda client: client.load(other, "other"))
    ask(lambda client: client.unload("other"))
    ask(lambda client: refused(lambda: client.load(damaged)))
    refused(lambda: attach(runtime_dir=run, archive="none", variant="ep=8", timeout=20))
    phases = dict.fromkeys(messages.PHASES, 1.5)
    report = messages.Report("fallback", held.attach_id, "default", 2, "layout_diverged", "because", phases)
    held.lease.send(messages.encode(report))
    eventually(lambda: ask(ControlClient.status).leases[0].outcome)
    drain(watcher, "tick")

    tap.refused_versions = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(20)
        sock.connect(os.fspath(RuntimeDir(run).door))
        newer = messages.Hello(messages.NEWEST + 1, messages.NEWEST + 1, "foundryd 9.9")
        wire.send(sock, msgspec.msgpack.encode(newer))
        with wire.receive(sock) as packet:
            messages.decode_answer(packet.payload)
    tap.refused_versions = False

    ask(ControlClient.stop)
    drain(watcher, "stopping")
    watcher.close()
    eventually(lambda: not RuntimeDir(run).answering())
    start_daemon(run, [str(model)], timeout=20, program=PROGRAM)
    eventually(lambda: held.lease.returned)
    watcher = ControlClient(run, 20)
    watcher.subscribe()
    other_held = attach(runtime_dir=run, rank=3, variant="ep=8", timeout=20)
    other_held.close()
    drain(watcher, "lease_ended")
    ask(ControlClient.subscribe)
    ask(ControlClient.stop)
    drain(watcher, "stopping")
    watcher.close()
    eventually(lambda: held.lost)
    held.close()


def main() -> None:
    tap = Tap()
    with tempfile.TemporaryDirectory(prefix="kept-", dir="/tmp") as temporary:
        record(Path(temporary), tap)
    folder = Path(sys.argv[1]) / f"v{messages.NEWEST}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in tap.kept.items():
        (folder / f"{name}.msgpack").write_bytes(data)
        print(f"{len(data):6} {name}")


if __name__ == "__main__":
    main()
