# SPDX-License-Identifier: Apache-2.0
"""A member made in memory that is used again is, byte for byte, what its definition says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from patched_rank import SCALES, Rank
from synthetic import Decoder, Shape

from foundryd._native import _rankpatch
from foundryd.archive.members import graph_block
from foundryd.errors import ArchiveFormatError
from foundryd.session.executables import Member
from foundryd.session.patching import MemberBlocks

SHAPE = {"graphs": 12, "templates": 3, "nodes": 51, "world": 8, "affine": 9, "tables": 4, "noise": 40}
# More members of a template than words of a cache line, in which case columns are turned.
MANY = SHAPE | {"graphs": 80, "templates": 2, "nodes": 34}


def defined(shape: Shape, member: int, rank: int) -> Any:
    """The block of a member for a rank by the definition: what was captured, then rules, then addresses."""
    decoder = Decoder(shape)
    block = bytearray(graph_block(decoder.graph(member)).tobytes())
    rules, tables = decoder.rules()
    for number, offset, width, kind, _, _, table, base, stride in rules[rules["block"] == member].tolist():
        assert number == member
        value = {0: base + stride * rank, 1: int(tables[table + rank]) if kind == 1 else 0}.get(kind)
        if value is not None:
            block[offset : offset + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    relocations = decoder.relocations()
    for _, offset, symbol, _, addend in relocations[relocations["block"] == member].tolist():
        assert symbol == 0
        block[offset : offset + 8] = (SCALES + addend).to_bytes(8, "little")
    return np.frombuffer(bytes(block), np.uint8)


expected = cache(defined)


@pytest.fixture(scope="module")
def ranks(archive_of: Callable[..., Any]) -> list[Rank]:
    return [Rank(archive_of(**SHAPE), rank) for rank in range(8)]


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 7), st.lists(st.integers(0, 11), min_size=1, max_size=6))
def test_members_in_any_order_are_what_their_definition_says(ranks: list[Rank], rank: int, members: list[int]) -> None:
    for member in members:
        graph = ranks[rank].patched(member)
        assert np.array_equal(graph_block(graph), expected(Shape(**SHAPE), member, rank))
        first = ranks[rank].reader.array(ranks[rank].variant.templates[member % 3].edges, graph.edges.dtype)
        assert np.array_equal(graph.edges, first)


@settings(deadline=None, max_examples=20)
@given(st.lists(st.integers(0, 79), max_size=8), st.permutations(range(8)))
def test_many_members_of_a_template_are_what_their_definition_says(
    archive_of: Callable[..., Any], members: list[int], order: list[int]
) -> None:
    rank = Rank(archive_of(**MANY))
    # One after another, as a restore comes to them, between others that are asked for at any time.
    neighbours = [2 * place for place in order]
    for member in [*neighbours, *members, *range(0, 80, 2), *members]:
        graph = rank.patched(member)
        assert np.array_equal(graph_block(graph), expected(Shape(**MANY), member, 5)), member


def test_a_member_is_whole_again_after_its_needs_were_asked_for(ranks: list[Rank]) -> None:
    place = 4
    wanted = Member(place, None, place % 3, None)
    for _ in range(2):
        ranks[2].blocks.needs(wanted)
        assert np.array_equal(graph_block(ranks[2].patched(place)), expected(Shape(**SHAPE), place, 2))


@pytest.mark.parametrize(("field", "what"), [("functions", "function"), ("symbols", "symbol")])
def test_a_graph_that_uses_what_the_archive_does_not_have_is_refused_by_its_number(
    ranks: list[Rank], field: str, what: str
) -> None:
    rank = ranks[0]
    fewer = msgspec.structs.replace(rank.variant, **{field: getattr(rank.variant, field)[:-1]})
    blocks = MemberBlocks(rank.reader, fewer, rank.plan)
    last = len(getattr(fewer, field))
    with pytest.raises(ArchiveFormatError, match=f"uses {what} {last} of an archive that has {last}"):
        blocks.needs(Member(0, None, 0, None))


def test_every_kernel_is_as_long_as_the_function_that_it_names(ranks: list[Rank]) -> None:
    graph = ranks[0].patched(0)
    functions = ranks[0].variant.functions
    for node in graph.nodes:
        assert int(node["param_bytes"]) == functions[int(node["function"])].param_bytes
    assert _rankpatch.write_dtype == ranks[0].plan.writes.dtype
