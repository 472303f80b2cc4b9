# SPDX-License-Identifier: Apache-2.0
"""``foundryd status``."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from foundryd.cli.start import RuntimeOption, runtime_path
from foundryd.daemon.client import ControlClient
from foundryd.daemon.messages import Status


def status(
    runtime_dir: RuntimeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until it must answer.")] = 5.0,
) -> None:
    """Shows the daemon, its archives and who is attached."""
    folder = runtime_path(runtime_dir)
    with ControlClient(folder, timeout) as client:
        now = client.status()
    if as_json:
        typer.echo(json.dumps(as_object(now, folder)))
        return
    console = Console()
    uptime = timedelta(seconds=int(now.uptime_ms / 1000))
    state = "ready" if now.ready else "loading"
    console.print(f"{now.build} is {state}: pid {now.pid}, up {uptime}, {folder}", soft_wrap=True, highlight=False)
    console.print(archive_table(now))
    table = Table("group", "generation", "rank", "variant", "archive", "pid", "user", box=None, pad_edge=False)
    for lease in now.leases:
        table.add_row(
            lease.group,
            str(lease.generation),
            str(lease.rank),
            lease.variant,
            lease.archive,
            str(lease.pid),
            str(lease.uid),
        )
    console.print(table if now.leases else "no rank is attached")


def archive_table(now: Status) -> Table:
    """The archives, for people."""
    table = Table("archive", "digest", "state", "bytes", "variants", box=None, pad_edge=False)
    for archive in now.archives:
        variants = ", ".join(f"{v.name} ({v.ranks} of {v.world} ranks)" for v in archive.variants)
        table.add_row(archive.name, archive.digest[:12], archive.state, str(archive.bytes), variants)
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
        "own_memory": sum(lease.own_memory for lease in now.leases),
    }
