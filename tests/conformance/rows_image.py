# SPDX-License-Identifier: Apache-2.0
"""Rows about what the driver takes from an image, and which variables of it have names."""

from __future__ import annotations

import struct
from typing import Any

from bench import Bench, code, cu, ok, row

LZ4 = 0x2000
PTX_KIND, ELF_KIND = 1, 2
NAMES = ("used", "unused", "init", "table", "_ZZ1kvE5inner", "$text", "visible", "elsewhere")


def ptx(architecture: int, declarations: str = "") -> bytes:
    return (
        f""".version 6.4
.target sm_{architecture}
.address_size 64
.visible .global .align 4 .u32 which = {architecture};
{declarations}
.visible .entry store(.param .u64 store_to)
{{
    .reg .u64 to;
    ld.param.u64 to, [store_to];
    st.global.u32 [to], 42;
    ret;
}}
""".encode()
        + b"\0"
    )


LOCAL = """
.global .align 4 .u32 used;
.global .align 4 .u32 unused;
.global .align 4 .u32 init = 7;
.const .align 4 .u32 table[4] = {5, 6};
.global .align 4 .u32 _ZZ1kvE5inner = 9;
.global .align 1 .b8 $text[4] = {104, 105};
.visible .global .align 4 .u32 visible = 3;
.visible .entry k(.param .u64 k_to)
{
    .reg .u64 to;
    .reg .u32 x;
    ld.param.u64 to, [k_to];
    ld.global.u32 x, [used];
    st.global.u32 [to], x;
    ret;
}
"""


def entry(kind: int, architecture: int, code: bytes, compressed: bytes = b"") -> bytes:
    payload = compressed or code
    padded = payload + bytes(-len(payload) % 8)
    minor, major = (4, 6) if kind == PTX_KIND else (code[8], 1)
    return struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x0101, 64, len(padded), len(compressed), 0, minor, major, architecture, 0, 0,
        0x11 | (LZ4 if compressed else 0), 0, len(code) if compressed else 0,
    ) + padded  # fmt: skip


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf_of(x: Bench) -> bytes:
    """The rows' own kernels: the software driver has them in a container with one entry, a GPU as a cubin."""
    return x.image[80:] if x.image[:4] != b"\x7fELF" else x.image


def architecture(x: Bench) -> int:
    ask = cu.CUdevice_attribute
    major = ok(cu.cuDeviceGetAttribute(ask.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, x.device))
    return 10 * int(major) + int(
        ok(cu.cuDeviceGetAttribute(ask.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, x.device))
    )


def literals(data: bytes) -> bytes:
    """An LZ4 block that repeats nothing."""
    rest = len(data) - 15
    return b"\xf0" + b"\xff" * (rest // 255) + bytes([rest % 255]) + data


@row("image.local_globals")
def local_globals(x: Bench) -> Any:
    """Variables that are neither .visible nor used by code, by name, from a module and from a library."""
    image = ptx(75, LOCAL)
    loaded = cu.cuModuleLoadData(image)
    if code(loaded) != "SUCCESS":
        return code(loaded)
    library = ok(cu.cuLibraryLoadData(image, [], [], 0, [], [], 0))
    out = {}
    for name in NAMES:
        rows = [cu.cuModuleGetGlobal(loaded[1], name.encode()), cu.cuLibraryGetGlobal(library, name.encode())]
        out[name] = [[code(r)] if code(r) != "SUCCESS" else [code(r), int(r[2]), x.read(int(r[1]))] for r in rows]
    ok(cu.cuLibraryUnload(library))
    ok(cu.cuModuleUnload(loaded[1]))
    return out


def taken(x: Bench, image: bytes) -> list[str]:
    """Whether an image's variables are those of the PTX, and whether they are those of the compiled code."""
    loaded = cu.cuModuleLoadData(image)
    if code(loaded) != "SUCCESS":
        return [code(loaded)]
    out = [code(cu.cuModuleGetGlobal(loaded[1], name)) for name in (b"which", b"conformance_counter")]
    ok(cu.cuModuleUnload(loaded[1]))
    return out


@row("image.compiled_before_ptx")
def compiled_before_ptx(x: Bench) -> Any:
    """Code for the device goes before PTX for it, whichever comes first."""
    own = architecture(x)
    both = [entry(PTX_KIND, 75, ptx(75)), entry(ELF_KIND, own, elf_of(x))]
    return [taken(x, container(*both)), taken(x, container(*reversed(both)))]


@row("image.lz4")
def lz4(x: Bench) -> Any:
    """Code compressed with LZ4."""
    elf = elf_of(x)
    return taken(x, container(entry(ELF_KIND, architecture(x), elf, literals(elf))))
