# SPDX-License-Identifier: Apache-2.0
"""Builds module images: cubins with symbols, LZ4 blocks, containers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import zstandard

OBJECT, FUNCTION, SECTION, TEXTURE = 1, 2, 3, 10
PROGBITS, SYMTAB, STRTAB, RELA, NOBITS = 1, 2, 3, 4, 8
COMMON = 0xFFF2

LZ4, ZSTD, SPECIFIC, FAMILY = 0x2000, 0x8000, 0x100000, 0x200000


@dataclass(frozen=True)
class Symbol:
    name: str
    section: str | int  # a section's name, or a special number
    value: int = 0
    size: int = 4
    type: int = OBJECT
    bind: int = 0


@dataclass
class Cubin:
    """``sections``: name to (bytes, alignment); ``relocations``: section to (offset, symbol's place in ``symbols``)."""

    sections: dict[str, tuple[int, int]] = field(default_factory=dict)
    symbols: list[Symbol] = field(default_factory=list)
    relocations: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    architecture: int = 90

    def build(self) -> bytes:
        names = ["", *self.sections, ".symtab", ".strtab", ".shstrtab", *(f".rela{s}" for s in self.relocations)]
        strings, places = _strings([s.name for s in self.symbols])
        titles, title_at = _strings(names)
        table = bytes(24)
        for s in self.symbols:
            section = names.index(s.section) if isinstance(s.section, str) else s.section
            table += struct.pack("<IBBHQQ", places[s.name], s.bind << 4 | s.type, 0, section, s.value, s.size)
        body, headers = bytearray(64), [bytes(64)]

        def add(name: str, kind: int, flags: int, data: bytes, size: int, link=0, info=0, align=8, entry=0) -> None:
            headers.append(
                struct.pack("<IIQQQQIIQQ", title_at[name], kind, flags, 0, len(body), size, link, info, align, entry)
            )
            body.extend(data)

        for name, (size, align) in self.sections.items():
            kind = NOBITS if name == ".nv.global" else PROGBITS
            flags = 6 if name.startswith(".text") else 2 if ".constant" in name else 3
            add(name, kind, flags, b"" if kind == NOBITS else bytes(size), size, align=align)
        add(".symtab", SYMTAB, 0, table, len(table), link=names.index(".strtab"), entry=24)
        add(".strtab", STRTAB, 0, strings, len(strings))
        add(".shstrtab", STRTAB, 0, titles, len(titles))
        for section, rows in self.relocations.items():
            data = b"".join(struct.pack("<QQq", at, symbol + 1 << 32 | 2, 0) for at, symbol in rows)
            info = names.index(section)
            add(f".rela{section}", RELA, 0x40, data, len(data), names.index(".symtab"), info, entry=24)
        ident = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
        head = struct.pack(
            "<16sHHIQQQIHHHHHH", ident, 2, 190, 1, 0, 0, len(body), 0x6000004 | self.architecture << 8, 64, 56, 0, 64,
            len(headers), names.index(".shstrtab"),
        )  # fmt: skip
        return head + bytes(body[64:]) + b"".join(headers)


def _strings(names: list[str]) -> tuple[bytes, dict[str, int]]:
    out, places = b"\0", {"": 0}
    for name in names:
        if name not in places:
            places[name] = len(out)
            out += name.encode() + b"\0"
    return out, places


def lz4(data: bytes) -> bytes:
    """An LZ4 block, greedy, with matches of the last place where four bytes were the same."""
    out, seen, at, start = bytearray(), {}, 0, 0
    while at < len(data) - 12:
        key = data[at : at + 4]
        before = seen.get(key)
        seen[key] = at
        if before is None or at - before > 0xFFFF:
            at += 1
            continue
        count = 4
        while at + count < len(data) - 5 and data[before + count] == data[at + count]:
            count += 1
        out += _sequence(data[start:at], at - before, count)
        at += count
        start = at
    return bytes(out + _sequence(data[start:], 0, 4))


def _sequence(literals: bytes, distance: int, count: int) -> bytes:
    token = min(len(literals), 15) << 4 | (min(count - 4, 15) if distance else 0)
    out = bytes([token]) + _more(len(literals)) + literals
    return out + struct.pack("<H", distance) + _more(count - 4) if distance else out


def _more(length: int) -> bytes:
    return b"" if length < 15 else b"\xff" * ((length - 15) // 255) + bytes([(length - 15) % 255])


def entry(code: bytes, architecture: int = 90, *, kind: int = 2, flags: int = 0, options: bytes = b"") -> bytes:
    """One entry of a container; ``flags`` says how ``code`` is compressed."""
    packed, compressed, full = code, 0, 0
    if flags & (LZ4 | ZSTD):
        packed = lz4(code) if flags & LZ4 else zstandard.ZstdCompressor().compress(code)
        compressed, full = len(packed), len(code)
    payload = packed + bytes(-len(packed) % 8)
    head = struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x0101, 64 + len(options), len(payload), compressed, 64 if options else 0, 0, 1,
        architecture, 0, 0, 0x11 | flags, 0, full,
    )  # fmt: skip
    return head + options + payload


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body
