# SPDX-License-Identifier: Apache-2.0
"""A range is mentioned exactly if some eight bytes are an address in it."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foundryd.capture.mentions import Mentions

BASE = 0x600000000000

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)), max_size=6)
contents = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.integers(-5, 90).map(lambda n: BASE + n), max_size=3)), max_size=3
)


def mentions(places):
    return Mentions([BASE + start for start, _ in places], [size for _, size in places])


def bytes_of(shift, addresses):
    return np.concatenate([np.zeros(shift, np.uint8), np.array(addresses, np.uint64).view(np.uint8)])


@given(ranges, contents, st.booleans())
def test_as_one_by_one(places, parts, aligned):
    found = mentions(places)
    data = [bytes_of(shift, addresses) for shift, addresses in parts]
    for part in data:
        found.see([part], aligned=aligned)
    values = {
        int.from_bytes(part[at : at + 8].tobytes(), "little")
        for part in data
        for at in range(0, len(part) - 7, 8 if aligned else 1)
    }
    expected = [any(BASE + start <= value < BASE + start + size for value in values) for start, size in places]
    assert found.found.tolist() == expected
    at_once = mentions(places)
    at_once.see(data, aligned=aligned)
    assert at_once.found.tolist() == expected
