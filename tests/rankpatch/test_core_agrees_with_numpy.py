# SPDX-License-Identifier: Apache-2.0
"""The native core against a plain model, and against input that cannot be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd._native import _rankpatch
from foundryd.rankpatch.rules import RuleKind

WORLD = 8
COORDINATES = (5, 1, 1, 2, 0, 1)
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)


@st.composite
def rules(draw: st.DrawFn, kinds: tuple[RuleKind, ...] = tuple(RuleKind)) -> tuple[np.ndarray, np.ndarray]:
    """Ascending rules, and tables that fit them."""
    count = draw(st.integers(0, 20))
    made = np.zeros(count, dtype=_rankpatch.rule_dtype)
    tables: list[int] = []
    block, end = 0, 0
    for rule in made:
        if draw(st.booleans()):
            block, end = block + draw(st.integers(1, 3)), 0
        rule["width"] = draw(st.sampled_from([1, 2, 4, 8]))
        rule["block"], rule["offset"] = block, end + draw(st.integers(0, 9))
        end = int(rule["offset"]) + int(rule["width"])
        rule["kind"], rule["coordinate"] = draw(st.sampled_from(kinds)), draw(st.integers(0, 5))
        rule["base"], rule["stride"] = draw(INT64), draw(INT64)
        if rule["kind"] == RuleKind.TABLE:
            rule["table"] = len(tables)
            top = 1 << 8 * int(rule["width"])
            tables += draw(st.lists(st.integers(0, top - 1), min_size=WORLD, max_size=WORLD))
    return made, np.array(tables, dtype=np.uint64)


def model(made: np.ndarray, tables: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(block, offset, width, value) in plain integers."""
    writes = []
    for rule in made.tolist():
        block, offset, width, kind, coordinate, _, table, base, stride = rule
        if kind == RuleKind.AFFINE:
            value = base + stride * COORDINATES[coordinate]
        elif kind == RuleKind.TABLE:
            value = int(tables[table + COORDINATES[0]])
        elif kind == RuleKind.WORLD:
            value = base + stride * WORLD
        else:
            continue
        writes.append((block, offset, width, value % (1 << 8 * width)))
    return writes


def as_tuples(writes: np.ndarray) -> list[tuple[int, int, int, int]]:
    return [(b, o, w, v) for b, o, w, _, v in writes.tolist()]


@settings(deadline=None)
@given(rules())
def test_a_plan_is_what_the_rules_say(made: tuple[np.ndarray, np.ndarray]) -> None:
    writes = _rankpatch.plan(*made, COORDINATES, WORLD)
    assert as_tuples(writes) == model(*made)
    _rankpatch.check_writes(writes)
    _rankpatch.check_rules(made[0], len(made[1]), WORLD)


@settings(deadline=None)
@given(rules(), st.data())
def test_applying_stores_exactly_the_words(made: tuple[np.ndarray, np.ndarray], data: st.DataObject) -> None:
    every = _rankpatch.plan(*made, COORDINATES, WORLD)
    block = data.draw(st.sampled_from([0, *every["block"].tolist()]))
    writes = every[every["block"] == block]
    content = np.frombuffer(data.draw(st.binary(min_size=600, max_size=600)), dtype=np.uint8).copy()
    expected = bytearray(content.tobytes())
    for _, offset, width, value in as_tuples(writes):
        expected[offset : offset + width] = value.to_bytes(width, "little")
    _rankpatch.apply(content, writes)
    assert content.tobytes() == bytes(expected)


def test_large_plans_are_the_same_as_small_ones() -> None:
    """Beyond a size the lock is released."""
    count = 100_000
    made = np.zeros(count, dtype=_rankpatch.rule_dtype)
    made["offset"], made["width"], made["coordinate"] = np.arange(count) * 4, 4, 0
    made["base"], made["stride"] = np.arange(count), -np.arange(count)
    writes = _rankpatch.plan(made, np.empty(0, dtype=np.uint64), COORDINATES, WORLD)
    content = np.zeros(4 * count, dtype=np.uint8)
    _rankpatch.apply(content, writes)
    assert (content.view("<u4") == (np.arange(count) - 5 * np.arange(count)).astype(np.uint32)).all()


