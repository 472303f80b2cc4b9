# SPDX-License-Identifier: Apache-2.0
"""Of kernels that nothing uses only the beginning is left, and everything else of a cubin is as it was.

The software driver's images are host libraries, which are never cut: that a driver takes what comes out is for the
conformance row ``image.kernels_cut`` and for the comparison of a capture, see ``test_modules.py``.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd import _native
from foundryd.capture.images import elf, is_cubin, without_unused
from foundryd.errors import UnreadableImage

sys.path.insert(0, str(Path(__file__).parent))
import image_builder as ib
from image_builder import Cubin, Symbol
from image_programs import BY_ADDRESS, DIRECT, HEADER, LEFT, SYMBOL, TAKEN, Parts, Program, damaged, programs


def refusal(image: bytes, used: set[str]) -> str:
    with pytest.raises(UnreadableImage) as refused:
        without_unused(image, used)
    return str(refused.value)


@settings(max_examples=300, deadline=None)
@given(programs())
def test_what_is_cut_is_unused_code_and_everything_else_is_as_it_was(program: Program) -> None:
    image = program.cubin().build()
    left = without_unused(image, program.used)
    before, after = Parts.of(image), Parts.of(left)
    gone = program.cut()
    assert {n.removeprefix(".text.") for n, a, b in zip(before.names, before.data, after.data, strict=True) if
            n.startswith(".text.") and len(b) < len(a)} == gone  # fmt: skip
    assert after.names == before.names
    for name, ours, theirs, data, was in zip(
        after.names, after.sections, before.sections, after.data, before.data, strict=True
    ):
        kept = LEFT if name.removeprefix(".text.") in gone and name.startswith(".text.") else theirs[5]
        assert (ours[:4], ours[5], ours[6:]) == (theirs[:4], kept, theirs[6:]), name
        if name != ".symtab":
            assert data == was[:kept], name
        if ours[5] and ours[1] != 8:
            assert ours[4] % max(ours[8], 1) == theirs[4] % max(ours[8], 1), name
    assert symbols(after, gone) == symbols(before, gone)
    assert all(row[5] <= LEFT for row in symbols(after, set()) if after.names[row[3]].removeprefix(".text.") in gone)
    assert elf.variables(left) == elf.variables(image)
    assert elf.loadable(left) == left
    assert without_unused(left, program.used) == left
    # Code is aligned to 128 bytes; what is behind it moves by a multiple of the largest alignment.
    least = sum(-(-program.kernels[n] // 128) * 128 - LEFT for n in gone)
    assert len(image) - len(left) <= least
    assert len(image) - len(left) > least - 128 - max(128, program.shared) or not gone


def symbols(parts: Parts, without_size: set[str]) -> list[tuple[Any, ...]]:
    rows = [list(r) for r in struct.iter_unpack(SYMBOL, parts.data[parts.names.index(".symtab")])]
    for row in rows:
        if parts.names[row[3]].removeprefix(".text.") in without_size:
            row[5] = -1
    return [tuple(row) for row in rows]


@settings(max_examples=200, deadline=None)
@given(programs())
def test_headers_stay_consistent(program: Program) -> None:
    image = program.cubin().build()
    left = without_unused(image, program.used)
    before, after = Parts.of(image), Parts.of(left)
    spans = [(s[4], s[4] + s[5]) for s in after.sections if s[1] not in (0, 8) and s[5]]
    spans += [(0, 64), (after.head[6], after.head[6] + 64 * len(after.sections))]
    spans += [(after.head[5], after.head[5] + 56 * len(after.segments))]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] == len(left)
    same = [0, 1, 2, 3, 4, *range(7, 14)]
    assert [after.head[i] for i in same] == [before.head[i] for i in same]
    assert [s[:2] for s in after.segments] == [s[:2] for s in before.segments]
    for i, (ours, theirs) in enumerate(zip(after.segments, before.segments, strict=True)):
        assert (ours[3:5], ours[6] - ours[5], ours[7]) == (theirs[3:5], theirs[6] - theirs[5], theirs[7])
        if i < 2:
            assert (ours[2], ours[5]) == (after.head[5], 56 * len(after.segments))
        else:
            assert after.held(ours) == before.held(theirs)
    moves = [was[4] - now[4] for was, now in zip(before.sections, after.sections, strict=True)]
    cuts = [i for i, (was, now) in enumerate(zip(before.sections, after.sections, strict=True)) if was[5] != now[5]]
    if cuts:
        assert set(moves[: cuts[0] + 1]) == {0}
        last = max(before.sections[i][4] for i in cuts)
        behind = {move for move, section in zip(moves, before.sections, strict=True) if section[4] > last}
        assert [move % max(s[8] for s in before.sections) for move in behind] == [0]


def test_room_that_no_alignment_asks_for_stays() -> None:
    program = Program({"a": 256, "b": 512}, used={"a"})
    image = bytearray(replace(program.cubin(), content={}).build())
    section(".debug_frame", 32, "<Q", 4)(image)
    left = Parts.of(without_unused(bytes(image), {"a"}))
    assert left.sections[2][4] - left.sections[1][4] == 40
    assert left.data[left.names.index(".text.b")] == bytes(LEFT)


def test_what_has_no_bytes_does_not_come_to_lie_within_what_has() -> None:
    program = Program({"a": 200, "b": 200, "c": 256}, used={"a"})
    image = bytearray(program.cubin().build())
    parts = Parts.of(bytes(image))
    behind = parts.sections[parts.names.index(".text.b")][4] + 200
    section(".nv.shared.a", 24, "<Q", behind + 40)(image)
    left = Parts.of(without_unused(bytes(image), {"a"}))
    place = left.sections[left.names.index(".nv.shared.a")][4]
    assert not [n for n, s in zip(left.names, left.sections, strict=True) if s[1] != 8 and s[4] < place < s[4] + s[5]]


def test_kernels_in_use_or_referred_to_keep_their_code() -> None:
    small = Program(dict.fromkeys("abcdefghi", 256), {"near": 512}, {"a"}, {"b"}, {"c"}, {"d"}, {"e"}, {"i"})
    assert small.cut() == set("fgh")
    linked = replace(small, calls={("a", "f"), ("near", "g")}, possible={("f", "h")})
    assert linked.cut() == set()
    for program in (small, linked):
        parts = Parts.of(without_unused(program.cubin().build(), {"a"}))
        short = {n[-1] for n, d in zip(parts.names, parts.data, strict=True) if n[:6] == ".text." and len(d) == LEFT}
        assert short == program.cut()


def test_references_of_debuggers_and_of_a_kernel_to_itself_do_not_count() -> None:
    program = Program({"a": 256, "b": 256}, used={"a"}, calls={("b", "b")})
    assert ".rela.debug_frame" in Parts.of(program.cubin().build()).names
    assert program.cut() == {"b"}


def cubin(**changes: Any) -> Cubin:
    return replace(Program({"a": 256, "b": 512}, {"near": 256}, {"a"}).cubin(), **changes)


def test_calls_by_address_of_code_that_may_run_keep_a_file_whole() -> None:
    names = [s.name for s in cubin().symbols]
    number = {n: names.index(n) + 1 for n in ("a", "b", "near")}
    for caller in ("a", "near"):
        found = refusal(cubin(calls=[(0, DIRECT), (0, BY_ADDRESS), (number[caller], 1)]).build(), {"a"})
        assert found == f"the code of its section .text.{caller} calls functions by address"
    by_unused = cubin(calls=[(0, DIRECT), (0, BY_ADDRESS), (number["b"], 1)]).build()
    assert len(without_unused(by_unused, {"a"})) == len(by_unused) - 384
    # What it writes into its own code is no reason to think that it runs.
    relocations = cubin().relocations | {".text.b": [(496, number["b"] - 1)]}
    writing = cubin(relocations=relocations, calls=[(0, DIRECT), (0, BY_ADDRESS), (number["b"], 1)]).build()
    assert without_unused(writing, {"a"}) == writing


def test_symbols_that_are_in_no_section_refer_to_none() -> None:
    absolute = Symbol("fixed", 0xFFF1, 64, 0)
    number = len(cubin().symbols) + 1
    relocations = cubin().relocations | {".nv.global.init": [(0, number - 1)]}
    calls = [(0, DIRECT), (number, number), (0, TAKEN), (number, 1)]
    image = cubin(symbols=[*cubin().symbols, absolute], relocations=relocations, calls=calls).build()
    assert len(without_unused(image, {"a"})) == len(image) - 384
    calls += [(0, BY_ADDRESS), (number, 1)]
    image = cubin(symbols=[*cubin().symbols, absolute], relocations=relocations, calls=calls).build()
    assert "calls functions by address" in refusal(image, {"a"})


def header(place: int, form: str, value: int) -> Any:
    def change(image: bytearray) -> None:
        struct.pack_into(form, image, place, value)

    return change


def section(name: str, place: int, form: str, value: int) -> Any:
    def change(image: bytearray) -> None:
        parts = Parts.of(bytes(image))
        struct.pack_into(form, image, parts.head[6] + 64 * parts.names.index(name) + place, value)

    return change


def segment(number: int, place: int, value: int) -> Any:
    def change(image: bytearray) -> None:
        struct.pack_into("<Q" if place else "<I", image, Parts.of(bytes(image)).head[5] + 56 * number + place, value)

    return change


def symbol(number: int, place: int, form: str, value: int) -> Any:
    def change(image: bytearray) -> None:
        parts = Parts.of(bytes(image))
        struct.pack_into(form, image, parts.sections[parts.names.index(".symtab")][4] + 24 * number + place, value)

    return change


def extended(image: bytearray) -> None:
    names = Parts.of(bytes(image)).head[13]
    struct.pack_into("<H", image, 62, 0xFFFF)
    struct.pack_into("<I", image, struct.unpack_from(HEADER, image)[6] + 40, names)


def between(image: bytearray) -> None:
    parts = Parts.of(bytes(image))
    image[parts.sections[parts.names.index(".text.a")][4] - 1] = 1


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (header(16, "<H", 1), "without being linked"),
        (header(18, "<H", 62), "without being linked"),
        (extended, "header has room for"),
        (header(56, "<H", 0xFFFF), "its program headers would be at"),
        (section(".nv.info.a", 4, "<I", 0x70000016), "and what that holds is not known"),
        (section(".nv.info.a", 4, "<I", 2), "2 tables of symbols|symbols of 0"),
        (section(".nv.constant4", 16, "<Q", 0x1000), "have addresses"),
        (section(".text.b", 24, "<Q", 0x41), "lie over each other"),
        (section(".rela.nv.constant4", 40, "<I", 2), "about the symbols of section 2"),
        (section(".rela.nv.constant4", 44, "<I", 999), "relocates section 999"),
        (section(".nv.callgraph", 40, "<I", 2), "about the symbols of section 2"),
        (section(".nv.prototype", 40, "<I", 2), "about the symbols of section 2"),
        (section(".nv.callgraph", 56, "<Q", 12), "has pairs of 12, not 8"),
        (section(".nv.shared.a", 24, "<Q", 0x50), "in the midst of a part"),
        (segment(1, 0, 7), "a segment of type 0x7"),
        (segment(0, 8, 64), "its program headers are said to be at 64"),
        (segment(2, 16, 4096), "have addresses"),
        (segment(2, 40, 1), "takes 1 in memory"),
        (segment(4, 8, 0x50), "in the midst of a part"),
        (symbol(3, 6, "<H", 999), "a symbol is in section 999"),
        (symbol(3, 6, "<H", 0xFFFF), "a symbol is in section 65535"),
        (between, "that are in no section"),
    ],
)
def test_what_is_not_understood_is_refused(change: Any, cause: str) -> None:
    image = bytearray(cubin().build())
    assert len(without_unused(bytes(image), {"a"})) < len(image)
    change(image)
    with pytest.raises(UnreadableImage, match=cause):
        without_unused(bytes(image), {"a"})


@pytest.mark.parametrize(
    ("calls", "cause"),
    [
        ([(1, 2)], "calls that are in no list"),
        ([(0, DIRECT), (0, -5)], "a list -5"),
        ([(0, TAKEN), (0, DIRECT)], "a list -1 behind list -2"),
        ([(0, DIRECT), (0, 3)], "a list"),
        ([(0, DIRECT), (99, 1)], "symbol 99"),
        ([(0, DIRECT), (1, 99)], "symbol 99"),
    ],
)
def test_a_call_graph_that_is_not_understood_is_refused(calls: list[tuple[int, int]], cause: str) -> None:
    assert cause in refusal(cubin(calls=calls).build(), {"a"})


def test_a_used_kernel_that_is_not_in_the_file_is_refused() -> None:
    assert refusal(cubin().build(), {"a", "elsewhere"}) == "it has no kernel elsewhere in a section of its own"
    assert "no kernel near" in refusal(cubin().build(), {"near"})  # which the host cannot launch


def test_code_of_two_kernels_in_one_section_stays() -> None:
    second = Symbol("c", ".text.b", 256, 256, ib.FUNCTION, 1, ib.ENTRY)
    image = cubin(symbols=[*cubin().symbols, second]).build()
    assert without_unused(image, {"a"}) == image


def test_images_of_the_software_driver_are_not_cut() -> None:
    image = _native.image("hooktest").read_bytes()
    library = image[image.index(b"\x7fELF") :]
    assert not is_cubin(library)
    assert is_cubin(cubin().build())
    end = Parts.of(library).head[6] + 64 * Parts.of(library).head[12]
    assert "machine 62, which is no GPU" in refusal(library[:end], set())


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from([p.cubin().build() for p in (
        Program({"a": 256, "b": 512, "c": 384}, {"near": 256}, {"a"}, {"c"}, calls={("a", "c")}),
        Program({"a": 128, "b": 1024}, used={"a"}, patched={"b"}, first=False, shared=1024),
    )]),
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), max_size=6),
    st.integers(0, 4000),
)  # fmt: skip
def test_a_damaged_file_is_cut_or_refused(image: bytes, changes: list[tuple[int, int]], lost: int) -> None:
    broken = damaged(image, changes, lost)
    with contextlib.suppress(UnreadableImage):
        left = without_unused(broken, {"a"})
        assert len(left) <= len(broken)
        assert elf.loadable(left)
        assert without_unused(left, {"a"}) == left
