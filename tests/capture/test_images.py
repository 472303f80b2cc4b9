# SPDX-License-Identifier: Apache-2.0
"""Every variable of a module image is named, however the image is packed; what cannot be read says so."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd import _native
from foundryd.capture.images import capability, entries, listings, summary
from foundryd.capture.images import elf as elf_module
from foundryd.capture.images import ptx as ptx_module
from foundryd.capture.images.lz4 import decode_block
from foundryd.errors import UnreadableImage

sys.path.insert(0, str(Path(__file__).parent))
import image_builder as ib
from image_builder import Cubin, Symbol, container, entry

HOPPER = (9, 0)


def cubin(*names: str, architecture: int = 90) -> bytes:
    """A cubin whose zeroed memory has a variable of four bytes for each name."""
    symbols = [Symbol(name, ".nv.global", 4 * i) for i, name in enumerate(names)]
    return Cubin({".nv.global": (4 * len(names), 4)}, symbols, architecture=architecture).build()


def ptx(*names: str, target: str = "sm_90") -> bytes:
    return "\n".join([".version 9.0", f".target {target}", *(f".global .u32 {n};" for n in names)]).encode() + b"\0"


def names_of(image: bytes, device: tuple[int, int] = HOPPER) -> list[str]:
    (listing,) = listings(image, device)
    return [v.name for v in listing.variables]


def unreadable(call: object, *arguments: object) -> str:
    with pytest.raises(UnreadableImage) as refused:
        call(*arguments)  # type: ignore[operator]
    return str(refused.value)


# --- containers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [0, ib.LZ4, ib.ZSTD])
@pytest.mark.parametrize("options", [b"", bytes(8), bytes(48)])
@pytest.mark.parametrize("kind", [1, 2])
def test_variables_are_found_however_an_entry_is_compressed(flags: int, options: bytes, kind: int) -> None:
    code = ptx("one", "two") if kind == 1 else cubin("one", "two")
    image = container(entry(code, kind=kind, flags=flags, options=options))
    assert names_of(image) == ["one", "two"]


def test_a_bare_cubin_and_bare_ptx_are_images() -> None:
    assert names_of(cubin("a")) == ["a"]
    assert names_of(ptx("a")) == ["a"]
    assert names_of(cubin("a"), (12, 0)) == names_of(ptx("a", target="sm_90a"), (12, 0)) == ["a"]
    assert [e.target for image in (cubin("a"), ptx("a", target="sm_90a")) for e in entries(image)] == [
        "sm_90",
        "compute_90a",
    ]


@pytest.mark.parametrize(
    ("device", "taken"),
    [
        ((9, 0), ["sm_90", "sm_90a"]),
        ((8, 0), ["sm_80"]),
        ((8, 6), ["sm_86"]),
        ((8, 9), ["sm_86"]),
        ((10, 0), ["sm_100f"]),
        ((10, 3), ["sm_100f"]),
        ((12, 0), ["compute_90"]),
        ((11, 0), ["compute_90"]),
    ],
)
def test_the_code_is_that_for_the_device(device: tuple[int, int], taken: list[str]) -> None:
    image = container(
        entry(ptx("p75"), 75, kind=1),
        entry(ptx("p90"), 90, kind=1),
        entry(ptx("p90a"), 90, kind=1, flags=ib.SPECIFIC),
        entry(cubin("c80"), 80, flags=ib.ZSTD),
        entry(cubin("c86"), 86),
        entry(cubin("c90"), 90, flags=ib.LZ4),
        entry(cubin("c90a"), 90, flags=ib.SPECIFIC),
        entry(cubin("c100"), 100, flags=ib.FAMILY),
        entry(b"code for a linker", 90, kind=8),
    )
    assert [listing.entry.target for listing in listings(image, device)] == taken


def test_code_for_no_device_of_this_kind_is_refused() -> None:
    image = container(entry(cubin("a"), 80), entry(ptx("a"), 90, kind=1, flags=ib.SPECIFIC))
    assert unreadable(listings, image, (12, 0)) == (
        "it has no code for compute capability 12.0, but elf sm_80, ptx compute_90a"
    )


def test_compression_that_is_not_known_is_refused() -> None:
    image = bytearray(container(entry(cubin("a"), flags=ib.LZ4)))
    image[16 + 40 : 16 + 48] = (0x1011).to_bytes(8, "little")
    assert "compressed in a way that is not known" in unreadable(entries, bytes(image))
    image[16 + 40 : 16 + 48] = (0xA011).to_bytes(8, "little")
    assert "compressed in a way that is not known" in unreadable(entries, bytes(image))


@pytest.mark.parametrize("flags", [ib.LZ4, ib.ZSTD])
@pytest.mark.parametrize("said", [0, 1, 1 << 20, 1 << 60])
def test_a_wrong_size_of_compressed_code_is_refused(flags: int, said: int) -> None:
    image = bytearray(container(entry(cubin("a"), flags=flags)))
    image[16 + 56 : 16 + 64] = said.to_bytes(8, "little")
    unreadable(listings, bytes(image), HOPPER)


def test_images_of_the_software_driver_name_what_it_shows() -> None:
    assert names_of(_native.image("hooktest").read_bytes()) == ["aimed", "counter", "table", "zeroed"]


def test_a_summary_says_what_is_inside_or_why_not() -> None:
    image = container(entry(cubin("a", "b"), flags=ib.ZSTD), entry(ptx("a"), kind=1, flags=ib.LZ4), entry(cubin(), 80))
    found = summary(image, "9.0")
    assert (found.targets, found.compression) == (["compute_90", "sm_80", "sm_90"], ["lz4", "none", "zstd"])
    assert (found.globals, found.unreadable) == (2, "")
    assert summary(image[:-1], "9.0").globals is None
    assert "container" in summary(image[:-1], "9.0").unreadable
    assert "compute capability" in summary(image, "").unreadable
    assert capability("12.1") == (12, 1)


# --- ELF -------------------------------------------------------------------------------------------------------------


def test_variables_are_those_of_global_and_user_constant_memory() -> None:
    image = Cubin(
        {
            ".nv.global": (12, 4), ".nv.global.init": (8, 8), ".nv.constant3": (16, 4), ".nv.constant0.k": (64, 4),
            ".nv.shared.k": (32, 4), ".text.k": (128, 128),
        },
        [
            Symbol("zero", ".nv.global", 0), Symbol("wide", ".nv.global", 4, 8, bind=1),
            Symbol("", ".nv.global", 0, 0, ib.SECTION), Symbol("init", ".nv.global.init", 0, 8),
            Symbol("table", ".nv.constant3", 0, 16, bind=2),
            Symbol("common", ib.COMMON, 4, 4, bind=1), Symbol("elsewhere", 0, 0, 8, bind=1),
            Symbol("shared", ".nv.shared.k", 0, 32), Symbol("k", ".text.k", 0, 128, ib.FUNCTION, 1),
        ],
    ).build()  # fmt: skip
    assert [v.name for v in elf_module.variables(image)] == ["common", "init", "table", "wide", "zero"]


def test_memory_without_a_name_is_refused() -> None:
    whole = Cubin({".nv.global": (32, 8)}, [Symbol("a", ".nv.global", 0, 4), Symbol("b", ".nv.global", 8, 20)])
    assert [v.name for v in elf_module.variables(whole.build())] == ["a", "b"]  # what is between is padding
    for symbols in ([whole.symbols[0]], [whole.symbols[1]], []):
        assert ".nv.global has 32 bytes" in unreadable(elf_module.variables, Cubin(whole.sections, symbols, {}).build())


def test_a_variable_without_a_name_is_refused() -> None:
    nameless = Cubin({".nv.global": (4, 4)}, [Symbol("", ".nv.global")])
    with pytest.raises(UnreadableImage, match="one of its variables has no name"):
        listings(nameless.build(), (9, 0))


def test_what_the_driver_cannot_tell_is_refused() -> None:
    twice = Cubin({".nv.global": (8, 4)}, [Symbol("a", ".nv.global"), Symbol("a", ".nv.global", 4)])
    assert unreadable(elf_module.variables, twice.build()) == "2 of its variables are named a"
    texture = Cubin({}, [Symbol("t", 0, 0, 0, ib.TEXTURE)])
    assert "t is a texture reference" in unreadable(elf_module.variables, texture.build())
    unknown = Cubin({".nv.novel": (8, 8)})
    assert ".nv.novel is written to" in unreadable(elf_module.variables, unknown.build())


def test_a_variable_with_the_address_of_code_is_marked() -> None:
    image = Cubin(
        {".nv.global.init": (24, 8), ".text.k": (128, 128)},
        [
            Symbol("data", ".nv.global.init", 0, 8), Symbol("to_data", ".nv.global.init", 8, 8),
            Symbol("to_code", ".nv.global.init", 16, 8), Symbol("k", ".text.k", 0, 128, ib.FUNCTION, 1),
        ],
        {".nv.global.init": [(8, 0), (16, 3)]},
    ).build()  # fmt: skip
    assert [(v.name, v.holds_code) for v in elf_module.variables(image)] == [
        ("data", False),
        ("to_code", True),
        ("to_data", False),
    ]


# --- PTX -------------------------------------------------------------------------------------------------------------

PTX = """
// .global .u32 in_comment;
/* .global .u32 in_comment;
   .const .u32 too; */
