# SPDX-License-Identifier: Apache-2.0
"""Of kernels that nothing uses nothing is left, and everything else means in the smaller file what it meant before.

Files are compared by what their numbers mean: a symbol by its name, section and place, a section by its name.
"""

from __future__ import annotations

import contextlib
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.capture.images import elf, stripped, without_unused
from foundryd.errors import UnreadableImage

sys.path.insert(0, str(Path(__file__).parent))
import image_builder as ib
from image_builder import Cubin, Symbol, fact
from image_programs import BY_ADDRESS, DIRECT, TAKEN, Meaning, Parts, Program, damaged, programs


def build(program: Program, **changes: Any) -> bytes:
    """The file of a program."""
    return replace(program.cubin(), **changes).build()


@settings(max_examples=300, deadline=None)
@given(programs())
def test_what_is_left_means_what_it_meant_and_nothing_of_other_kernels_is_left(program: Program) -> None:
    image = build(program)
    left = stripped(image, program.used)
    gone = program.stripped()
    before, after = Meaning.of(image), Meaning.of(left)
    if not gone:
        assert left == image
        return
    assert after == before.without_kernels(gone)
    assert {s.removeprefix(".text.") for s in after.sections if s.startswith(".text.")} == {
        *program.kernels, *program.devices
    } - gone  # fmt: skip
    assert elf.variables(left) == elf.variables(image)
    assert elf.loadable(left) == left
    assert stripped(left, program.used) == left == stripped(image, sorted(program.used))
    assert len(left) <= len(without_unused(image, program.used))


@settings(max_examples=300, deadline=None)
@given(programs())
def test_tables_of_strings_have_what_is_named_and_no_more(program: Program) -> None:
    left = stripped(build(program), program.used)
    if not program.stripped():
        return
    parts, meaning = Parts.of(left), Meaning.of(left)
    named = {s.name for s in meaning.symbols}
    called = {"#v"} if program.taken | program.described | set(program.devices) else set()
    assert set(parts.data[parts.names.index(".strtab")].decode().split("\0")) == named | called | {""}
    assert set(parts.data[parts.head[13]].decode().split("\0")) == set(parts.names)


@settings(max_examples=200, deadline=None)
@given(programs())
def test_headers_and_segments_are_those_of_what_is_left(program: Program) -> None:
    image = build(program)
    left = stripped(image, program.used)
    before, after = Parts.of(image), Parts.of(left)
    spans = [(s[4], s[4] + s[5]) for s in after.sections if s[1] not in (0, 8) and s[5]]
    spans += [(0, 64), (after.head[6], after.head[6] + 64 * len(after.sections))]
    spans += [(after.head[5], after.head[5] + 56 * len(after.segments))]
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] == len(left)
    same = [0, 1, 2, 3, 4, 8, 9, 11]
    assert [after.head[i] for i in same] == [before.head[i] for i in same]
    assert after.names[after.head[13]] == ".shstrtab"
    for i, section in enumerate(after.sections):
        was = before.sections[before.names.index(after.names[i])]
        if section[5] and section[1] != 8:
            assert section[4] % max(section[8], 1) == was[4] % max(section[8], 1)
    held = {}
    for segment in before.segments[2:]:
        names, *_ = before.held(segment)
        if rest := [n for n in names if n in after.names]:
            held[segment[1]] = rest
    assert [s[:3] + s[5:7] for s in after.segments[:2]] == [
        [kind, 4, after.head[5], 56 * len(after.segments), 56 * len(after.segments)] for kind in (6, 1)
    ]
    for segment in after.segments[2:]:
        names, before_first, behind_last = after.held(segment)
        assert (names, before_first) == (held[segment[1]], 0)
        assert behind_last < 128
        memory = segment[5]
        for section in after.sections:
            if segment[1] == 6 and section[1] == 8:
                assert section[4] == segment[2] + segment[5]
                memory += -memory % section[8] + section[5]
        assert segment[6] == memory


def refusal(image: bytes, used: set[str]) -> str:
    with pytest.raises(UnreadableImage) as refused:
        stripped(image, used)
    return str(refused.value)


SMALL = Program(
    {"a": 256, "b": 512, "c": 384, "idle": 128},
    {"near": 256},
    {"a"},
    calls={("a", "c")},
    taken={"c"},
    patched={"b"},
)


