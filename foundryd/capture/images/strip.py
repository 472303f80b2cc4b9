# SPDX-License-Identifier: Apache-2.0
"""A cubin without the kernels that are not used, and without what only debuggers read.

After the code is cut, names, headers, facts and parameters of the kernels that nobody launches are most of a cubin.
Here nothing of such a kernel stays: its sections and symbols go, the others get other numbers, and what refers to them
gets these.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from foundryd.capture.images import elf
from foundryd.capture.images.facts import facts
from foundryd.capture.images.kernels import (
    BY_ADDRESS,
    CALLS,
    CALLS_BY_ADDRESS,
    CODE,
    INFO,
    PAIR,
    PROTOTYPES,
    Program,
    program,
    reached,
)
from foundryd.capture.images.layout import rewritten
from foundryd.errors import UnreadableImage

# What compilers of CUDA 12 and 13 make.  The flags of the latter's header say which section is a note, and its header
# which one tells what the file is compatible with, as that it is for sm_90a and not for sm_90.
_FORMS = {(0x33, 7), (0x41, 8)}
_WITH_NOTE, _NOTE, _NOTE_AT = (0x41, 8), ".note.nv.cuinfo", 24
_FLAGS = 48  # where they are in the header
_OF_A_KERNEL = re.compile(r"\.nv\.(?:info|constant\d+|shared|local)\.(?P<kernel>.+)")
_STRINGS = 3  # sh_type
_ABOUT_SECTION = 0x40  # sh_flags: sh_info is a section's number
_SYMBOL = 0xFFFFFF  # of the sh_info of code; above it older compilers say how many registers it takes
_PROTOTYPE = "#"  # begins the strings that say how a function is called


def stripped(cubin: bytes, used: Collection[str]) -> bytes:
    """The cubin without the kernels that are not used; itself if all of them are, or are referred to by what stays.

    What is not a kernel stays, be it a function, a variable or a constant bank, with the kernels that it refers to.
    Raises ``UnreadableImage``, saying why it is not known what may be left out.
    """
    code = program(cubin, used)
    if code.file.form not in _FORMS:
        raise UnreadableImage(f"its ABI is {code.file.form[0]:#x}, version {code.file.form[1]}, which is not known")
    owners = _owners(code)
    gone = _unused(code, owners, {i for i, name in code.kernels.items() if name not in used})
    if not gone:
        return cubin
    left_out = {i for i, owner in owners.items() if owner in gone}
    left_out |= {i for i in range(len(code.file.sections)) if _for_debuggers(code, i)}
    return _Numbers(code, left_out).rewritten()


def _owners(code: Program) -> dict[int, int]:
    """The section of the kernel that a section is of, for those that are of one."""
    sections, names = code.file.sections, code.file.names
    known = set(code.kernels.values())
    out = {i: i for i in code.kernels}
    for i, section in enumerate(sections):
        match = _OF_A_KERNEL.fullmatch(names[i])
        kernel = code.kernels.get(section.info) if match else None
        if kernel is not None and match and match["kernel"] == kernel:
            out[i] = section.info
        elif match and (kernel is not None or match["kernel"] in known):
            raise UnreadableImage(f"its section {names[i]} says that it is about section {section.info}")
    return out | {i: out[s.info] for i, s in enumerate(sections) if s.type in elf.RELOCATIONS and s.info in out}


def _unused(code: Program, owners: Mapping[int, int], unused: set[int]) -> set[int]:
    """The kernels among those that are not used that nothing refers to that stays."""
    referred: dict[int, set[int]] = {}
    graph = code.graph()
    needed = {i for i in range(len(code.file.sections)) if owners.get(i) not in unused} | graph.taken
    needed -= {i for i in needed if _for_debuggers(code, i)}

    def refer(where: int, to: int) -> None:
        referred.setdefault(owners.get(where, where), set()).add(owners.get(to, to))

    for into, to in code.relocations():
        refer(into, to)
    for caller, called in graph.calls.items():
        for to in called:
            refer(caller, to)
    for i, section in enumerate(code.file.sections):
        if section.type == INFO:
            for fact in facts(code.content(i)):
                # Those of all kernels are about the symbol; those of one say what it takes.
                if fact.about is not None and i in owners:
                    refer(i, code.section(fact.about))
                for number in fact.names:
                    refer(i, code.section(number))
    kept = reached(needed, referred)
    code.check_calls(graph, kept)
    return unused - kept


def _for_debuggers(code: Program, section: int) -> bool:
    about = code.file.sections[section]
    return code.for_debuggers(about.info if about.type in elf.RELOCATIONS else section)


class _Strings:
    """A table of strings; equal ones are there once."""

    def __init__(self) -> None:
        self.data = bytearray(b"\0")
        self._places = {"": 0}

    def place(self, text: str) -> int:
        """Where a string is."""
        if text not in self._places:
            self._places[text] = len(self.data)
            self.data += text.encode() + b"\0"
        return self._places[text]


@dataclass(frozen=True)
class _Kept:
    """Old numbers of what stays, to new ones."""

    what: str
    numbers: Mapping[int, int]

    @staticmethod
    def of(what: str, kept: Sequence[int]) -> _Kept:
        return _Kept(what, {old: new for new, old in enumerate(kept)})

    def __getitem__(self, number: int) -> int:
        if number not in self.numbers:
            raise UnreadableImage(f"what stays of it refers to {self.what} {number}, which nothing in use leads to")
        return self.numbers[number]


class _Numbers:
    """The numbers of a cubin's sections, symbols and strings without some sections."""

    def __init__(self, code: Program, left_out: Collection[int]) -> None:
        self._code, self._left_out = code, left_out
        sections = range(len(code.file.sections))
        self._sections = _Kept.of("section", [i for i in sections if i not in left_out])
        in_section = [code.section(i) for i in range(len(code.symbols))]
        self._symbols = _Kept.of("symbol", [i for i, s in enumerate(in_section) if s not in left_out])
        self._names, self._titles = _Strings(), _Strings()

    def rewritten(self) -> bytes:
        """The file."""
        code, file = self._code, self._code.file
        names, titles = file.sections[code.table].link, file.names_in
        headers = {i: self._header(i) for i in self._sections.numbers}
        contents: dict[int, bytes | None] = dict.fromkeys(self._left_out)
        rows = {INFO: self._facts, CALLS: self._calls, PROTOTYPES: self._prototypes, elf.SYMTAB: self._table}
        rows |= dict.fromkeys(elf.RELOCATIONS, self._relocations)
        contents |= {i: rows[s.type](i) for i, s in enumerate(file.sections) if i in headers and s.type in rows}
        if names == titles or any(i not in headers or file.sections[i].type != _STRINGS for i in (names, titles)):
            raise UnreadableImage(f"the names of its symbols and sections are in sections {names} and {titles}")
        contents |= {names: bytes(self._names.data), titles: bytes(self._titles.data)}
        data = code.data[:_FLAGS] + struct.pack("<I", self._flags()) + code.data[_FLAGS + 4 :]
        return rewritten(data, file, contents, headers)

    def _flags(self) -> int:
        file, flags = self._code.file, self._code.file.flags
        note = flags >> _NOTE_AT
        if file.form != _WITH_NOTE:
            return flags
        if note >= len(file.sections) or file.names[note] != _NOTE:
            raise UnreadableImage(f"its flags {flags:#x} say that {_NOTE} is section {note}, which it is not")
        return flags & (1 << _NOTE_AT) - 1 | self._sections[note] << _NOTE_AT

    def _header(self, number: int) -> elf.Section:
        section, name = self._code.file.sections[number], self._code.file.names[number]
        link = self._sections[section.link]
        if section.type == elf.SYMTAB:
            # The first symbol that is not local, or how many there are.
            info = sum(1 for old in self._symbols.numbers if old < section.info)
        elif section.type == CODE and name.startswith(".text."):
            function = section.info & _SYMBOL
            symbol = self._code.symbol(function)
            if symbol.type != elf.FUNCTION or symbol.section != number:
                raise UnreadableImage(f"its section {name} is of symbol {function}, which is not its code")
            info = section.info & ~_SYMBOL | self._symbols[function]
        elif (
            section.info == 0
            or section.flags & _ABOUT_SECTION
            or section.type in {INFO, *elf.RELOCATIONS}
            or _OF_A_KERNEL.fullmatch(name)
        ):
            info = self._sections[section.info]
        else:
            raise UnreadableImage(f"its section {name} refers to {section.info}, and what that is is not known")
        return replace(section, name_at=self._titles.place(name), link=link, info=info)

    def _table(self, number: int) -> bytes:
        code, out = self._code, bytearray()
        table = code.file.sections[number]
        for i, row in enumerate(elf.SYMBOL.iter_unpack(code.content(number))):
            if i in self._symbols.numbers:
                _, info, other, section, value, size = row
                name = self._names.place(code.file.symbol_name(table, code.symbols[i]))
                section = section if section >= elf.RESERVED else self._sections[section]
                out += elf.SYMBOL.pack(name, info, other, section, value, size)
        return bytes(out)

    def _relocations(self, number: int) -> bytes:
        size = elf.RELOCATIONS[self._code.file.sections[number].type]
        out = bytearray(self._code.content(number))
        for at in range(0, len(out), size):
            (info,) = struct.unpack_from("<Q", out, at + 8)
            struct.pack_into("<Q", out, at + 8, self._symbols[info >> 32] << 32 | info & 0xFFFFFFFF)
        return bytes(out)

    def _facts(self, number: int) -> bytes:
        out = bytearray()
        for fact in facts(self._code.content(number)):
            about_other = fact.about is not None and self._code.section(fact.about) in self._left_out
            # Only those of all kernels can be about one that is left out.
            if not about_other or self._code.file.names[number] != ".nv.info":
                out += fact.renumbered(self._symbols.__getitem__)
        return bytes(out)

    def _calls(self, number: int) -> bytes:
        """The call graph; its lists of addresses say by a string how each is called."""
        code, out = self._code, bytearray()
        which = 0
        for first, second in PAIR.iter_unpack(code.content(number)):
            if first == 0:
                which = (1 << 32) - second
                out += PAIR.pack(first, second)
            elif code.section(first) not in self._left_out:
                called = which in (BY_ADDRESS, CALLS_BY_ADDRESS)
                out += PAIR.pack(self._symbols[first], self._prototype(second) if called else self._symbols[second])
        return bytes(out)

    def _prototypes(self, number: int) -> bytes:
        rows = PAIR.iter_unpack(self._code.content(number))
        return b"".join(PAIR.pack(self._symbols[first], self._prototype(second)) for first, second in rows)

    def _prototype(self, at: int) -> int:
        """Where the string is now that says how a function is called."""
        file = self._code.file
        text = file.text(file.sections[file.sections[self._code.table].link], at)
        if not text.startswith(_PROTOTYPE):
            raise UnreadableImage(f"it says {text!r} of how a function is called")
        return self._names.place(text)
