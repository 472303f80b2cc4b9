# SPDX-License-Identifier: Apache-2.0
"""``foundryd status``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from foundryd.cli.start import RuntimeOption, runtime_path
from foundryd.daemon.client import ControlClient
from foundryd.daemon.messages import LeaseState, Status
from foundryd.errors import DaemonError


def status(
    runtime_dir: RuntimeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Go on showing it, until interrupted.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks with --watch.")] = 1.0,
    timeout: Annotated[float, typer.Option(help="Seconds until it must answer.")] = 5.0,
) -> None:
    """Shows the daemon, its archives and who is attached."""
    folder = runtime_path(runtime_dir)
    if watch:
        _watch(folder, interval, timeout, as_json)
        return
    with ControlClient(folder, timeout) as client:
        now = client.status()
    if as_json:
        typer.echo(json.dumps(as_object(now, folder)))
    else:
        Console().print(table(now, folder), soft_wrap=True, highlight=False)


def _watch(folder: Path, interval: float, timeout: float, as_json: bool) -> None:
    """Shows the state again and again; a daemon that is gone is said, and looked for again."""
    console = Console()
    # A file or a pipe gets one table after another.
    live = Live(console=console, auto_refresh=False, screen=console.is_terminal) if not as_json else None
    with live or nullcontext(), suppress(KeyboardInterrupt, BrokenPipeError):
        for now in looks(folder, interval, timeout):
            if as_json:
                shown = (
                    {"error": str(now), "reason": now.reason}
                    if isinstance(now, DaemonError)
                    else as_object(now, folder)
                )
                typer.echo(json.dumps(shown))
            elif console.is_terminal and live is not None:
                live.update(str(now) if isinstance(now, DaemonError) else table(now, folder), refresh=True)
            else:
                console.print(str(now) if isinstance(now, DaemonError) else table(now, folder), highlight=False)


def looks(folder: Path, interval: float, timeout: float) -> Iterator[Status | DaemonError]:
    """The state, or why it cannot be had, once in each interval for ever."""
    client: ControlClient | None = None
    try:
        while True:
            begin = time.monotonic()
            try:
                if client is None:
                    client = ControlClient(folder, timeout)
                yield client.status()
            except DaemonError as error:
                if client is not None:
                    client.close()
                    client = None
                yield error
            time.sleep(max(0.0, interval - (time.monotonic() - begin)))
    finally:
        if client is not None:
            client.close()


def table(now: Status, folder: Path) -> Group:
    """Everything, for people."""
    uptime = timedelta(seconds=int(now.uptime_ms / 1000))
    state = "ready" if now.ready else "loading"
    head = f"{now.build} is {state}: pid {now.pid}, up {uptime}, {folder}"
    if now.http_port:
        head += f", http://127.0.0.1:{now.http_port}"
    ranks = Table(
        "group", "generation", "rank", "variant", "archive", "pid", "user", "restore", box=None, pad_edge=False
    )
    for lease in now.leases:
        numbers = (str(lease.generation), str(lease.rank))
        process = (str(lease.pid), str(lease.uid))
        ranks.add_row(escape(lease.group), *numbers, lease.variant, escape(lease.archive), *process, outcome(lease))
    return Group(Text(head), archive_table(now), ranks if now.leases else "no rank is attached")


def outcome(lease: LeaseState) -> str:
    """What the rank said about its restore."""
    if lease.outcome == "fallback":
        return f"captured natively ({lease.reason})"
    return f"{lease.restore_ms:.0f} ms" if lease.outcome else "not yet"


def archive_table(now: Status) -> Table:
    """The archives, for people."""
    table = Table("archive", "digest", "state", "bytes", "variants", box=None, pad_edge=False)
    for archive in now.archives:
        variants = ", ".join(f"{v.name} ({v.ranks} of {v.world} ranks)" for v in archive.variants)
        table.add_row(escape(archive.name), archive.digest[:12], archive.state, str(archive.bytes), variants)
    return table


def as_object(now: Status, folder: Path) -> dict[str, Any]:
    """The object of ``--json``: lists are lists, sizes bytes, times milliseconds."""
    value: dict[str, Any] = msgspec.to_builtins(now)
    return {
        "pid": now.pid,
        "build": now.build,
        "protocol": now.protocol,
        "instance": now.instance,
        "ready": now.ready,
        "started": now.started,
        "uptime_ms": now.uptime_ms,
        "runtime_dir": str(folder),
        "event": now.event,
        "archives": [{**a, "resident": a["state"] == "resident"} for a in value["archives"]],
        "clients": value["leases"],
        "http_port": now.http_port or None,
        "resident_bytes": now.resident_bytes,
        "own_memory": sum(lease.own_memory for lease in now.leases),
    }