def test_what_kernels_in_use_lead_to_is_there() -> None:
    image = build(SMALL)
    assert {n for n in Parts.of(stripped(image, {"a"})).names if n.startswith(".text")} == {
        ".text.a", ".text.c", ".text.near"
    }  # fmt: skip
    for more in (
        {"linked": {("a", "b")}},
        {"possible": {("near", "b")}},
        {"pointed": {"b"}},
        {"placed": {"b"}},
        {"taken": {"b"}},
    ):
        program = replace(SMALL, **more)  # type: ignore[arg-type]
        assert program.stripped() == {"idle"}
        assert Meaning.of(stripped(build(program), {"a"})) == Meaning.of(build(program)).without_kernels(
            program.stripped()
        )


def test_what_facts_and_shared_memory_refer_to_is_there() -> None:
    cubin = SMALL.cubin()
    numbers = {s.name: i for i, s in enumerate(cubin.symbols, 1)}
    rows = cubin.content[".nv.info.a"]
    calling = rows + fact(0xF, numbers["vprintf"], numbers["b"])
    sections = cubin.sections | {".nv.info.a": (len(calling), 4)}
    with_facts = replace(cubin, content=cubin.content | {".nv.info.a": calling}, sections=sections).build()
    assert ".text.b" in Parts.of(stripped(with_facts, {"a"})).names
    # A variable in the shared memory of another kernel.
    shared = [*cubin.symbols, Symbol("block", ".nv.shared.b", 16, 16)]
    relocations = cubin.relocations | {".text.a": [(0, len(shared) - 1)]}
    with_shared = replace(cubin, symbols=shared, relocations=relocations).build()
    assert {".text.b", ".nv.shared.b"} <= set(Parts.of(stripped(with_shared, {"a"})).names)


def test_facts_without_room_for_a_symbol_need_not_be_known() -> None:
    cubin = SMALL.cubin()
    short = b"".join(struct.pack("<BBH", form, 0x6B, 7) for form in (1, 2, 3))
    rows = cubin.content[".nv.info.a"] + short
    sections = cubin.sections | {".nv.info.a": (len(rows), 4)}
    left = Parts.of(
        stripped(replace(cubin, content=cubin.content | {".nv.info.a": rows}, sections=sections).build(), {"a"})
    )
    assert left.data[left.names.index(".nv.info.a")].endswith(short)


def test_a_segment_that_held_only_what_is_gone_is_left_out() -> None:
    cubin = Cubin(
        {ib.CUINFO: (32, 4), ".text.a": (256, 128), ".text.b": (256, 128), ".nv.shared.b": (64, 16)},
        [ib.kernel("a", 256), ib.kernel("b", 256)],
        segments=True,
    )
    before, after = (Parts.of(image) for image in (cubin.build(), stripped(cubin.build(), {"a"})))
    assert [s[1] for s in before.segments] == [4, 4, 5, 6]
    assert [s[1] for s in after.segments] == [4, 4, 5]
    assert after.segments[0][5] == 56 * 3


def test_a_symbol_table_says_where_its_global_symbols_begin() -> None:
    cubin = SMALL.cubin()
    image = bytearray(cubin.build())
    section(".symtab", 44, "<I", 6)(image)
    gone = {f".text.{k}" for k in SMALL.stripped()}
    table = Parts.of(stripped(bytes(image), {"a"}))
    kept = [i for i, s in enumerate(cubin.symbols, 1) if s.section not in gone and i < 6]
    assert table.sections[table.names.index(".symtab")][7] == 1 + len(kept)
    assert gone
    assert len(kept) < 5


def header(place: int, form: str, value: int) -> Callable[[bytearray], None]:
    return lambda image: struct.pack_into(form, image, place, value)


def section(name: str, place: int, form: str, value: int) -> Callable[[bytearray], None]:
    def change(image: bytearray) -> None:
        parts = Parts.of(bytes(image))
        struct.pack_into(form, image, parts.head[6] + 64 * parts.names.index(name) + place, value)

    return change


def inside(name: str, place: int, form: str, value: int) -> Callable[[bytearray], None]:
    def change(image: bytearray) -> None:
        parts = Parts.of(bytes(image))
        struct.pack_into(form, image, parts.sections[parts.names.index(name)][4] + place, value)

    return change


