# SPDX-License-Identifier: Apache-2.0
"""What is left of an image is what the driver takes from it; an image that is not understood stays whole."""

from __future__ import annotations

import contextlib
import struct
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd import _native
from foundryd.capture.images import chosen, entries, listings, pruned
from foundryd.errors import UnreadableImage

sys.path.insert(0, str(Path(__file__).parent))
import image_builder as ib
from image_builder import Cubin, Symbol, container, entry

HOPPER = (9, 0)
TABLE = 0x1000000  # with a table in place of options, on compiled code for sm_100 and later
DEVICES = [(7, 5), (8, 0), (8, 6), (9, 0), (10, 0), (10, 3), (12, 0)]
ARCHITECTURES = [75, 80, 86, 90, 100, 103, 120]


@dataclass(frozen=True)
class Piece:
    """An entry of a container, and what is in it."""

    kind: int
    architecture: int
    flags: int
    options: bytes = b""

    @property
    def code(self) -> bytes:
        """Code that no other piece has."""
        name = f"v{self.kind}_{self.architecture}_{self.flags:x}"
        if self.kind == 1:
            return f".version 9.0\n.target sm_{self.architecture}\n.global .u32 {name};\n".encode() + b"\0"
        return Cubin({".nv.global": (4, 4)}, [Symbol(name, ".nv.global", 0)], architecture=self.architecture).build()

    @property
    def raw(self) -> bytes:
        return entry(self.code, self.architecture, kind=self.kind, flags=self.flags, options=self.options)


compressions = st.sampled_from([0, ib.LZ4, ib.ZSTD])
suffixes = st.sampled_from([0, 0, 0, ib.SPECIFIC, ib.FAMILY])
PTX = st.builds(
    lambda a, c, s, o: Piece(1, a, c | s, o),
    st.sampled_from(ARCHITECTURES), compressions, suffixes, st.sampled_from([b"", bytes(16)]),
)  # fmt: skip
COMPILED = st.builds(lambda a, c, s: Piece(2, a, c | s), st.sampled_from(ARCHITECTURES), compressions, suffixes)
PIECES = st.lists(PTX | COMPILED, max_size=8, unique_by=lambda p: (p.kind, p.architecture, p.flags))


def refusal(image: bytes, device: tuple[int, int] = HOPPER) -> str:
    with pytest.raises(UnreadableImage) as refused:
        pruned(image, device)
    return str(refused.value)


@settings(max_examples=400, deadline=None)
@given(PIECES, st.sampled_from(DEVICES))
def test_what_is_left_is_exactly_what_the_driver_may_take(pieces: list[Piece], device: tuple[int, int]) -> None:
    image = container(*(p.raw for p in pieces))
    taken = []
    with contextlib.suppress(UnreadableImage):
        taken = chosen(entries(image), device)
    if not taken:
        assert "it has no code for compute capability" in refusal(image, device)
        return
    if len({e.target for e in taken}) < len(taken):
        assert "the driver may link" in refusal(image, device)
        return
    left = pruned(image, device)
    own = [p for p in pieces if p.raw in [e.raw for e in taken]]
    # Compiled code comes out as its file; whatever leaves the driver something to choose or to compile as it was.
    assert left == (own[0].code if [p.kind for p in own] == [2] else container(*(p.raw for p in own)))
    names = [[v.name for v in listing.variables] for listing in listings(image, device)]
    assert [[v.name for v in listing.variables] for listing in listings(left, device)] == names
    assert pruned(left, device) == left


