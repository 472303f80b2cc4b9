# SPDX-License-Identifier: Apache-2.0
"""Work grows with graphs, nodes and ranks in a straight line at worst; counted in calls and bytes, not in time."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.rankpatch.plan import compute_plan

Calls = Callable[[Callable[[], Any]], int]


def later_member(rank: Any, place: int = 1) -> Callable[[], Any]:
    """Makes a member of a template, the one at that place, whose memory is ready, after those before it."""
    templates = len(rank.variant.templates)
    for earlier in range(place):
        rank.patched(earlier * templates)
    return lambda: rank.patched(place * templates)


# Of many members some come with their neighbours, so that the second takes a few more calls, and the third fewer.
@pytest.mark.parametrize(
    ("place", "shapes"),
    [
        (
            1,
            [
                {"graphs": 8, "nodes": 100},
                {"graphs": 8, "nodes": 1000},
                {"graphs": 8, "nodes": 5000, "affine": 500, "relocations": 500, "noise": 3000},
            ],
        ),
        (1, [{"graphs": 128}, {"graphs": 512}, {"graphs": 128, "nodes": 1000}]),
        (2, [{"graphs": 128}, {"graphs": 512}, {"graphs": 128, "nodes": 1000}]),
    ],
)
def test_a_member_takes_the_same_calls_whatever_its_nodes_words_and_neighbours(
    rank_of: Callable[..., Any], calls: Calls, place: int, shapes: list[dict[str, int]]
) -> None:
    counts = {calls(later_member(rank_of(**shape), place)) for shape in shapes}
    assert len(counts) == 1
    assert counts.pop() < 60


@pytest.mark.parametrize("nodes", [100, 5000])
def test_a_member_allocates_nothing_that_grows_with_it(rank_of: Callable[..., Any], nodes: int) -> None:
    member = later_member(rank_of(graphs=8, nodes=nodes, relocations=nodes // 10))
    member()
    tracemalloc.start()
    try:
        member()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4096


def test_a_plan_takes_the_same_calls_whatever_the_graphs(archive_of: Callable[..., Path], calls: Calls) -> None:
    counts = []
    for graphs in (1, 64, 512):
        with ArchiveReader.open(archive_of(graphs=graphs)) as reader:
            compute_plan(reader, "ep=64", 2)  # the groups of a rank are kept
            counts.append(calls(lambda reader=reader: compute_plan(reader, "ep=64", 2)))
    assert len(set(counts)) == 1


def test_what_a_plan_reads_does_not_grow_with_noise(archive_of: Callable[..., Path]) -> None:
    def read(noise: int) -> int:
        with ArchiveReader.open(archive_of(graphs=64, noise=noise)) as reader:
            compute_plan(reader, "ep=64", 2)
            return sum(reader.entry(name).length for name in reader._checked)

    assert read(7500) == read(120) > 64 * 13 * 32


def test_a_plan_has_a_write_for_each_word_that_a_rank_has_of_its_own(archive_of: Callable[..., Path]) -> None:
    for graphs, noise in ((1, 120), (64, 120), (64, 7500)):
        with ArchiveReader.open(archive_of(graphs=graphs, noise=noise)) as reader:
            plan = compute_plan(reader, "ep=64", 2)
            assert len(plan.writes) == 13 * graphs
            assert len(plan.to_bytes()) < 13 * graphs * 24 + 1024


@pytest.mark.parametrize("world", [1, 8, 64])
def test_a_plan_of_a_larger_world_is_as_large(archive_of: Callable[..., Path], world: int) -> None:
    with ArchiveReader.open(archive_of(graphs=8, world=world)) as reader:
        plan = compute_plan(reader, f"ep={world}", world - 1)
        assert len(plan.writes) == 13 * 8
        assert len(plan.to_bytes()) < 13 * 8 * 24 + 1024


def test_opening_takes_calls_in_proportion_to_the_graphs_at_most(archive_of: Callable[..., Path], calls: Calls) -> None:
    def opening(graphs: int) -> int:
        path = archive_of(graphs=graphs)
        return calls(lambda: ArchiveReader.open(path).close())

    one, some, many = opening(1), opening(64), opening(512)
    assert many - some <= 1.1 * (512 - 64) / (64 - 1) * (some - one)


def test_a_file_grows_by_the_words_that_members_do_not_share(archive_of: Callable[..., Path]) -> None:
    def sizes(**shape: int) -> dict[str, int]:
        path = archive_of(**shape)
        with ArchiveReader.open(path) as reader:
            return stored_bytes(reader) | {"file": path.stat().st_size}

    few, many = sizes(graphs=64), sizes(graphs=512)
    assert many["templates"] == few["templates"]
    assert many["file"] - few["file"] < 1.1 * (512 - 64) / (64 - 8) * (few["file"] - sizes(graphs=8)["file"])
    # With noise for all the garbage that stacks leave in structs, and a table of 64 ranks for each graph.
    assert sizes(graphs=512, noise=7500)["file"] < 25e6


def test_stored_members_grow_with_nodes_in_proportion_at_most(archive_of: Callable[..., Path]) -> None:
    def members(nodes: int) -> int:
        with ArchiveReader.open(archive_of(graphs=8, nodes=nodes)) as reader:
            return stored_bytes(reader)["members"]

    assert members(5000) < 1.2 * 5 * members(1000)
