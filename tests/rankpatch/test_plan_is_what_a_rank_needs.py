# SPDX-License-Identifier: Apache-2.0
"""Plans: what is worked out for a rank, what is refused, and the bytes that carry it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd._native import _rankpatch
from foundryd.archive.index import Communicator, Index, Module, RankClass, Variant
from foundryd.errors import ArchiveFormatError, FoundrydError, NotInArchiveError, UsageError
from foundryd.rankpatch.infer import RankView, infer
from foundryd.rankpatch.mesh import Coordinate, Mesh
from foundryd.rankpatch.plan import Plan, compute_plan
from foundryd.rankpatch.rules import RuleKind
from foundryd.rankpatch.sampling import sample

MESH = Mesh.parse("ep=4,tp=2")


@dataclass
class Archive:
    """An open archive, as far as plans look at one."""

    index: Index
    sections: dict[str, npt.NDArray[Any]] = field(default_factory=dict)

    def array(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        found = self.sections[name]
        assert found.dtype == np.dtype(dtype)
        return found


def blocks(rank: int) -> RankView:
    place = MESH.place(rank)
    words = [7, 1000 + 3 * place["ep"], (1 << 40) - place["tp"], 5 * rank, 9]
    return RankView(rank, [np.zeros(4, dtype=np.uint8), np.array(words, dtype="<u8").view(np.uint8)])


def variant(name: str = "ep=4,tp=2", world: int = 8, ranks: list[int] | None = None, **parts: Any) -> Variant:
    ranks = list(range(world)) if ranks is None else ranks
    empty: dict[str, Any] = {
        "functions": [], "modules": [], "symbols": [], "templates": [], "members": [], "communicators": [],
        "contents": [], "blocks": [], "comm_ops": "o", "allocations": "a", "rules": "r", "tables": "t",
        "relocations": "l",
    }  # fmt: skip
    return Variant(
        name=name,
        world=world,
        rank_class=RankClass(ranks, ranks, None, None),
        arena_base=0x600000000000,
        arena_stride=1 << 38,
        **(empty | parts),
    )


def archive(*variants: Variant, **sections: npt.NDArray[Any]) -> Archive:
    sections = {"r": np.zeros(0, dtype=_rankpatch.rule_dtype), "t": np.zeros(0, dtype=np.uint64)} | sections
    return Archive(Index("archive", "2026-01-01T00:00:00Z", "foundryd", {}, list(variants)), sections)


@pytest.fixture(scope="module")
def good() -> Archive:
    inferred = infer(
        [blocks(r) for r in sample(MESH).ranks], MESH, fields=[None, np.array([(8 * i, 8) for i in range(5)])]
    )
    assert len(inferred.rules) == 3
    made = variant(
        modules=[Module(0, ["aa"]), Module(0, ["bb", "cc"], [0, 1, 1, 0, 0, 0, 0, -1])],
        communicators=[Communicator(8, ["ep", "tp"]), Communicator(2, ["tp"]), Communicator(4, ["ep"])],
    )
    return archive(made, r=inferred.rules, t=inferred.tables)


@pytest.mark.parametrize("rank", range(7))
def test_a_plan_reproduces_the_rank(good: Archive, rank: int) -> None:
    plan = compute_plan(good, "tp=2,ep=4", rank)  # axes in another order
    assert (plan.variant, plan.place, plan.rank, plan.world) == ("ep=4,tp=2", 0, rank, 8)
    assert plan.coordinates == MESH.coordinates(rank)
    assert plan.modules == ("aa", "cc" if rank in (1, 2) else "bb")
    assert plan.communicators == (tuple(range(8)), MESH.group(rank, ("tp",)), MESH.group(rank, ("ep",)))
    content = blocks(0).blocks[1].copy()
    plan.apply(1, content)
    assert content.tobytes() == blocks(rank).blocks[1].tobytes()
    assert not len(plan.writes_of(0))
    assert not len(plan.writes_of(2))
    assert len(plan.writes_of(1)) == 3


def same(a: Plan, b: Plan) -> bool:
    names = ("variant", "place", "rank", "world", "coordinates", "modules", "communicators")
    return all(getattr(a, n) == getattr(b, n) for n in names) and a.writes.tobytes() == b.writes.tobytes()


def test_bytes_carry_the_plan_without_a_copy(good: Archive) -> None:
    plan = compute_plan(good, "ep=4,tp=2", 5)
    memory = np.frombuffer(plan.to_bytes(), dtype=np.uint8)
    read = Plan.from_buffer(memory)
    assert same(plan, read)
    assert np.shares_memory(read.writes, memory)
    assert not read.writes.flags.writeable
    assert read.writes.ctypes.data % 8 == memory.ctypes.data % 8
    for other in (bytes(memory), bytearray(memory), memoryview(bytes(memory))):
        assert same(plan, Plan.from_buffer(other))


def test_an_empty_plan(good: Archive) -> None:
    plan = compute_plan(archive(variant("tp=1", 1)), "", 0)
    assert same(plan, Plan.from_buffer(plan.to_bytes()))
    assert not len(plan.writes)


@settings(deadline=None)
@given(st.data())
def test_truncated_and_extended_bytes_are_refused(good: Archive, data: st.DataObject) -> None:
    whole = compute_plan(good, "ep=4,tp=2", 5).to_bytes()
    for bad in (
        whole[: data.draw(st.integers(0, len(whole) - 1))],
        whole + data.draw(st.binary(min_size=1, max_size=99)),
    ):
        with pytest.raises(ArchiveFormatError, match="no plan"):
            Plan.from_buffer(bad)


@settings(deadline=None)
@given(st.data())
def test_flipped_bytes_are_refused_or_read_as_something_valid(good: Archive, data: st.DataObject) -> None:
    whole = bytearray(compute_plan(good, "ep=4,tp=2", 5).to_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        plan = Plan.from_buffer(whole)
    except ArchiveFormatError:
        return
    _rankpatch.check_writes(plan.writes)
    assert same(plan, Plan.from_buffer(plan.to_bytes()))
    assert all(plan.rank in ranks for ranks in plan.communicators)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", 8), ("rank", -1), ("rank", 6), ("world", 0), ("world", 1 << 40), ("place", -1),
        ("coordinates", [5, 5]), ("coordinates", [5, 5, 1, 2, 0, 8]), ("coordinates", [4, 5, 1, 2, 0, 0]),
        ("communicators", [[0, 1]]), ("communicators", [[5, 5]]), ("communicators", [[5, 8]]), ("communicators", [[]]),
        ("modules", 3), ("variant", None), ("unknown", 1),
    ],
)  # fmt: skip
def test_headers_that_contradict_themselves_are_refused(good: Archive, name: str, value: object) -> None:
    whole = compute_plan(good, "ep=4,tp=2", 5).to_bytes()
    header_bytes = int.from_bytes(whole[8:12], "little")
    header = msgspec.msgpack.decode(whole[16 : 16 + header_bytes])
    changed = msgspec.msgpack.encode(header | {name: value})
    padding = bytes(-len(changed) % 16)
    body = whole[16 + header_bytes + -header_bytes % 16 :]
    head = whole[:8] + len(changed).to_bytes(4, "little") + whole[12:16]
    with pytest.raises(ArchiveFormatError, match="no plan"):
        Plan.from_buffer(head + changed + padding + body)
    changed = msgspec.msgpack.encode(header)
    Plan.from_buffer(
        whole[:8] + len(changed).to_bytes(4, "little") + whole[12:16] + changed + bytes(-len(changed) % 16) + body
    )


def test_writes_past_a_block_are_refused(good: Archive) -> None:
    plan = compute_plan(good, "ep=4,tp=2", 5)
    content = np.zeros(24, dtype=np.uint8)
    with pytest.raises(ArchiveFormatError, match="past block 1 of 24 bytes"):
        plan.apply(1, content)
    assert not content.any()


# --- what an archive cannot serve ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "rank", "message"),
    [
        ("ep=8", 0, "no variant 'ep=8': use one of ep=4,tp=2"),
        ("nonsense", 0, "no variant 'nonsense'"),
        ("ep=4,tp=2", 8, "serves ranks 0-7 of the variant ep=4,tp=2, which has 8 ranks, but not rank 8"),
        ("ep=4,tp=2", -1, "but not rank -1"),
        ("ep=4,tp=2", 7, "module 1 differs by rank and rank 7 was not captured"),
    ],
)
def test_what_the_archive_does_not_have_is_named(good: Archive, name: str, rank: int, message: str) -> None:
    with pytest.raises(NotInArchiveError, match=message):
        compute_plan(good, name, rank)


def test_the_class_of_a_rank_is_found() -> None:
    reader = archive(variant(ranks=[0, 1]), variant(ranks=[2, 3, 4, 7]))
    assert compute_plan(reader, "ep=4,tp=2", 1).place == 0
    assert compute_plan(reader, "ep=4,tp=2", 7).place == 1
    with pytest.raises(NotInArchiveError, match="serves ranks 0-4, 7 of"):
        compute_plan(reader, "ep=4,tp=2", 5)


def test_members_of_a_communicator_off_the_mesh() -> None:
    reader = archive(variant(communicators=[Communicator(3, None, [4, 1, 0])]))
    assert compute_plan(reader, "ep=4,tp=2", 1).communicators == ((4, 1, 0),)
    with pytest.raises(NotInArchiveError, match="communicator 0 was captured with ranks"):
        compute_plan(reader, "ep=4,tp=2", 2)


def one_rule(**fields: int) -> npt.NDArray[np.void]:
    rule = np.zeros(1, dtype=_rankpatch.rule_dtype)
    rule["width"] = 4
    for name, value in fields.items():
        rule[name] = value
    return rule


@pytest.mark.parametrize(
    "reader",
    [
        archive(variant(world=7)),
        archive(variant(name="tp=banana")),
        archive(variant(ranks=[0, 9])),
        archive(variant(modules=[Module(0, [])])),
        archive(variant(modules=[Module(0, ["aa", "bb"])])),
        archive(variant(modules=[Module(0, ["aa"], [0])])),
        archive(variant(modules=[Module(0, ["aa"], [1] * 8)])),
        archive(variant(modules=[Module(0, ["aa"], [-2] * 8)])),
        archive(variant(communicators=[Communicator(3, ["tp"])])),
        archive(variant(communicators=[Communicator(2, ["sp"])])),
        archive(variant(communicators=[Communicator(2, None)])),
        archive(variant(communicators=[Communicator(2, None, [0, 8])])),
        archive(variant(communicators=[Communicator(2, None, [0, 0])])),
        archive(variant(), r=one_rule(kind=RuleKind.TABLE)),
        archive(variant(), r=one_rule(kind=9)),
    ],
)
def test_an_index_that_contradicts_itself_is_a_typed_error(reader: Archive) -> None:
    rank = reader.index.variants[0].rank_class.ranks[-1]
    with pytest.raises(FoundrydError) as caught:
        compute_plan(reader, reader.index.variants[0].name, 0 if rank == 7 else rank)
    assert isinstance(caught.value, ArchiveFormatError)


def test_rules_by_local_rank_need_the_size_of_a_node() -> None:
    rules = one_rule(coordinate=Coordinate.LOCAL_RANK, stride=1)
    reader = archive(variant(), r=rules)
    with pytest.raises(UsageError, match="how many ranks a node has"):
        compute_plan(reader, "ep=4,tp=2", 6)
    assert compute_plan(reader, "ep=4,tp=2", 6, local_size=4).writes["value"].tolist() == [2]
