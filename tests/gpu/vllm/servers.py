# SPDX-License-Identifier: Apache-2.0
"""``vllm serve`` as a process: asked over HTTP, ended by signals, and what is left of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from launch import RunFailed, TimeUp, reserved_port

CALLABLE = {"VLLM_SERVER_DEV_MODE": "1"}  # variables of a server whose workers' methods can be called
SETTLE = 10.0  # seconds that processes of a server may take to end after it


class Server:
    """One server in a session of its own, ended with all its processes when the block ends.

    ``command`` is everything up to the address.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._log, self._held = log, ExitStack()
        self._port = self._held.enter_context(reserved_port())
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self._port)],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._held:
            self.sweep()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def sweep(self) -> None:
        """Kills what is left of its session, and waits until that is gone."""
        end = time.monotonic() + SETTLE
        while (left := session(self._process.pid)) and time.monotonic() < end:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def wait_ready(self, seconds: float) -> None:
        """Waits until it answers; raises ``RunFailed`` if it ends before, ``TimeUp`` if it is late."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise RunFailed(f"the server ended with {self._process.returncode}: {self.tail()}")
            if self.healthy():
                return
            time.sleep(0.1)
        raise TimeUp(f"the server was not ready in {seconds:.0f} s: {self.tail()}")

    def healthy(self) -> bool:
        """Whether it says that it is."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def complete(
        self, model: str, prompts: Sequence[list[int]], tokens: int, seconds: float = 60, replica: int | None = None
    ) -> list[list[int]]:
        """What follows each prompt, greedily, from that replica or any; raises ``OSError`` if there is no answer."""
        body = {
            "model": model,
            "prompt": list(prompts),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"} | ({} if replica is None else {"X-data-parallel-rank": str(replica)}),
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                choices = json.load(answer)["choices"]
        except urllib.error.HTTPError as error:
            raise OSError(f"HTTP {error.code}: {error.read(500)!r}") from error
        return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: int(choice["index"]))]

    def call(self, method: str, arguments: Sequence[str] = (), seconds: float = 60) -> None:
        """Calls a method of all workers of all replicas of a ``CALLABLE`` server; raises ``OSError`` if that fails."""
        body = {"method": method, "args": list(arguments), "timeout": seconds}
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}/collective_rpc",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            urllib.request.urlopen(request, timeout=seconds).close()
        except urllib.error.HTTPError as error:
            raise OSError(f"{method}: HTTP {error.code}: {error.read(500)!r}") from error

    def engines(self) -> list[int]:
        """Its processes that have a GPU open, without the one that was started."""
        return [pid for pid in session(self._process.pid) if pid != self._process.pid and _has_gpu(pid)]

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process that was started, as whoever runs a server does."""
        self._process.send_signal(number)

    def end(self, seconds: float) -> dict[str, Any]:
        """Waits until it ended: its status (None if it did not) and how many of its processes are still there."""
        started = time.monotonic()
        code: int | None = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(timeout=seconds)
        # Its processes may end a moment after it.
        end = time.monotonic() + SETTLE
        while code is not None and session(self._process.pid) and time.monotonic() < end:
            time.sleep(0.1)
        return {"code": code, "left": len(session(self._process.pid)), "s": round(time.monotonic() - started, 1)}

    def tail(self) -> str:
        """The end of what it said."""
        return self._log.read_text(errors="replace")[-3000:]


def session(leader: int) -> list[int]:
    """Processes of that session that run."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with suppress(OSError):
            # After the name, which may hold anything: state, parent, group, session.
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader and fields[0] != "Z":
                found.append(int(entry.name))
    return sorted(found)


def _has_gpu(pid: int) -> bool:
    with suppress(OSError):
        for opened in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if "nvidia-uvm" in os.readlink(opened):
                    return True
    return False