def one(**fields: int) -> np.ndarray:
    rule = np.zeros(1, dtype=_rankpatch.rule_dtype)
    rule["width"] = 4
    for name, value in fields.items():
        rule[name] = value
    return rule


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (one(kind=4), "rule 0 is of kind 4"),
        (one(width=0), "rule 0 has a width of 0"),
        (one(width=3), "rule 0 has a width of 3"),
        (one(width=16), "rule 0 has a width of 16"),
        (one(coordinate=6), "rule 0 follows coordinate 6"),
        (one(reserved=1), "reserved"),
        (one(kind=1), "rule 0 has its table at entry 0 for 8 ranks, but there are 7"),
        (one(kind=1, table=0xFFFFFFFF), "rule 0 has its table at entry 4294967295"),
        (one(offset=0xFFFFFFFD), "rule 0 ends past 4 GiB"),
        (np.concatenate((one(offset=4), one(offset=0))), "rule 1 is at block 0, offset 0, which is not after"),
        (np.concatenate((one(offset=4), one(offset=6))), "rule 1 is at block 0, offset 6, which is not after"),
        (np.concatenate((one(block=1), one(block=0))), "rule 1 is at block 0"),
        (np.concatenate((one(kind=2), one(offset=2))), "rule 1 is at block 0, offset 2"),
    ],
)
def test_rules_that_cannot_be_are_refused(made: np.ndarray, message: str) -> None:
    tables = np.zeros(7, dtype=np.uint64)
    with pytest.raises(_rankpatch.InvalidRules, match=message):
        _rankpatch.plan(made, tables, COORDINATES, WORLD)
    with pytest.raises(_rankpatch.InvalidRules, match=message):
        _rankpatch.check_rules(made, len(tables), WORLD)


def test_tables_and_coordinates_that_cannot_be_are_refused() -> None:
    tables = np.full(8, 1 << 32, dtype=np.uint64)
    with pytest.raises(_rankpatch.InvalidRules, match="too large for 4 bytes"):
        _rankpatch.plan(one(kind=1), tables, COORDINATES, WORLD)
    with pytest.raises(_rankpatch.InvalidRules, match="coordinate 0 is 8"):
        _rankpatch.plan(one(), tables, (8, 0, 0, 0, 0, 0), WORLD)
    with pytest.raises(_rankpatch.InvalidRules, match="not below the world size 0"):
        _rankpatch.plan(one(), tables, (0, 0, 0, 0, 0, 0), 0)
    for coordinates in ((0,) * 5, (0,) * 7, (-1, 0, 0, 0, 0, 0)):
        with pytest.raises(TypeError):
            _rankpatch.plan(one(), tables, coordinates, WORLD)


def test_arrays_of_another_type_are_not_converted() -> None:
    tables = np.zeros(8, dtype=np.uint64)
    with pytest.raises(TypeError):
        _rankpatch.plan(np.zeros(4, dtype=np.uint64), tables, COORDINATES, WORLD)
    with pytest.raises(TypeError):
        _rankpatch.plan(one(), tables.astype(np.float64), COORDINATES, WORLD)
    with pytest.raises(TypeError):
        _rankpatch.apply(np.zeros(4, dtype=np.uint32), np.zeros(1, dtype=_rankpatch.write_dtype))
    with pytest.raises(TypeError):
        _rankpatch.apply(np.zeros(8, dtype=np.uint8)[::2], np.zeros(1, dtype=_rankpatch.write_dtype))


def write(**fields: int) -> np.ndarray:
    made = np.zeros(1, dtype=_rankpatch.write_dtype)
    made["width"] = 4
    for name, value in fields.items():
        made[name] = value
    return made


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (write(width=0), "width of 0"),
        (write(width=1 << 31), "width"),
        (write(reserved=1), "reserved"),
        (write(value=1 << 32), "too large for 4 bytes"),
        (np.concatenate((write(offset=4), write(offset=4))), "write 1 is at block 0, offset 4"),
    ],
)
def test_writes_that_cannot_be_are_refused(made: np.ndarray, message: str) -> None:
    with pytest.raises(_rankpatch.InvalidRules, match=message):
        _rankpatch.check_writes(made)


