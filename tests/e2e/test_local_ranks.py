# SPDX-License-Identifier: Apache-2.0
"""Nothing of a capture tells a rank from its place on its node, so where these differ a restore has to be allowed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from foundryd._native import _rankpatch
from foundryd.archive.reader import ArchiveReader
from foundryd.errors import IdentityMismatch
from foundryd.rankpatch.mesh import Coordinate, Mesh
from foundryd.rankpatch.rules import RuleKind
from foundryd.session.local_ranks import check_local_rank, follows_the_rank

KEPT = Path(__file__).parents[1] / "archive" / "kept"
APART = {"LOCAL_RANK": "0"}  # each rank is the first of its node


def test_ranks_of_several_nodes_capture_where_words_follow_the_rank(e2e, worlds, pair):
    ranks = worlds.run(pair.config, pair.env(**APART), every=e2e.Change(env=APART))
    assert e2e.right_tokens(pair.config, ranks)
    reason, message = ranks[1].fallback
    assert reason == "identity"
    assert message.startswith("LOCAL_RANK is 0 for rank 1, which the archive has captured with 1, and ")
    assert "FOUNDRYD_LOCAL_RANK_UNUSED=1" in message
    assert e2e.sentence(message)
    # The other one's numbers are equal; a world restores as a whole.
    assert ranks[0].fallback[0] == "peer_failed"


def test_they_restore_where_no_kernel_is_told_its_local_rank(e2e, worlds, pair):
    apart = e2e.Change(env=APART | {"FOUNDRYD_LOCAL_RANK_UNUSED": "1"})
    ranks = worlds.run(pair.config, pair.env(), every=apart)
    assert all(rank.result["restored"] for rank in ranks)
    assert e2e.right_tokens(pair.config, ranks)


def test_a_rank_that_is_alone_restores_at_any_place_of_its_node(e2e, worlds, solo):
    (rank,) = worlds.run(solo.config, solo.env(), every=e2e.Change(env={"LOCAL_RANK": "3"}))
    assert rank.result["restored"] is True
    assert e2e.right_tokens(solo.config, [rank])


@pytest.mark.parametrize("local_rank", [0, 3, 5, 7])
def test_one_rule_that_goes_with_the_rank_is_enough(local_rank):
    """Of a world of ``ep=8``, whose ep axis has the numbers of the ranks."""
    with ArchiveReader.open(KEPT / "format-1.3.archive") as reader:
        (variant,) = reader.index.variants
        check_local_rank(reader, variant, local_rank, local_rank)
        with pytest.raises(IdentityMismatch, match=rf"LOCAL_RANK is {local_rank} for rank 4"):
            check_local_rank(reader, variant, 4, local_rank)


RANK, LOCAL, TP, EP, DP = (Coordinate[name] for name in ("RANK", "LOCAL_RANK", "TP", "EP", "DP"))


@pytest.mark.parametrize(
    ("mesh", "members", "alike"),
    [
        ("tp=8", range(8), {RANK, LOCAL, TP}),
        ("ep=4,tp=2", range(8), {RANK, LOCAL}),
        ("ep=4,tp=2", (0, 1), {RANK, LOCAL, TP}),  # a class that does not go beyond one group of tp
        ("dp=2,tp=4", range(8), {RANK, LOCAL}),
        ("dp=8,ep=dp*tp", range(8), {RANK, LOCAL, DP, EP}),
    ],
)
def test_rules_count_whose_coordinate_has_the_numbers_of_the_ranks(mesh, members, alike):
    rules = np.zeros(len(Coordinate), _rankpatch.rule_dtype)
    rules["kind"], rules["coordinate"] = RuleKind.AFFINE, list(Coordinate)
    found = follows_the_rank(rules, Mesh.parse(mesh), members)
    assert {c for c in Coordinate if found[c]} == alike
    for kind, counts in ((RuleKind.TABLE, True), (RuleKind.NOISE, False), (RuleKind.WORLD, False)):
        rules["kind"] = kind
        assert (follows_the_rank(rules, Mesh.parse(mesh), members) == counts).all()
