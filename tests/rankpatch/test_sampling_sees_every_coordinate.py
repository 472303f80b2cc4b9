# SPDX-License-Identifier: Apache-2.0
"""Which ranks are captured, and how rank classes are found."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.errors import UsageError
from foundryd.rankpatch.mesh import AXES, Coordinate, Mesh, coordinate_table
from foundryd.rankpatch.sampling import Sampling, missing_ranks, sample, split_classes, twos


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {axis: draw(st.integers(1, 4)) for axis in AXES}
    return Mesh(**sizes, local_size=draw(st.sampled_from([0, 2, 8])))


@pytest.mark.parametrize(
    ("world", "ranks", "control", "held_out"),
    [
        (1, (0,), 0, None),
        (2, (0, 1), 1, None),
        (4, (0, 1, 2, 3), 1, None),
        (5, (0, 1, 2, 4), 1, 3),
        (6, (0, 1, 2, 5), 1, 3),
        (8, (0, 1, 2, 3, 7), 1, 4),
        (64, (0, 1, 2, 31, 63), 1, 3),
    ],
)
def test_the_default_sample(world: int, ranks: tuple[int, ...], control: int, held_out: int | None) -> None:
    sampling = sample(Mesh(ep=world))
    assert sampling == Sampling(tuple(range(world)), ranks, control, held_out)
    assert sampling.complete == (held_out is None)


@pytest.mark.parametrize("text", ["dp=2,tp=4", "ep=4,tp=2", "dp=2,tp=4,ep=dp*tp", "pp=2,dp=2,tp=2"])
def test_meshes_of_eight_need_no_more_than_the_default(text: str) -> None:
    assert sample(Mesh.parse(text)).ranks == (0, 1, 2, 3, 7)


@settings(deadline=None)
@given(meshes(), st.data())
def test_every_sample_holds_the_extremes_of_every_coordinate(mesh: Mesh, data: st.DataObject) -> None:
    requested = data.draw(st.one_of(st.none(), st.lists(st.integers(0, mesh.world - 1), max_size=4)))
    members = data.draw(st.one_of(st.none(), st.sets(st.integers(0, mesh.world - 1), min_size=1)))
    if members is not None and requested is not None:
        requested = [r for r in requested if r in members]
    sampling = sample(mesh, requested, None if members is None else sorted(members))
    table = coordinate_table(mesh)
    ranks, every = list(sampling.ranks), list(sampling.members)
    assert set(requested or []) <= set(ranks) <= set(every)
    assert every == sorted(members if members is not None else range(mesh.world))
    assert sampling.control in ranks
    assert sampling.held_out == next((r for r in every if r not in ranks), None)
    for coordinate in Coordinate:
        seen, all_ = np.unique(table[ranks, coordinate]), np.unique(table[every, coordinate])
        assert (seen[0], seen[-1]) == (all_[0], all_[-1])
        assert len(seen) >= min(3, len(all_))
        assert twos(seen.tolist()) == twos(all_.tolist())
    assert not missing_ranks(mesh, every, ranks)


@settings(deadline=None)
@given(meshes(), st.data())
def test_an_extended_sample_keeps_a_held_out_rank_while_there_is_one(mesh: Mesh, data: st.DataObject) -> None:
    sampling = sample(mesh)
    more = data.draw(st.sets(st.integers(0, mesh.world - 1)))
    extended = sampling.extended(more)
    assert set(extended.ranks) == set(sampling.ranks) | more
    assert (extended.held_out is None) == extended.complete == (len(extended.ranks) == mesh.world)
    assert extended.held_out not in extended.ranks


@settings(deadline=None)
@given(st.lists(st.integers(0, 1 << 20), min_size=1, max_size=6))
def test_shared_factors_of_two(values: list[int]) -> None:
    differences = [abs(a - b) for a in values for b in values if a != b]
    assert twos(values) == min(((d & -d).bit_length() - 1 for d in differences), default=64)


@pytest.mark.parametrize(
    "call",
    [
        lambda: sample(Mesh(ep=8), [8]),
        lambda: sample(Mesh(ep=8), [7], [0, 1, 2, 3, 4, 5]),
        lambda: sample(Mesh(ep=8), None, []),
        lambda: sample(Mesh(ep=8), None, [8]),
        lambda: split_classes(Mesh(ep=8), {}),
        lambda: split_classes(Mesh(ep=8), {8: "a"}),
    ],
)
def test_ranks_that_do_not_exist_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(UsageError):
        call()


# --- classes ---------------------------------------------------------------------------------------------------------


def found_classes(mesh: Mesh, key: Callable[[int], Hashable]) -> tuple[tuple[tuple[int, ...], ...], set[int]]:
    """What a capture does: capture what is asked for until the classes are known."""
    captured = {r: key(r) for r in sample(mesh).ranks}
    while True:
        split = split_classes(mesh, captured)
        if not split.capture:
            return split.classes, set(captured)
        assert not split.classes
        assert not set(split.capture) & set(captured), "asked for what is known"
        captured |= {r: key(r) for r in split.capture}


def classes_of(mesh: Mesh, key: Callable[[int], Hashable]) -> tuple[tuple[int, ...], ...]:
    by_key: dict[Hashable, list[int]] = {}
    for rank in range(mesh.world):
        by_key.setdefault(key(rank), []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in by_key.values()))


@settings(deadline=None)
@given(meshes(), st.sampled_from([Coordinate.TP, Coordinate.EP, Coordinate.DP, Coordinate.PP, Coordinate.RANK]))
def test_a_first_and_a_last_shard_are_found(mesh: Mesh, coordinate: Coordinate) -> None:
    values = coordinate_table(mesh)[:, coordinate]

    def key(rank: int) -> str:
        return "first" if values[rank] == 0 else "last" if values[rank] == values.max() else "middle"

    assert found_classes(mesh, key)[0] == classes_of(mesh, key)


def test_boundaries_are_bisected() -> None:
    mesh = Mesh(ep=64)
    classes, captured = found_classes(mesh, lambda rank: rank >= 40)
    assert classes == (tuple(range(40)), tuple(range(40, 64)))
    assert {39, 40} <= captured
    assert len(captured) <= 5 + 6


def test_stages_of_a_pipeline_are_classes() -> None:
    mesh = Mesh.parse("pp=4,tp=8")
    classes, captured = found_classes(mesh, lambda rank: ("first", "middle", "middle", "last")[rank // 8])
    assert classes == (tuple(range(8)), tuple(range(8, 24)), tuple(range(24, 32)))
    assert len(captured) < 12


def test_equal_templates_are_one_class() -> None:
    assert found_classes(Mesh(ep=64), lambda rank: "same") == ((tuple(range(64)),), {0, 1, 2, 31, 63})