@pytest.mark.parametrize("bad", [write(offset=5), write(offset=0xFFFFFFFF), write(offset=4, width=8), write(width=3)])
def test_nothing_is_stored_if_one_write_does_not_fit(bad: np.ndarray) -> None:
    content = np.zeros(8, dtype=np.uint8)
    with pytest.raises(ValueError, match="write"):
        _rankpatch.apply(content, np.concatenate((write(value=7), bad)))
    assert not content.any()


def test_a_read_only_block_is_refused() -> None:
    content = np.frombuffer(bytes(8), dtype=np.uint8)
    with pytest.raises(ValueError, match="read-only"):
        _rankpatch.apply(content, write(value=7))
    assert not content.any()


@settings(deadline=None)
@given(st.data())
def test_expanding_gives_each_member(data: st.DataObject) -> None:
    words = data.draw(st.integers(1, 40))
    members = data.draw(st.integers(1, 5))
    block = np.frombuffer(data.draw(st.binary(min_size=4 * words, max_size=4 * words)), dtype=np.uint8)
    chosen = data.draw(st.lists(st.integers(0, words - 1), unique=True))
    positions = np.array([4 * w for w in sorted(chosen)], dtype=np.uint32)
    columns = np.array(
        data.draw(
            st.lists(st.integers(0, (1 << 32) - 1), min_size=len(chosen) * members, max_size=len(chosen) * members)
        ),
        dtype=np.uint32,
    ).reshape(len(chosen), members)
    before = block.tobytes()
    cut = data.draw(st.integers(0, 4 * words))
    found = np.full_like(block, 0xA5)
    for member in range(members):
        expected = block.copy().view("<u4")
        expected[positions // 4] += columns[:, member]
        _rankpatch.expand(found, [block[:cut], block[cut:]], positions, columns, member)
        assert found.tobytes() == expected.tobytes()
    assert block.tobytes() == before


@pytest.mark.parametrize(
    ("positions", "shape", "column", "message"),
    [
        ([0, 5], (2, 2), 0, "position 5 is past the block of 8 bytes"),
        ([0xFFFFFFFF], (1, 2), 0, "position 4294967295"),
        ([0], (1, 2), 2, "column 2 is not one of 2"),
        ([0], (1, 0), 0, "column 0 is not one of 0"),
        ([0], (2, 2), 0, "do not go with"),
        ([0, 4], (1, 2), 0, "do not go with"),
        ([0], (1,), 0, "no matrix|not a matrix"),
    ],
)
def test_columns_that_do_not_fit_are_refused(
    positions: list[int], shape: tuple[int, ...], column: int, message: str
) -> None:
    block = np.full(8, 0xA5, dtype=np.uint8)
    with pytest.raises(ValueError, match=message):
        _rankpatch.expand(
            block,
            [np.zeros(8, dtype=np.uint8)],
            np.array(positions, dtype=np.uint32),
            np.zeros(shape, dtype=np.uint32),
            column,
        )
    assert (block == 0xA5).all()


@given(st.integers(0, 40), st.integers(0, 70), st.data())
def test_turned_columns_are_those_of_the_matrix(rows: int, columns: int, data: st.DataObject) -> None:
    matrix = np.arange(rows * columns, dtype=np.uint32).reshape(rows, columns)
    first = data.draw(st.integers(0, columns))
    count = data.draw(st.integers(0, columns - first))
    found = np.full((count, rows), 7, np.uint32)
    _rankpatch.turn(found, matrix, first)
    assert np.array_equal(found, matrix[:, first : first + count].T)


@pytest.mark.parametrize(("first", "count"), [(0, 4), (3, 1), (4, 0), (1, 3), (1 << 62, 1)])
def test_columns_that_a_matrix_does_not_have_are_refused(first: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} columns from {first} on are not in a matrix of 3"):
        _rankpatch.turn(np.zeros((count, 5), np.uint32), np.zeros((5, 3), np.uint32), first)


@pytest.mark.parametrize("length", [0, 7, 9])
def test_a_member_is_made_only_in_a_block_of_its_length(length: int) -> None:
    block = np.full(length, 0xA5, dtype=np.uint8)
    with pytest.raises(ValueError, match=f"a block of {length} bytes cannot take a member of a template of 8"):
        _rankpatch.expand(
            block,
            [np.zeros(5, np.uint8), np.zeros(3, np.uint8)],
            np.zeros(1, np.uint32),
            np.ones((1, 1), dtype=np.uint32),
            0,
        )
    assert (block == 0xA5).all()


def relocations(*rows: tuple[int, int, int]) -> np.ndarray:
    """(offset, symbol, addend) of block 0."""
    return np.array([(0, offset, symbol, 0, addend) for offset, symbol, addend in rows], _rankpatch.relocation_dtype)


@settings(deadline=None)
@given(
    st.binary(min_size=64, max_size=64),
    st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 56), st.integers(0, 3), INT64), max_size=6),
)
def test_relocating_stores_address_plus_addend(
    content: bytes, symbols: list[int], rows: list[tuple[int, int, int]]
) -> None:
    rows = [(offset, symbol % len(symbols), addend) for offset, symbol, addend in rows]
    block, expected = np.frombuffer(content, np.uint8).copy(), bytearray(content)
    for offset, symbol, addend in rows:
        expected[offset : offset + 8] = ((symbols[symbol] + addend) % (1 << 64)).to_bytes(8, "little")
    _rankpatch.relocate(block, relocations(*rows), np.array(symbols, np.uint64))
    assert block.tobytes() == bytes(expected)


