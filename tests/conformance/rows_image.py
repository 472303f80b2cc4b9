# SPDX-License-Identifier: Apache-2.0
"""Rows about what the driver takes from an image, and which variables of it have names."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

from bench import Bench, code, cu, ok, row

LZ4, SPECIFIC = 0x2000, 0x100000
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


def entry(kind: int, architecture: int, code: bytes, compressed: bytes = b"", flags: int = 0) -> bytes:
    payload = compressed or code
    padded = payload + bytes(-len(payload) % 8)
    minor, major = (4, 6) if kind == PTX_KIND else (code[8], 1)
    return struct.pack(
        "<HHIQIIHHIIIQQQ", kind, 0x0101, 64, len(padded), len(compressed), 0, minor, major, architecture, 0, 0,
        0x11 | flags | (LZ4 if compressed else 0), 0, len(code) if compressed else 0,
    ) + padded  # fmt: skip


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def elf_of(x: Bench) -> bytes:
    """The rows' own kernels: the software driver has them in a container, a GPU as a cubin."""
    if x.image[:4] == b"\x7fELF":
        return x.image
    at = 16
    while True:
        header, size, target = (
            int.from_bytes(x.image[at + start : at + end], "little") for start, end in ((4, 8), (8, 16), (28, 32))
        )
        if target == architecture(x):
            return x.image[at + header : at + header + size]
        at += header + size


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


KERNELS = ("add_value", "scale_value", "append_digit", "bump_counter", "no_parameters", "mixed_parameters",
           "large_parameter", "take_time")  # fmt: skip
GLOBALS = ("conformance_counter", "conformance_table")
ATTRIBUTES = [a for a in cu.CUfunction_attribute if a.name != "CU_FUNC_ATTRIBUTE_MAX"]


def traits(x: Bench, function: Any) -> list[Any]:
    """What the driver says of a function: every attribute, and where its parameters lie."""
    asked = [cu.cuFuncGetAttribute(a, function) for a in ATTRIBUTES]
    out: list[Any] = [[code(r)] if code(r) != "SUCCESS" else [code(r), int(r[1])] for r in asked]
    for place in range(16):
        place_and_size = cu.cuFuncGetParamInfo(function, place)
        if code(place_and_size) != "SUCCESS":
            break
        out.append([int(n) for n in place_and_size[1:]])
    return out


