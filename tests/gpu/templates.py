# SPDX-License-Identifier: Apache-2.0
"""Which batch sizes take each other's executables: by templates, since executables are updated within one only."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from launch import RunFailed

from foundryd.archive.reader import ArchiveReader

Pair = tuple[int, int]
# Of a batch size: the number of its template in each rank class.
Templates = tuple[int, ...]


@dataclass(frozen=True)
class Chosen:
    """Pairs of batch sizes, and how many templates the graphs of all batch sizes have."""

    same: tuple[Pair, ...]  # of one template
    across: tuple[Pair, ...]  # of different templates
    templates: int


def listed(text: str) -> tuple[Pair, ...]:
    """Reads batch sizes two by two: ``1,2,7,8`` is 1 and 2, then 7 and 8."""
    words = text.split(",")
    sizes = [int(word) for word in words if word.isdecimal()]
    found = tuple(zip(sizes[::2], sizes[1::2], strict=False))
    if len(sizes) < len(words) or len(sizes) % 2 or any(first == second for first, second in found):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of pairs: give different batch sizes two by two")
    return found


def choose(templates: Mapping[int, Templates]) -> Chosen:
    """The smallest and the largest neighbours of one template, and the smallest ones of different templates.

    They are neighbours among the sizes of their template, or among all.  No size is in two pairs of one template.
    """
    sizes: dict[Templates, list[int]] = {}
    for batch in sorted(templates):
        sizes.setdefault(templates[batch], []).append(batch)
    several = [batches for batches in sizes.values() if len(batches) > 1]
    same: list[Pair] = []
    if several:
        first, second, *_ = min(several)
        *_, last_but_one, last = max(several, key=lambda batches: batches[-1])
        same.append((first, second))
        if not {first, second} & {last_but_one, last}:
            same.append((last_but_one, last))
    neighbours = pairwise(sorted(templates))
    across = next((pair for pair in neighbours if _differ(templates, pair)), None)
    return Chosen(tuple(same), () if across is None else (across,), len(sizes))


def sort_out(templates: Mapping[int, Templates], pairs: Iterable[Pair]) -> Chosen:
    """These pairs, by whether they are of one template.

    Raises
    ------
    RunFailed
        A batch size has no graph, or two have one template in one rank class and not in another.
    """
    same: list[Pair] = []
    across: list[Pair] = []
    for pair in pairs:
        if absent := sorted(set(pair) - templates.keys()):
            raise RunFailed(f"batch sizes {absent} have no graph: choose among {sorted(templates)}")
        if templates[pair[0]] == templates[pair[1]]:
            same.append(pair)
        elif _differ(templates, pair):
            across.append(pair)
        else:
            raise RunFailed(f"batch sizes {pair} have one template in some rank classes only: choose others")
    return Chosen(tuple(same), tuple(across), len(set(templates.values())))


def of_archive(path: Path) -> dict[int, Templates]:
    """The templates of every batch size in an archive of one parallel configuration."""
    with ArchiveReader.open(path) as reader:
        classes = [
            {batch: member.template for member in variant.members for name, batch in [member.key] if name == "decode"}
            for variant in reader.index.variants
        ]
    return {batch: tuple(found[batch] for found in classes) for batch in sorted(set.intersection(*map(set, classes)))}


def text(pairs: Sequence[Pair]) -> str:
    """Pairs as ``bench.py`` reads them."""
    return ",".join(f"{first}:{second}" for first, second in pairs)


def _differ(templates: Mapping[int, Templates], pair: Pair) -> bool:
    """Whether their templates are different ones in every rank class."""
    return all(one != other for one, other in zip(*(templates[batch] for batch in pair), strict=True))