@pytest.mark.parametrize("bad", [(57, 0, 0), (0xFFFFFFFF, 0, 0), (0, 2, 0), (0, 0xFFFFFFFF, 0)])
def test_nothing_is_stored_if_one_relocation_does_not_fit(bad: tuple[int, int, int]) -> None:
    block = np.zeros(64, np.uint8)
    with pytest.raises(ValueError, match="a relocation"):
        _rankpatch.relocate(block, relocations((0, 1, 7), bad), np.array([1, 2], np.uint64))
    assert not block.any()


def test_rules_may_not_follow_a_coordinate_that_is_not_known() -> None:
    unknown = list(COORDINATES)
    unknown[1] = _rankpatch.UNKNOWN
    tables = np.zeros(0, np.uint64)
    assert len(_rankpatch.plan(one(coordinate=0, stride=1), tables, unknown, WORLD)) == 1
    with pytest.raises(_rankpatch.UnknownCoordinate, match="rule 0 follows coordinate 1, which is not known"):
        _rankpatch.plan(one(coordinate=1, stride=1), tables, unknown, WORLD)
    with pytest.raises(_rankpatch.InvalidRules, match="the rank itself"):
        _rankpatch.plan(one(), tables, [_rankpatch.UNKNOWN, 0, 0, 0, 0, 0], WORLD)


@settings(deadline=None)
@given(st.data())
def test_differences_are_found_by_the_word(data: st.DataObject) -> None:
    # Longer than the step in which equal bytes are skipped, and rarely a multiple of a word.
    length = data.draw(st.sampled_from([0, 1, 7, 8, 4095, 4096, 4097, 9001]))
    width = data.draw(st.sampled_from([1, 2, 4, 8]))
    reference = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
    others = []
    expected: set[int] = set()
    for _ in range(data.draw(st.integers(0, 3))):
        other = reference.copy()
        for at in data.draw(st.lists(st.integers(0, max(0, length - 1)), max_size=5)) if length else []:
            other[at] ^= 0x80
        expected |= {int(at) // width * width for at in np.flatnonzero(other != reference)}
        others.append(other)
    found = _rankpatch.differing(reference, others, width)
    assert found.dtype == np.uint32
    assert found.tolist() == sorted(expected)


def test_blocks_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="7 bytes is compared with one of 8"):
        _rankpatch.differing(np.zeros(8, dtype=np.uint8), [np.zeros(7, dtype=np.uint8)], 4)
    with pytest.raises(ValueError, match="not 1, 2, 4 or 8"):
        _rankpatch.differing(np.zeros(8, dtype=np.uint8), [], 3)


def test_dtypes_have_the_layout_of_the_header() -> None:
    assert _rankpatch.rule_dtype.itemsize == 32
    assert _rankpatch.write_dtype.itemsize == 24
    assert _rankpatch.relocation_dtype.itemsize == 24
    assert _rankpatch.rule_dtype.fields["stride"][1] == 24
    assert _rankpatch.relocation_dtype.names == ("block", "offset", "symbol", "reserved", "addend")
