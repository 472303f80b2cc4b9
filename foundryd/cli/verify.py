# SPDX-License-Identifier: Apache-2.0
"""``foundryd verify``: is this archive whole and sane, and can this machine restore it?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foundryd.archive.identity import MachineIdentity, check, compare, fact, shown
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import require_none, violations
from foundryd.errors import FoundrydError


def verify(
    file: Annotated[Path, typer.Argument(help="The archive.", show_default=False)],
    against: Annotated[
        Path | None, typer.Option(help="A machine's facts as JSON: can the archive be restored there?")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every byte of an archive and everything it says, and compare it with a machine."""
    report: dict[str, Any] = {"file": str(file), "ok": False}
    try:
        machine = None if against is None else MachineIdentity.load(against)
        with ArchiveReader.open(file) as reader:
            _verify(reader, machine, report)
    except FoundrydError as error:
        report |= {"reason": error.reason, "error": str(error)}
        raise
    finally:
        if as_json:
            typer.echo(json.dumps(report))
        else:
            _show(report)


def _verify(reader: ArchiveReader, machine: MachineIdentity | None, report: dict[str, Any]) -> None:
    header, index = reader.header, reader.index
    report |= {
        "format": f"{header.major}.{header.minor}",
        "kind": index.kind,
        "bytes": header.file_length,
        "sections": len(reader.sections),
        "content_digest": reader.content_digest,
    }
    reader.verify()
    report["digests"] = True
    found = violations(reader)
    report["violations"] = found
    mismatches = []
    if machine is not None:
        mismatches = compare(index.identity, machine)
        wrong = {mismatch.field: mismatch for mismatch in mismatches}
        report["identity"] = [
            {
                "field": name,
                "archived": index.identity[name].value if name in index.identity else None,
                "found": machine.fields[name].value if name in machine.fields else None,
                "match": index.identity[name].match if name in index.identity else "exact",
                "ok": name not in wrong,
                "why": wrong[name].why if name in wrong else None,
                "advice": wrong[name].advice if name in wrong else None,
            }
            for name in sorted(index.identity.keys() | wrong.keys())
        ]
    report["ok"] = not found and not mismatches
    require_none(found, reader.name)
    if machine is not None:
        check(index.identity, machine, reader.name)


def _show(report: dict[str, Any]) -> None:
    if "format" not in report:
        return  # it could not be opened: the error says it all
    console = Console()
    table = Table(show_header=False, box=None)
    for name, key in (("archive", "file"), ("format", "format"), ("kind", "kind"), ("bytes", "bytes")):
        table.add_row(name, escape(str(report[key])))
    whole = "every byte is as written" if report.get("digests") else "[red]damaged"
    table.add_row("sections", f"{report['sections']}, {whole}")
    if "violations" in report:
        count = len(report["violations"])
        table.add_row("structure", f"[red]{count} contradictions" if count else "sane")
    console.print(table)
    for sentence in report.get("violations", []):
        console.print(f"  [red]✗[/red] {escape(sentence)}", highlight=False)
    if "identity" in report:
        console.print(_identity_table(report["identity"]))


def _identity_table(rows: list[dict[str, Any]]) -> Table:
    table = Table("", "fact", "archive", "machine", "match", "what to do")
    for row in rows:
        table.add_row(
            "[green]✓" if row["ok"] else "[red]✗",
            escape(row["field"]),
            escape(shown(row["archived"])),
            escape(shown(row["found"])),
            row["match"] if row["match"] == "exact" else fact(row["field"]).rule,
            row["advice"] or "",
        )
    return table
