# SPDX-License-Identifier: Apache-2.0
"""The kernels of a cubin, and what refers to them."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from foundryd.capture.images import elf
from foundryd.errors import UnreadableImage

CODE = 1  # sh_type
INFO, CALLS, PROTOTYPES = 0x70000000, 0x70000001, 0x70000002  # sh_type: facts, the call graph, how functions are called
DIRECT, BY_ADDRESS, CALLS_BY_ADDRESS, POSSIBLE = 1, 2, 3, 4  # lists of the call graph

_ENTRY = 0x10  # st_other of a function that the host can launch
_NUMBERING = {*elf.RELOCATIONS, CALLS, PROTOTYPES}  # what refers to symbols of the table that it links
# What names no code but as it is read here.  Also strings, notes, facts of kernels by their symbols (.nv.info), how
# relocations are computed, what the file is compatible with.
_KNOWN = _NUMBERING | {elf.NULL, elf.SYMTAB, elf.NOBITS, CODE, INFO} | {3, 7, 0x7000000B, 0x70000086}
_FOR_DEBUGGERS = (".debug_", ".nv_debug_")  # which the driver does not load to run a kernel

# Rows of both are two words, the first a symbol's number.  In the call graph (0, -1), (0, -2), … begin its lists.
PAIR = struct.Struct("<II")


@dataclass(frozen=True)
class CallGraph:
    """Sections by those that call them, sections that are known by their address, and those that call by address."""

    calls: dict[int, set[int]]
    taken: set[int]
    by_address: list[int]


@dataclass(frozen=True)
class Program:
    """A cubin of which everything is known.

    ``kernels``: the sections that are one kernel, the whole of it, and its name.
    """

    data: bytes
    file: elf.File
    table: int  # the section of the symbols
    symbols: list[elf.Symbol]
    kernels: dict[int, str]

    def symbol(self, number: int) -> elf.Symbol:
        """A symbol that something refers to."""
        if number >= len(self.symbols):
            raise UnreadableImage(f"it refers to symbol {number}, and there are {len(self.symbols)}")
        return self.symbols[number]

    def section(self, number: int) -> int:
        """The section of a symbol, 0 if it is in none."""
        section = self.symbol(number).section
        return section if section < elf.RESERVED else 0

    def content(self, number: int) -> bytes:
        """The bytes of a section."""
        return self.file.content(self.file.sections[number])

    def relocations(self) -> Iterator[tuple[int, int]]:
        """(the section that the loader writes an address into, the section that it is in) of each."""
        for section in self.file.sections:
            if section.type in elf.RELOCATIONS and not self.for_debuggers(section.info):
                for _, number in self.file.relocations(section):
                    yield section.info, self.section(number)

    def for_debuggers(self, section: int) -> bool:
        """Whether the driver does not load a section to run a kernel."""
        return self.file.names[section].startswith(_FOR_DEBUGGERS)

    def calls(self) -> Iterator[tuple[int, int, int]]:
        """(which list, a function's symbol, the other word) of each row of the call graph."""
        which = 0
        for first, second in self.pairs(CALLS):
            if first == 0:
                before, which = which, (1 << 32) - second
                if not before < which <= POSSIBLE:
                    raise UnreadableImage(f"its call graph has a list {-which} behind list {-before}")
            elif which == 0:
                raise UnreadableImage("its call graph has calls that are in no list")
            else:
                yield which, first, second

    def pairs(self, kind: int) -> Iterator[tuple[int, int]]:
        """The rows of all sections of a type."""
        for section in self.file.sections:
            if section.type == kind:
                yield from PAIR.iter_unpack(self.file.table(section, PAIR.size, "pair"))

    def graph(self) -> CallGraph:
        """What calls what, by section."""
        out = CallGraph({}, {self.section(number) for number, _ in self.pairs(PROTOTYPES)}, [])
        for which, function, other in self.calls():
            section = self.section(function)
            if which in (DIRECT, POSSIBLE):
                out.calls.setdefault(section, set()).add(self.section(other))
            elif which == BY_ADDRESS:
                out.taken.add(section)
            elif which == CALLS_BY_ADDRESS:
                out.by_address.append(section)
        return out

    def check_calls(self, graph: CallGraph, running: Collection[int]) -> None:
        """Raises ``UnreadableImage`` if code that may run calls by address, for it is not known what it calls."""
        found = [self.file.names[i] for i in graph.by_address if i in running]
        if found:
            raise UnreadableImage(f"the code of its section {found[0]} calls functions by address")


def reached(needed: Iterable[int], references: Mapping[int, Iterable[int]]) -> set[int]:
    """Sections that are needed, and those that they lead to."""
    out = set(needed)
    new = set(out)
    while new:
        new = {to for i in new for to in references.get(i, ())} - out
        out |= new
    return out


def program(cubin: bytes, used: Collection[str]) -> Program:
    """Reads a cubin; raises ``UnreadableImage`` if it has anything that is not known, or not the kernels in use."""
    data = elf.loadable(cubin)
    file = elf.File(data)
    if file.machine != elf.CUDA:
        raise UnreadableImage(f"its code is for machine {file.machine}, which is no GPU")
    table, symbols = _symbols(file)
    out = Program(data, file, table, symbols, _kernels(file, table, symbols))
    missing = sorted(set(used) - set(out.kernels.values()))
    if missing:
        raise UnreadableImage(f"it has no kernel {missing[0]} in a section of its own")
    return out


def _symbols(file: elf.File) -> tuple[int, list[elf.Symbol]]:
    """The table of symbols of a file of which everything is known, and what is in it."""
    if file.extended:
        raise UnreadableImage("it has more sections or segments than its header has room for")
    for name, section in zip(file.names, file.sections, strict=True):
        if section.type not in _KNOWN:
            raise UnreadableImage(f"its section {name} is of type {section.type:#x}, and what that holds is not known")
    tables = list(file.symbols(elf.SYMTAB))
    if len(tables) != 1:
        raise UnreadableImage(f"it has {len(tables)} tables of symbols, not one")
    table, symbols = tables[0]
    for symbol in symbols:
        if len(file.sections) <= symbol.section < elf.RESERVED or symbol.section == elf.EXTENDED:
            raise UnreadableImage(f"a symbol is in section {symbol.section}, and there are {len(file.sections)}")
    numbering = [(n, s) for n, s in zip(file.names, file.sections, strict=True) if s.type in _NUMBERING]
    for name, section in numbering:
        if section.link >= len(file.sections) or file.sections[section.link] is not table:
            raise UnreadableImage(f"its section {name} is about the symbols of section {section.link}")
        if section.type in elf.RELOCATIONS and section.info >= len(file.sections):
            raise UnreadableImage(f"it relocates section {section.info}, and there are {len(file.sections)}")
    return next(i for i, section in enumerate(file.sections) if section is table), symbols


def _kernels(file: elf.File, table: int, symbols: list[elf.Symbol]) -> dict[int, str]:
    entries: dict[int, list[elf.Symbol]] = {}
    for symbol in symbols:
        if symbol.other & _ENTRY and symbol.type == elf.FUNCTION and 0 < symbol.section < elf.RESERVED:
            entries.setdefault(symbol.section, []).append(symbol)
    out = {}
    for i, (first, *others) in entries.items():
        name, section = file.symbol_name(file.sections[table], first), file.sections[i]
        whole = section.type == CODE and (first.value, first.size) == (0, section.size)
        if not others and whole and file.names[i] == f".text.{name}":
            out[i] = name
    return out
