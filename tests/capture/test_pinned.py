# SPDX-License-Identifier: Apache-2.0
"""Pinned memory is archived up to the last allocation that something refers to, and no further."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foundryd._native import _hook
from foundryd.capture.pinned import needed
from foundryd.session.arena import ARENAS

BASE, PAGE = 0x614000000000, 4096


@st.composite
def sequences(draw):
    """Rows of the host arena: places of a few pages, which may be given back and taken again by a larger one."""
    sizes = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 2 * PAGE)), max_size=8))
    rows = np.zeros(len(sizes), _hook.allocation_dtype)
    for number, (page, size) in enumerate(sizes):
        rows[number]["address"], rows[number]["bytes"] = BASE + 2 * PAGE * page, size
        rows[number]["ordinal"], rows[number]["arena"] = number, ARENAS.index("host")
    return rows


places = st.integers(BASE - PAGE, BASE + 14 * PAGE)


def packed(addresses, shift=0):
    """Bytes that hold addresses, each ``shift`` behind a multiple of 8, and nothing else that looks like one."""
    return np.concatenate([np.zeros(shift, np.uint8), np.array(addresses, np.uint64).view(np.uint8)])


def last_of(rows, addresses):
    hit = [n for n, row in enumerate(rows) for a in addresses if row["address"] <= a < row["address"] + row["bytes"]]
    return max(hit, default=-1)


@given(sequences(), st.lists(places, max_size=3), st.lists(places, max_size=3), st.lists(places, max_size=2), st.data())
def test_what_is_referred_to_stays(rows, exact, aligned, named, data):
    shift = data.draw(st.integers(0, 7))
    kept = needed(rows, [packed(exact, shift)], [packed(aligned)], named)
    assert len(kept) == 1 + last_of(rows, [*exact, *aligned, *named])
    assert (kept == rows[: len(kept)]).all()


@given(sequences(), st.lists(places, min_size=1, max_size=3), st.integers(1, 7))
def test_content_refers_by_aligned_words_alone(rows, addresses, shift):
    assert len(needed(rows, [], [packed(addresses, shift)], ())) == 0


@given(st.lists(places, max_size=3))
def test_without_pinned_memory_nothing_is_needed(addresses):
    none = np.zeros(0, _hook.allocation_dtype)
    assert len(needed(none, [packed(addresses)], [packed(addresses)], addresses)) == 0


@given(sequences(), st.integers(0, 7), st.lists(places, max_size=2))
def test_what_a_needed_row_holds_an_address_of_is_needed_and_so_on(rows, start, named):
    """Each row holds the address of the one behind ``start`` others."""
    held = {n: packed([int(rows[(n + start) % len(rows)]["address"])]) for n in range(len(rows))}
    count = 1 + last_of(rows, named)
    while (more := 1 + last_of(rows, [*named, *(int(held[n].view(np.uint64)[0]) for n in range(count))])) > count:
        count = more
    assert len(needed(rows, [], [], named, list(held.items()))) == count
