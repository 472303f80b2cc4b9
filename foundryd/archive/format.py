# SPDX-License-Identifier: Apache-2.0
"""The frame of an archive file: header, section table, limits, and the msgpack of the directory.

``docs/archive-format.md`` describes the same in words.  Reader, writer and inflation all go through this module, so
that no offset and no rule of the frame is written twice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgpack  # type: ignore[import-untyped,unused-ignore]
import msgspec
from blake3 import blake3

from foundryd.errors import ArchiveFormatError, ArchiveVersionError

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAGIC = b"FOUNDRYD"
MAJOR = 1
MINOR = 3
MIN_READER = 0  # lowest minor whose readers understand what this writer writes, ...
WINDOWS_READER = 1  # ... and with windows: a rank that does not look for them runs graphs into unmapped memory

ALIGNMENT = 4096
DIGEST_BYTES = 32

# magic, major, minor, min_reader, reserved, file length, index offset, index length, index digest, header checksum
HEADER = struct.Struct("<8s4H3Q16s8s")
_CHECKED = HEADER.size - 8  # bytes of the header that its checksum covers
_VERSIONED = 16  # magic and versions stay in these bytes in every major version


@dataclass(frozen=True)
class Limits:
    """What a reader accepts before it allocates anything.

    Attributes
    ----------
    index_bytes : largest msgpack index.
    depth : deepest nesting inside the index.
    items : most entries of one array or map of the index, and most sections.
    section_bytes : largest decoded section.
    decoded_bytes : most bytes of all decoded sections together.
    """

    index_bytes: int = 64 << 20
    depth: int = 48
    items: int = 1 << 20
    section_bytes: int = 16 << 30
    decoded_bytes: int = 256 << 30


DEFAULT_LIMITS = Limits()

Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Digest = Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class SectionEntry(msgspec.Struct, frozen=True):
    """One section of the file: where its stored bytes lie and what they decode to."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    offset: Size  # from the start of the file, a multiple of ALIGNMENT
    stored: Size  # bytes in the file
    length: Size  # bytes once decoded
    codec: Literal["raw", "zstd", "columns"]
    stored_digest: Digest  # blake3 of the stored bytes
    digest: Digest  # blake3 of the decoded bytes
    params: dict[str, Size] = {}  # of the codec


@dataclass(frozen=True)
class Header:
    """The first 64 bytes."""

    file_length: int
    index_offset: int
    index_length: int
    index_digest: bytes
    major: int = MAJOR
    minor: int = MINOR
    min_reader: int = MIN_READER
    reserved: int = 0

    def pack(self) -> bytes:
        """The header's bytes, with its checksum."""
        raw = HEADER.pack(
            MAGIC,
            self.major,
            self.minor,
            self.min_reader,
            self.reserved,
            self.file_length,
            self.index_offset,
            self.index_length,
            self.index_digest,
            bytes(8),
        )
        return raw[:_CHECKED] + digest(raw[:_CHECKED])[:8]

    @classmethod
    def unpack(cls, data: memoryview, name: str, limits: Limits = DEFAULT_LIMITS) -> Header:
        """Reads and checks the header of the whole file ``data``.

        Raises
        ------
        ArchiveFormatError
            Not an archive, truncated, damaged, or impossible sizes.
        ArchiveVersionError
            Another major version, or a newer minor that this reader may not read.
        """
        size = len(data)
        head = bytes(data[:_VERSIONED])
        if head[:8] != MAGIC[: len(head[:8])] or not head:
            raise ArchiveFormatError(
                f"{name} is not a foundryd archive: it starts with {head[:8]!r}, not {MAGIC!r}: give the path of an "
                "archive"
            )
        if size < HEADER.size:
            raise ArchiveFormatError(
                f"{name} is truncated: it has {size} bytes, and the header alone has {HEADER.size}: fetch it again"
            )
        major, minor, min_reader = struct.unpack_from("<3H", head, 8)
        if major != MAJOR:
            raise ArchiveVersionError(
                f"{name} says format {major}.{minor} and this foundryd reads format {MAJOR}: use the foundryd that "
                "wrote "
                "it, or capture again"
            )
        raw = bytes(data[: HEADER.size])
        *_, reserved, file_length, index_offset, index_length, index_digest, checksum = HEADER.unpack(raw)
        expected = digest(raw[:_CHECKED])[:8]
        if checksum != expected:
            raise ArchiveFormatError(
                f"the header of {name} is damaged: its checksum is {checksum.hex()}, its bytes give {expected.hex()}: "
                "fetch the archive again"
            )
        if min_reader > MINOR:
            raise ArchiveVersionError(
                f"{name} has format {major}.{minor} and needs a reader of {major}.{min_reader}, this is "
                f"{MAJOR}.{MINOR}: "
                "install a newer foundryd"
            )
        if min_reader > minor or (reserved and minor <= MINOR):
            raise ArchiveFormatError(
                f"the header of {name} contradicts itself (minor {minor}, min_reader {min_reader}, reserved "
                f"{reserved}): "
                "fetch the archive again"
            )
        if file_length != size:
            raise ArchiveFormatError(
                f"{name} has {size} bytes and its header says {file_length}: it is truncated or has something behind "
                "it: "
                "fetch it again"
            )
        if index_length > limits.index_bytes:
            raise ArchiveFormatError(
                f"the index of {name} has {index_length} bytes, more than the {limits.index_bytes} that a reader "
                "accepts: "
                "capture again"
            )
        if index_offset % ALIGNMENT or index_offset < ALIGNMENT or index_offset + index_length != file_length:
            raise ArchiveFormatError(
                f"the index of {name} is said to lie at {index_offset}, {index_length} bytes long, which is not the "
                "end of "
                f"a file of {file_length} bytes: fetch it again"
            )
        return cls(file_length, index_offset, index_length, index_digest, major, minor, min_reader, reserved)


