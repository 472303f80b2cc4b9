# SPDX-License-Identifier: Apache-2.0
"""``foundryd doctor``."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from foundryd.cli.start import RuntimeOption, runtime_path
from foundryd.doctor.examine import examine
from foundryd.doctor.finding import Finding, Level, Surroundings

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.ERROR: "red"}


def doctor(
    runtime_dir: RuntimeOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds for each look at driver and libraries.")] = 60.0,
) -> None:
    """Looks at driver, libraries, memory, preloads and daemon; each line is ok, or says what to do."""
    around = Surroundings(os.environ, runtime_path(runtime_dir), timeout=timeout)
    console, found = Console(), []
    for finding in examine(around):
        found.append(finding)
        if not as_json:
            _show(console, finding)
    counts = {level: sum(f.level is level for f in found) for level in Level}
    if as_json:
        report = {
            "ok": not counts[Level.ERROR],
            "errors": counts[Level.ERROR],
            "warnings": counts[Level.WARNING],
            "findings": [asdict(f) | {"level": f.level.value} for f in found],
        }
        typer.echo(json.dumps(report))
    else:
        console.print(f"{counts[Level.ERROR]} errors, {counts[Level.WARNING]} warnings", highlight=False)
    raise typer.Exit(1 if counts[Level.ERROR] else 0)


def _show(console: Console, finding: Finding) -> None:
    level = f"[{_STYLES[finding.level]}]{finding.level.value:7}[/]"
    console.print(f"{level} {finding.check:8} {escape(finding.message)}", soft_wrap=True, highlight=False)
    if finding.fix:
        console.print(f"{'':17}-> {escape(finding.fix)}", soft_wrap=True, highlight=False)
