# SPDX-License-Identifier: Apache-2.0
"""Cubins with kernels that refer to each other, and a reader of files that shares nothing with the one under test."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import image_builder as ib
from hypothesis import strategies as st
from image_builder import Cubin, Symbol, fact, kernel

LEFT = 128
VARIABLES = ("init", "zero")
DIRECT, TAKEN, BY_ADDRESS, POSSIBLE = -1, -2, -3, -4
HEADER, SECTION, SEGMENT, SYMBOL = "<16sHHIQQQIHHHHHH", "<IIQQQQIIQQ", "<IIQQQQQQ", "<IBBHQQ"


@dataclass
class Parts:
    """A file read without the parser that is tested."""

    head: list[Any]
    names: list[str]
    sections: list[list[Any]]
    data: list[bytes]
    segments: list[list[Any]]

    @staticmethod
    def of(file: bytes) -> Parts:
        head = list(struct.unpack_from(HEADER, file))
        sections = [list(struct.unpack_from(SECTION, file, head[6] + 64 * i)) for i in range(head[12])]
        data = [b"" if s[1] in (0, 8) else file[s[4] : s[4] + s[5]] for s in sections]
        titles = data[head[13]]
        names = [titles[s[0] : titles.index(b"\0", s[0])].decode() for s in sections]
        segments = [list(struct.unpack_from(SEGMENT, file, head[5] + 56 * i)) for i in range(head[10])]
        return Parts(head, names, sections, data, segments)

    def held(self, segment: list[Any]) -> tuple[list[str], int, int]:
        """Names of the sections in a segment, the bytes in it before the first and behind the last."""
        start, end = segment[2], segment[2] + segment[5]
        inside = [
            i
            for i, s in enumerate(self.sections)
            if s[1] not in (0, 8) and s[5] and start <= s[4] and s[4] + s[5] <= end
        ]
        first, last = (self.sections[i] for i in (inside[0], inside[-1]))
        return [self.names[i] for i in inside], first[4] - start, end - last[4] - last[5]


@dataclass(frozen=True)
class Named:
    """A symbol by what it means."""

    name: str
    section: str | int
    value: int
    size: int
    info: int
    other: int


@dataclass(frozen=True)
class Meaning:
    """A file without its numbers.

    ``sections``: name to type, flags, alignment, size of entries, the names or values of what its header refers to, and
    what it holds: bytes, or what its rows mean.  ``flags``: those of the header, and the section that they name.
    """

    sections: dict[str, tuple[Any, ...]]
    symbols: list[Named]
    flags: tuple[int, str]

    @staticmethod
    def of(file: bytes) -> Meaning:
        parts = Parts.of(file)
        table = next(i for i, s in enumerate(parts.sections) if s[1] == ib.SYMTAB)
        strings = parts.data[parts.sections[table][6]]

        def text(at: int) -> str:
            return strings[at : strings.index(b"\0", at)].decode()

        symbols = [
            Named(text(at), parts.names[where] if where < 0xFF00 else where, value, size, info, other)
            for at, info, other, where, value, size in struct.iter_unpack(SYMBOL, parts.data[table])
        ]
        out = {}
        for i, (_, kind, flags, _, _, size, link, info, align, entry) in enumerate(parts.sections):
            name, data = parts.names[i], parts.data[i]
            held: Any = data if kind != ib.NOBITS else size
            about: Any = parts.names[info] if info < len(parts.names) else info
            if kind in (4, 9):
                fields = struct.iter_unpack("<QQq" if kind == 4 else "<QQ", data)
                held = [(at, low & 0xFFFFFFFF, symbols[low >> 32], *addend) for at, low, *addend in fields]
            elif kind == ib.INFO:
                held = [_meant(row, symbols) for row in _facts(data)]
            elif kind == ib.CALLS:
                held = list(_calls(data, symbols, text))
            elif kind == ib.PROTOTYPES:
                held = [(symbols[first], text(second)) for first, second in struct.iter_unpack("<II", data)]
            elif kind == ib.SYMTAB:
                held, about = symbols, info == len(symbols)
            elif kind == ib.STRTAB:
                held = None
            elif name.startswith(".text."):
                about = (info >> 24, symbols[info & 0xFFFFFF])
            out[name] = (kind, flags, align, entry, parts.names[link], about, held)
        note = parts.head[7] >> 24 if file[7:9] == b"\x41\x08" else 0
        return Meaning(out, symbols, (parts.head[7] - (note << 24), parts.names[note]))

    def without_kernels(self, kernels: set[str]) -> Meaning:
        """What would be left without kernels and what debuggers read: no symbol of theirs, and no row about these."""
        kinds = (".text", ".nv.info", ".nv.constant0", ".nv.constant2", ".nv.shared", ".nv.local")
        gone = {f"{way}{kind}.{kernel}" for kernel in kernels for kind in kinds for way in ("", ".rel", ".rela")}
        gone |= {f"{way}.debug_frame" for way in ("", ".rel", ".rela")}
        symbols = [s for s in self.symbols if s.section not in gone]
        out = {}
        for name, (*head, held) in self.sections.items():
            if name in gone:
                continue
            if name == ".nv.info" or name == ".nv.callgraph":
                held = [row for row in held if not (isinstance(row[1], Named) and row[1].section in gone)]
            out[name] = (*head, symbols if name == ".symtab" else held)
        return Meaning(out, symbols, self.flags)


def _facts(data: bytes) -> Iterator[bytes]:
    while data:
        size = 4 + (int.from_bytes(data[2:4], "little") if data[0] == 4 else 0)
        yield data[:size]
        data = data[size:]


def _meant(row: bytes, symbols: list[Named]) -> tuple[Any, ...]:
    words = [n for (n,) in struct.iter_unpack("<I", row[4:])]
    if row[1] in (0xF, 0x5D):
        return row[:4], *(symbols[n] for n in words)
    if row[1] in (0xA, 0x11, 0x12, 0x17, 0x23, 0x2F):
        return row[:4], symbols[words[0]], *words[1:]
    return (row,)


def _calls(data: bytes, symbols: list[Named], text: Callable[[int], str]) -> Iterator[tuple[Any, ...]]:
    which = 0
    for first, second in struct.iter_unpack("<Ii", data):
        if first == 0:
            which = second
            yield which, None
        else:
            yield which, symbols[first], text(second) if which in (TAKEN, BY_ADDRESS) else symbols[second]


@dataclass
class Program:
    """Kernels and device functions by size, and what refers to them."""

    kernels: dict[str, int]
    devices: dict[str, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    pointed: set[str] = field(default_factory=set)  # by a variable, through the function's symbol
    placed: set[str] = field(default_factory=set)  # by a constant, through the section's symbol
    patched: set[str] = field(default_factory=set)  # with a relocation in their code
    taken: set[str] = field(default_factory=set)
    described: set[str] = field(default_factory=set)  # by a prototype
    calls: set[tuple[str, str]] = field(default_factory=set)
    possible: set[tuple[str, str]] = field(default_factory=set)
    linked: set[tuple[str, str]] = field(default_factory=set)  # through a relocation in the code of the first
    shared: int = 16  # alignment
    first: bool = True  # whether the variables come before the code

    def cubin(self) -> Cubin:
        order = random.Random(7)
        sizes = self.kernels | self.devices
        texts: dict[str, tuple[int, int]] = {f".text.{n}": (size, 128) for n, size in sizes.items()}
        constants = {".nv.constant4": (8, 8), **{f".nv.constant0.{n}": (20, 4) for n in self.kernels}}
        variables = {".nv.global.init": (24, 8), ".nv.global": (28, 1)}
        variables |= {f".nv.shared.{n}": (64, self.shared) for n in self.kernels}
        symbols = [Symbol("init", ".nv.global.init", 0, 24), Symbol("zero", ".nv.global", 0, 28)]
        symbols += [Symbol("", f".text.{n}", 0, 0, ib.SECTION) for n in sizes]
        symbols += [kernel(n, size) for n, size in self.kernels.items()]
        symbols += [Symbol(n, f".text.{n}", 0, size, ib.FUNCTION, 1) for n, size in self.devices.items()]
        # A function that a compiler put into the code of a kernel.
        symbols += [
            Symbol(f"${n}$div", f".text.{n}", s - 64, 64, ib.FUNCTION) for n, s in self.kernels.items() if s > 64
        ]
        symbols += [Symbol("", f".nv.constant0.{n}", 0, 0, ib.SECTION) for n in self.kernels]
        symbols += [Symbol("", ".debug_frame", 0, 0, ib.SECTION), Symbol("vprintf", 0, 0, 0, ib.FUNCTION, 1)]
        places = {s.name: i for i, s in enumerate(symbols) if s.name}
        starts = {str(s.section): i for i, s in enumerate(symbols) if s.type == ib.SECTION}
        facts = self._facts({n: i + 1 for n, i in places.items()}, {n: i + 1 for n, i in starts.items()})
        infos = {name: (len(rows), 4) for name, rows in facts.items()}
        loaded = [constants, variables, texts] if self.first else [texts, constants, variables]
        sections: dict[str, tuple[int, int]] = {".debug_frame": (40, 1), ib.CUINFO: (32, 4), ib.COMPAT: (36, 4)} | infos
        for group in loaded:
            sections |= group
        code = {n: [(sizes[n] - 16, places["zero"])] for n in sorted(self.patched)}
        for a, b in sorted(self.linked):
            code.setdefault(a, []).append((0, places[b]))
        relocations = {
            ".debug_frame": [(8, places[n]) for n in self.kernels],
            ".nv.global.init": [(8, places[n]) for n in sorted(self.pointed)],
            ".nv.constant4": [(0, places["zero"]), *((0, starts[f".text.{n}"]) for n in sorted(self.placed))],
            **{f".text.{n}": rows for n, rows in code.items()},
        }
        calls = [(0, DIRECT), *((places[a] + 1, places[b] + 1) for a, b in sorted(self.calls))]
        calls += [(0, TAKEN), *((places[n] + 1, 1) for n in sorted(self.taken)), (0, BY_ADDRESS)]
        calls += [(0, POSSIBLE), *((places[a] + 1, places[b] + 1) for a, b in sorted(self.possible))]
        content = {name: order.randbytes(size) for name, (size, _) in sections.items()} | facts
        prototypes = [(places[n] + 1, 1) for n in sorted(self.described | set(self.devices))]
        return Cubin(sections, symbols, relocations, content=content, calls=calls, prototypes=prototypes, segments=True)

    def _facts(self, numbers: dict[str, int], starts: dict[str, int]) -> dict[str, bytes]:
        """What .nv.info says: of all functions what they take, of each kernel its parameters and what it calls."""
        about = [fact(0x2F, n, 32) + fact(0x11, n, 8) for name, n in numbers.items() if name not in VARIABLES]
        own = {
            n: fact(0x37, 130) + fact(0xA, starts[f".nv.constant0.{n}"], 0x140210) + fact(0x17, 0, 0, 0x21F000)
            for n in self.kernels
        }
        return {
            ".nv.info": b"".join(about),
            **{f".nv.info.{n}": rows + fact(0xF, numbers["vprintf"]) * (n in self.patched) for n, rows in own.items()},
            **{f".nv.info.{n}": fact(0x37, 130) for n in self.devices},
        }

    def cut(self) -> set[str]:
        """The kernels of which only the beginning has to be left."""
        kept = self.used | self.pointed | self.placed | self.taken | self.described | set(self.devices)
        # Code with relocations stays whole, and so does what they lead to; its own start leads nowhere.
        kept |= self.patched | {a for a, _ in self.linked} | {b for a, b in self.linked if a != b}
        return {n for n, size in self.kernels.items() if size > LEFT} - self._with_led(kept, self.calls | self.possible)

    def stripped(self) -> set[str]:
        """The kernels of which nothing has to be left."""
        kept = self.used | self.pointed | self.placed | self.taken | self.described | set(self.devices)
        return set(self.kernels) - self._with_led(kept, self.calls | self.possible | self.linked)

    @staticmethod
    def _with_led(kept: set[str], pairs: set[tuple[str, str]]) -> set[str]:
        while more := {b for a, b in pairs if a in kept} - kept:
            kept = kept | more
        return kept


@st.composite
def programs(draw: st.DrawFn) -> Program:
    kernels = {f"k{i}": 16 * n for i, n in enumerate(draw(st.lists(st.integers(1, 64), min_size=1, max_size=7)))}
    devices = {f"d{i}": 16 * n for i, n in enumerate(draw(st.lists(st.integers(1, 20), max_size=2)))}
    rarely = st.sets(st.sampled_from(sorted(kernels)), max_size=2)
    pairs = st.sets(st.tuples(*[st.sampled_from(sorted(kernels | devices))] * 2), max_size=2)
    used = draw(st.sets(st.sampled_from(sorted(kernels)), min_size=1))
    several = [draw(rarely) for _ in range(5)]
    return Program(
        kernels,
        devices,
        used,
        *several,
        draw(pairs),
        draw(pairs),
        draw(pairs),
        draw(st.sampled_from([16, 1024])),
        draw(st.booleans()),
    )


def damaged(image: bytes, changes: Sequence[tuple[int, int]], lost: int) -> bytes:
    """An image with bytes changed, which (place, value) say; every third ``lost`` takes bytes off its end, too."""
    broken = bytearray(image)
    for at, value in changes:
        broken[at % len(broken)] = value
    if lost % 3 == 0:
        del broken[len(broken) - lost % len(broken) :]
    return bytes(broken)
