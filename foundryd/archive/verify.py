# SPDX-License-Identifier: Apache-2.0
"""Whether an archive makes sense: what digests cannot tell, because somebody may have written nonsense."""

from __future__ import annotations

from foundryd.archive.checks.code import check_code, check_images, check_sections
from foundryd.archive.checks.findings import Findings
from foundryd.archive.checks.graphs import check_graphs
from foundryd.archive.checks.memory import check_memory
from foundryd.archive.checks.ranks import check_class, check_communication, check_patches
from foundryd.archive.dtypes import Records, records
from foundryd.archive.index import Variant
from foundryd.archive.reader import ArchiveReader
from foundryd.errors import ArchiveFormatError


def violations(reader: ArchiveReader, *, deep: bool = True, dtypes: Records | None = None) -> list[str]:
    """Everything that is wrong with the archive, each a sentence that names the object; empty if nothing is.

    Parameters
    ----------
    reader : an open archive, whose header, index and section places are therefore right.
    deep : also decode every section and check what comes out, and look at every member's words.
    dtypes : the structs in the archive, by default those of this build.
    """
    found = Findings(reader, dtypes or records(), deep)
    if deep:
        check_sections(found)
    variants = reader.index.variants
    check_images(found, variants)
    _check_variants(found, reader)
    for variant in variants:
        here = found.inside(_title(variant))
        check_class(here, variant)
        check_memory(here, variant)
        check_code(here, variant)
        groups = check_communication(here, variant)
        templates = check_graphs(here, variant, groups)
        check_patches(here, variant, templates)
    return found.sentences


def verify(reader: ArchiveReader, deep: bool = True, dtypes: Records | None = None) -> None:
    """Checks everything: with ``deep`` every byte of the file, and what they mean.

    Raises
    ------
    ArchiveDigestError
        A byte is not the one that was written.
    ArchiveFormatError
        Something in it is impossible: the first violation, and the number of others; see ``violations``.
    """
    if deep:
        reader.verify()
    require_none(violations(reader, deep=deep, dtypes=dtypes), reader.name)


def require_none(sentences: list[str], name: str) -> None:
    """Raises ``ArchiveFormatError`` if ``violations`` found any in the archive called ``name``."""
    if sentences:
        more = f", and {len(sentences) - 1} more" if len(sentences) > 1 else ""
        raise ArchiveFormatError(
            f"{name} contradicts itself ({sentences[0]}{more}): capture again, and report it if it happens again"
        )


def _check_variants(found: Findings, reader: ArchiveReader) -> None:
    index = reader.index
    if index.kind == "recording":
        found.need(len(index.variants) == 1, f"a recording has one variant, this has {len(index.variants)}")
        for variant in index.variants:
            found.inside(_title(variant)).need(
                len(variant.rank_class.ranks) == 1, "is a recording of more than one rank"
            )
            entry = reader.sections.get(variant.rules)
            found.inside(_title(variant)).need(entry is None or entry.length == 0, "is a recording and has rules")
    worlds: dict[str, int] = {}
    ranks: dict[str, set[int]] = {}
    for variant in index.variants:
        here = found.inside(_title(variant))
        world, mine = worlds.setdefault(variant.name, variant.world), set(variant.rank_class.ranks)
        here.need(world == variant.world, f"has a world of {variant.world}, and another rank class of it {world}")
        common = sorted(mine & ranks.setdefault(variant.name, set()))
        here.need(not common, f"has rank {common[:1]}, which another rank class of it has too")
        ranks[variant.name] |= mine


def _title(variant: Variant) -> str:
    ranks = variant.rank_class.ranks
    return f"variant {variant.name} (ranks {min(ranks)} to {max(ranks)})" if ranks else f"variant {variant.name}"
