# SPDX-License-Identifier: Apache-2.0
"""The native core with arrays that nobody made sense of: right results or ``ValueError``, no byte outside an array."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd._native import _rankpatch

TOP = 0xFFFFFFFF
# Numbers at which sums and products leave their type, and those around them.
EDGES = sorted({max(1, edge + d) for edge in (0, 8, 1 << 16, 1 << 31, 1 << 32) for d in (-9, -8, -4, -1, 0, 1, 4)})
WORD = st.sampled_from([edge for edge in (0, *EDGES) if edge <= TOP]) | st.integers(0, 64) | st.integers(0, TOP)
WIDE = st.sampled_from([*EDGES, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]) | st.integers(0, (1 << 64) - 1)
SIGNED = st.sampled_from([0, -1, (1 << 63) - 1, -(1 << 63)]) | st.integers(-(1 << 63), (1 << 63) - 1)
BYTE = st.sampled_from([0, 1, 2, 3, 4, 5, 6, 7, 8, 16, 255])
GUARD = 64  # bytes on either side of a block


@st.composite
def structs(draw: st.DrawFn, dtype: np.dtype[Any], most: int = 6) -> np.ndarray:
    """Structs with any value in any field."""
    made = np.zeros(draw(st.integers(0, most)), dtype)
    of = {"u1": BYTE, "u4": WORD, "u8": WIDE, "i8": SIGNED}
    for row in made:
        for name in dtype.names or ():
            kind = dtype[name].str[1:]
            row[name] = draw(BYTE if name == "width" else of[kind])
    return made


@st.composite
def guarded(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Memory, and a block in the middle of it."""
    size = draw(st.integers(0, 80))
    memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)
    return memory, memory[GUARD : GUARD + size]


def untouched(memory: np.ndarray) -> bool:
    return bool((memory[:GUARD] == 0xA5).all() and (memory[len(memory) - GUARD :] == 0xA5).all())


TABLES = st.lists(WIDE, max_size=12).map(lambda values: np.array(values, np.uint64))
COORDINATES = st.tuples(*[WORD | st.integers(0, 9)] * 6)


@settings(deadline=None, max_examples=300)
@given(structs(_rankpatch.rule_dtype), TABLES, COORDINATES, WORD)
def test_rules_give_writes_that_hold_or_are_refused(
    rules: np.ndarray, tables: np.ndarray, coordinates: tuple[int, ...], world: int
) -> None:
    try:
        writes = _rankpatch.plan(rules, tables, coordinates, world)
    except _rankpatch.InvalidRules:
        return
    _rankpatch.check_writes(writes)
    _rankpatch.check_rules(rules, len(tables), world)
    assert len(writes) == np.count_nonzero(rules["kind"] != 2)


@settings(deadline=None, max_examples=300)
@given(structs(_rankpatch.rule_dtype), WIDE, WORD)
def test_rules_are_checked_against_tables_of_any_length(rules: np.ndarray, count: int, world: int) -> None:
    table = (rules["kind"] == 1) & (rules["table"].astype(object) + world > count)
    try:
        _rankpatch.check_rules(rules, count, world)
    except _rankpatch.InvalidRules:
        return
    assert not table.any()


@settings(deadline=None, max_examples=300)
@given(guarded(), structs(_rankpatch.write_dtype))
def test_writes_stay_in_their_block(block: tuple[np.ndarray, np.ndarray], writes: np.ndarray) -> None:
    memory, inside = block
    before = inside.copy()
    fit = all(w["width"] in (1, 2, 4, 8) and int(w["offset"]) + int(w["width"]) <= len(inside) for w in writes)
    if fit:
        _rankpatch.apply(inside, writes)
        expected = bytearray(before.tobytes())
        for write in writes:
            width, offset = int(write["width"]), int(write["offset"])
            expected[offset : offset + width] = (int(write["value"]) % (1 << 8 * width)).to_bytes(width, "little")
        assert inside.tobytes() == bytes(expected)
    else:
        with pytest.raises(ValueError, match="write"):
            _rankpatch.apply(inside, writes)
        assert (inside == before).all()
    assert untouched(memory)


@settings(deadline=None, max_examples=300)
@given(guarded(), st.lists(WORD | st.integers(0, 90), max_size=6), st.integers(0, 6), st.integers(0, 4), WIDE)
def test_columns_of_any_shape_expand_or_are_refused(
    block: tuple[np.ndarray, np.ndarray], places: list[int], rows: int, cols: int, column: int
) -> None:
    memory, base = block
    positions = np.array(places, np.uint32)
    columns = np.arange(rows * cols, dtype=np.uint32).reshape(rows, cols)
    column = column % (cols + 1) if column < 1 << 16 else column
    fit = column < cols and rows == len(places) and all(place + 4 <= len(base) for place in places)
    template = np.arange(len(base), dtype=np.uint8)
    if fit:
        _rankpatch.expand(base, [template], positions, columns, column)
        expected = bytearray(template.tobytes())
        for row, place in enumerate(places):
            word = int.from_bytes(expected[place : place + 4], "little") + int(columns[row, column])
            expected[place : place + 4] = (word % (1 << 32)).to_bytes(4, "little")
        assert base.tobytes() == bytes(expected)
        assert untouched(memory)
    else:
        with pytest.raises(ValueError):
            _rankpatch.expand(base, [template], positions, columns, column)
        assert (memory == 0xA5).all()


