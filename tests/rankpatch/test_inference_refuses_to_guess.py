# SPDX-License-Identifier: Apache-2.0
"""What no rule explains is an error that names the word; what several rules explain is captured, not guessed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.errors import HeldOutMismatch, UnexplainedWord, UsageError
from foundryd.rankpatch.affine import Frame, explain
from foundryd.rankpatch.infer import RankView, infer
from foundryd.rankpatch.mesh import Coordinate, Mesh
from foundryd.rankpatch.noise import address_candidates, noise_candidates, stray_candidates
from foundryd.rankpatch.rules import RuleKind
from foundryd.rankpatch.sampling import sample
from foundryd.rankpatch.verify import check_held_out, predict

EP8 = Mesh(ep=8)
ONE_FIELD = [np.array([(0, 8)])]


def view(rank: int, *words: int, width: int = 8) -> RankView:
    return RankView(rank, [np.array([w % (1 << 8 * width) for w in words], dtype=f"<u{width}").view(np.uint8)])


def views(word: Callable[[int], int], ranks: tuple[int, ...] = (0, 1, 2, 3, 7), width: int = 8) -> list[RankView]:
    return [view(rank, word(rank), width=width) for rank in ranks]


@settings(deadline=None)
@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=5, max_size=5), st.sampled_from([4, 8]))
def test_an_unexplainable_word_is_named_with_its_values(values: list[int], width: int) -> None:
    by_rank = dict(zip((0, 1, 2, 3, 7), values, strict=True))
    rises = [(values[i] - values[0]) % (1 << 4 * width) for i in (1, 2, 3, 4)]
    if rises[1] == 2 * rises[0] % (1 << 4 * width):
        by_rank[2] += 1  # a low half that is a line would only be half unexplained
    with pytest.raises(UnexplainedWord) as caught:
        infer(
            views(by_rank.__getitem__, width=width),
            EP8,
            fields=[np.array([(0, width)])],
            describe=lambda block, offset: f"kernel gate, parameter 3 at {block}/{offset}",
        )
    message = str(caught.value)
    assert message.startswith("kernel gate, parameter 3 at 0/0, offset 0 ")
    for rank, value in by_rank.items():
        assert f"rank {rank} has 0x{value % (1 << 8 * width):0{2 * width}x}" in message


def test_the_first_unexplained_word_is_named_and_the_others_are_counted() -> None:
    fields = [np.array([(8 * i, 8) for i in range(4)])]
    captures = [view(r, 5, 3 * r, r * r, r * r * r) for r in (0, 1, 2, 3, 7)]
    with pytest.raises(UnexplainedWord, match=r"block 0, offset 16 .*\(and 1 more words\)"):
        infer(captures, EP8, fields=fields)


def test_a_table_needs_every_rank() -> None:
    inferred = infer(views(lambda r: r * r, tuple(range(8))), EP8, fields=ONE_FIELD, complete=True)
    assert inferred.rules["kind"].tolist() == [RuleKind.TABLE]
    assert inferred.tables.tolist() == [r * r for r in range(8)]
    with pytest.raises(UsageError, match="capture the others too"):
        infer(views(lambda r: r * r), EP8, fields=ONE_FIELD, complete=True)


def test_equal_tables_are_stored_once() -> None:
    mesh = Mesh(ep=4)
    captures = [view(r, r * r, 7, r * r, r * r + 1) for r in range(4)]
    inferred = infer(captures, mesh, complete=True, fields=[np.array([(8 * i, 8) for i in range(4)])])
    assert len(inferred.rules) == 3
    assert len(inferred.tables) == 8


def test_a_class_captured_whole_has_its_own_tables() -> None:
    mesh = Mesh(ep=8)
    inferred = infer([view(6, 40), view(7, 13)], mesh, complete=True, members=[6, 7])
    assert [
        predict(inferred.rules, inferred.tables, view(6, 40).blocks, mesh, r)[0].view("<u8")[0] for r in (6, 7)
    ] == [
        40,
        13,
    ]


def test_samples_that_hide_a_coordinate_are_not_enough() -> None:
    mesh = Mesh(dp=2, tp=4)
    assert infer([view(r, 1) for r in (0, 1, 2, 3)], mesh).undecided == [7]
    assert infer([view(r, 1) for r in (0, 4)], mesh).undecided == [1, 7]
    assert infer([view(0, 1)], Mesh(ep=64)).undecided == [1, 63]
    assert infer([view(r, 1) for r in (0, 2, 8)], Mesh(ep=9)).undecided == [1], "a stride is known up to its top bit"


def test_two_coordinates_that_fit_but_differ_elsewhere_are_undecided() -> None:
    mesh = Mesh(ep=24, local_size=8)
    ranks = (0, 1, 2, 23)  # nodes 0 and 2: what moves by 2^60 a rank comes around after two nodes
    captures = views(lambda r: (r % 8) << 60, ranks)
    inferred = infer(captures, mesh, fields=ONE_FIELD)
    assert inferred.undecided == [8]
    assert not len(inferred.rules)
    assert not len(inferred.tables)
    decided = infer(views(lambda r: (r % 8) << 60, (*ranks, 8)), mesh, fields=ONE_FIELD)
    assert decided.rules["coordinate"].tolist() == [Coordinate.LOCAL_RANK]
    assert not decided.undecided


def test_a_carry_beyond_the_samples_is_a_conflict() -> None:
    # Samples without the last rank: as two ints the low one wraps at rank 5, as one number it carries.
    frame = Frame.of(EP8, range(8), [0, 1, 2, 3])
    low = np.array([(1 << 32) - 5 + r for r in range(4)], dtype=np.uint64)
    found = explain(frame, np.array([low | np.uint64(9 << 32)]), 0, 4)
    assert found.readable.all()
    assert found.conflicts == {frozenset({5, 6, 7})}
    # With it they cannot both fit.
    frame = Frame.of(EP8, range(8), [0, 1, 2, 7])
    low = np.array([((1 << 32) - 5 + r) % (1 << 32) for r in (0, 1, 2, 7)], dtype=np.uint64)
    found = explain(frame, np.array([low | np.uint64(9 << 32)]), 0, 4)
    assert found.conflicts == set()
    assert [(p.start, p.width) for p in found.pieces] == [(0, 4)]


@settings(deadline=None)
@given(st.integers(0, (1 << 64) - 1), st.integers(-(1 << 31), 1 << 31), st.integers(3, 64), st.sampled_from([1, 2, 4]))
def test_the_default_sample_leaves_no_hidden_carry(base: int, stride: int, world: int, narrow: int) -> None:
    """The argument in ``affine``: with extremes and two adjacent ranks readings agree or do not both fit."""
    mesh = Mesh(ep=world)
    ranks = sample(mesh).ranks
    top = 1 << 8 * narrow
    value = [base // top * top + (base + stride * r) % top for r in range(world)]  # the low part wraps by itself
    found = explain(Frame.of(mesh, range(world), ranks), np.array([[value[r] for r in ranks]], dtype=np.uint64), 0, 1)
    assert found.readable.all()
    assert not found.conflicts
    for r in range(world):
        got = value[0]
        for piece in found.pieces:
            line = int(piece.base[0]) + int(piece.stride[0]) * r
            for byte in range(piece.width):
                at = 8 * (piece.start + byte)
                got = got & ~(0xFF << at) | (line >> 8 * byte & 0xFF) << at
        assert got == value[r]


# --- noise -----------------------------------------------------------------------------------------------------------


def test_noise_must_be_proven() -> None:
    captures = views(lambda r: 0x7F00_0000_1000 + 0x40 * r)  # an affine rule would fit
    control = view(1, 0x7FAA_1111_2000)
    with pytest.raises(UnexplainedWord, match=r"noise that was not proven.* control of rank 1 has 0x00007faa"):
        infer(captures, EP8, control=control, fields=ONE_FIELD)
    inferred = infer(captures, EP8, control=control, fields=ONE_FIELD, proven_noise={(0, 0)})
    assert inferred.rules["kind"].tolist() == [RuleKind.NOISE]
    assert inferred.rules["width"].tolist() == [8]


@pytest.mark.parametrize("low", [0, 4])  # an address, or its lower half is a number of its own
def test_an_address_is_noise_as_a_whole(low: int) -> None:
    """Two captures of rank 1 have their heaps in the same 4 GiB, and rank 0 has not."""
    mesh = Mesh(ep=2)
    captures = [view(0, 0, 0x7F12_3456_7010 << 8 * low), view(1, 0, 0x7F56_789A_B010 << 8 * low)]
    control = view(1, 0, 0x7F56_1357_9010 << 8 * low)
    fields = [np.array([(0, 16)])]
    noise = noise_candidates(control, captures[1], fields, others=captures[:1])
    beside = address_candidates([control, *captures], noise)
    if low:
        assert not len(beside)
        return
    assert beside.tolist() == [(0, 12, 1)]
    inferred = infer(
        captures, mesh, control=control, fields=fields, proven_noise=noise, proven_strays=beside, complete=True
    )
    assert set(inferred.rules["kind"].tolist()) == {RuleKind.NOISE}
    # A proof that fails, where it was no address, leaves it a rule.
    inferred = infer(captures, mesh, control=control, fields=fields, proven_noise=noise, complete=True)
    assert set(inferred.rules["kind"].tolist()) == {RuleKind.NOISE, RuleKind.TABLE}


def test_a_rank_beside_garbage_is_no_suspect() -> None:
    fields = [np.array([(0, 8)])]
    captures = [view(r, (r + 1) << 32 | 0x1111 * r) for r in (0, 1)]
    control = view(1, 2 << 32 | 0x2345)
    noise = noise_candidates(control, captures[1], fields, others=captures[:1])
    assert len(noise)
    assert not len(address_candidates([control, *captures], noise))


def test_noise_needs_proof_even_where_all_ranks_agree() -> None:
    with pytest.raises(UnexplainedWord, match="noise"):
        infer(views(lambda r: 5), EP8, control=view(1, 6), fields=ONE_FIELD)
    with pytest.raises(UnexplainedWord, match="noise"):
        infer([view(0, 5)], Mesh(), control=view(0, 6), fields=ONE_FIELD, complete=True)


def test_harmless_is_not_noise_by_itself() -> None:
    """A word that the control repeats follows the rank, even if perturbing it showed nothing."""
    captures = views(lambda r: r * r)
    with pytest.raises(UnexplainedWord, match="follows no coordinate"):
        infer(captures, EP8, control=captures[1], fields=ONE_FIELD, proven_noise={(0, 0)})
    captures = views(lambda r: 3 * r)
    inferred = infer(captures, EP8, control=captures[1], fields=ONE_FIELD, proven_noise={(0, 0)})
    assert inferred.rules["kind"].tolist() == [RuleKind.AFFINE]


def test_without_a_control_the_message_asks_for_one() -> None:
    with pytest.raises(UnexplainedWord, match="capture a control"):
        infer(views(lambda r: r * r), EP8, fields=ONE_FIELD)


def test_an_int_beside_noise_in_a_struct_keeps_its_rule() -> None:
    """A 4-byte int that follows the rank, 4 bytes of heap garbage, and a stale pointer whose high half seldom moves."""
    garbage = {0: 0xDEAD0000, 1: 0xBEEF0001, 2: 0x0BAD0002, 3: 0xF00D0003, 7: 0x12340007}
    high = {0: 0x7F10, 1: 0x7F11, 2: 0x7F15, 3: 0x7F1A, 7: 0x7F02}
    low = {r: 0x1000 * (r + 3) ** 3 for r in garbage}

    def struct(rank: int, garbage_: int, low_: int) -> RankView:
        words = [100 + rank, garbage_, low_, high[rank], 1]
        return RankView(rank, [np.array(words, dtype="<u4").view(np.uint8)])

    captures = [struct(r, garbage[r], low[r]) for r in garbage]
    control = struct(1, 0x77777777, 0x5000)  # the pointer's high half happens to be equal
    proven = noise_candidates(captures[1], control, [None], others=captures)
    assert [tuple(c) for c in proven.tolist()] == [(0, 4, 4), (0, 9, 2)]  # of the pointer two bytes differ
    with pytest.raises(UnexplainedWord, match=r"offset 8 .*next to noise") as refused:
        infer(captures, EP8, control=control, proven_noise=proven)
    strays = stray_candidates(captures[1], captures, refused.value.strays, proven)
    assert [tuple(c) for c in strays.tolist()] == [(0, 12, 1)]  # the one byte in which the high halves differ
    inferred = infer(captures, EP8, control=control, proven_noise=proven, proven_strays=strays)
    assert [(int(r["offset"]), int(r["width"]), int(r["kind"])) for r in inferred.rules] == [
        (0, 4, RuleKind.AFFINE),
        (4, 4, RuleKind.NOISE),
        *((at, 1, RuleKind.NOISE) for at in (9, 10, 12)),
    ]


def test_garbage_that_the_control_repeats_shows_in_another_repeat() -> None:
    """A byte of one bit: two captures of a rank agree half of the time."""
    values = {0: 1, 1: 1, 2: 0, 3: 1, 7: 1}
    captures = views(lambda r: values[r])
    control, repeats = view(1, 1), [view(r, values[r] ^ (r == 2)) for r in values]
    candidates = noise_candidates(captures[1], control, [None], others=[*captures, *repeats])
    assert [tuple(c) for c in candidates] == [(0, 0, 1)]
    assert not len(noise_candidates(captures[1], control, [None], others=captures))
    proven = {(0, 0, 1)}
    with pytest.raises(UnexplainedWord, match="follows no coordinate"):
        infer(captures, EP8, control=control, proven_noise=proven)
    inferred = infer(captures, EP8, control=control, repeats=repeats, proven_noise=proven)
    assert [(int(r["offset"]), int(r["width"]), int(r["kind"])) for r in inferred.rules] == [(0, 1, RuleKind.NOISE)]


def test_a_flag_beside_garbage_is_never_perturbed() -> None:
    """A truth value with three bytes of padding behind it: setting it to garbage may send a kernel astray."""

    def struct(rank: int, garbage: int, seldom: int) -> RankView:
        return RankView(rank, [np.array([1, garbage & 0xFF, garbage >> 8, seldom, 5, 0, 0, 0], dtype=np.uint8)])

    ours, control = struct(1, 0x1234, 7), struct(1, 0xABCD, 7)
    others = [struct(0, 0x5678, 7), struct(3, 0x9999, 9)]
    assert [tuple(c) for c in noise_candidates(ours, control, [None])] == [(0, 1, 2)]
    assert [tuple(c) for c in noise_candidates(ours, control, [None], others=others)] == [(0, 1, 3)]


STRAY = {0: 0x104, 1: 0x104, 2: 0x004, 3: 0x104, 7: 0x104, 4: 0x304}  # by rank, in every capture of it


def test_words_of_a_struct_that_follow_no_rule_are_noise_where_they_are_proven_harmless() -> None:
    captures, control = views(lambda r: STRAY[r]), view(1, STRAY[1])
    with pytest.raises(UnexplainedWord, match="follows no coordinate") as refused:
        infer(captures, EP8, control=control)
    assert refused.value.strays == [(0, 0, 8)]
    # Only the byte that differs is perturbed; beside it may be a number that a kernel reads.
    candidates = stray_candidates(captures[1], captures, refused.value.strays, noise_candidates(captures[1], control))
    assert [tuple(c) for c in candidates] == [(0, 1, 1)]
    inferred = infer(captures, EP8, control=control, proven_strays=[(0, 1, 1)])
    assert [(int(r["offset"]), int(r["width"]), int(r["kind"])) for r in inferred.rules] == [(1, 1, RuleKind.NOISE)]
    with pytest.raises(UnexplainedWord):
        infer(captures, EP8, control=control, proven_strays=[(0, 2, 1)])


@pytest.mark.parametrize(("size", "garbage"), [(1, True), (2, False), (4, False), (8, True)])
def test_a_number_of_its_own_is_never_garbage_and_an_empty_struct_may_be(size: int, garbage: bool) -> None:
    """A caller gives every number a value; a byte may be an empty struct, eight an empty struct and a number."""
    values = {0: 4, 1: 4, 2: 9, 3: 4, 7: 4}
    with pytest.raises(UnexplainedWord) as refused:
        infer(views(lambda r: values[r]), EP8, control=view(1, 4), fields=[np.array([(0, size)])])
    assert refused.value.strays == ([(0, 0, size)] if garbage else [])


def test_a_stray_that_only_the_held_out_rank_shows_is_named_and_can_be_noise() -> None:
    captures, control, held_out = views(lambda r: 4), view(1, 4), view(4, STRAY[4])
    inferred = infer(captures, EP8, control=control)
    with pytest.raises(HeldOutMismatch) as refused:
        check_held_out(inferred.rules, inferred.tables, captures[0], EP8, held_out)
    assert refused.value.strays == [(0, 0, 8)]
    candidates = stray_candidates(
        captures[1], [*captures, held_out], refused.value.strays, noise_candidates(*[control] * 2)
    )
    assert [tuple(c) for c in candidates] == [(0, 1, 1)]
    inferred = infer(captures, EP8, control=control, proven_strays=[(0, 1, 1)])
    check_held_out(inferred.rules, inferred.tables, captures[0], EP8, held_out)
    with pytest.raises(HeldOutMismatch):
        check_held_out(inferred.rules, inferred.tables, captures[0], EP8, view(4, STRAY[4] ^ 1))
    with pytest.raises(HeldOutMismatch) as refused:
        check_held_out(inferred.rules, inferred.tables, captures[0], EP8, view(4, 5), fields=[np.array([(0, 4)])])
    assert refused.value.strays == []


def test_what_the_held_out_rank_has_beside_noise_is_known_as_such() -> None:
    """The two low bytes of a stale address are noise; a held-out rank differs in the third, or in the fifth as well."""
    captures = views(lambda r: 0x7F_1100_0000 + 0x101 * r)
    inferred = infer(captures, EP8, control=view(1, 0x7F_1100_7777), proven_noise=[(0, 0, 2)])
    for found, beside in ((0x7F_1200_0404, True), (0x7E_1200_0404, False)):
        low = f"0x{found & 0xFFFFFFFF:08x}"
        with pytest.raises(HeldOutMismatch, match=f"{low} .* no rule but noise changes") as refused:
            check_held_out(inferred.rules, inferred.tables, captures[0], EP8, view(4, found))
        assert refused.value.strays == [(0, 0, 8)]
        assert refused.value.beside_noise == beside
    check_held_out(inferred.rules, inferred.tables, captures[0], EP8, view(4, 0x7F_1100_ABCD))


def test_strays_beside_a_rule_leave_it_alone() -> None:
    captures = views(lambda r: 100 + 16 * r | (r * r % 5) << 40)
    control = view(1, 100 + 16 | 1 << 40)
    inferred = infer(captures, EP8, control=control, proven_strays=[(0, 5, 1)])
    for rank, block in ((r, predict(inferred.rules, inferred.tables, captures[0].blocks, EP8, r)[0]) for r in range(8)):
        assert int(block.view("<u8")[0]) & 0xFFFFFFFF == 100 + 16 * rank


def test_noise_can_be_proven_by_the_byte() -> None:
    def flags(rank: int, garbage: int) -> RankView:
        return RankView(rank, [np.array([rank, 9, garbage, garbage ^ 0x5A, 0, 0, 0, 0, 0], dtype=np.uint8)])

    captures = [flags(r, 31 * r + 7) for r in (0, 1, 2, 3, 7)]
    inferred = infer(captures, EP8, control=flags(1, 200), proven_noise=[(0, 2, 2)])
    assert [(int(r["offset"]), int(r["width"]), int(r["kind"])) for r in inferred.rules] == [
        (0, 2, RuleKind.AFFINE),
        (2, 2, RuleKind.NOISE),
    ]
    with pytest.raises(UnexplainedWord, match="noise"):
        infer(captures, EP8, control=flags(1, 200), proven_noise=[(0, 2, 1)])


def test_padding_needs_no_proof_and_undeclared_bytes_do() -> None:
    garbage = {0: 5, 1: 77, 2: 1, 3: 200, 7: 13}
    captures = [RankView(r, [np.array([1, 0, 0, g, 4 * r, 0, 0, 0], dtype=np.uint8)]) for r, g in garbage.items()]
    inferred = infer(captures, EP8, fields=[np.array([(0, 1), (4, 4)])])
    assert inferred.rules["kind"].tolist() == [RuleKind.NOISE] * len(inferred.rules[:-1]) + [RuleKind.AFFINE]
    with pytest.raises(UnexplainedWord):
        infer(captures, EP8, fields=[np.array([(4, 4)])])  # what precedes the first field is not padding


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("at least one rank", lambda: infer([], EP8)),
        ("different ranks", lambda: infer([view(0, 1), view(0, 1)], EP8)),
        ("different ranks", lambda: infer([view(0, 1)], EP8, members=[1, 2])),
        ("not in the mesh", lambda: infer([view(0, 1)], EP8, members=[1, 8])),
        ("has 16 bytes on rank 1 and 8 on rank 0", lambda: infer([view(0, 1), view(1, 1, 2)], EP8)),
        ("has 0 blocks", lambda: infer([view(0, 1), RankView(1, [])], EP8)),
        ("no contiguous row of bytes", lambda: infer([RankView(0, [np.zeros(4, dtype=np.uint32)])], EP8)),
        ("not among the captures", lambda: infer([view(0, 1)], EP8, control=view(5, 1))),
        ("field boundaries for 0 blocks", lambda: infer(views(int), EP8, fields=[])),
        ("do not ascend", lambda: infer(views(int), EP8, fields=[np.array([(0, 9)])])),
        ("do not ascend", lambda: infer(views(int), EP8, fields=[np.array([(4, 4), (0, 4)])])),
        ("no word of the captures", lambda: infer(views(int), EP8, proven_noise=[(0, 8)])),
        ("no word of the captures", lambda: infer(views(int), EP8, proven_noise=[(1, 0)])),
        ("capture that rank again", lambda: noise_candidates(view(0, 1), view(1, 1))),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(message: str, call: Callable[[], object]) -> None:
    with pytest.raises(UsageError, match=message):
        call()