@dataclass
class Frame:
    """Places sections one after another; the same rule writes and checks a file."""

    end: int = HEADER.size
    entries: list[SectionEntry] = field(default_factory=list)

    @property
    def next_offset(self) -> int:
        """Where the next section, or the index, has to start."""
        return align(self.end)

    def append(self, entry: SectionEntry) -> None:
        """Takes the next section, whose offset is already ``next_offset``."""
        self.entries.append(entry)
        self.end = entry.offset + entry.stored

    def close(self, index: Any, *, minor: int = MINOR, min_reader: int = MIN_READER) -> tuple[Header, bytes]:
        """The header and the bytes of the directory that complete the file."""
        directory = encode_directory(self.entries, index)
        offset = self.next_offset
        header = Header(
            file_length=offset + len(directory),
            index_offset=offset,
            index_length=len(directory),
            index_digest=digest(directory)[:16],
            minor=minor,
            min_reader=min_reader,
        )
        return header, directory


def align(offset: int) -> int:
    """``offset`` rounded up to where a section may start."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def digest(data: Buffer) -> bytes:
    """blake3 of ``data``, 32 bytes."""
    # One thread: the library's pool of threads would not survive a fork.
    return blake3(data).digest()


def image_section(image_digest: str) -> str:
    """Name of the section that holds the module image with this digest, which is the blake3 of its bytes in hex."""
    return f"module/{image_digest}"


def encode_directory(sections: Iterable[SectionEntry], index: Any) -> bytes:
    """The msgpack of the directory: a map of ``sections`` and ``index``."""
    return msgspec.msgpack.encode({"sections": list(sections), "index": index}, order="deterministic")


def decode_directory(
    data: Buffer, name: str, limits: Limits = DEFAULT_LIMITS, *, trusted: bool = False
) -> tuple[list[Any], dict[str, Any]]:
    """The two parts of the directory as plain objects: sizes are bounded, nothing is typed yet.

    ``trusted``: the bytes were decoded before.
    """
    # Every element takes a byte at least, so an honest array is never longer than the index.
    items = min(limits.items, memoryview(data).nbytes)
    try:
        if not trusted:
            # msgpack makes room for as many elements as a list says that it has, also in a thousand lists in one
            # another.  This decoder makes it as they come, so what the other one then reads is honest.
            msgspec.msgpack.decode(data)
        root = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_unique_keys,
            ext_hook=_no_extension,
            max_str_len=limits.index_bytes,
            max_bin_len=limits.index_bytes,
            max_array_len=items,
            max_map_len=items,
            max_ext_len=0,
        )
    except (
        ValueError,
        TypeError,
        RecursionError,
        MemoryError,
        msgspec.DecodeError,
        msgpack.UnpackException,
    ) as error:
        raise ArchiveFormatError(
            f"the index of {name} is not the msgpack that it should be ({type(error).__name__}: {error}): capture again"
        ) from error
    match root:
        case {"sections": list(sections), "index": dict(index)} if len(root) == 2:
            return sections, index
    raise ArchiveFormatError(f"the index of {name} is not a map of a list, sections, and a map, index: capture again")


def excess_depth(value: Any, depth: int) -> bool:
    """Whether ``value`` nests deeper than ``depth``."""
    level = [value]
    for _ in range(depth):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True


def unknown_fields(raw: Any, known: Any, where: str = "index") -> str | None:
    """Place of the first key of ``raw`` that ``known``, the same value after it was typed, does not have."""
    if isinstance(raw, dict) and isinstance(known, dict):
        for key, value in raw.items():
            if key not in known:
                return f"{where}.{key}"
            if isinstance(value, dict | list) and (found := unknown_fields(value, known[key], f"{where}.{key}")):
                return found
    elif isinstance(raw, list) and isinstance(known, list):
        for place, (value, other) in enumerate(zip(raw, known, strict=False)):
            if isinstance(value, dict | list) and (found := unknown_fields(value, other, f"{where}[{place}]")):
                return found
    return None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map has a key twice")
    return result


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")