@settings(max_examples=200, deadline=None)
@given(PIECES, st.sampled_from(DEVICES), st.sampled_from(["kind", "version", "flag", "options", "reserved"]), st.data())
def test_what_is_not_known_and_could_be_taken_keeps_an_image_whole(
    pieces: list[Piece], device: tuple[int, int], feature: str, data: st.DataObject
) -> None:
    architecture = data.draw(st.sampled_from([0, *ARCHITECTURES]))
    strange = bytearray(Piece(2, architecture, 0, bytes(8) if feature == "options" else b"").raw)
    if feature == "kind":
        struct.pack_into("<H", strange, 0, data.draw(st.sampled_from([0, 4, 8, 16, 64])))
    elif feature == "version":
        struct.pack_into("<H", strange, 2, 0x0102)
    elif feature == "flag":
        bit = data.draw(st.sampled_from([b for b in range(64) if not 0x130A013 >> b & 1]))
        struct.pack_into("<Q", strange, 40, 0x11 | 1 << bit)
    elif feature == "reserved":
        struct.pack_into("<Q", strange, 48, 1)
    place = data.draw(st.integers(0, len(pieces)))
    image = container(*(p.raw for p in pieces[:place]), bytes(strange), *(p.raw for p in pieces[place:]))
    if divmod(architecture, 10) <= device:
        assert "is not known" in refusal(image, device)
    else:  # code for later devices, whatever it is
        with contextlib.suppress(UnreadableImage):
            assert bytes(strange) not in pruned(image, device)


def test_the_table_of_later_architectures_is_known() -> None:
    later = Piece(2, 100, ib.FAMILY | TABLE, bytes(48))
    image = container(Piece(2, 90, 0).raw, later.raw)
    assert pruned(image, (10, 0)) == later.code
    assert pruned(image, HOPPER) == Piece(2, 90, 0).code


def test_parts_that_the_driver_has_to_link_keep_an_image_whole() -> None:
    code = bytearray(Piece(2, 90, 0).code)
    struct.pack_into("<H", code, 16, 1)
    assert "without being linked" in refusal(container(entry(bytes(code))))
    assert "without being linked" in refusal(container(entry(bytes(code)), Piece(2, 90, ib.SPECIFIC).raw))
    twice = [Piece(2, 90, flags).raw for flags in (0, ib.LZ4)]
    assert (
        refusal(container(*twice, Piece(2, 80, 0).raw))
        == "it has 2 pieces of code for sm_90, which the driver may link"
    )


def test_code_that_contradicts_its_header_keeps_an_image_whole() -> None:
    assert "says that it is for sm_80" in refusal(container(entry(Piece(2, 80, 0).code, 90)))
    assert "are behind the ELF file" in refusal(container(entry(Piece(2, 90, 0).code + bytes(8))))
    assert "are behind the ELF file" in refusal(container(entry(Piece(2, 90, 0).code + b"x", flags=ib.LZ4)))
    assert pruned(container(entry(Piece(2, 90, 0).code + bytes(7), flags=ib.LZ4)), HOPPER) == Piece(2, 90, 0).code


def test_a_header_of_a_container_that_is_not_known_keeps_it_whole() -> None:
    body = Piece(2, 90, 0).raw
    assert "a header of 24 bytes" in refusal(struct.pack("<IHHQQ", 0xBA55ED50, 1, 24, len(body), 0) + body)


def test_an_image_of_one_file_is_left_as_it_is() -> None:
    for piece in (Piece(1, 75, 0), Piece(2, 80, 0)):
        assert pruned(piece.code, HOPPER) == piece.code


def test_an_image_of_the_software_driver_comes_out_as_its_library() -> None:
    image = _native.image("hooktest").read_bytes()
    left = pruned(image, HOPPER)
    assert left[:4] == b"\x7fELF"
    assert len(left) < len(image) / 2.9
    assert [[v.name for v in one.variables] for one in listings(left, HOPPER)] == [
        ["aimed", "counter", "table", "zeroed"]
    ]


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([container(*(Piece(2, a, flags).raw for a in (80, 90))) for flags in (0, ib.LZ4, ib.ZSTD)]),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6),
    st.integers(0, 4000),
)
def test_a_damaged_image_is_pruned_or_refused(image: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    broken = bytearray(image)
    for at, value in changes:
        broken[at % len(broken)] = value
    del broken[len(broken) - cut % len(broken) if cut % 3 == 0 else len(broken) :]
    with contextlib.suppress(UnreadableImage):
        assert entries(pruned(bytes(broken), HOPPER))