def loaded_as(x: Bench, image: bytes, library: bool, names: tuple[str, ...] = KERNELS) -> dict[str, Any]:
    """What the driver says of kernels, all of them if none are named, and of every variable of an image."""
    out: dict[str, Any] = {}
    if library:
        handle = ok(cu.cuLibraryLoadData(image, [], [], 0, [], [], 0))
        kernels = {n: ok(cu.cuLibraryGetKernel(handle, n.encode())) for n in names}
        functions = {n: ok(cu.cuKernelGetFunction(k)) for n, k in kernels.items()}
        variables = {n: ok(cu.cuLibraryGetGlobal(handle, n.encode())) for n in GLOBALS}
    else:
        handle = ok(cu.cuModuleLoadData(image))
        functions = {n: ok(cu.cuModuleGetFunction(handle, n.encode())) for n in names}
        variables = {n: ok(cu.cuModuleGetGlobal(handle, n.encode())) for n in GLOBALS}
    out |= {name: traits(x, function) for name, function in functions.items()}
    out |= {name: [int(size), x.read(int(at), int(size) // 4)] for name, (at, size) in variables.items()}
    x.write(x.words, [5] * 64)
    stream = x.stream()
    ok(x.add(stream, 3, functions["add_value"]))
    ok(cu.cuStreamSynchronize(stream))
    out["launched"] = x.read(x.words, 2)
    ok((cu.cuLibraryUnload if library else cu.cuModuleUnload)(handle))
    return out


def others(x: Bench) -> list[bytes]:
    """Entries that the driver does not take: PTX, and what looks like code for another architecture."""
    return [entry(PTX_KIND, 75, ptx(75)), entry(ELF_KIND, 80 if architecture(x) >= 90 else 100, elf_of(x)[::-1])]


@row("image.code_alone")
def code_alone(x: Bench) -> Any:
    """The code for the device taken out of its container, and what of it differs then, by either interface."""
    elf = elf_of(x)
    whole = container(*others(x), entry(ELF_KIND, architecture(x), elf))
    packed = container(*others(x), entry(ELF_KIND, architecture(x), elf, literals(elf)))
    out = {}
    for library in (False, True):
        alone, *containers = (loaded_as(x, image, library) for image in (elf, whole, packed))
        differing = sorted({name for seen in containers for name in alone if seen[name] != alone[name]})
        out["library" if library else "module"] = [alone["launched"], alone["conformance_table"][1][:3], differing]
    return out


@row("image.choice_kept")
def choice_kept(x: Bench) -> Any:
    """Of code for an architecture and for that one alone, whether other entries change which is taken."""
    elf, first = elf_of(x), struct.pack("<16I", 1, 2, 3, *[0] * 13)
    if elf.count(first) != 1:
        return "the table is not in the code once"
    marked = elf.replace(first, struct.pack("<16I", 4, 2, 3, *[0] * 13))
    both = [entry(ELF_KIND, architecture(x), elf), entry(ELF_KIND, architecture(x), marked, flags=SPECIFIC)]
    out = []
    for library in (False, True):
        for order in (both, both[::-1]):
            images = container(*others(x), *order), container(*order)
            seen = [loaded_as(x, image, library)["conformance_table"][1][0] for image in images]
            out.append("one of them" if seen[0] in (1, 4) and seen[0] == seen[1] else seen)
    return out


def cut_as(x: Bench, name: str) -> tuple[bytes, bytes]:
    """The rows' own kernels, and what is left of them in a way, with one in use; the same if they are no cubin."""
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # on a GPU foundryd need not be installed
    from foundryd.capture.images import CUTS, is_cubin

    elf = elf_of(x)
    (cut,) = [c for c in CUTS if c.name == name]
    return elf, cut.apply(elf, {"add_value"}) if is_cubin(elf) else elf


@row("image.kernels_cut")
def kernels_cut(x: Bench) -> Any:
    """A cubin with the code of one kernel and the beginning of the others, and what of it differs from the whole one.

    The code of all of them is loaded, though only that of the one is launched.
    """
    elf, cut = cut_as(x, "cut")
    if elf == cut:
        return "no cubin"
    out: dict[str, Any] = {"shorter": len(cut) < len(elf)}
    for library in (False, True):
        whole, left = (loaded_as(x, image, library) for image in (elf, cut))
        differing = sorted(name for name in whole if whole[name] != left[name])
        out["library" if library else "module"] = [left["launched"], differing]
    module = ok(cu.cuModuleLoadData(cut))
    out["loads"] = sorted({code(cu.cuFuncLoad(ok(cu.cuModuleGetFunction(module, n.encode())))) for n in KERNELS})
    ok(cu.cuModuleUnload(module))
    return out


@row("image.kernels_stripped")
def kernels_stripped(x: Bench) -> Any:
    """A cubin with one kernel and nothing of the others, and what of it differs from the whole one."""
    elf, left = cut_as(x, "stripped")
    if elf == left:
        return "no cubin"
    out: dict[str, Any] = {"shorter": len(left) < len(cut_as(x, "cut")[1])}
    for library in (False, True):
        first, second = (loaded_as(x, image, library, ("add_value",)) for image in (elf, left))
        differing = sorted(name for name in first if first[name] != second[name])
        out["library" if library else "module"] = [second["launched"], differing]
    module = ok(cu.cuModuleLoadData(left))
    out["loads"] = code(cu.cuFuncLoad(ok(cu.cuModuleGetFunction(module, b"add_value"))))
    out["others"] = sorted({code(cu.cuModuleGetFunction(module, n.encode())) for n in KERNELS if n != "add_value"})
    ok(cu.cuModuleUnload(module))
    return out
