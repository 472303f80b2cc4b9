# SPDX-License-Identifier: Apache-2.0
"""Steps in which ``vllm serve`` meets what servers meet: a signal, a killed engine, a daemon that goes away."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from answers import prompts
from launch import FOUNDRYD, Deadline, RunFailed, foundryd
from results import FAILED, OK, Row, differences
from servers import Server
from steps import Context

SETUP = "small"
PROMPTS, TOKENS = 5, 16
# What is compared between a server with foundryd and one without.
COMPARED = ("answers", "code", "left", "request", "healthy", "later")
WAYS = ("native", "run", "plugin", "daemon")


def served(what: str, way: str) -> Callable[[Context, str], Row]:
    """A step in which a server that started that way meets ``what``: ``term``, ``kill`` or ``stop``."""

    def serve(context: Context, name: str) -> Row:
        setup = context.setups[SETUP]
        model, deadline = str(context.models(setup)), Deadline(context.limit)
        with ExitStack() as stack:
            given = context.environment(setup, name)
            command = ["vllm", "serve", model, *setup.flags]
            if way == "run":
                command = [*FOUNDRYD, "run", "--archive", str(context.archive(SETUP)), "--", *command]
            elif way == "plugin":
                given |= {"FOUNDRYD_MODE": "restore", "FOUNDRYD_ARCHIVE": str(context.archive(SETUP))}
            elif way == "daemon":
                runtime = _Daemon(context, name, stack)
                given |= {"FOUNDRYD_RUNTIME_DIR": runtime.folder}
                command = [*FOUNDRYD, "run", "--archive", SETUP, "--", *command]
            server = stack.enter_context(Server(command_of(command), given, context.out / f"{name}.log"))
            started = time.monotonic()
            server.wait_ready(deadline.left())
            row: Row = {"ready_s": time.monotonic() - started, "ways": context.report(name)["ways"]}
            row |= {"fallbacks": context.report(name)["fallbacks"]}
            asked = prompts(setup.model.vocabulary, PROMPTS)
            row["answers"] = server.complete(model, asked, TOKENS)
            if way == "daemon":
                runtime.stop()
                row["later"] = server.complete(model, asked, TOKENS)
            if what == "term":
                server.send(signal.SIGTERM)
            else:
                row |= _killed(server, model, asked)
            row |= server.end(min(60, deadline.left()))
        expected = ["native" if way == "native" else "restored"]
        wrong = [] if row["ways"] == expected else [f"it was {row['ways'][0]}: {row['fallbacks']}"]
        if way == "daemon" and differences(row["later"], row["answers"]):
            wrong.append("it answered otherwise after the daemon was stopped")
        detail = f"ready after {row['ready_s']:.1f} s, {row['ways'][0]}; {what}: ended with {row['code']}, "
        detail += f"{row['left']} processes left" + (f", a request {row['request']}" if "request" in row else "")
        return row | {"verdict": FAILED if wrong else OK, "detail": "; ".join([*wrong, detail])}

    return serve


def command_of(command: list[str]) -> list[str]:
    """The command with this environment's own ``vllm``, which need not be on the path."""
    place = command.index("vllm")
    return [*command[:place], sys.executable, "-P", "-m", "vllm.entrypoints.cli.main", *command[place + 1 :]]


class _Daemon:
    """A daemon that holds the archive until it is stopped."""

    def __init__(self, context: Context, name: str, stack: ExitStack) -> None:
        self.folder = str(context.out / f"run-{name}")
        self._runs = True
        archive = str(context.archive(SETUP))
        foundryd("start", "--runtime-dir", self.folder, archive, timeout=60, log=context.out / f"{name}-daemon.log")
        stack.callback(self.stop)

    def stop(self) -> None:
        """Stops it; a second call does nothing."""
        if self._runs:
            self._runs = False
            foundryd("stop", "--runtime-dir", self.folder, timeout=30, stoppable=False)


def _killed(server: Server, model: str, asked: list[list[int]]) -> Row:
    """Kills the engine under a long request; what became of that, and whether the server still said it was well."""
    engines = server.engines()
    if len(engines) != 1:
        raise RunFailed(f"the server has {len(engines)} processes with a GPU and should have one engine")
    outcome: dict[str, str] = {}

    def request() -> None:
        try:
            server.complete(model, asked, 3000)
            outcome["request"] = "was answered"
        except (OSError, ValueError) as error:
            outcome.update(request="failed", error=str(error))

    asking = threading.Thread(target=request, daemon=True)
    asking.start()
    time.sleep(1)  # so that it is under way
    os.kill(engines[0], signal.SIGKILL)
    asking.join(60)
    outcome.setdefault("request", "hung")
    time.sleep(1)
    return {**outcome, "healthy": server.healthy()}


def same(what: str) -> Callable[[Context, str], Row]:
    """A step that compares what servers with foundryd did with what a server without did; it starts nothing."""

    def compare(context: Context, name: str) -> Row:
        native = context.results.of(f"serve.native-{what}")
        if not native:
            raise RunFailed(f"there is nothing to compare with: run serve.native-{what} first")
        wrong, compared = [], []
        for way in WAYS[1:]:
            row = context.results.of(f"serve.{way}-{what}")
            if row:
                compared.append(way)
                wrong += [f"{way}: {difference}" for difference in unlike(row, native)]
        said = f"{', '.join(compared) or 'nobody'} compared with native"
        return {"verdict": FAILED if wrong or not compared else OK, "detail": "; ".join([*wrong, said])}

    return compare


def unlike(row: Mapping[str, Any], native: Mapping[str, Any]) -> list[str]:
    """In what a server was not as the native one."""
    if "code" not in row or "code" not in native:
        return ["a server did not come to its end"]
    found = []
    for name in COMPARED:
        # Only servers with a daemon are asked later; they answer as before.
        ours, theirs = row.get(name), native.get("answers" if name == "later" else name)
        if name in row and ours != theirs:
            shown = (ours, theirs) if name not in ("answers", "later") else differences(ours or [], theirs or [])[:3]
            found.append(f"{name} {json.dumps(shown)}")
    return found
