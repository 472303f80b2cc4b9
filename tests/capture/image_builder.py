# SPDX-License-Identifier: Apache-2.0
"""Builds module images: cubins with symbols, LZ4 blocks, containers."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

import zstandard

NOTYPE, OBJECT, FUNCTION, SECTION, TEXTURE = 0, 1, 2, 3, 10
PROGBITS, SYMTAB, STRTAB, RELA, NOBITS, INFO, CALLS, PROTOTYPES = 1, 2, 3, 4, 8, 0x70000000, 0x70000001, 0x70000002
NOTE, COMPATIBLE = 7, 0x70000086
CUINFO, COMPAT = ".note.nv.cuinfo", ".nv.compat"
COMMON, ENTRY = 0xFFF2, 0x10

LZ4, ZSTD, SPECIFIC, FAMILY = 0x2000, 0x8000, 0x100000, 0x200000


@dataclass(frozen=True)
class Symbol:
    name: str
    section: str | int  # a section's name, or a special number
    value: int = 0
    size: int = 4
    type: int = OBJECT
    bind: int = 0
    other: int = 0


def fact(attribute: int, *words: int) -> bytes:
    """A row of .nv.info with words behind it."""
    return struct.pack(f"<BBH{len(words)}I", 4, attribute, 4 * len(words), *words)


def kernel(name: str, size: int) -> Symbol:
    """The symbol of a kernel that has its section to itself."""
    return Symbol(name, f".text.{name}", 0, size, FUNCTION, 1, ENTRY)


@dataclass
class Cubin:
    """``sections``: name to (bytes, alignment); ``relocations``: section to (offset, symbol's place in ``symbols``).

    ``content`` is what sections hold beside zeros.  ``calls`` are the words of a call graph, where a symbol's number is
    its place and one, and the string at 1 says how a function is called; ``prototypes`` are the words of another table
    that says so.  With ``segments`` there are program headers, of runs of sections with the same flags.
    """

    sections: dict[str, tuple[int, int]] = field(default_factory=dict)
    symbols: list[Symbol] = field(default_factory=list)
    relocations: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    architecture: int = 90
    content: dict[str, bytes] = field(default_factory=dict)
    calls: list[tuple[int, int]] = field(default_factory=list)
    prototypes: list[tuple[int, int]] = field(default_factory=list)
    segments: bool = False

    def build(self) -> bytes:
        names = ["", *self.sections, ".symtab", ".strtab", ".shstrtab", *(f".rela{s}" for s in self.relocations)]
        pairs = {".nv.callgraph": (CALLS, self.calls), ".nv.prototype": (PROTOTYPES, self.prototypes)}
        names += [name for name, (_, rows) in pairs.items() if rows]
        strings, places = _strings(["#v", *(s.name for s in self.symbols)])
        titles, title_at = _strings(names)
        table = bytes(24)
        for s in self.symbols:
            section = names.index(s.section) if isinstance(s.section, str) else s.section
            table += struct.pack("<IBBHQQ", places[s.name], s.bind << 4 | s.type, s.other, section, s.value, s.size)
        body, headers = bytearray(64), [bytes(64)]
        # Flags, where it begins, the section behind it, where it ends in the file, bytes that are not there.
        runs: list[tuple[int, int, int, int, int]] = []

        def add(name: str, kind: int, flags: int, data: bytes, size: int, link=0, info=0, align=8, entry=0) -> None:
            body.extend(bytes(-len(body) % align) if kind != NOBITS else b"")
            if flags & 2:
                started = runs and runs[-1][0] == flags & 7 and runs[-1][2] == len(headers)
                _, begin, _, _, more = runs.pop() if started else (0, len(body), 0, 0, 0)
                if kind == NOBITS:
                    more += -(len(body) - begin + more) % align + size
                runs.append((flags & 7, begin, len(headers) + 1, len(body) + len(data), more))
            headers.append(
                struct.pack("<IIQQQQIIQQ", title_at[name], kind, flags, 0, len(body), size, link, info, align, entry)
            )
            body.extend(data)

        for name, (size, align) in self.sections.items():
            kind = NOBITS if name == ".nv.global" or name.startswith(".nv.shared") else PROGBITS
            kind = INFO if name.startswith(".nv.info") else kind
            kind = {CUINFO: NOTE, COMPAT: COMPATIBLE}.get(name, kind)
            loaded = not name.startswith((".nv.info", ".debug_", CUINFO, COMPAT))
            flags = (6 if name.startswith(".text") else 2 if ".constant" in name else 3) * loaded
            data = b"" if kind == NOBITS else self.content.get(name, b"").ljust(size, b"\0")
            link, info = names.index(".symtab") * (kind == INFO or name.startswith(".text.")), 0
            if name.startswith(".text."):
                info = next((i for i, s in enumerate(self.symbols, 1) if s.section == name and s.type == FUNCTION), 0)
            elif (code := f".text.{name.split('.', 3)[-1]}") in self.sections:
                flags, info = flags | 0x40, names.index(code)
            elif name == CUINFO and COMPAT in self.sections:
                flags, info = 0x40, names.index(COMPAT)
            add(name, kind, flags, data, size, link, info, align)
        add(".symtab", SYMTAB, 0, table, len(table), names.index(".strtab"), 1 + len(self.symbols), entry=24)
        add(".strtab", STRTAB, 0, strings, len(strings))
        add(".shstrtab", STRTAB, 0, titles, len(titles))
        for section, rows in self.relocations.items():
            data = b"".join(struct.pack("<QQq", at, symbol + 1 << 32 | 2, 0) for at, symbol in rows)
            info = names.index(section)
            add(f".rela{section}", RELA, 0x40, data, len(data), names.index(".symtab"), info, entry=24)
        for name, (kind, words) in pairs.items():
            if words:
                data = b"".join(struct.pack("<II", *(n & 0xFFFFFFFF for n in row)) for row in words)
                add(name, kind, 0, data, len(data), names.index(".symtab"), align=4, entry=8)
        body.extend(bytes(-len(body) % 8))
        after = len(body) + 64 * len(headers)
        count = 2 + len(runs) if self.segments else 0
        rows = [(kind, 4, after, after + 56 * count, 0) for kind in (6, 1)] + [
            (1, (flags & 1) << 1 | flags >> 2 & 1 | 4, begin, end, more) for flags, begin, _, end, more in runs
        ]
        segments = b"".join(
            struct.pack("<IIQQQQQQ", kind, flags, begin, 0, 0, end - begin, end - begin + more, 8)
            for kind, flags, begin, end, more in rows[:count]
        )
        note = names.index(CUINFO) if CUINFO in self.sections else 0
        file_flags = note << 24 | self.architecture << 8 | 4
        ident = b"\x7fELF\x02\x01\x01\x41\x08" + bytes(7)
        head = struct.pack(
            "<16sHHIQQQIHHHHHH", ident, 2, 190, 1, 0, after * bool(count), len(body),
            file_flags, 64, 56, count, 64, len(headers), names.index(".shstrtab"),
        )  # fmt: skip
        return head + bytes(body[64:]) + b"".join(headers) + segments


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
