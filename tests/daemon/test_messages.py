# SPDX-License-Identifier: Apache-2.0
"""Every byte string is a message or a ProtocolError."""

import pickle
import typing
from contextlib import suppress

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundryd import errors
from foundryd.daemon import messages
from foundryd.daemon.messages import Attach, Hello, LoadArchive, Refused, decode_answer, decode_request, encode
from foundryd.errors import FoundrydError, ProtocolError, RankTaken

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


def test_tags_are_different():
    kinds = typing.get_args(messages.FromClient) + typing.get_args(messages.FromDaemon)
    assert len({kind.__struct_config__.tag for kind in kinds}) == len(kinds)


@given(st.builds(Attach, st.text(max_size=50), st.text(max_size=50), st.integers(-(1 << 63), 1 << 63), st.text()))
def test_a_request_comes_back_as_it_was(message):
    assert decode_request(encode(message)) == message


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_protocol_error(data):
    for decode in (decode_request, decode_answer):
        with suppress(ProtocolError):
            decode(data)
    assert type(messages.request_id(data)) is int


@given(PLAIN, st.sampled_from(["hello", "attach", "stop", "loadarchive", "os.system", ""]))
def test_any_plain_value_is_a_message_or_a_protocol_error(value, tag):
    if isinstance(value, dict):
        value["type"] = tag
    data = msgpack.packb(value)
    with suppress(ProtocolError):
        assert decode_request(data).__struct_config__.tag == tag
    assert type(messages.request_id(data)) is int


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x91" * 60000 + b"\xc0", "not msgpack|deeper"),
        (b"\x81\xa4type" * 10000, "not msgpack"),
        (msgpack.packb({"type": "hello", "oldest": 1, "newest": 1, "build": "x", "more": [[[[[[[[1]]]]]]]]}), "deeper"),
        (msgpack.packb({"type": "getstatus", "id": 1, "protocol": 1, "x": b"bytes"}), "not msgpack"),
        (msgpack.packb({"type": "stop", "id": 1, "protocol": 1, "x": msgpack.ExtType(4, b"1234")}), "not msgpack"),
        (msgpack.packb({"type": "getstatus", "id": "1", "protocol": 1}), "does not fit"),
        (msgpack.packb({"type": "getstatus", "id": 1}), "does not fit"),
        (msgpack.packb({"type": "granted"}), "does not fit"),
        (msgpack.packb({1: 2}), "not msgpack"),
        (msgpack.packb([]), "does not fit"),
        (msgpack.packb({"type": "hello", "oldest": 1, "newest": 1, "build": "x"}) + b"\xc0", "not msgpack"),
        (b"\xdf\xff\xff\xff\xff", "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\xdb\xff\xff\xff\xff", "not msgpack"),
        (pickle.dumps({"type": "stop"}), "not msgpack|does not fit"),
        (b"", "not msgpack"),
        (b"x" * (messages.MAX_REQUEST + 1), "may have 65536"),
    ],
)
def test_nonsense_is_refused_with_a_reason(data, why):
    with pytest.raises(ProtocolError, match=why):
        decode_request(data)


def test_a_newer_peer_may_add_fields():
    data = msgpack.packb({"type": "hello", "oldest": 1, "newest": 3, "build": "foundryd 9", "features": ["x"]})
    assert decode_request(data) == Hello(1, 3, "foundryd 9")


@pytest.mark.parametrize(("oldest", "newest", "version"), [(1, 1, 1), (0, 2, 2), (1, 99, 2)])
def test_the_newest_common_version_is_used(oldest, newest, version):
    assert messages.agree(oldest, newest, "other") == version


@pytest.mark.parametrize(("oldest", "newest"), [(3, 4), (0, 0), (5, 1)])
def test_without_a_common_version_both_ranges_are_named(oldest, newest):
    with pytest.raises(ProtocolError, match=rf"foundryd 9 speaks .* {oldest} to {newest} and this .* 1 to 2"):
        messages.agree(oldest, newest, "foundryd 9")


def test_every_error_survives_the_way_to_the_peer():
    def below(kind):
        yield kind
        for child in kind.__subclasses__():
            yield from below(child)

    kinds = [k for k in below(FoundrydError) if k.__module__ == errors.__name__]
    assert len({k.reason for k in kinds}) == len(kinds)
    for kind in kinds:
        back = messages.error_of(decode_answer(encode(messages.refusal(kind("because of x"), 7))))
        assert type(back) is kind
        assert str(back) == "because of x"
    assert isinstance(messages.error_of(Refused("never_heard_of", "x")), errors.DaemonError)


def test_a_message_of_an_error_is_cut_and_always_text():
    refused = messages.refusal(RankTaken("x" * 100000 + "\udcff"))
    assert len(encode(refused)) < messages.MAX_REQUEST
    assert "?" in messages.refusal(RankTaken("a\udcffb")).message


def test_what_is_too_large_is_refused_by_the_sender():
    with pytest.raises(ProtocolError, match="LoadArchive has"):
        encode(LoadArchive(1, 1, "x" * messages.MAX_REQUEST))
    with pytest.raises((msgspec.ValidationError, ProtocolError)):
        decode_request(encode(LoadArchive(1, 1, "x" * 20000)))
