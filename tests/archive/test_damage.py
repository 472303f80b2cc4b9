# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to the bytes of an archive, a reader says so with a typed error."""

from __future__ import annotations

import random
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
import zstandard

from foundryd.archive.format import ALIGNMENT, HEADER, MINOR, Frame, Header, Limits, SectionEntry, align, digest
from foundryd.archive.index import Index
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.errors import ArchiveDigestError, ArchiveError, ArchiveFormatError, ArchiveVersionError

replace = msgspec.structs.replace


def read(data: bytes) -> None:
    """Opens and checks every byte."""
    reader = ArchiveReader(data, name="a.foundry")
    reader.verify()
    for name in reader.sections:
        reader.section(name)


@contextmanager
def allocating_less_than(count: int) -> Iterator[None]:
    """Fails if the block has more bytes of Python's memory at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, empty_index: Index) -> bytes:
    path = tmp_path_factory.mktemp("tiny") / "a.foundry"
    with ArchiveWriter(path) as writer:
        writer.add("raw", b"some bytes")
        writer.add("packed", b"more bytes" * 9, "zstd")
        writer.finish(empty_index)
    read(path.read_bytes())
    return path.read_bytes()


def entry(name: str, data: bytes, offset: int, **other: Any) -> SectionEntry:
    fields = {"codec": "raw", "length": len(data), "stored_digest": digest(data), "digest": digest(data), **other}
    return SectionEntry(name=name, offset=offset, stored=fields.pop("stored", len(data)), **fields)


def forge(
    pieces: list[tuple[SectionEntry, bytes]],
    index: Any,
    *,
    directory: bytes | None = None,
    header: Callable[[Header], Header] = lambda header: header,
) -> bytes:
    """A file that a hostile writer could make: every digest is right, whatever else is."""
    if directory is None:
        directory = msgspec.msgpack.encode({"sections": [piece for piece, _ in pieces], "index": index})
    end = max([piece.offset + len(data) for piece, data in pieces if piece.offset < 1 << 30], default=HEADER.size)
    offset = align(end)
    made = Header(offset + len(directory), offset, len(directory), digest(directory)[:16])
    file = bytearray(made.file_length)
    for piece, data in pieces:
        if piece.offset < 1 << 30:
            file[piece.offset : piece.offset + len(data)] = data
    file[offset:] = directory
    file[: HEADER.size] = header(made).pack()
    return bytes(file)


def test_forged_files_are_read_when_nothing_is_wrong(empty_index: Index) -> None:
    read(forge([(entry("a", b"x", ALIGNMENT), b"x"), (entry("b", b"y", 2 * ALIGNMENT), b"y")], empty_index))
    read(forge([], empty_index))


def test_every_cut_of_a_small_archive_is_refused(tiny: bytes) -> None:
    for size in range(len(tiny)):
        with pytest.raises((ArchiveFormatError, ArchiveVersionError)):
            read(tiny[:size])


def test_cuts_and_tails_of_a_whole_archive_are_refused(sample: Path, tmp_path: Path) -> None:
    data = sample.read_bytes()
    rng = random.Random(7)
    cuts = {
        0,
        1,
        8,
        63,
        64,
        65,
        ALIGNMENT - 1,
        ALIGNMENT,
        len(data) - 1,
        *(rng.randrange(len(data)) for _ in range(200)),
    }
    cut = tmp_path / "cut.foundry"
    for size in sorted(cuts):
        cut.write_bytes(data[:size])
        with pytest.raises(ArchiveFormatError, match=r"cut\.foundry"):
            ArchiveReader.open(cut)
    cut.write_bytes(data + b"\0")
    with pytest.raises(ArchiveFormatError, match="something behind it"):
        ArchiveReader.open(cut)


def test_every_flipped_bit_of_a_small_archive_is_found(tiny: bytes) -> None:
    data = bytearray(tiny)
    padding = {i for i in range(HEADER.size, len(data)) if data[i : i + 1] == b"\0"}
    for place in range(len(data)):
        # All bits of every byte that says something; of zero padding one.
        for bit in [place % 8] if place in padding else range(8):
            data[place] ^= 1 << bit
            with pytest.raises(ArchiveError):
                read(bytes(data))
            data[place] ^= 1 << bit
    read(bytes(data))


def test_flipped_bits_anywhere_are_found(sample: Path) -> None:
    data = bytearray(sample.read_bytes())
    rng = random.Random(11)
    for _ in range(400):
        place, bit = rng.randrange(len(data)), rng.randrange(8)
        data[place] ^= 1 << bit
        with pytest.raises((ArchiveFormatError, ArchiveDigestError, ArchiveVersionError)):
            ArchiveReader(bytes(data)).verify()
        data[place] ^= 1 << bit


@pytest.mark.parametrize("data", [b"", b"\x7fELF" + bytes(100), b"FOUNDRYX" + bytes(100), b"PK\3\4"])
def test_other_magic_is_not_an_archive(data: bytes) -> None:
    with pytest.raises(ArchiveFormatError, match="is not a foundryd archive"):
        ArchiveReader(data, name="x")


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="cannot be opened"):
        ArchiveReader.open(tmp_path / "none.foundry")
    with pytest.raises(ArchiveFormatError, match="is not a foundryd archive"):
        ArchiveReader.open(tmp_path)
    with pytest.raises(ArchiveFormatError, match="is not a foundryd archive"):
        ArchiveReader.open("/dev/null")


def test_newer_major_is_another_format(empty_index: Index) -> None:
    data = forge([], empty_index, header=lambda h: Header(**{**vars(h), "major": 2, "min_reader": 9}))
    with pytest.raises(ArchiveVersionError, match=rf"format 2\.{MINOR} .* reads format 1"):
        ArchiveReader(data)


def test_newer_minor_is_read_if_it_allows_it(empty_index: Index) -> None:
    raw = msgspec.to_builtins(empty_index) | {"invention": [1, 2]}
    newer = forge([], raw, header=lambda h: Header(**{**vars(h), "minor": MINOR + 1}))
    reader = ArchiveReader(newer)
    assert reader.index == empty_index
    assert reader.raw_index()["invention"] == [1, 2]
    with pytest.raises(ArchiveVersionError, match=rf"needs a reader of 1\.{MINOR + 1}"):
        ArchiveReader(
            forge([], raw, header=lambda h: Header(**{**vars(h), "minor": MINOR + 1, "min_reader": MINOR + 1}))
        )
    with pytest.raises(ArchiveFormatError, match=rf"has index\.invention, which format 1\.{MINOR} does not have"):
        ArchiveReader(forge([], raw))


def test_unknown_fields_are_found_at_any_depth(sample: Path) -> None:
    reader = ArchiveReader.open(sample)
    raw = reader.raw_index()
    raw["variants"][0]["templates"][0]["children"][0]["spin"] = 1
    pieces = [(replace(s, codec="raw"), bytes(reader.stored(s))) for s in reader.sections.values()]
    pieces = [(replace(s, length=s.stored, digest=s.stored_digest, params={}), data) for s, data in pieces]
    with pytest.raises(ArchiveFormatError, match=r"variants\[0\]\.templates\[0\]\.children\[0\]\.spin"):
        ArchiveReader(forge(pieces, raw))


@pytest.mark.parametrize(
    "change",
    [
        {"file_length": 2**64 - 1},
        {"file_length": 0},
        {"index_offset": 2**64 - 1},
        {"index_offset": 2**63},
        {"index_offset": 0},
        {"index_offset": 64},
        {"index_length": 2**64 - 1},
        {"index_length": 0},
        {"reserved": 1},
        {"min_reader": MINOR + 1},
        {"index_digest": bytes(16)},
    ],
    ids=str,
)
def test_wild_headers_are_refused(empty_index: Index, change: dict[str, Any]) -> None:
    data = forge([(entry("a", b"x", ALIGNMENT), b"x")], empty_index, header=lambda h: Header(**{**vars(h), **change}))
    with pytest.raises(ArchiveError):
        ArchiveReader(data)


def shape(rows: int, cols: int, by_column: int = 0) -> dict[str, int]:
    return {"rows": rows, "cols": cols, "by_column": by_column, "shuffled": 0}


A = ALIGNMENT
LAYOUTS = {
    "overlap": [entry("a", b"x" * 5000, A), entry("b", b"y", 2 * A)],
    "same place": [entry("a", b"x", A), entry("b", b"x", A)],
    "hole": [entry("a", b"x", A), entry("b", b"y", 3 * A)],
    "hole in front": [entry("a", b"x", 2 * A)],
    "order": [entry("b", b"y", 2 * A), entry("a", b"x", A)],
    "unaligned": [entry("a", b"x", A), entry("b", b"y", A + 64)],
    "inside the header": [entry("a", b"x", 0)],
    "wild offset": [entry("a", b"x", 2**62)],
    "beyond the end": [entry("a", b"x", A, stored=2**62, length=2**62)],
    "duplicate name": [entry("a", b"x", A), entry("a", b"x", 2 * A)],
    "raw that grows": [entry("a", b"x", A, length=2)],
    "raw with two digests": [entry("a", b"x", A, digest=bytes(32))],
    "raw with parameters": [entry("a", b"x", A, params={"rows": 1})],
    "columns without parameters": [entry("a", b"x", A, codec="columns", length=4)],
    "columns of another size": [entry("a", b"x", A, codec="columns", length=8, params=shape(1, 1))],
    "columns of wild size": [
        entry(
            "a",
            b"x",
            A,
            codec="columns",
            length=4,
            params=shape(2**62, 2**62),
        )
    ],
    "columns with a wild flag": [entry("a", b"x", A, codec="columns", length=4, params=shape(1, 1, 2))],
    "empty and packed": [entry("a", b"", A, codec="zstd")],
    "too large": [entry("a", b"x", A, codec="zstd", length=2**60)],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_impossible_places_are_refused(empty_index: Index, layout: list[SectionEntry]) -> None:
    pieces = [(piece, b"x" * min(piece.stored, 9000)) for piece in layout]
    with pytest.raises(ArchiveFormatError):
        ArchiveReader(forge(pieces, empty_index))


def test_a_hole_before_the_index_is_refused(empty_index: Index) -> None:
    file = forge([(entry("a", b"x", A), b"x" + bytes(A))], empty_index)
    with pytest.raises(ArchiveFormatError, match="with a hole in between"):
        ArchiveReader(file)


WRONG_ENTRIES = {
    "negative": {"offset": -4096},
    "text for a number": {"offset": "4096"},
    "real for a number": {"stored": 1.0},
    "short digest": {"digest": bytes(31)},
    "unknown codec": {"codec": "lz4"},
    "empty name": {"name": ""},
    "unknown field": {"colour": 1},
    "beyond 2**62": {"length": 2**63},
}


@pytest.mark.parametrize("change", WRONG_ENTRIES.values(), ids=WRONG_ENTRIES.keys())
def test_malformed_entries_are_refused(empty_index: Index, change: dict[str, Any]) -> None:
    raw = msgspec.to_builtins(entry("a", b"x", A), builtin_types=(bytes,)) | change
    directory = msgpack.packb({"sections": [raw], "index": msgspec.to_builtins(empty_index)})
    with pytest.raises(ArchiveFormatError):
        ArchiveReader(forge([(entry("a", b"x", A), b"x")], empty_index, directory=directory))


def nested(depth: int) -> bytes:
    return b"\x91" * depth + b"\xc0"


WRONG_DIRECTORIES = {
    "nothing": b"",
    "not msgpack": b"\xc1",
    "a list": b"\x90",
    "a cut map": b"\x82\xa8sections\x90",
    "bytes behind": b"\x82\xa8sections\x90\xa5index\x80\x00",
    "a third part": b"\x83\xa8sections\x90\xa5index\x80\xa1x\x00",
    "a key twice": b"\x83\xa8sections\x90\xa5index\x80\xa5index\x80",
    "a number as key": b"\x82\x01\x90\xa5index\x80",
    "an extension": b"\x82\xa8sections\x90\xa5index\xd4\x01\x00",
    "a timestamp": b"\x82\xa8sections\x90\xa5index\xd6\xff\x00\x00\x00\x00",
    "broken UTF-8": b"\x82\xa8sections\x90\xa5index\x81\xa1\xff\x00",
    "an endless list": b"\x82\xa8sections\xdd\xff\xff\xff\xff",
    "an endless text": b"\x82\xa8sections\xdb\xff\xff\xff\xff",
    "an endless map": b"\x82\xa8sections\xdf\xff\xff\xff\xff",
    "endless lists in one another": b"\x82\xa8sections" + b"\xdd\x00\x00\x0f\xff" * 900,
    "very deep": b"\x82\xa8sections" + nested(5000) + b"\xa5index\x80",
    "deep notes": b"\x82\xa8sections\x90\xa5index\x81\xa5notes\x81\xa1n" + nested(200),
}


@pytest.mark.parametrize("directory", WRONG_DIRECTORIES.values(), ids=WRONG_DIRECTORIES.keys())
def test_malformed_directories_are_refused(empty_index: Index, directory: bytes) -> None:
    file = forge([], empty_index, directory=directory)
    with allocating_less_than(64 << 20), pytest.raises(ArchiveFormatError):
        ArchiveReader(file)


def test_an_index_that_is_too_long_is_not_decoded(tiny: bytes) -> None:
    with pytest.raises(ArchiveFormatError, match="more than the 100 that a reader accepts"):
        ArchiveReader(tiny, limits=Limits(index_bytes=100))


def packed(data: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(**options).compress(data)


BOMBS = {
    "larger than its entry": (packed(bytes(1 << 28)), 1000),
    "smaller than its entry": (packed(bytes(1000)), 1 << 18),
    "no size in the frame": (packed(bytes(1000), write_content_size=False), 1000),
    "bytes behind the frame": (packed(bytes(1000)) + b"x", 1000),
    "a second frame": (packed(bytes(1000)) * 2, 1000),
    "a cut frame": (packed(bytes(range(256)) * 4)[:-3], 1024),
    "not zstd": (b"garbage, garbage", 1000),
    "a frame of another kind": (b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd", 4),
}


@pytest.mark.parametrize("codec", ["zstd", "columns"])
@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS.keys())
def test_streams_that_lie_about_their_size_are_refused(empty_index: Index, bomb: tuple[bytes, int], codec: str) -> None:
    stored, length = bomb
    params = {"rows": length // 4, "cols": 1, "by_column": 0, "shuffled": 1} if codec == "columns" else {}
    piece = entry("a", stored, A, codec=codec, length=length, digest=digest(bytes(1000)), params=params)
    reader = ArchiveReader(forge([(piece, stored)], empty_index))
    reader.verify()  # every stored byte is as written
    with allocating_less_than(1 << 20), pytest.raises(ArchiveFormatError, match="section a"):
        reader.section("a")


@pytest.mark.parametrize("codec", ["zstd", "columns"])
def test_a_size_that_no_frame_could_have_is_refused_at_once(empty_index: Index, codec: str) -> None:
    length = 12 << 30  # within the limits, and so would be allocated
    stored = b"\x28\xb5\x2f\xfd\xe0" + length.to_bytes(8, "little") + bytes(100)  # a frame that agrees
    params = {"rows": length // 4, "cols": 1, "by_column": 0, "shuffled": 1} if codec == "columns" else {}
    piece = entry("a", stored, A, codec=codec, length=length, params=params)
    with allocating_less_than(1 << 20), pytest.raises(ArchiveFormatError, match="cannot have 12884901888 bytes in"):
        ArchiveReader(forge([(piece, stored)], empty_index))


def test_what_packs_best_is_not_taken_for_impossible(empty_index: Index) -> None:
    stored = packed(bytes(1 << 26), level=19)
    piece = entry("a", stored, A, codec="zstd", length=1 << 26, digest=digest(bytes(1 << 26)))
    read(forge([(piece, stored)], empty_index))


def test_long_lists_in_one_another_cost_no_room(empty_index: Index) -> None:
    """Each of 900 lists says that it has a million elements, which the directory has bytes for."""
    lists = b"\x82\xa8sections" + (b"\xdd" + (1 << 20).to_bytes(4, "big")) * 900
    file = forge([], empty_index, directory=lists + b"\xc0" * (1 << 20))
    start = time.process_time()
    with allocating_less_than(64 << 20), pytest.raises(ArchiveFormatError):
        ArchiveReader(file)
    assert time.process_time() - start < 2


def test_decoded_bytes_have_a_digest_of_their_own(empty_index: Index) -> None:
    stored = packed(b"other bytes")
    piece = entry("a", stored, A, codec="zstd", length=11, digest=digest(b"these bytes"))
    with pytest.raises(ArchiveDigestError, match="once decoded"):
        ArchiveReader(forge([(piece, stored)], empty_index)).section("a")


def test_all_sections_together_are_bounded(empty_index: Index) -> None:
    stored = packed(bytes(6000))
    pieces = [
        (entry(name, stored, place * A, codec="zstd", length=6000, digest=digest(bytes(6000))), stored)
        for place, name in enumerate("abc", start=1)
    ]
    data = forge(pieces, empty_index)
    read(data)
    with pytest.raises(ArchiveFormatError, match="18000 with those before it"):
        ArchiveReader(data, limits=Limits(decoded_bytes=17999))
    with pytest.raises(ArchiveFormatError, match="6000 bytes"):
        ArchiveReader(data, limits=Limits(section_bytes=5999))


def test_bytes_between_sections_are_zero(tiny: bytes) -> None:
    for place in (HEADER.size, ALIGNMENT - 1, ALIGNMENT + 20, 2 * ALIGNMENT - 1, 3 * ALIGNMENT - 1):
        data = bytearray(tiny)
        data[place] = 1
        with pytest.raises(ArchiveFormatError, match=f"0x01 at {place}, between two sections"):
            ArchiveReader(bytes(data)).verify()


def test_one_rule_places_sections_for_reader_and_writer(tiny: bytes) -> None:
    frame = Frame()
    for section in ArchiveReader(tiny).sections.values():
        assert section.offset == frame.next_offset
        frame.append(section)
    assert frame.next_offset == ArchiveReader(tiny).header.index_offset


def test_a_section_of_another_item_size_is_no_array(sample: Path) -> None:
    with ArchiveReader.open(sample) as reader, pytest.raises(ArchiveFormatError, match="not a multiple of the 7 bytes"):
        reader.array(next(iter(reader.sections)), np.dtype("V7"))
