# SPDX-License-Identifier: Apache-2.0
"""Noise of an archive: bytes of members on which nothing depends, kept once for all members of a template.

No restore reads it, since a member has in such a byte what the first member of its template has.  It says what was
proven, and lets ``verify`` see that no rank gets a value of its own there.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foundryd.archive.dtypes import noise_dtype, template_noise_dtype
from foundryd.errors import CaptureError

Counts = npt.NDArray[np.int64]


def count_bytes(
    offset: npt.NDArray[np.integer],
    width: npt.NDArray[np.integer],
    length: int,
    weight: npt.NDArray[np.integer] | None = None,
) -> Counts:
    """How many spans, or what weight of them, have each byte of a block of ``length`` bytes, in which all lie."""
    first, end = offset.astype(np.int64), offset.astype(np.int64) + width.astype(np.int64)
    steps = np.bincount(first, weight, length + 1) - np.bincount(end, weight, length + 1)
    counts: Counts = np.cumsum(steps.astype(np.int64)[:length])
    return counts


def by_template(noise: npt.NDArray[np.void], templates: Sequence[Sequence[int]]) -> npt.NDArray[np.void]:
    """Noise of members as noise of templates.

    Parameters
    ----------
    noise : ``noise_dtype`` by (block, offset), of blocks whose number is the member's.
    templates : the members of each.

    Returns
    -------
    ``template_noise_dtype``, by (template, offset); neighbours that are noise in equally many members are one run.
    """
    order = np.argsort(noise["block"], kind="stable")
    bounds = np.searchsorted(noise["block"][order], np.arange(int(noise["block"].max(initial=0)) + 2))
    rows = [np.zeros(0, template_noise_dtype)]
    for number, members in enumerate(templates):
        known = [m for m in members if m + 1 < len(bounds)]
        mine = noise[np.concatenate([order[:0], *(order[bounds[m] : bounds[m + 1]] for m in known)])]
        if not len(mine):
            continue
        counts = count_bytes(mine["offset"], mine["width"], int((mine["offset"] + mine["width"]).max()))
        first = np.flatnonzero(np.diff(counts, prepend=0))
        runs = np.zeros(len(first), template_noise_dtype)
        runs["template"], runs["offset"] = number, first
        runs["width"] = np.diff(np.append(first, len(counts)))
        runs["members"] = counts[first]
        rows.append(runs[runs["members"] > 0])
    return np.concatenate(rows)


def noise_bytes(noise: npt.NDArray[np.void]) -> int:
    """Bytes of noise of either kind, over all blocks."""
    each = noise["width"].astype(np.int64)
    return int((each if noise.dtype == noise_dtype else each * noise["members"]).sum())


def to_store(
    noise: npt.NDArray[np.void],
    known: tuple[npt.NDArray[np.void], list[list[int]]] | None,
    templates: list[list[int]],
) -> tuple[npt.NDArray[np.void], npt.NDArray[np.void]]:
    """What a variant has as ``noise`` and ``template_noise``.

    Parameters
    ----------
    noise : ``noise_dtype`` of blocks, those of the members first.
    known : of an archive, ``template_noise`` and the members of its templates; ``noise`` is what it has beside that.
    templates : the members of each.

    Raises
    ------
    CaptureError
        The archive's templates are others.
    """
    if known is None:
        of_members = noise["block"] < sum(map(len, templates))
        return noise[~of_members], by_template(noise[of_members], templates)
    if known[1] != templates:
        raise CaptureError(
            f"the archive's graphs are in {len(known[1])} templates and this version puts them into {len(templates)} "
            "others, so that its noise fits no more: capture all variants again"
        )
    return noise, known[0]
