# SPDX-License-Identifier: Apache-2.0
"""An ELF image: a cubin, or a host library of the software driver; its variables and where it ends.

Every offset and count is checked against the file before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from foundryd.capture.images.variables import Variable, distinct
from foundryd.errors import UnreadableImage

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IBBHQQ")
SEGMENT = struct.Struct("<IIQQQQQQ")
CUDA, _HOST = 190, 62  # e_machine
_WHOLE = {CUDA: 2, _HOST: 3}  # e_type of what is loaded without being linked first
_PADDING = 8  # of entries of a container
NULL, SYMTAB, NOBITS, _DYNSYM = 0, 2, 8, 11  # sh_type
RELOCATIONS = {4: 24, 9: 16}  # sh_type: entry size
_WRITE, _ALLOC = 1, 2  # sh_flags
_OBJECT, FUNCTION, _SECTION_SYMBOL, _REFERENCES = 1, 2, 3, {10: "texture", 11: "sampler", 12: "surface"}  # st_info
_UNDEFINED, RESERVED, _COMMON, EXTENDED = 0, 0xFF00, 0xFFF2, 0xFFFF  # st_shndx; from RESERVED on no section's

# Written to, but of a block or a thread; or the code in a form for other members of its family.
_NOT_VARIABLES = (".nv.shared", ".nv.local", ".nv.merc.")


@dataclass(frozen=True)
class Section:
    name_at: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


@dataclass(frozen=True)
class Symbol:
    name_at: int
    type: int
    other: int
    section: int
    value: int
    size: int


@dataclass(frozen=True)
class Segment:
    """A program header; only a file that is loaded as it is has some."""

    type: int
    flags: int
    offset: int
    address: int
    physical: int
    size: int
    memory: int
    align: int


class File:
    """The tables of a file, bounded."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        head = HEADER.unpack(self._bytes(0, HEADER.size, "header"))
        if head[0][:6] != b"\x7fELF\x02\x01":
            raise UnreadableImage("it is not a 64-bit little-endian ELF file")
        self.form = head[0][7], head[0][8]  # whose rules it follows, and which version of them
        self.type, self.machine, self._table = head[1], head[2], head[6]
        self.flags: int = head[7]
        entry_size, count, names = head[11], head[12], head[13]
        self._segments: tuple[int, int, int] = head[5], head[9], head[10]  # offset, bytes of each, number
        self.extended = count == 0 or EXTENDED in (names, head[10])  # numbers that the header has no room for
        if self._table and entry_size != SECTION.size:
            raise UnreadableImage(f"its section headers are {entry_size} bytes each, not {SECTION.size}")
        # Where the numbers do not fit, the first section has them.
        if self._table and count == 0:
            count = self._read_section(0).size
        self._check(self._table, count * SECTION.size, "section headers")
        self.sections = [self._read_section(i) for i in range(count)]
        if names == EXTENDED and self.sections:
            names = self.sections[0].link
        if self.sections and names >= count:
            raise UnreadableImage(f"the names of its sections are in section {names}, and there are {count}")
        self.names_in = names
        self.names = [self.text(self.sections[names], s.name_at) for s in self.sections]

    def end(self) -> int:
        """The first byte that is behind everything that the file has."""
        spans = [(0, HEADER.size), *self.tables()]
        spans += [(s.offset, s.size) for s in self.sections if s.type not in (NULL, NOBITS)]
        spans += [(s.offset, s.size) for s in self.segments()]
        for start, length in spans:
            self._check(start, length, "parts")
        return max(start + length for start, length in spans)

    def tables(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(offset, bytes) of the section headers and of the program headers."""
        offset, _, count = self._segments
        return (self._table, len(self.sections) * SECTION.size), (offset, count * SEGMENT.size)

    def segments(self) -> list[Segment]:
        """The program headers."""
        offset, size, count = self._segments
        if count and size != SEGMENT.size:
            raise UnreadableImage(f"its program headers are {size} bytes each, not {SEGMENT.size}")
        table = self._bytes(offset, count * SEGMENT.size, "program headers")
        return [Segment(*row) for row in SEGMENT.iter_unpack(table)]

    def symbols(self, kind: int) -> Iterator[tuple[Section, list[Symbol]]]:
        """The tables of symbols of a type."""
        for section in self.sections:
            if section.type == kind:
                yield (
                    section,
                    [
                        Symbol(name, info & 15, other, index, value, size)
                        for name, info, other, index, value, size in SYMBOL.iter_unpack(
                            self.table(section, SYMBOL.size, "symbol")
                        )
                    ],
                )

    def relocations(self, section: Section) -> Iterator[tuple[int, int]]:
        """(offset in the section that is relocated, number of the symbol) of each."""
        size = RELOCATIONS[section.type]
        rows = self.table(section, size, "relocation")
        for at in range(0, len(rows), size):
            offset, info = struct.unpack_from("<QQ", rows, at)
            yield offset, info >> 32

    def symbol_name(self, table: Section, symbol: Symbol) -> str:
        """A symbol's name; raises ``UnreadableImage``."""
        if table.link >= len(self.sections):
            raise UnreadableImage(f"its symbols have names in section {table.link}, and there are {len(self.sections)}")
        return self.text(self.sections[table.link], symbol.name_at)

    def _check(self, offset: int, size: int, what: str) -> None:
        if offset + size > len(self._data):
            raise UnreadableImage(f"its code has {len(self._data)} bytes, and its {what} would be at {offset} + {size}")

    def _bytes(self, offset: int, size: int, what: str) -> bytes:
        self._check(offset, size, what)
        return self._data[offset : offset + size]

    def content(self, section: Section) -> bytes:
        """The bytes of a section."""
        return b"" if section.type in (NULL, NOBITS) else self._bytes(section.offset, section.size, "content")

    def table(self, section: Section, size: int, what: str) -> bytes:
        """The content of a section that has entries of a size."""
        if section.entry_size != size or section.size % size:
            raise UnreadableImage(f"a table of {section.size} bytes has {what}s of {section.entry_size}, not {size}")
        return self._bytes(section.offset, section.size, f"{what}s")

    def _read_section(self, number: int) -> Section:
        return Section(
            *SECTION.unpack(self._bytes(self._table + number * SECTION.size, SECTION.size, "section headers"))
        )

    def text(self, strings: Section, at: int) -> str:
        """A string of a table; raises ``UnreadableImage``."""
        self._check(strings.offset, strings.size, "names")
        end = self._data.find(b"\0", strings.offset + at, strings.offset + strings.size)
        if at >= strings.size or end < 0:
            raise UnreadableImage(f"a name at {at} is not within the {strings.size} bytes of names")
        try:
            return self._data[strings.offset + at : end].decode()
        except UnicodeDecodeError:
            raise UnreadableImage(f"the name at {at} is not text") from None


def is_cubin(data: bytes) -> bool:
    """Whether it begins as the code of a GPU does."""
    return data[:4] == b"\x7fELF" and int.from_bytes(data[18:20], "little") == CUDA


def loadable(data: bytes) -> bytes:
    """The file without the padding behind it; raises ``UnreadableImage`` if the driver would have to link it."""
    file = File(data)
    if _WHOLE.get(file.machine) != file.type:
        raise UnreadableImage(
            f"its code is an ELF file of type {file.type} for machine {file.machine}, which is not known to be loaded "
            "without being linked"
        )
    end = file.end()
    if len(data) - end >= _PADDING or any(data[end:]):
        raise UnreadableImage(f"its code has {len(data)} bytes, of which {len(data) - end} are behind the ELF file")
    return data[:end]


def variables(data: bytes) -> list[Variable]:
    """The variables of a file, by name; raises ``UnreadableImage`` if there may be others."""
    file = File(data)
    found = distinct(_of_cubin(file) if file.machine == CUDA else _of_host(file))
    if not all(variable.name for variable in found):
        raise UnreadableImage("one of its variables has no name")
    return found


def _of_host(file: File) -> list[Variable]:
    """What a host library shows the software driver.  Relocated read-only data is marked writable, too."""
    found = []
    for table, symbols in file.symbols(_DYNSYM):
        for symbol in symbols:
            if symbol.type != _OBJECT or not symbol.size or not 0 < symbol.section < len(file.sections):
                continue
            written = file.sections[symbol.section].flags & _WRITE
            if written and not file.names[symbol.section].startswith(".data.rel.ro"):
                found.append(Variable(file.symbol_name(table, symbol)))
    return found


def _of_cubin(file: File) -> list[Variable]:
    spans: dict[int, list[tuple[int, int, str]]] = {
        i: [] for i, name in enumerate(file.names) if _is_variable_section(name)
    }
    for i, section in enumerate(file.sections):
        known = i in spans or file.names[i].startswith(_NOT_VARIABLES)
        if section.flags & _WRITE and section.flags & _ALLOC and section.size and not known:
            raise UnreadableImage(f"its section {file.names[i]} is written to and of a kind that is not known")
    common = []
    tables = list(file.symbols(SYMTAB))
    for table, symbols in tables:
        for symbol in symbols:
            if symbol.type in _REFERENCES:
                kind = _REFERENCES[symbol.type]
                raise UnreadableImage(f"{file.symbol_name(table, symbol)} is a {kind} reference, whose state is hidden")
            if symbol.type != _OBJECT or not symbol.size or symbol.section == _UNDEFINED:
                continue
            name = file.symbol_name(table, symbol)
            if symbol.section == _COMMON:
                common.append(Variable(name))
            elif symbol.section in spans:
                spans[symbol.section].append((symbol.value, symbol.value + symbol.size, name))
            elif symbol.section >= len(file.sections):
                raise UnreadableImage(f"its variable {name} is in section {symbol.section}, which does not exist")
    for i, own in spans.items():
        _check_covered(file.sections[i], file.names[i], own)
    code = _with_code(file, tables, spans)
    return [*common, *(Variable(name, name in code) for own in spans.values() for _, _, name in own)]


def _is_variable_section(name: str) -> bool:
    """Variables of programs; the other constant banks hold parameters, literals and addresses.

    ``__constant__`` memory is not marked as written to, but the host writes it.
    """
    return name in (".nv.global", ".nv.constant3") or name.startswith((".nv.global.", ".nv.constant3."))


def _check_covered(section: Section, name: str, spans: list[tuple[int, int, str]]) -> None:
    """Raises ``UnreadableImage`` if more of a section than padding has no name."""
    padding, reached = max(section.align, 1), 0
    for start, end, _ in [*sorted(spans), (section.size, section.size, "")]:
        if end > section.size or start - reached >= padding:
            raise UnreadableImage(
                f"its section {name} has {section.size} bytes, and symbols name those up to {reached} and from {start} "
                f"to {end} only"
            )
        reached = max(reached, end)


def _with_code(
    file: File, tables: list[tuple[Section, list[Symbol]]], spans: dict[int, list[tuple[int, int, str]]]
) -> set[str]:
    """Names of variables that the loader puts the address of anything but another variable into."""
    found = set()
    for section in file.sections:
        if section.type not in RELOCATIONS or section.info not in spans:
            continue
        linked = file.sections[section.link : section.link + 1]
        symbols = next((s for table, s in tables if [table] == linked), [])
        for offset, number in file.relocations(section):
            if number >= len(symbols):
                raise UnreadableImage(f"a relocation has symbol {number}, and there are {len(symbols)}")
            symbol = symbols[number]
            if symbol.type == _OBJECT or (symbol.type == _SECTION_SYMBOL and symbol.section in spans):
                continue
            found |= {name for start, end, name in spans[section.info] if start <= offset < end}
    return found
