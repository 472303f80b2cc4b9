# SPDX-License-Identifier: Apache-2.0
"""``foundryd ls``."""

from __future__ import annotations

import json
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from foundryd.cli.start import RuntimeOption, runtime_path
from foundryd.daemon.client import ControlClient


def ls(
    runtime_dir: RuntimeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until the daemon must answer.")] = 5.0,
) -> None:
    """Lists the daemon's archives with their variants."""
    with ControlClient(runtime_path(runtime_dir), timeout) as client:
        archives = client.archives()
    if as_json:
        typer.echo(json.dumps([msgspec.to_builtins(a) for a in archives]))
        return
    table = Table("archive", "digest", "variant", "ranks", "graphs", "bytes", "file", box=None, pad_edge=False)
    for archive in archives:
        row = (archive.name, archive.digest[:12] or archive.state)
        for variant in archive.variants:
            ranks = f"{variant.ranks} of {variant.world}"
            table.add_row(*row, variant.name, ranks, str(variant.graphs), str(archive.bytes), archive.path)
        if not archive.variants:
            table.add_row(*row, "", "", "", str(archive.bytes), archive.path)
    Console().print(table if archives else "the daemon holds no archive")
