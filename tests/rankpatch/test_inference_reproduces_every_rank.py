# SPDX-License-Identifier: Apache-2.0
"""The property: what is inferred from a few ranks reproduces every rank, in every byte that is not noise.

A program is made up: blocks of fields, structs and padding whose members are constant, affine in one coordinate, or
noise.  What a rank records follows from the definition alone, in plain integers; it is compared with what the rules
give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundryd.errors import HeldOutMismatch
from foundryd.rankpatch.infer import Inference, RankView, infer
from foundryd.rankpatch.mesh import AXES, Coordinate, Mesh
from foundryd.rankpatch.noise import noise_candidates
from foundryd.rankpatch.rules import RuleKind
from foundryd.rankpatch.sampling import Sampling, sample
from foundryd.rankpatch.verify import check_held_out, predict


@dataclass(frozen=True)
class Member:
    """``coordinate`` None: constant; else affine.  ``noise``: another value in every capture."""

    width: int
    base: int = 0
    stride: int = 0
    coordinate: Coordinate | None = None
    noise: bool = False

    def value(self, coordinates: tuple[int, ...], random: Random) -> int:
        if self.noise:
            return random.getrandbits(8 * self.width)
        step = 0 if self.coordinate is None else self.stride * coordinates[self.coordinate]
        return (self.base + step) % (1 << 8 * self.width)


@dataclass(frozen=True)
class Field:
    """One member is a plain field, several are a by-value struct, none is undeclared padding of ``padding`` bytes."""

    members: tuple[Member, ...]
    padding: int = 0

    def layout(self) -> tuple[list[int], int]:
        """Natural offsets of the members, and the size."""
        at, offsets = 0, []
        for member in self.members:
            at += -at % member.width
            offsets.append(at)
            at += member.width
        return offsets, at + -at % max((m.width for m in self.members), default=1) + self.padding


@dataclass(frozen=True)
class Program:
    mesh: Mesh
    blocks: tuple[tuple[Field, ...], ...]
    seed: int

    def places(self, block: tuple[Field, ...]) -> list[tuple[int, Field]]:
        at, places = 0, []
        for field in block:
            at += -at % max((m.width for m in field.members), default=1)
            places.append((at, field))
            at += field.layout()[1]
        return places

    def record(self, rank: int, launch: int = 0) -> RankView:
        """What launching the program as ``rank`` records; launches differ in noise and padding alone."""
        random = Random(f"{self.seed} {rank} {launch}")
        coordinates = self.mesh.coordinates(rank)
        blocks = []
        for block in self.blocks:
            places = self.places(block)
            content = bytearray(places[-1][0] + places[-1][1].layout()[1])
            for at, field in places:
                for offset, member in zip(field.layout()[0], field.members, strict=True):
                    value = member.value(coordinates, random)
                    content[at + offset : at + offset + member.width] = value.to_bytes(member.width, "little")
                content[at : at + field.padding] = random.randbytes(field.padding)
            blocks.append(np.frombuffer(bytes(content), dtype=np.uint8))
        return RankView(rank, blocks)

    def fields(self) -> list[np.ndarray | None]:
        return [
            np.array([(at, f.layout()[1]) for at, f in self.places(block) if f.members], dtype=np.int64).reshape(-1, 2)
            for block in self.blocks
        ]

    def quiet(self) -> list[np.ndarray]:
        """Which bytes are not noise and lie in fields."""
        masks = []
        for block, content in zip(self.blocks, self.record(0).blocks, strict=True):
            mask = np.zeros(len(content), dtype=bool)
            for at, field in self.places(block):
                mask[at : at + field.layout()[1] - field.padding] = True
                for offset, member in zip(field.layout()[0], field.members, strict=True):
                    if member.noise:
                        mask[at + offset : at + offset + member.width] = False
            masks.append(mask)
        return masks

    def proven(self, candidates: np.ndarray) -> list[tuple[int, int, int]]:
        """Perturbing a word leaves outputs alone exactly if all of its bytes are noise."""
        quiet = self.quiet()
        return [
            (int(c["block"]), int(c["offset"]), int(c["width"]))
            for c in candidates
            if not quiet[c["block"]][c["offset"] : c["offset"] + c["width"]].any()
        ]


@dataclass(frozen=True)
class Captured:
    sampling: Sampling
    views: list[RankView]
    inference: Inference


def capture(program: Program, requested: list[int] | None = None) -> Captured:
    """The loop of a capture: sample, infer, capture what is undecided, infer again."""
    sampling = sample(program.mesh, requested)
    control = program.record(sampling.control, launch=1)
    while True:
        views = [program.record(rank) for rank in sampling.ranks]
        ours = program.record(sampling.control)
        proven = program.proven(noise_candidates(ours, control, program.fields(), others=views))
        inference = infer(
            views,
            program.mesh,
            control=control,
            proven_noise=proven,
            fields=program.fields(),
            complete=sampling.complete,
        )
        if not inference.undecided:
            return Captured(sampling, views, inference)
        assert not set(inference.undecided) & set(sampling.ranks), "an undecided rank was captured already"
        sampling = sampling.extended(inference.undecided)


@st.composite
def meshes(draw: st.DrawFn, smallest: int = 1) -> Mesh:
    sizes = dict.fromkeys(AXES, 1)
    for axis in draw(st.permutations(AXES)):
        room = 64 // int(np.prod(list(sizes.values())))
        sizes[axis] = draw(st.sampled_from([n for n in (1, 2, 3, 4, 5, 8, 16, 64) if n <= room]))
    spans = sizes["ep"] == 1 and draw(st.booleans())
    mesh = Mesh(**sizes, ep_spans=spans, local_size=draw(st.sampled_from([0, 0, 2, 8])))
    return mesh if mesh.world >= smallest else Mesh(ep=smallest)


def bases(width: int) -> st.SearchStrategy[int]:
    """Anything, and with preference what is about to wrap, in the word or in its low half."""
    top = 1 << 8 * width
    half = 1 << 4 * width
    near = st.integers(-70, 70)
    return st.one_of(
        st.integers(0, top - 1), near.map(lambda n: n % top), near.map(lambda n: (half + n) % top), st.just(0)
    )


def strides(width: int) -> st.SearchStrategy[int]:
    top = 1 << 8 * width
    return st.one_of(
        st.sampled_from([1, -1, 2, -2, 8, 256, -256, 4096, 1 << 20, 1 << 31, -(1 << 31), 1 << 32, (1 << 32) - 1]),
        st.integers(-top // 2, top // 2 - 1),
    )


@st.composite
def members(draw: st.DrawFn, widths: tuple[int, ...] = (1, 2, 4, 8), noisy: bool = True) -> Member:
    width = draw(st.sampled_from(widths))
    kind = draw(st.sampled_from(["constant", "affine", "affine", "noise"]))
    if kind == "noise" and noisy and width >= 4:
        return Member(width, noise=True)
    coordinate = draw(st.sampled_from(Coordinate)) if kind == "affine" else None
    return Member(width, draw(bases(width)), draw(strides(width)), coordinate)


@st.composite
def programs(draw: st.DrawFn, smallest: int = 1) -> Program:
    plain = members().map(lambda m: Field((m,)))
    # A struct of 1, 2, 4 or 8 bytes cannot be told from a plain field; two ints are the one that engines do pass.
    struct = (
        st.lists(members(), min_size=3, max_size=6).map(lambda m: Field(tuple(m))).filter(lambda f: f.layout()[1] > 8)
    )
    pair = st.tuples(members((4,), False), members((4,), False)).map(Field)
    padding = st.integers(1, 8).map(lambda n: Field((), n))
    layout = draw(st.lists(st.one_of(plain, plain, struct, struct, pair), min_size=1, max_size=6))
    for place in sorted(draw(st.sets(st.integers(1, max(1, len(layout) - 1)), max_size=2)), reverse=True):
        if place < len(layout):
            layout.insert(place, draw(padding))
    mesh = draw(meshes(smallest))
    blocks = [tuple(layout)]
    for _ in range(draw(st.integers(0, 2))):  # members of one template: the same layout, strides of their own
        blocks.append(
            tuple(
                Field(
                    tuple(
                        Member(m.width, draw(bases(m.width)), draw(strides(m.width)), m.coordinate, m.noise)
                        for m in f.members
                    ),
                    f.padding,
                )
                for f in layout
            )
        )
    return Program(mesh, tuple(blocks), draw(st.integers(0, 1 << 32)))


def assert_reproduced(program: Program, captured: Captured) -> None:
    """Every rank of the world, in every byte that is not noise."""
    quiet = program.quiet()
    for rank in range(program.mesh.world):
        found = predict(
            captured.inference.rules, captured.inference.tables, captured.views[0].blocks, program.mesh, rank
        )
        for number, (block, expected) in enumerate(zip(found, program.record(rank).blocks, strict=True)):
            wrong = np.flatnonzero((block != expected) & quiet[number])
            assert not wrong.size, f"rank {rank}, block {number}, offset {wrong[0]} of {program.mesh}"


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs())
def test_rules_from_the_default_sample_reproduce_every_rank(program: Program) -> None:
    captured = capture(program)
    assert_reproduced(program, captured)
    if captured.sampling.held_out is not None:
        held_out = program.record(captured.sampling.held_out)
        report = check_held_out(
            captured.inference.rules, captured.inference.tables, captured.views[0], program.mesh, held_out
        )
        noise = (captured.inference.rules["kind"] == RuleKind.NOISE).sum()
        assert report.patched_words == len(captured.inference.rules) - noise == sum(report.words.values()) - noise


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs(smallest=6), st.data())
def test_rules_from_any_requested_sample_reproduce_every_rank(program: Program, data: st.DataObject) -> None:
    requested = data.draw(st.lists(st.integers(0, program.mesh.world - 1), min_size=1, max_size=4))
    assert_reproduced(program, capture(program, requested))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs())
def test_rules_are_sorted_disjoint_and_touch_only_what_differs(program: Program) -> None:
    rules = capture(program).inference.rules
    start = rules["offset"].astype(np.int64)
    assert (np.diff(rules["block"].astype(np.int64)) >= 0).all()
    same = rules["block"][1:] == rules["block"][:-1]
    assert (start[1:] >= start[:-1] + rules["width"][:-1])[same].all()
    every = [program.record(rank).blocks for rank in range(program.mesh.world)]
    for rule in rules[rules["kind"] != RuleKind.NOISE]:
        word = slice(int(rule["offset"]), int(rule["offset"]) + int(rule["width"]))
        assert any((blocks[rule["block"]][word] != every[0][rule["block"]][word]).any() for blocks in every)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("axis", ["tp", "ep", "dp", "pp"])
def test_small_worlds_are_captured_whole_and_become_tables(world: int, axis: str) -> None:
    words = tuple(Field((Member(w, (1 << 8 * w) - 2, 7, Coordinate.RANK),)) for w in (8, 4, 2, 1))
    program = Program(Mesh(**{axis: world}), (words, (Field((Member(8, noise=True),)),)), 5)
    captured = capture(program)
    assert captured.sampling.held_out is None
    assert captured.sampling.complete
    assert_reproduced(program, captured)
    kinds = captured.inference.rules["kind"].tolist()
    assert kinds == ([RuleKind.TABLE] * 4 if world > 1 else []) + [RuleKind.NOISE]


@pytest.mark.parametrize(
    ("text", "follows", "expected"),
    [
        ("ep=8", Coordinate.RANK, Coordinate.EP),
        ("tp=8", Coordinate.RANK, Coordinate.TP),
        ("dp=2,tp=4", Coordinate.TP, Coordinate.TP),
        ("dp=2,tp=4", Coordinate.DP, Coordinate.DP),
        ("dp=2,tp=4", Coordinate.RANK, Coordinate.RANK),
        ("ep=4,tp=2", Coordinate.EP, Coordinate.EP),
        ("ep=4,tp=2", Coordinate.TP, Coordinate.TP),
        ("ep=4,tp=2", Coordinate.RANK, Coordinate.RANK),
        ("dp=2,tp=4,ep=dp*tp", Coordinate.RANK, Coordinate.EP),
        ("pp=2,dp=2,tp=2,ep=dp*tp", Coordinate.EP, Coordinate.EP),
        ("ep=64", Coordinate.RANK, Coordinate.EP),
    ],
)
@pytest.mark.parametrize("width", [4, 8])
@pytest.mark.parametrize("stride", [3, -5, 1 << 20])
def test_rules_follow_the_right_coordinate(
    text: str, follows: Coordinate, expected: Coordinate, width: int, stride: int
) -> None:
    program = Program(Mesh.parse(text), ((Field((Member(width, 1 << 30, stride, follows),)),),), 1)
    captured = capture(program)
    assert captured.sampling == sample(program.mesh), "the default sample decides"
    rule = captured.inference.rules[0]
    assert (rule["kind"], rule["coordinate"], rule["stride"]) == (RuleKind.AFFINE, expected, stride)
    assert_reproduced(program, captured)


def test_local_rank_is_told_from_rank_by_the_size_of_a_node() -> None:
    mesh = Mesh(ep=32, local_size=8)
    program = Program(mesh, ((Field((Member(4, 100, 3, Coordinate.LOCAL_RANK),)),),), 1)
    captured = capture(program)
    assert captured.inference.rules["coordinate"].tolist() == [Coordinate.LOCAL_RANK]
    assert_reproduced(program, captured)


def _mutants() -> dict[str, Callable[[np.ndarray], None]]:
    def wrong_coordinate(rules: np.ndarray) -> None:
        tp = rules["coordinate"] == Coordinate.TP
        rules["coordinate"] = np.where(tp, Coordinate.RANK, rules["coordinate"])

    def swapped_axis(rules: np.ndarray) -> None:
        dp = rules["coordinate"] == Coordinate.DP
        rules["coordinate"] = np.where(dp, Coordinate.TP, rules["coordinate"])

    def other_base(rules: np.ndarray) -> None:
        rules["base"][-1] ^= 1

    def other_stride(rules: np.ndarray) -> None:
        rules["stride"][rules["coordinate"] == Coordinate.RANK] += 1

    def dropped_rule(rules: np.ndarray) -> None:
        rules["kind"][rules["coordinate"] == Coordinate.RANK] = RuleKind.WORLD

    return {f.__name__: f for f in (wrong_coordinate, swapped_axis, other_base, other_stride, dropped_rule)}


@pytest.mark.parametrize("mutant", _mutants())
def test_the_held_out_rank_catches_wrong_rules(mutant: str) -> None:
    mesh = Mesh.parse("dp=2,tp=4")
    block = tuple(Field((Member(8, 1 << 40, 4096, c),)) for c in (Coordinate.TP, Coordinate.DP, Coordinate.RANK))
    program = Program(mesh, (block,), 3)
    captured = capture(program)
    held_out = program.record(captured.sampling.held_out)
    rules = captured.inference.rules.copy()
    check_held_out(rules, captured.inference.tables, captured.views[0], mesh, held_out)
    _mutants()[mutant](rules)
    with pytest.raises(HeldOutMismatch, match=r"the gate, block 0, offset (0|8|16) \(8 bytes\).*held-out rank 4"):
        check_held_out(
            rules,
            captured.inference.tables,
            captured.views[0],
            mesh,
            held_out,
            describe=lambda block, offset: "the gate",
        )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(programs(smallest=6), st.data())
def test_a_flipped_bit_on_the_held_out_rank_is_found_unless_it_is_noise(program: Program, data: st.DataObject) -> None:
    captured = capture(program)
    if captured.sampling.held_out is None:
        return
    held_out = program.record(captured.sampling.held_out)
    number = data.draw(st.integers(0, len(held_out.blocks) - 1))
    block = held_out.blocks[number].copy()
    at = data.draw(st.integers(0, len(block) - 1))
    block[at] ^= 1 << data.draw(st.integers(0, 7))
    flipped = RankView(held_out.rank, [*held_out.blocks[:number], block, *held_out.blocks[number + 1 :]])
    rules, tables = captured.inference.rules, captured.inference.tables
    if program.quiet()[number][at]:
        with pytest.raises(HeldOutMismatch, match=f"block {number}, "):
            check_held_out(rules, tables, captured.views[0], program.mesh, flipped, fields=program.fields())
    else:
        check_held_out(rules, tables, captured.views[0], program.mesh, flipped, fields=program.fields())
