# SPDX-License-Identifier: Apache-2.0
"""Outputs pass through an archive unchanged, and only what an archive can hold is taken."""

from __future__ import annotations

from collections import OrderedDict
from enum import IntEnum
from typing import NamedTuple

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundryd.errors import ArchiveFormatError, CaptureError
from foundryd.session.arrays import DeviceArray, decode_outputs, encode_outputs, freeze_key

arrays = st.builds(
    DeviceArray,
    st.integers(0, 2**63),
    st.lists(st.integers(0, 1 << 20), max_size=4).map(tuple),
    st.sampled_from(["<f4", "<i8", "<f2", "|u1"]),
)
leaves = arrays | st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(max_size=8) | st.binary(max_size=8)
outputs = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(outputs)
def test_outputs_come_back_as_they_went(value):
    packed = msgpack.packb(encode_outputs(value))
    assert decode_outputs(msgpack.unpackb(packed)) == value


@pytest.mark.parametrize("value", [object(), {1: 2}, {"a": {3}}, np.zeros(2)])
def test_what_an_archive_cannot_hold_is_refused_by_its_type(value):
    with pytest.raises(CaptureError, match=r"set|object|dict|ndarray"):
        encode_outputs(value)


class Pair(NamedTuple):
    first: int
    second: int


class Level(IntEnum):
    HIGH = 3


@pytest.mark.parametrize(
    "value",
    [
        Pair(1, 2),
        [Pair(1, 2)],
        OrderedDict(a=1),
        {Level.HIGH.name: Level.HIGH},
        np.float64(1.5),
        1 << 64,
        -(1 << 63) - 1,
    ],
)
def test_what_would_come_back_as_something_else_or_not_at_all_is_refused_when_it_is_captured(value):
    with pytest.raises(CaptureError, match=r"Pair|OrderedDict|Level|float64|6\d-bit int"):
        encode_outputs(value)


@pytest.mark.parametrize("value", [7, {}, {"x": 1}, {"a": [1, 2]}, {"a": ["x", [1], "<f4"]}, {"t": 3}])
def test_what_no_writer_makes_is_refused(value):
    with pytest.raises(ArchiveFormatError):
        decode_outputs(value)


def test_the_array_interface_tells_address_shape_and_type():
    array = DeviceArray(0x600000000000, (2, 3), "float32")
    assert array.nbytes == 24
    interface = array.__cuda_array_interface__
    assert interface["data"] == (0x600000000000, False)
    assert interface["shape"] == (2, 3)
    assert interface["typestr"] == "<f4"


def test_keys_compare_alike_before_and_after_an_archive():
    key = ("decode", 8, ("x", [1, 2]))
    assert freeze_key(msgpack.unpackb(msgpack.packb(key))) == freeze_key(key)