.version 9.0
.target sm_90, debug
.address_size 64
.file 1 "a.cu;.global .u32 in_string;"
.extern .func (.param .b32 r) vprintf (.param .b64 f, .param .b64 v) ;
.extern .global .align 4 .u32 defined_elsewhere;
.global .align 4 .u32 plain;
.visible .global .align 4 .u32 visible = 5;
.weak .const .align 8 .b8 table[16] = {1, 2, {3}, 0xff};
.global .align 1 .b8 $str[6] = {104, 101, 108};
.global .attribute(.managed) .align 4 .u32 managed = 3;
.global .v4 .f32 vector; .global .u32 one, two[2][3] = {{1, 2, 3}, {4, 5, 6}}, three;
.common .global .u32 common;
.global .u64 pointer = generic(plain) + 4;
.const .u64 functions[2] = {_Z3onei, _Z3twoi};
.global .b32 numbered<3>;
.global .align 8 .b8 _ZN12_GLOBAL__N_15anon_E[800];
.func (.reg .b32 r) _Z3onei (.param .b32 x) { ret; }
.visible .entry k(.param .u64 .ptr .global .align 16 a, .param .align 4 .b8 b[12])
.maxntid 128, 1, 1
{
    .reg .u32 %r<4>; .shared .align 4 .b8 s[64]; .local .u32 l;
    { .reg .u64 t; }
L1: ld.global.u32 %r1, [plain];
    ld.const.u32 %r2, [table];
    st.global.v2.u32 [a], {%r1, %r2};
    @%p bra L1;
    ret;
}
.section .debug_info { .b32 4 .b8 1 }
.global .u32 after_all;
"""


def test_ptx_declarations_are_read_as_the_manual_spells_them() -> None:
    found = ptx_module.variables(PTX.encode() + b"\0\0")
    assert [v.name for v in found] == sorted(
        ["$str", "_ZN12_GLOBAL__N_15anon_E", "after_all", "common", "functions", "managed", "numbered0", "numbered1",
         "numbered2", "one", "plain", "pointer", "table", "three", "two", "vector", "visible"]
    )  # fmt: skip
    assert [v.name for v in found if v.holds_code] == ["functions"]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (".global .u32 a;", "no .version"),
        (".version 9.0 .global .texref t;", "texref"),
        (".version 9.0 .entry k() { .global .u32 inside; ret; }", "declares a variable"),
        (".version 9.0 .entry k() { ret;", "ends within a function"),
        (".version 9.0 .global .u32 ;", "which has no name"),
        (".version 9.0 .global .u32 a<x>;", "cannot be counted"),
        (".version 9.0 .global .u32 a<99999999>;", "cannot be counted"),
        (".version 9.0 .global .u32 a; .global .u32 a;", "named a"),
        ("\xff", "no .version"),
    ],
)
def test_ptx_whose_variables_cannot_be_told_is_refused(text: str, cause: str) -> None:
    assert cause in unreadable(ptx_module.variables, text.encode())


# --- damaged input ---------------------------------------------------------------------------------------------------


@given(st.binary(max_size=400), st.integers(0, 3))
def test_lz4_gives_back_what_was_packed(data: bytes, repeats: int) -> None:
    data = data * (1 + repeats * 40)
    assert decode_block(ib.lz4(data), len(data)) == data


@given(st.binary(max_size=200), st.integers(0, 1000))
def test_a_damaged_lz4_block_is_an_error_or_of_the_right_size(block: bytes, size: int) -> None:
    with contextlib.suppress(UnreadableImage):
        assert len(decode_block(block, size)) == size


SOUND = [
    container(
        entry(Cubin({".nv.global": (8, 4), ".nv.global.init": (8, 8)}, [Symbol("a", ".nv.global", 0, 8),
                    Symbol("p", ".nv.global.init", 0, 8)], {".nv.global.init": [(0, 0)]}).build(), flags=flags),
        entry(PTX.encode(), 80, kind=1, flags=flags),
    )
    for flags in (0, ib.LZ4, ib.ZSTD)
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(SOUND),
    st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6),
    st.integers(0, 4000),
    st.sampled_from([(9, 0), (8, 0)]),
)
def test_a_damaged_image_is_read_or_refused(
    image: bytes, changes: list[tuple[int, int]], cut: int, device: tuple[int, int]
) -> None:
    broken = bytearray(image)
    for at, value in changes:
        broken[at % len(broken)] = value
    del broken[len(broken) - cut % len(broken) if cut % 3 == 0 else len(broken) :]
    with contextlib.suppress(UnreadableImage):
        for listing in listings(bytes(broken), device):
            assert all(v.name for v in listing.variables)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=300).map(str.encode))
def test_noise_is_read_or_refused(data: bytes) -> None:
    for read in (elf_module.variables, ptx_module.variables, lambda d: listings(d, HOPPER)):
        with contextlib.suppress(UnreadableImage):
            read(data)
