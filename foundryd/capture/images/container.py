# SPDX-License-Identifier: Apache-2.0
"""Fat binaries: pieces of code for several architectures, each an ELF file or PTX, compressed or not.

A container is a header of 16 bytes and entries behind each other.  An entry is a header (64 bytes, more where options
follow) and a payload padded to 8 bytes.  An image that is one ELF file or PTX counts as one entry.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import zstandard

from foundryd.capture.images.lz4 import decode_block
from foundryd.errors import UnreadableImage

Capability = tuple[int, int]
"""Compute capability of a device, as (9, 0)."""

ELF, PTX = "elf", "ptx"

_MAGIC = 0xBA55ED50
_HEADER = struct.Struct("<IHHQ")  # magic, version, header bytes, bytes of all entries
# kind, version, header bytes, payload bytes, compressed bytes, options, minor, major, architecture, name, name bytes,
# flags, reserved, uncompressed bytes
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
_KINDS = {1: PTX, 2: ELF}
_LZ4, _ZSTD = 0x2000, 0x8000
_SPECIFIC, _FAMILY = 0x100000, 0x200000  # sm_90a, sm_100f
# On compiled code for sm_100 and later, whose options are then a table; the payload is what `nvcc -cubin` makes.
_TABLE = 0x1000000
_USUAL = 0x1 | 0x2 | 0x10 | _LZ4 | _ZSTD | _SPECIFIC | _FAMILY | _TABLE  # the first are 64 bits, debug, Linux
_VERSION = 0x0101
_LARGEST = 1 << 30  # of one entry's code
_PIECE = 1 << 22


@dataclass(frozen=True)
class Entry:
    """One piece of an image.

    ``kind`` is ``elf``, ``ptx`` or what an unknown kind's number is; ``architecture`` is 90 for sm_90, 0 if it is not
    said; ``suffix`` is ``a`` for code of exactly one architecture, ``f`` for that of a family; ``compression`` is
    ``""``, ``lz4`` or ``zstd``.  ``alone``: it is the whole image, so the driver has no choice.  ``raw`` is all of it
    as the container has it; ``unusual`` says what in its header is not known, empty if nothing.
    """

    kind: str
    architecture: int
    suffix: str
    compression: str
    payload: bytes
    size: int  # of the code, not compressed
    alone: bool = False
    raw: bytes = b""
    unusual: str = ""

    @property
    def target(self) -> str:
        """``sm_90a`` or ``compute_90``; for code that does not say, ``any``."""
        if not self.architecture:
            return "any"
        return f"{'compute' if self.kind == PTX else 'sm'}_{self.architecture}{self.suffix}"

    def code(self) -> bytes:
        """The ELF file or PTX; raises ``UnreadableImage``."""
        if not self.compression:
            return self.payload
        if self.size > _LARGEST:
            raise UnreadableImage(f"its code for {self.target} is said to be {self.size} bytes, beyond {_LARGEST}")
        return decode_block(self.payload, self.size) if self.compression == "lz4" else _inflate(self.payload, self.size)

    def runs_on(self, device: Capability) -> bool:
        """Whether a device can take it."""
        major, minor = divmod(self.architecture, 10)
        if self.suffix == "a":
            return (major, minor) == device
        if self.kind == PTX and not self.suffix:
            return (major, minor) <= device
        return major == device[0] and minor <= device[1]


def capability(text: str) -> Capability:
    """(9, 0) for ``9.0``; raises ``UnreadableImage`` for what is none."""
    match = re.fullmatch(r"(\d+)\.(\d+)", text)
    if not match:
        raise UnreadableImage(f"the device's compute capability is {text!r}, not two numbers")
    return int(match[1]), int(match[2])


def entries(image: bytes) -> list[Entry]:
    """Every piece of an image; raises ``UnreadableImage`` if it is none."""
    if image[:4] == b"\x7fELF":
        return [Entry(ELF, architecture_of(image), "", "", image, len(image), alone=True)]
    if len(image) < 4 or int.from_bytes(image[:4], "little") != _MAGIC:
        target = re.search(rb"\.target\s+sm_(\d{2,3})([af]?)\b", image)
        number, suffix = (int(target[1]), target[2].decode()) if target else (0, "")
        return [Entry(PTX, number, suffix, "", image, len(image), alone=True)]
    if len(image) < _HEADER.size:
        raise UnreadableImage(f"its container has {len(image)} bytes and no whole header")
    _, version, header, size = _HEADER.unpack_from(image)
    if version != 1 or header < _HEADER.size or header + size != len(image):
        raise UnreadableImage(f"its container of {len(image)} bytes says version {version} and {header} + {size} bytes")
    found, at = [], header
    while at < len(image):
        entry, at = _entry(image, at)
        found.append(entry)
    return found


def header_bytes(image: bytes) -> int:
    """Bytes of the header of a container that ``entries`` took."""
    return int(_HEADER.unpack_from(image)[2])


def container(found: Sequence[Entry]) -> bytes:
    """A container of entries of others, as they were there."""
    return _HEADER.pack(_MAGIC, 1, _HEADER.size, sum(len(e.raw) for e in found)) + b"".join(e.raw for e in found)


def chosen(found: Sequence[Entry], device: Capability) -> list[Entry]:
    """The entries that the driver takes code from; more than one only where it may take either.

    Code for the highest architecture that the device runs, and PTX for the highest if there is none.  Code for one
    architecture alone (sm_90a) and for all of its kind (sm_90) are both candidates.
    """
    if [e.alone for e in found] == [True]:
        return list(found)
    for kind in (ELF, PTX):
        able = [e for e in found if e.kind == kind and e.runs_on(device)]
        if able:
            best = max(e.architecture for e in able)
            return [e for e in able if e.architecture == best]
    there = ", ".join(f"{e.kind} {e.target}" for e in found) or "nothing"
    raise UnreadableImage(f"it has no code for compute capability {device[0]}.{device[1]}, but {there}")


def _entry(image: bytes, at: int) -> tuple[Entry, int]:
    if len(image) - at < _ENTRY.size:
        raise UnreadableImage(f"its container ends within the header of an entry at {at}")
    kind, version, header, size, compressed, options, _, _, architecture, _, _, flags, reserved, full = (
        _ENTRY.unpack_from(image, at)
    )
    if header < _ENTRY.size or header > len(image) - at or size > len(image) - at - header:
        raise UnreadableImage(f"its container has {len(image)} bytes, and an entry at {at} is {header} + {size} long")
    payload = image[at + header : at + header + size]
    compression = {_LZ4: "lz4", _ZSTD: "zstd", 0: ""}.get(flags & (_LZ4 | _ZSTD))
    if compression is None or (compressed != 0) != bool(compression) or compressed > size:
        raise UnreadableImage(
            f"an entry at {at} has flags {flags:#x}, {compressed} compressed bytes and {size} in all: it is compressed "
            "in a way that is not known"
        )
    suffix = "a" if flags & _SPECIFIC else "f" if flags & _FAMILY else ""
    code, full = (payload[:compressed], full) if compression else (payload, size)
    entry = Entry(
        _KINDS.get(kind, f"kind {kind}"),
        architecture,
        suffix,
        compression,
        code,
        full,
        raw=image[at : at + header + size],
        unusual=_unusual(kind, version, options, flags, reserved),
    )
    return entry, at + header + size


def _unusual(kind: int, version: int, options: int, flags: int, reserved: int) -> str:
    if kind not in _KINDS:
        return f"of kind {kind}"
    if version != _VERSION:
        return f"of version {version:#x}"
    if flags & ~_USUAL:
        return f"with flags {flags:#x}"
    if reserved:
        return f"with {reserved:#x} in a field without a meaning"
    if _KINDS[kind] == ELF and options and not flags & _TABLE:
        return "with options, though it is compiled"
    return ""


def _inflate(data: bytes, size: int) -> bytes:
    """Decodes zstd without trusting what it says of its own size."""
    out = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while piece := reader.read(min(_PIECE, size + 1 - len(out))):
                out += piece
    except zstandard.ZstdError as error:
        raise UnreadableImage(f"its zstd data is damaged ({error})") from None
    if len(out) != size:
        raise UnreadableImage(f"its zstd data does not hold {size} bytes")
    return bytes(out)


def architecture_of(elf: bytes) -> int:
    """Architecture that a cubin says it is for; 0 if the file is something else."""
    if len(elf) < 64 or int.from_bytes(elf[18:20], "little") != 190:
        return 0
    flags = int.from_bytes(elf[48:52], "little")
    return flags >> 8 & 0xFF if elf[8] >= 8 else flags & 0xFF
