# SPDX-License-Identifier: Apache-2.0
"""A cubin with only the beginning of the kernels that are not used.

A driver that loads a module reads the code of all its kernels, so most of a load goes into kernels that nobody
launches.  Their sections, symbols and everything else stay: only the code becomes short.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterator, Mapping

from foundryd.capture.images import elf
from foundryd.capture.images.layout import shortened
from foundryd.errors import UnreadableImage

LEFT = 128
"""Bytes that stay of a kernel: a whole number of instructions, and the alignment of code."""

_ENTRY = 0x10  # st_other of a function that the host can launch
_CODE = 1  # sh_type
_CALLS, _PROTOTYPES = 0x70000001, 0x70000002  # sh_type of the call graph, and of how functions are called
_NUMBERING = {*elf.RELOCATIONS, _CALLS, _PROTOTYPES}  # what refers to symbols of the table that it links
# What names no code but as it is read here.  Also strings, notes, facts of kernels by their symbols (.nv.info), how
# relocations are computed, what the file is compatible with.
_KNOWN = _NUMBERING | {elf.NULL, elf.SYMTAB, elf.NOBITS, _CODE} | {3, 7, 0x70000000, 0x7000000B, 0x70000086}
_FOR_DEBUGGERS = (".debug_", ".nv_debug_")  # which the driver does not load to run a kernel

# Rows of both are two words, the first a symbol's number.  In the call graph (0, -1), (0, -2), … begin its lists.
_PAIR = struct.Struct("<II")
_DIRECT, _BY_ADDRESS, _CALLS_BY_ADDRESS, _POSSIBLE = 1, 2, 3, 4


def without_unused(cubin: bytes, used: Collection[str]) -> bytes:
    """The cubin with all but the first bytes of every kernel cut off that is not used; itself if nothing can be cut.

    Kernels that anything refers to stay whole, be it a relocation, a call or an address that is taken.  So do those
    with relocations in their code: cut short, these would point behind it, and without them the loader would see
    kernels that no compiler made.
    Raises ``UnreadableImage``, saying why it is not known what may be cut.
    """
    data = elf.loadable(cubin)
    file = elf.File(data)
    if file.machine != elf.CUDA:
        raise UnreadableImage(f"its code is for machine {file.machine}, which is no GPU")
    symbols = _symbols(file)
    kernels = _kernels(file, symbols)
    missing = sorted(set(used) - set(kernels.values()))
    if missing:
        raise UnreadableImage(f"it has no kernel {missing[0]} in a section of its own")
    kept = _kept(file, symbols, {i for i, name in kernels.items() if name not in used})
    sizes = {i: LEFT for i in kernels if i not in kept and file.sections[i].size > LEFT}
    return shortened(data, file, sizes) if sizes else cubin


def _symbols(file: elf.File) -> list[elf.Symbol]:
    """The symbols of a file of which everything is known."""
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
    return symbols


def _kernels(file: elf.File, symbols: list[elf.Symbol]) -> dict[int, str]:
    """The sections that are one kernel, the whole of it, and its name."""
    (table, _), *_ = file.symbols(elf.SYMTAB)
    entries: dict[int, list[elf.Symbol]] = {}
    for symbol in symbols:
        if symbol.other & _ENTRY and symbol.type == elf.FUNCTION and 0 < symbol.section < elf.RESERVED:
            entries.setdefault(symbol.section, []).append(symbol)
    out = {}
    for i, (first, *others) in entries.items():
        name, section = file.symbol_name(table, first), file.sections[i]
        whole = section.type == _CODE and (first.value, first.size) == (0, section.size)
        if not others and whole and file.names[i] == f".text.{name}":
            out[i] = name
    return out


def _kept(file: elf.File, symbols: list[elf.Symbol], unused: set[int]) -> set[int]:
    """The sections that have to stay as they are, of kernels that are not used as well."""
    relocated, referred = _relocations(file, symbols)
    needed = set(range(len(file.sections))) - unused | referred
    needed |= {_section(symbols, number) for number, _ in _pairs(file, _PROTOTYPES)}
    calls: dict[int, set[int]] = {}
    callers = []
    for which, first, second in _call_graph(file, symbols):
        if which in (_DIRECT, _POSSIBLE):
            calls.setdefault(first, set()).add(_section(symbols, second))
        elif which == _BY_ADDRESS:
            needed.add(first)
        elif which == _CALLS_BY_ADDRESS:
            callers.append(first)
    needed = _with_called(needed, calls)
    by_address = [file.names[i] for i in callers if i in needed]
    if by_address:
        raise UnreadableImage(f"the code of its section {by_address[0]} calls functions by address")
    return _with_called(needed | relocated, calls)


def _with_called(code: set[int], calls: Mapping[int, set[int]]) -> set[int]:
    out, new = set(code), set(code)
    while new:
        new = {called for i in new for called in calls.get(i, ())} - out
        out |= new
    return out


def _relocations(file: elf.File, symbols: list[elf.Symbol]) -> tuple[set[int], set[int]]:
    """The sections that the loader writes addresses into, and those whose addresses it writes into others."""
    relocated, referred = set(), set()
    for section in file.sections:
        if section.type not in elf.RELOCATIONS:
            continue
        if section.info >= len(file.sections):
            raise UnreadableImage(f"it relocates section {section.info}, and there are {len(file.sections)}")
        if file.names[section.info].startswith(_FOR_DEBUGGERS):
            continue
        for _, number in file.relocations(section):
            relocated.add(section.info)
            referred |= {_section(symbols, number)} - {section.info}
    return relocated, referred


def _call_graph(file: elf.File, symbols: list[elf.Symbol]) -> Iterator[tuple[int, int, int]]:
    """(which list, the section of a function, the other word) of each row of the call graph."""
    which = 0
    for first, second in _pairs(file, _CALLS):
        if first == 0:
            before, which = which, (1 << 32) - second
            if not before < which <= _POSSIBLE:
                raise UnreadableImage(f"its call graph has a list {-which} behind list {-before}")
        elif which == 0:
            raise UnreadableImage("its call graph has calls that are in no list")
        else:
            yield which, _section(symbols, first), second


def _pairs(file: elf.File, kind: int) -> Iterator[tuple[int, int]]:
    for section in file.sections:
        if section.type == kind:
            yield from _PAIR.iter_unpack(file.table(section, _PAIR.size, "pair"))


def _section(symbols: list[elf.Symbol], number: int) -> int:
    """The section of a symbol, 0 if it is in none."""
    if number >= len(symbols):
        raise UnreadableImage(f"it refers to symbol {number}, and there are {len(symbols)}")
    section = symbols[number].section
    return section if section < elf.RESERVED else 0