def shared_memory(image: bytearray) -> None:
    parts = Parts.of(bytes(image))
    (number,) = [i for i, s in enumerate(parts.segments) if s[1] == 6]
    place = parts.head[5] + 56 * number + 40
    struct.pack_into("<Q", image, place, parts.segments[number][6] + 4)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (header(7, "<B", 0x42), "its ABI is 0x42, version 8"),
        (header(8, "<B", 9), "its ABI is 0x41, version 9"),
        (header(51, "<B", 1), "flags 0x1005a04 say that .note.nv.cuinfo is section 1, which it is not"),
        (header(51, "<B", 255), "is section 255, which it is not"),
        (section(".nv.info.b", 4, "<I", 0x70000016), "and what that holds is not known"),
        (inside(".nv.info", 1, "<B", 0x60), "a fact of kernels 0x60 of format 4"),
        (inside(".nv.info.b", 1, "<B", 0x4B), "a fact of kernels 0x4b of format 4"),
        (inside(".nv.info.b", 1, "<B", 0x6B), "a fact of kernels 0x6b of format 4"),
        (inside(".nv.info.b", 0, "<B", 5), "of format 5 and 4 bytes at 0"),
        (inside(".nv.info.b", 2, "<H", 6), "of format 4 and 6 bytes at 0"),
        (inside(".nv.info.b", 2, "<H", 4000), "of format 4 and 4000 bytes at 0"),
        (inside(".nv.info", 0, "<B", 3), "a fact of kernels 0x2f of format 3"),
        (section(".nv.info.b", 32, "<Q", 10), "within a row at"),
        (inside(".nv.info", 4, "<I", 999), "refers to symbol 999"),
        (section(".nv.info.b", 44, "<I", 1), ".nv.info.b says that it is about section 1"),
        (section(".nv.constant0.a", 44, "<I", 0), ".nv.constant0.a says that it is about section 0"),
        (section(".text.a", 44, "<I", 1), ".text.a is of symbol 1, which is not its code"),
        (section(".nv.constant4", 44, "<I", 3), ".nv.constant4 refers to 3, and what that is is not known"),
        (section(".symtab", 40, "<I", 999), "names in section 999"),
        (section(".shstrtab", 4, "<I", 1), "the names of its symbols and sections are in sections"),
        (inside(".nv.callgraph", 28, "<I", 4), "it says '.*' of how"),
        (inside(".nv.callgraph", 28, "<I", 1 << 20), "is not within the"),
        (shared_memory, "in memory, not by what is in it"),
    ],
)
def test_what_is_not_understood_is_refused(change: Callable[[bytearray], None], cause: str) -> None:
    image = bytearray(build(SMALL))
    assert len(stripped(bytes(image), {"a"})) < len(image)
    change(image)
    with pytest.raises(UnreadableImage, match=cause):
        stripped(bytes(image), {"a"})


def test_a_section_about_something_that_is_left_out_is_refused() -> None:
    image = bytearray(build(SMALL))
    parts = Parts.of(bytes(image))
    section(".nv.constant4", 40, "<I", parts.names.index(".text.b"))(image)
    assert "refers to section" in refusal(bytes(image), {"a"})


def test_calls_by_address_of_code_in_use_are_refused() -> None:
    names = [s.name for s in SMALL.cubin().symbols]
    for caller in ("a", "near"):
        calls = [(0, DIRECT), (0, TAKEN), (0, BY_ADDRESS), (names.index(caller) + 1, 1)]
        assert f".text.{caller} calls functions by address" in refusal(build(SMALL, calls=calls), {"a"})
    by_unused = [(0, DIRECT), (0, TAKEN), (0, BY_ADDRESS), (names.index("b") + 1, 1)]
    assert ".text.b" not in Parts.of(stripped(build(SMALL, calls=by_unused), {"a"})).names


def test_what_is_for_debuggers_is_left_out_with_kernels_and_else_not() -> None:
    image = build(SMALL)
    assert not [n for n in Parts.of(stripped(image, {"a"})).names if "debug" in n]
    assert stripped(image, {"a", "b", "c", "idle"}) == image


@settings(max_examples=600, deadline=None)
@given(
    st.sampled_from([build(p) for p in (
        SMALL, Program({"a": 128, "b": 1024}, used={"a"}, patched={"b"}, first=False, shared=1024),
    )]),
    st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 255)), max_size=6),
    st.integers(0, 4000),
)  # fmt: skip
def test_a_damaged_file_is_stripped_or_refused(image: bytes, changes: list[tuple[int, int]], lost: int) -> None:
    broken = damaged(image, changes, lost)
    with contextlib.suppress(UnreadableImage):
        left = stripped(broken, {"a"})
        assert elf.loadable(left)
        assert stripped(left, {"a"}) == left
        code = [parts.data[parts.names.index(".text.a")] for parts in (Parts.of(broken), Parts.of(left))]
        assert code[0] == code[1]
