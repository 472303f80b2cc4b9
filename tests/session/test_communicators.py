# SPDX-License-Identifier: Apache-2.0
"""An archive's communicators are found again by the order of declarations, whatever else was made and when."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundryd._native import _hook
from foundryd.archive.index import Communicator
from foundryd.errors import CommunicatorMismatch
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.plan import Plan
from foundryd.session.communicators import match, used_declarations

WORLD = (0, 1, 2, 3)
PAIR = (2, 3)
NONE = _hook.NONE


class Process:
    """A process of rank 2 of 4 with these communicators, each (size, declared ranks, place among declarations)."""

    def __init__(self, *made: tuple[int, tuple[int, ...], int | None]) -> None:
        self.made = made

    def communicators(self) -> tuple[np.ndarray, np.ndarray]:
        table = np.zeros(len(self.made), _hook.communicator_dtype)
        ranks: list[int] = []
        for slot, (size, members, place) in enumerate(self.made):
            table[slot] = (slot, size, 0, 1, 64 + slot, len(ranks), len(members), NONE if place is None else place, 0)
            ranks += members
        return table, np.array(ranks, np.uint32)


def plan(*members: tuple[int, ...]) -> Plan:
    return Plan("tp=4", 0, 2, 4, Mesh.parse("tp=4").coordinates(2), (), members, np.zeros(0, np.uint8))


def using(*numbers: int) -> np.ndarray:
    ops = np.zeros(len(numbers), _hook.comm_op_dtype)
    ops["communicator"] = numbers
    return ops


def matched(process: Process, known: list[tuple[Communicator, tuple[int, ...]]], *used: int) -> list[int]:
    hook: Any = process
    members = [ranks for _, ranks in known]
    return match(hook, plan(*members), [c for c, _ in known], using(*used)).tolist()


def archived(ranks: tuple[int, ...], place: int | None) -> tuple[Communicator, tuple[int, ...]]:
    return Communicator(len(ranks), None, list(ranks), place), ranks


@given(st.integers(1, 6).flatmap(lambda n: st.tuples(st.permutations(range(n)), st.permutations(range(n)))), st.data())
def test_any_order_of_creation_leads_to_the_same_communicator(orders: Any, data: st.DataObject) -> None:
    """All join the same ranks, so that nothing but the declarations tells them apart."""
    then, now = orders
    extra = data.draw(st.lists(st.integers(0, len(now)), max_size=3))
    made: list[tuple[int, tuple[int, ...], int | None]] = [(2, PAIR, place) for place in now]
    for at in extra:  # of the library's own
        made.insert(at, (4, (), None))
    known = [archived(PAIR, place) for place in then]
    slots = matched(Process(*made), known, *range(len(then)))
    assert [made[slot][2] for slot in slots] == list(then)


def test_what_no_graph_uses_need_not_be_here() -> None:
    known = [archived(WORLD, 0), archived(PAIR, 1), archived((2,), 2)]
    process = Process((2, PAIR, 1))
    assert matched(process, known, 1, 1) == [NONE, 0, NONE]
    with pytest.raises(
        CommunicatorMismatch, match=r"communicator 0 of the archive, over ranks \[0, 1, 2, 3\], was not declared"
    ):
        matched(process, known, 0, 1)


def test_other_ranks_are_refused_even_where_no_graph_uses_them() -> None:
    """An engine that declares in another order may have exchanged two that join the same ranks, too."""
    known = [archived(WORLD, 0), archived(PAIR, 1)]
    with pytest.raises(CommunicatorMismatch, match=r"communicator 0 joins ranks \[2, 3\] here and \[0, 1, 2, 3\]"):
        matched(Process((2, PAIR, 0), (4, WORLD, 1)), known, 1)
    with pytest.raises(CommunicatorMismatch, match="communicator 1 joins ranks"):
        matched(Process((4, WORLD, 0), (2, (3, 2), 1)), known, 0)


def test_undeclared_ones_are_found_in_the_order_of_creation() -> None:
    world = Communicator(4, ["tp"]), WORLD
    assert matched(Process((2, PAIR, 0), (4, (), None)), [world, archived(PAIR, 0)], 0, 1) == [1, 0]
    with pytest.raises(CommunicatorMismatch, match=r"communicator 0 of the archive.* was not created here"):
        matched(Process((2, PAIR, 0)), [world, archived(PAIR, 0)], 0)
    with pytest.raises(CommunicatorMismatch, match="communicator 0 joins ranks 2 here"):
        matched(Process((2, (), None)), [world], 0)


def test_an_archive_without_places_has_all_in_the_order_of_creation() -> None:
    known = [archived(PAIR, None), archived(WORLD, None)]
    assert matched(Process((2, PAIR, 1), (4, WORLD, 0)), known, 0, 1) == [0, 1]
    with pytest.raises(CommunicatorMismatch):
        matched(Process((4, WORLD, 0), (2, PAIR, 1)), known, 0, 1)


def test_only_declared_ones_that_graphs_use_are_wanted() -> None:
    variant: Any = type(
        "Variant", (), {"communicators": [c for c, _ in (archived(WORLD, 3), archived(PAIR, None), archived(PAIR, 1))]}
    )
    assert used_declarations(variant, using(0, 1, 0)) == {3}
    assert used_declarations(variant, using(2)) == {1}
    assert used_declarations(variant, using()) == set()
