# SPDX-License-Identifier: Apache-2.0
"""What the bytes of an archive are spent on."""

from __future__ import annotations

from collections.abc import Iterator

from foundryd.archive.format import image_section
from foundryd.archive.index import Index, Template
from foundryd.archive.reader import ArchiveReader

KINDS = ("templates", "members", "modules", "content", "rules", "comm", "memory", "other", "index", "padding")


def stored_bytes(reader: ArchiveReader) -> dict[str, int]:
    """Bytes of the file by kind, in the order of ``KINDS``; they add up to the file.

    A section that two kinds use counts for the first.  ``padding`` includes the header.
    """
    kind_of: dict[str, str] = {}
    for kind, name in _uses(reader.index):
        kind_of.setdefault(name, kind)
    sizes = dict.fromkeys(KINDS, 0)
    for entry in reader.sections.values():
        sizes[kind_of.get(entry.name, "other")] += entry.stored
    sizes["index"] = reader.header.index_length
    sizes["padding"] = reader.header.file_length - sum(sizes.values())
    return sizes


def _uses(index: Index) -> Iterator[tuple[str, str]]:
    for variant in index.variants:
        for template in variant.templates:
            yield from (("templates", name) for name in _template_sections(template))
            yield from (("members", name) for name in (template.positions, template.columns))
        for module in variant.modules:
            yield from (("modules", image_section(digest)) for digest in module.digests)
        yield from (("content", content.section) for content in variant.contents)
        yield from (("rules", name) for name in (variant.rules, variant.tables, variant.relocations))
        yield from (("rules", name) for name in (variant.noise, variant.template_noise) if name)
        yield "comm", variant.comm_ops
        yield "memory", variant.allocations
        if variant.windows is not None:
            yield "memory", variant.windows.section
        # What is left of the blocks: the bytes of globals.
        yield from (("modules", block.section) for block in variant.blocks if block.section)


def _template_sections(template: Template) -> Iterator[str]:
    yield from (template.nodes, template.edges, template.attributes, template.params)
    for child in template.children:
        yield from _template_sections(child)
