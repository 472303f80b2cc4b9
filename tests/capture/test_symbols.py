# SPDX-License-Identifier: Apache-2.0
"""Addresses of globals are found wherever a parameter has them."""

from __future__ import annotations

import numpy as np
import pytest

from foundryd._native import _hook, _rankpatch
from foundryd.archive.index import Symbol
from foundryd.capture.canonical import KERNEL, NONE, Graph
from foundryd.capture.modules import GlobalRange
from foundryd.capture.symbols import Symbols

FIRST, SECOND, THIRD = 0x7F00_0000_1000, 0x7F00_0000_1100, 0x7F00_0000_2000
RANGES = [
    GlobalRange(FIRST, 0x100, Symbol(0, "first")),
    GlobalRange(SECOND, 4, Symbol(0, "second")),  # where the first one ends
    GlobalRange(THIRD, 64, Symbol(1, "third")),
]


def graph(params: bytes) -> Graph:
    """A kernel with these parameters, of which the fields are nobody's business."""
    nodes = np.zeros(1, _hook.node_dtype)
    nodes["type"], nodes["comm_group"], nodes["child"], nodes["param_bytes"] = KERNEL, NONE, NONE, len(params)
    edges, attributes = np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype)
    return Graph("step", nodes, edges, attributes, np.frombuffer(params, np.uint8).copy())


def word(value: int) -> bytes:
    return value.to_bytes(8, "little")


@pytest.mark.parametrize("before", range(17))
@pytest.mark.parametrize("address", [FIRST, FIRST + 5, SECOND, THIRD + 63])
def test_an_address_is_found_at_any_byte(before, address):
    """Packed structs have pointers anywhere, and a kernel may be given the halves of one as two numbers."""
    one = graph(b"\x81" * before + word(address) + b"\x17" * 9)
    expected = one.params.copy()
    expected[before : before + 8] = 0
    symbols = Symbols(RANGES)
    rows = symbols.replace_in_graphs([one])
    assert one.params.tolist() == expected.tolist()
    (owner,) = [r for r in RANGES if r.address <= address < r.address + r.bytes]
    assert symbols.used == [owner.symbol]
    assert rows[["block", "offset", "symbol"]].tolist() == [(0, one.param_start() + before, 0)]
    # What a restore makes of it, where the driver put the global elsewhere.
    moved = one.params.copy()
    rows["offset"] -= one.param_start()
    _rankpatch.relocate(moved, rows, np.array([0x1234_5000], np.uint64))
    assert int.from_bytes(moved[before : before + 8].tobytes(), "little") == 0x1234_5000 + address - owner.address


def test_the_end_of_a_global_is_an_address_of_it_unless_another_one_begins_there():
    one = graph(word(FIRST) + word(SECOND) + word(SECOND + 4) + word(THIRD + 64) + word(THIRD + 65))
    symbols = Symbols(RANGES)
    rows = symbols.replace_in_graphs([one])
    named = [(symbols.used[int(r["symbol"])].name, int(r["addend"])) for r in rows]
    assert named == [("first", 0), ("second", 0), ("second", 4), ("third", 64)]
    assert one.params.tobytes() == bytes(32) + word(THIRD + 65)


def test_of_words_that_overlap_the_aligned_one_is_an_address():
    """Seven bytes of the one before and one of the next can look like a third."""
    low = FIRST & ~0xFF
    one = graph(word(low << 8 & (1 << 64) - 1 | 0x22) + word(FIRST))
    both = int.from_bytes(one.params[1:9].tobytes(), "little")
    symbols = Symbols([GlobalRange(both, 1, Symbol(0, "between")), *RANGES])
    symbols.replace_in_graphs([one])
    assert symbols.used == [Symbol(0, "first")]


def test_what_is_no_address_stays():
    values = [0, 1, FIRST - 1, SECOND + 5, THIRD - 1, 1 << 63, 2**64 - 1]
    one = graph(b"".join(map(word, values)) + b"tail")
    before = one.params.copy()
    assert len(Symbols(RANGES).replace_in_graphs([one])) == 0
    assert len(Symbols([]).replace_in_graphs([graph(word(FIRST))])) == 0
    assert one.params.tolist() == before.tolist()
