# SPDX-License-Identifier: Apache-2.0
"""``foundryd logs``."""

from __future__ import annotations

import json
import time
from collections import deque
from typing import Annotated, Any

import typer

from foundryd.cli.start import RuntimeOption, runtime_path
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import UsageError


def logs(
    runtime_dir: RuntimeOption = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=0, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on printing what is written.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines as they are written.")] = False,
) -> None:
    """Prints the log of the daemon that runs, or of the last one."""
    log = RuntimeDir(runtime_path(runtime_dir)).log
    try:
        stream = log.open(errors="replace")
    except OSError as error:
        raise UsageError(
            f"the log {log} cannot be read ({error.strerror}): name the runtime directory of a daemon that was started "
            "in the background"
        ) from error
    with stream:
        for line in deque(stream, maxlen=lines):
            typer.echo(line.rstrip("\n") if as_json else readable(line))
        pending = ""
        while follow:
            pending += stream.readline()
            if pending.endswith("\n"):
                typer.echo(pending.rstrip("\n") if as_json else readable(pending))
                pending = ""
            else:
                time.sleep(0.2)


def readable(line: str) -> str:
    """A log line for people; a line that is not the daemon's own JSON stays as it is."""
    try:
        entry: dict[str, Any] = json.loads(line)
        text = f"{entry['time']} {entry['level']:7} {entry['message']}"
    except (ValueError, KeyError, TypeError):
        return line.rstrip("\n")
    if entry.get("attach"):
        text += f" (attach {entry['attach']})"
    return f"{text}\n{entry['traceback']}" if "traceback" in entry else text