@settings(deadline=None, max_examples=200)
@given(guarded(), structs(_rankpatch.relocation_dtype), st.integers(0, 3))
def test_relocations_stay_in_their_block(
    block: tuple[np.ndarray, np.ndarray], relocations: np.ndarray, count: int
) -> None:
    memory, inside = block
    symbols = np.arange(count, dtype=np.uint64)
    fit = all(r["symbol"] < count and int(r["offset"]) + 8 <= len(inside) for r in relocations)
    if fit:
        _rankpatch.relocate(inside, relocations, symbols)
    else:
        with pytest.raises(ValueError, match="relocation"):
            _rankpatch.relocate(inside, relocations, symbols)
        assert (memory == 0xA5).all()
    assert untouched(memory)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.binary(max_size=40), max_size=4), st.binary(max_size=40), BYTE)
def test_blocks_of_any_length_are_compared_or_refused(others: list[bytes], reference: bytes, width: int) -> None:
    arrays = [np.frombuffer(other, np.uint8) for other in others]
    base = np.frombuffer(reference, np.uint8)
    if width in (1, 2, 4, 8) and all(len(other) == len(reference) for other in others):
        found = _rankpatch.differing(base, arrays, width)
        differ = {at // width * width for other in others for at in range(len(other)) if other[at] != reference[at]}
        assert found.tolist() == sorted(differ)
    else:
        with pytest.raises(ValueError):
            _rankpatch.differing(base, arrays, width)


ODD: list[Any] = [
    None,
    b"bytes",
    [],
    np.zeros((2, 2), np.uint64),
    np.zeros(4, ">u8"),
    np.zeros(8, np.uint64)[::-1],
    np.zeros(8, np.uint64)[::2],
    np.frombuffer(bytes(33), np.uint8)[1:].view(np.uint64),  # at an odd address
    np.zeros(0, np.uint64),
    np.empty((0, 5), np.uint64),
    np.array(7, np.uint64),
    np.broadcast_to(np.uint64(7), (1 << 40,)),
    np.zeros(1, _rankpatch.rule_dtype),
    np.zeros((3, 1), _rankpatch.rule_dtype),
    np.zeros(3, _rankpatch.rule_dtype)[::-1],
    np.frombuffer(bytes(65), np.uint8)[1:].view(_rankpatch.rule_dtype),
    np.zeros(2, _rankpatch.write_dtype),
    np.zeros(2, np.uint8),
    np.zeros(2, np.uint32),
]


@pytest.mark.parametrize("first", range(len(ODD)))
def test_arrays_of_any_kind_are_taken_or_refused(first: int) -> None:
    """Each function with each pair of odd things: a result, ``TypeError`` or ``ValueError``."""
    one = ODD[first]
    for two in ODD:
        for call in (
            lambda a, b: _rankpatch.plan(a, b, (0,) * 6, 1),
            lambda a, b: _rankpatch.check_rules(a, 1, 1),
            lambda a, b: _rankpatch.check_writes(a),
            lambda a, b: _rankpatch.apply(a, b),
            lambda a, b: _rankpatch.differing(a, [b], 4),
            lambda a, b: _rankpatch.expand(a, [b], np.zeros(1, np.uint32), np.zeros((1, 1), np.uint32), 0),
            lambda a, b: _rankpatch.expand(np.zeros(8, np.uint8), [np.zeros(8, np.uint8)], a, b, 0),
            lambda a, b: _rankpatch.turn(a, b, 0),
            lambda a, b: _rankpatch.relocate(a, b, np.zeros(1, np.uint64)),
            lambda a, b: _rankpatch.relocate(np.zeros(8, np.uint8), a, b),
        ):
            try:
                call(one, two)
            except (TypeError, ValueError):
                continue


def test_blocks_at_the_limit_of_a_position() -> None:
    """Blocks are as long as 32 bits can say, and one byte longer; only the pages that are touched exist."""
    block = np.zeros((1 << 32) + 1, np.uint8)
    last = np.zeros(1, _rankpatch.write_dtype)
    last["offset"], last["width"], last["value"] = TOP, 1, 0xAB
    _rankpatch.check_writes(last)
    _rankpatch.apply(block[:-1], last)
    assert block[TOP] == 0xAB
    last["width"] = 2
    with pytest.raises(ValueError, match="ends past 4 GiB"):
        _rankpatch.check_writes(last)
    with pytest.raises(ValueError, match="is past block 0 of 4294967296 bytes"):
        _rankpatch.apply(block[:-1], last)
    assert block[TOP] == 0xAB
    assert block[TOP + 1] == 0
    with pytest.raises(ValueError, match="longer than 4 GiB"):
        _rankpatch.differing(block, [], 4)
