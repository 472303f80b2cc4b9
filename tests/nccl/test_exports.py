# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import ctypes
import os
import re
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from foundryd import _native

FUNCTIONS = Path(__file__).parents[2] / "stubs/nccl/src/functions.def"
KINDS = ["fake", "soft"]


def listed() -> dict[str, bool]:
    """Name and whether the library implements it, from the one list."""
    text = re.sub(r"//.*", "", FUNCTIONS.read_text())
    implemented = re.findall(r"NCCL_(?:FUNCTION|TEXT)\((\w+)", text)
    refused = re.findall(r"NCCL_REFUSED\(\w+, (\w+)\)", text)
    names = dict.fromkeys(implemented, True) | dict.fromkeys(refused, False)
    assert len(names) == len(implemented) + len(refused), "a name is listed twice"
    return names


@dataclass
class Elf:
    exports: dict[str, str]  # name and binding
    needed: list[str]
    soname: str


def read_elf(path: Path) -> Elf:
    data = path.read_bytes()
    assert data[:6] == b"\x7fELF\x02\x01"
    section_offset, section_size, section_count = (
        struct.unpack_from("<Q", data, 40)[0],
        *struct.unpack_from("<HH", data, 58),
    )
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * section_size) for i in range(section_count)
    ]

    def text(table: int, offset: int) -> str:
        start = sections[table][4] + offset
        return data[start : data.index(b"\0", start)].decode()

    exports: dict[str, str] = {}
    needed: list[str] = []
    soname = ""
    for kind, offset, size, link in ((s[1], s[4], s[5], s[6]) for s in sections):
        if kind == 11:  # SHT_DYNSYM
            for at in range(offset, offset + size, 24):
                name, info, _, section, _, _ = struct.unpack_from("<IBBHQQ", data, at)
                if section != 0 and name != 0:
                    exports[text(link, name)] = {1: "global", 2: "weak"}.get(info >> 4, "other")
        elif kind == 6:  # SHT_DYNAMIC
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<qQ", data, at)
                if tag == 1:
                    needed.append(text(link, value))
                elif tag == 14:
                    soname = text(link, value)
    return Elf(exports, needed, soname)


@pytest.mark.parametrize("kind", KINDS)
def test_every_listed_name_is_exported_twice_and_nothing_else(kind: str) -> None:
    exports = read_elf(_native.find(f"{kind}/libnccl.so.2")).exports
    names = listed()
    assert len(names) == 83  # 82 of 2.30.7, and ncclResetDebugInitInternal, which 2.28 has
    expected = dict.fromkeys(names, "weak") | {"p" + name: "global" for name in names}
    assert exports == expected | {"foundryd_nccl_declare": "global"}


@pytest.mark.parametrize("kind", KINDS)
def test_library_is_named_as_nccl_and_needs_no_cuda_library(kind: str) -> None:
    elf = read_elf(_native.find(f"{kind}/libnccl.so.2"))
    assert elf.soname == "libnccl.so.2"
    assert [name for name in elf.needed if "cuda" in name] == []


@pytest.mark.parametrize("kind", KINDS)
def test_refused_functions_fail_and_tell_their_names(kind: str, cuda_nccl: ModuleType) -> None:
    nccl = cuda_nccl.Nccl(_native.find(f"{kind}/libnccl.so.2"))
    refused = [name for name, implemented in listed().items() if not implemented]
    silent = {"ncclParamDumpAll", "ncclResetDebugInit", "ncclResetDebugInitInternal"}
    other = {"ncclLLA2ACalcSlots": -1, "ncclTeamRankToLsa": -1, "ncclTeamRankToWorld": -1}
    for name in refused:
        result = getattr(nccl.lib, name)()
        assert name in nccl.last_error()
        if not name.startswith("ncclTeam") or name in other:
            assert name in silent or result == other.get(name, cuda_nccl.INVALID_USAGE), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("setting", "version"),
    [(None, 22809), ("22703", 22703), ("22907", 22907), ("23007", 23007), ("29999", None), ("x", None)],
)
def test_version_is_the_one_that_the_environment_tells(
    kind: str, setting: str | None, version: int | None, cuda_nccl: ModuleType
) -> None:
    program = (
        "import ctypes, sys\n"
        "lib = ctypes.CDLL(sys.argv[1]); lib.ncclGetLastError.restype = ctypes.c_char_p; out = ctypes.c_int()\n"
        "print(lib.ncclGetVersion(ctypes.byref(out)), out.value, lib.ncclGetLastError(None).decode())"
    )
    env = cuda_nccl.environment(**({} if setting is None else {"FOUNDRYD_NCCL_VERSION": setting}))
    library = str(_native.find(f"{kind}/libnccl.so.2"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, library], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    code, value, message = done.stdout.strip().split(" ", 2) if version is None else [*done.stdout.split(), ""]
    if version is None:
        assert int(code) == cuda_nccl.INVALID_ARGUMENT
        assert f"'{setting}'" in message
    else:
        assert (int(code), int(value)) == (0, version)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_driver_initialisation_fails_and_says_so(kind: str, cuda_nccl: ModuleType) -> None:
    program = (
        "import ctypes, sys\n"
        "lib = ctypes.CDLL(sys.argv[1]); lib.ncclGetLastError.restype = ctypes.c_char_p\n"
        "class Id(ctypes.Structure): _fields_ = [('b', ctypes.c_char * 128)]\n"
        "unique = Id(); lib.ncclGetUniqueId(ctypes.byref(unique)); comm = ctypes.c_void_p(7)\n"
        "lib.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]\n"
        "print(lib.ncclCommInitRank(ctypes.byref(comm), 1, unique, 0), lib.ncclGetLastError(None).decode())"
    )
    env = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    if (
        subprocess.run(
            [sys.executable, "-P", "-c", "import ctypes; ctypes.CDLL('libcuda.so.1')"],
            env=env,
            capture_output=True,
            timeout=30,
        ).returncode
        == 0
    ):
        pytest.skip("this machine has a CUDA driver of its own")
    library = str(_native.find(f"{kind}/libnccl.so.2"))
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, library], env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.startswith("1 there is no CUDA driver")
    assert "libcuda.so.1" in done.stderr


def test_unique_ids_differ_and_are_128_bytes(cuda_nccl: ModuleType) -> None:
    nccl = cuda_nccl.Nccl(cuda_nccl.soft_nccl())
    raws = {nccl.unique_id().raw() for _ in range(100)}
    assert len(raws) == 100
    assert {len(raw) for raw in raws} == {128}


def test_results_have_texts(cuda_nccl: ModuleType) -> None:
    nccl = cuda_nccl.Nccl(cuda_nccl.soft_nccl())
    texts = [nccl.lib.ncclGetErrorString(ctypes.c_int(code)) for code in range(10)]
    assert len(set(texts)) == 10
