# SPDX-License-Identifier: Apache-2.0
"""Whatever comes in is a message or a ``ProtocolError``, soon and with little memory: kept cases, and made ones.

``corpus`` holds one packet a file, named for what is wrong with it: none of them is a message.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import time
import tracemalloc
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.daemon import messages, wire
from foundryd.daemon.messages import Attach, Hello, decode_answer, decode_request
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import ProtocolError

CORPUS = sorted(Path(__file__).with_name("corpus").glob("*.bin"))
SECONDS = 1.0  # of the processor for one message; none takes a tenth
MEMORY = 8 << 20  # bytes for one request: less than 128 for each byte that it may have
DECODERS: tuple[Callable[[bytes], Any], ...] = (decode_request, decode_answer, messages.request_id)


@contextmanager
def bounded() -> Iterator[None]:
    """Fails if the block takes more time or memory than a message may."""
    tracemalloc.start()
    began = time.process_time()
    try:
        yield
        assert time.process_time() - began < SECONDS
        assert tracemalloc.get_traced_memory()[1] < MEMORY
    finally:
        tracemalloc.stop()


def test_there_is_a_corpus() -> None:
    assert len(CORPUS) > 40
    assert all(path.stat().st_size <= messages.MAX_REQUEST for path in CORPUS)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_kept_cases_are_refused_soon_and_with_little_memory(path: Path) -> None:
    data = path.read_bytes()
    for decode in (decode_request, decode_answer):
        with bounded(), pytest.raises(ProtocolError) as caught:
            decode(data)
        assert len(str(caught.value)) < 2000
    with bounded():
        assert type(messages.request_id(data)) is int


def test_the_daemon_outlives_the_corpus(start, archive, join, control, runtime_dir) -> None:
    started = start(archive)
    attachment = join(0)
    client = control()
    for path in CORPUS:
        if not (data := path.read_bytes()):
            continue  # the end of a connection
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.settimeout(20)
            door.connect(os.fspath(RuntimeDir(runtime_dir).door))
            door.send(data)
            with suppress(ConnectionError):
                while door.recv(wire.MAX_PACKET):
                    pass
    assert client.status().ready
    assert not attachment.lost
    assert started.process.poll() is None


# --- made cases ------------------------------------------------------------------------------------------------------


def head(kind: int, width: str) -> st.SearchStrategy[bytes]:
    """The head of something with a length: the length says what it likes."""
    top = (1 << 8 * struct.calcsize(width)) - 1
    lengths = st.sampled_from([0, 1, 2, 15, 64, 65, 255, 4096, 16384, 16385, 65535, 65536, top - 1, top])
    return lengths.map(lambda n: bytes([kind]) + struct.pack(width, min(n, top)))


TOKENS = st.one_of(
    head(0xD9, ">B"),
    head(0xDA, ">H"),
    head(0xDB, ">I"),
    head(0xC4, ">B"),
    head(0xC6, ">I"),
    head(0xDC, ">H"),
    head(0xDD, ">I"),
    head(0xDE, ">H"),
    head(0xDF, ">I"),
    head(0xC7, ">B"),
    head(0xC9, ">I"),
    st.integers(0, 255).map(lambda b: bytes([b])),
    st.integers(-(1 << 63), (1 << 64) - 1).map(msgpack.packb),
    st.sampled_from(["type", "id", "protocol", "hello", "stop", "attach", "rank", "path", ""]).map(msgpack.packb),
    st.binary(max_size=9),
)
TANGLED = st.tuples(st.lists(TOKENS, max_size=12), st.integers(0, 400)).map(
    lambda made: (b"".join(made[0][:-1]) + b"".join(made[0][-1:]) * made[1])[: messages.MAX_REQUEST]
)


@settings(deadline=None, max_examples=200)
@given(TANGLED)
def test_tangled_msgpack_is_refused_or_decoded(data: bytes) -> None:
    for decode in DECODERS:
        with bounded(), suppress(ProtocolError):
            decode(data)


def valid(kind: type[Any]) -> st.SearchStrategy[Any]:
    """A message of that kind."""
    texts = st.text(max_size=30)
    of_type = {
        str: texts,
        int: st.integers(-(1 << 63), (1 << 64) - 1),
        dict[str, float]: st.dictionaries(texts, st.floats(0, 1e9), max_size=8),
    }
    fields = {"attach_id": st.from_regex(r"\A[0-9A-Za-z_-]{0,64}\Z")}
    for name, hint in typing.get_type_hints(kind).items():
        if name in kind.__struct_fields__ and name not in fields:
            literal = typing.get_origin(hint) is typing.Literal
            fields[name] = st.sampled_from(typing.get_args(hint)) if literal else of_type[hint]
    return st.builds(kind, **{name: fields[name] for name in kind.__struct_fields__})


REQUESTS = st.one_of([valid(kind) for kind in typing.get_args(messages.FromClient)])


@settings(deadline=None, max_examples=200)
@given(REQUESTS, st.data())
def test_damaged_messages_are_refused_or_another_message(message: Any, data: st.DataObject) -> None:
    raw = bytearray(messages.encode(message))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, max(len(raw) - 1, 0)))
        match data.draw(st.sampled_from(["set", "cut", "insert", "repeat"])):
            case "set":
                raw[place : place + 1] = bytes([data.draw(st.integers(0, 255))])
            case "cut":
                del raw[place:]
            case "insert":
                raw[place:place] = data.draw(TOKENS)
            case "repeat":
                raw += raw[place:]
    with bounded(), suppress(ProtocolError):
        decoded = decode_request(bytes(raw))
        assert isinstance(decoded, typing.get_args(messages.FromClient))
        assert decode_request(messages.encode(decoded)) == decoded


@settings(deadline=None)
@given(REQUESTS, st.sampled_from(["type", "id", "rank", "oldest", "build", "new"]), st.integers(0, 9))
def test_a_key_twice_is_refused_wherever_it_is(message: Any, key: str, value: int) -> None:
    raw = messages.encode(message)
    count = raw[0] & 0x0F
    pair = msgpack.packb(key) + msgpack.packb(value)
    twice = pair if key in message.__struct_fields__ or key == "type" else pair * 2
    data = bytes([0x80 | count + (1 if twice == pair else 2)]) + raw[1:] + twice
    with pytest.raises(ProtocolError, match="a key twice"):
        decode_request(data)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.tuples(st.integers(0, wire.MAX_PACKET + 2), st.integers(0, 6), st.integers(0, wire.MAX_DESCRIPTORS)),
        max_size=6,
    )
)
def test_packets_of_any_size_with_any_descriptors_leave_none_behind(sent: list[tuple[int, int, int]]) -> None:
    """(bytes, descriptors, descriptors allowed) of each packet, from a peer that keeps to nothing."""
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.settimeout(10)
        for size, count, allowed in sent:
            payload = b"\x91" * size
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [theirs.fileno()] * count))]
            theirs.sendmsg([payload], rights if count else [])
            try:
                packet = wire.receive(ours, allowed)
            except ProtocolError:
                assert size > wire.MAX_PACKET or count > allowed
                continue
            if packet is None:
                assert size == 0
                continue
            with packet:
                assert (packet.payload, packet.count) == (payload, count)
                assert count <= allowed
    assert len(os.listdir("/proc/self/fd")) == before


def test_what_is_right_passes_the_same_bounds() -> None:
    """The bounds that refuse all of the above are not what a message comes near."""
    largest = "x" * messages.MAX_TEXT
    with bounded():
        decode_request(messages.encode(Attach(largest, largest, 0, largest)))
        decode_request(messages.encode(Hello(1, 1, largest)))
