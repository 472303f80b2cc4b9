# SPDX-License-Identifier: Apache-2.0
"""Meshes: text, places, groups."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.errors import UsageError
from foundryd.rankpatch.mesh import AXES, Coordinate, Mesh


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    sizes = {axis: draw(st.integers(1, 4)) for axis in AXES}
    spans = draw(st.booleans())
    if spans:
        sizes["ep"] = 1
    return Mesh(**sizes, ep_spans=spans, local_size=draw(st.integers(0, 9)))


@settings(deadline=None)
@given(meshes())
def test_text_and_mesh_are_the_same_thing(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh), local_size=mesh.local_size) == mesh


@settings(deadline=None)
@given(meshes())
def test_ranks_enumerate_the_axes_with_tp_fastest(mesh: Mesh) -> None:
    for rank, place in enumerate(product(*(range(getattr(mesh, axis)) for axis in AXES))):
        expected = dict(zip(AXES, place, strict=True))
        if mesh.ep_spans:
            expected["ep"] = expected["dp"] * mesh.tp + expected["tp"]
        assert mesh.place(rank) == expected
        coordinates = mesh.coordinates(rank)
        assert coordinates[Coordinate.RANK] == rank
        assert coordinates[Coordinate.LOCAL_RANK] == (rank % mesh.local_size if mesh.local_size else rank)
        assert {axis: coordinates[Coordinate[axis.upper()]] for axis in AXES} == expected
    assert rank == mesh.world - 1


@settings(deadline=None)
@given(meshes(), st.data())
def test_a_group_has_the_ranks_that_share_all_other_places(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world - 1))
    axes = tuple(data.draw(st.sets(st.sampled_from(AXES))))
    free = {*axes, "dp", "tp"} if mesh.ep_spans and "ep" in axes else set(axes)
    fixed = [a for a in AXES if a not in free and (a != "ep" or not mesh.ep_spans)]
    group = mesh.group(rank, axes)
    mine = mesh.place(rank)
    assert group == tuple(r for r in range(mesh.world) if all(mesh.place(r)[a] == mine[a] for a in fixed))
    assert all(mesh.group(other, axes) == group for other in group)


@settings(deadline=None)
@given(meshes(), st.data())
def test_the_axes_of_a_group_are_found_again(mesh: Mesh, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, mesh.world - 1))
    sized = [a for a in AXES if getattr(mesh, a) > 1]
    for count in range(len(sized) + 1):
        for axes in combinations(sized, count):
            group = mesh.group(rank, axes)
            assert mesh.axes_of(rank, group[::-1]) == axes
            if 1 < len(group) < mesh.world:
                outsider = next(r for r in range(mesh.world) if r not in group)
                others = tuple(sorted((rank, *group[2:], outsider)))
                found = mesh.axes_of(rank, others)
                assert found is None or mesh.group(rank, found) == others


def test_groups_of_a_thousand_ranks() -> None:
    mesh = Mesh.parse("pp=4,dp=16,tp=16")
    for rank in range(mesh.world):
        assert mesh.axes_of(rank, mesh.group(rank, ("dp",))) == ("dp",)
    assert mesh.axes_of(0, tuple(range(1024))) == ("pp", "dp", "tp")
    assert mesh.axes_of(0, (0, 1, 2)) is None


@pytest.mark.parametrize(
    "text",
    [
        *("tp", "tp=", "tp=0", "tp=-1", "tp=x", "tp=²", "tp=٣", "tp=2=3", "tp=2,tp=2", "sp=2", "dp=dp*tp"),
        *("ep=2,ep=dp*tp", "ep=dp*tp,ep=2", "tp=999999999", "tp=9999999999", "tp=1" + "0" * 5000, "tp=256,dp=257"),
    ],
)
def test_texts_that_are_no_mesh_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Mesh.parse(text)


def test_meshes_and_ranks_that_cannot_be_are_refused() -> None:
    for sizes in ({"tp": 0}, {"ep": -1}, {"local_size": -1}, {"ep": 2, "ep_spans": True}, {"tp": 1 << 17}):
        with pytest.raises(UsageError):
            Mesh(**sizes)
    mesh = Mesh.parse("tp=2")
    for rank in (-1, 2):
        for call in (mesh.place, mesh.coordinates, lambda r: mesh.group(r, ("tp",))):
            with pytest.raises(UsageError, match="ranks 0 to 1"):
                call(rank)
    with pytest.raises(UsageError, match="sp is not an axis"):
        mesh.group(0, ("sp",))
