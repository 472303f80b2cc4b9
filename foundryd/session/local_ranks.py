# SPDX-License-Identifier: Apache-2.0
"""Refuses to take a rank for its place on its node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foundryd._native import _rankpatch
from foundryd.archive.index import Variant
from foundryd.archive.reader import ArchiveReader
from foundryd.errors import IdentityMismatch
from foundryd.rankpatch.mesh import Coordinate, Mesh, coordinate_table
from foundryd.rankpatch.rules import RuleKind


def check_local_rank(reader: ArchiveReader, variant: Variant, rank: int, local_rank: int) -> None:
    """Whether the variant may be restored where a rank is at another place on its node than its number.

    A capture tells every rank its number as ``LOCAL_RANK``, so a word or an image that is said to follow the rank may
    follow the local rank instead.

    Raises
    ------
    IdentityMismatch
        ``local_rank`` is not ``rank``, and something follows either.
    """
    if local_rank == rank:
        return
    rules = reader.array(variant.rules, _rankpatch.rule_dtype)
    words = int(np.count_nonzero(follows_the_rank(rules, Mesh.parse(variant.name), variant.rank_class.ranks)))
    images = sum(module.by_rank is not None for module in variant.modules)
    if words or images:
        raise IdentityMismatch(
            f"LOCAL_RANK is {local_rank} for rank {rank}, which the archive has captured with {rank}, and {words} words"
            f" and {images} images follow the rank or the local rank: set FOUNDRYD_LOCAL_RANK_UNUSED=1 if the engine "
            "tells no kernel its local rank"
        )


def follows_the_rank(rules: np.ndarray, mesh: Mesh, members: Sequence[int]) -> np.ndarray:
    """Which rules of a rank class are of the rank, or of a coordinate that has its number on all members: bool [rules].

    A word that follows the local rank has such a rule, since both were one number in the capture.
    """
    columns = coordinate_table(mesh)[list(members)]
    alike = [c for c in Coordinate if np.array_equal(columns[:, c], columns[:, Coordinate.RANK])]
    affine = (rules["kind"] == RuleKind.AFFINE) & np.isin(rules["coordinate"], alike)
    return np.asarray(affine | (rules["kind"] == RuleKind.TABLE))
