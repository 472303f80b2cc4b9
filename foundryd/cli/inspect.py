# SPDX-License-Identifier: Apache-2.0
"""``foundryd inspect``: what is in an archive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from foundryd.archive.dtypes import noise_dtype, template_noise_dtype
from foundryd.archive.format import image_section
from foundryd.archive.identity import shown
from foundryd.archive.index import Variant
from foundryd.archive.inflate import inflated_size
from foundryd.archive.noise import noise_bytes
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.capture.images import summary

# What archives of before images were cut, or cut in more than one way, do not say of each.
_UNCUT = (0, "", "")


def inspect(
    file: Annotated[Path, typer.Argument(help="The archive.", show_default=False)],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show what an archive holds: identity, variants, graphs, and where its bytes go."""
    with ArchiveReader.open(file) as reader:
        report = _report(reader)
    report["file"] = str(file)
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _show(report)


def _report(reader: ArchiveReader) -> dict[str, Any]:
    header, index = reader.header, reader.index
    return {
        "format": f"{header.major}.{header.minor}",
        "kind": index.kind,
        "created": index.created,
        "writer": index.writer,
        "content_digest": reader.content_digest,
        "bytes": header.file_length,
        "resident_bytes": inflated_size(reader),
        "stored_bytes": stored_bytes(reader),
        "identity": {name: field.value for name, field in sorted(index.identity.items())},
        "variants": [_variant(reader, variant) for variant in index.variants],
        "notes": json.loads(json.dumps(index.notes, default=str)),
    }


def _variant(reader: ArchiveReader, variant: Variant) -> dict[str, Any]:
    ranks = variant.rank_class
    return {
        "name": variant.name,
        "world": variant.world,
        "ranks": ranks.ranks,
        "captured": ranks.captured,
        "control": ranks.control,
        "held_out": ranks.held_out,
        "graphs": len(variant.members),
        "templates": len(variant.templates),
        "keys": json.loads(json.dumps([member.key for member in variant.members], default=str)),
        "functions": len(variant.functions),
        "modules": len(variant.modules),
        "images": len({digest for module in variant.modules for digest in module.digests}),
        "module_details": _modules(reader, variant),
        "communicators": len(variant.communicators),
        "contents": len(variant.contents),
        "content_bytes": sum(content.bytes for content in variant.contents),
        "rules_bytes": reader.entry(variant.rules).length,
        "noise_bytes": _noise_bytes(reader, variant),
    }


def _noise_bytes(reader: ArchiveReader, variant: Variant) -> int:
    """Bytes of all members together on which nothing depends."""
    tables = ((variant.noise, noise_dtype), (variant.template_noise, template_noise_dtype))
    return sum(noise_bytes(reader.array(name, dtype)) for name, dtype in tables if name)


def _modules(reader: ArchiveReader, variant: Variant) -> list[dict[str, Any]]:
    """What each module's image holds; where ranks have images of their own, the first of them."""
    notes = reader.index.notes if reader.index.kind == "recording" else reader.index.notes.get(variant.name, {})
    opaque = dict(notes.get("opaque_modules", []))
    whole = dict(enumerate(notes.get("images", [])))  # of the first rank class
    fact = reader.index.identity.get("compute_capability")
    out = []
    for number, module in enumerate(variant.modules):
        image = bytes(reader.section(image_section(module.digests[0])))
        found = summary(image, str(fact.value if fact else ""))
        note: list[Any] = list(whole.get(number, [len(image), ""]))
        note += _UNCUT[len(note) - 2 :]
        loaded, whole_because, _, uncut_because, cut = note
        out.append(
            {
                "digest": module.digests[0],
                "images": len(module.digests),
                "bytes": len(image),
                "loaded_bytes": loaded,
                "whole_because": whole_because,
                "cut": cut,
                "uncut_because": uncut_because,
                "targets": found.targets,
                "compression": found.compression,
                "globals": found.globals,
                "changed_globals": [g.name for g in module.globals],
                "opaque": opaque.get(number, found.unreadable),
            }
        )
    return out


def _show(report: dict[str, Any]) -> None:
    console = Console()
    head = Table(show_header=False, box=None)
    head.add_column()
    head.add_column(overflow="fold")
    for key in ("file", "format", "kind", "created", "writer", "content_digest", "bytes", "resident_bytes"):
        head.add_row(key.replace("_", " "), escape(str(report[key])))
    console.print(head)
    variants = Table("variant", "ranks", "captured", "graphs", "templates", "functions", "images", "content bytes")
    for variant in report["variants"]:
        variants.add_row(
            escape(variant["name"]),
            ranges(variant["ranks"]),
            ranges(variant["captured"]),
            *(str(variant[key]) for key in ("graphs", "templates", "functions", "images", "content_bytes")),
        )
    console.print(variants)
    modules = Table("module", "bytes", "of", "code for", "compressed", "globals", "changed", "opaque")
    for variant in report["variants"]:
        for number, module in enumerate(variant["module_details"]):
            modules.add_row(
                f"{escape(variant['name'])} {number}",
                str(module["bytes"]),
                str(module["loaded_bytes"]),
                escape(", ".join(module["targets"])),
                ", ".join("no" if c == "none" else c for c in module["compression"]),
                "unknown" if module["globals"] is None else str(module["globals"]),
                str(len(module["changed_globals"])),
                escape(module["opaque"]),
            )
    console.print(modules)
    sizes = Table("stored", "bytes", "share")
    for kind, count in report["stored_bytes"].items():
        sizes.add_row(kind, str(count), f"{100 * count / report['bytes']:.1f} %")
    console.print(sizes)
    facts = Table("fact", "value")
    for name, value in report["identity"].items():
        facts.add_row(escape(name), escape(shown(value)))
    console.print(facts)


def ranges(ranks: list[int]) -> str:
    """``0-3, 7`` for ranks 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
