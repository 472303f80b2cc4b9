# SPDX-License-Identifier: Apache-2.0
"""What is installed is what the repository has, and its libraries fit into other people's programs."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from functools import lru_cache
from pathlib import Path, PurePath

import pytest

from foundryd import _native

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]

# Of the C library.  Nothing else: the C++ runtime is inside, and CUDA and NCCL are found in the process.
C_LIBRARY = {"libc.so.6", "libm.so.6", "libdl.so.2", "librt.so.1", "libpthread.so.0", "ld-linux-x86-64.so.2"}
# Python modules share exceptions with each other, and the software driver with kernels: so the process's own runtime.
CPP_LIBRARY = C_LIBRARY | {"libstdc++.so.6", "libgcc_s.so.1"}
SELF_CONTAINED = ("libfoundryd_hook.so", "fake/libnccl.so.2", "soft/libnccl.so.2")
EXPORTS = {
    "libfoundryd_hook.so": r"fdy_hook_api|dlsym|dlvsym|cu[A-Z]\w*|nccl[A-Z]\w*",
    "soft/libcuda.so.1": r"cu[A-Z]\w*|softcuda_\w+",
    "fake/libnccl.so.2": r"p?nccl[A-Z]\w*|foundryd_nccl_declare",
    "soft/libnccl.so.2": r"p?nccl[A-Z]\w*|foundryd_nccl_declare",
}


def native() -> dict[str, Path]:
    """Every shared object of the installed package, by its path in the folder of native parts."""
    return {
        str(path.relative_to(folder)): path
        for folder in _native.__path__
        for path in sorted(Path(folder).rglob("*"))
        if path.is_file() and re.search(r"\.so(\.\d+)*$", path.name)
    }


@lru_cache
def readelf(path: Path, *options: str) -> str:
    done = subprocess.run(["readelf", "-W", *options, path], capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_every_native_part_is_installed() -> None:
    modules = {"_hook", "_rankpatch"}
    assert native().keys() >= EXPORTS.keys()
    assert {name.split(".")[0] for name in native() if name not in EXPORTS} == modules


@pytest.mark.parametrize("name", sorted(native()))
def test_libraries_need_nothing_but_the_c_library(name: str) -> None:
    dynamic = readelf(native()[name], "-d")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert needed <= (C_LIBRARY if name in SELF_CONTAINED else CPP_LIBRARY)
    assert needed >= {"libc.so.6"}
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic)
    assert not re.findall(r"\(TEXTREL\)", dynamic)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_libraries_that_are_preloaded_export_their_interface_alone(name: str) -> None:
    rows = [line.split() for line in readelf(native()[name], "--dyn-syms").splitlines()]
    # Number, value, size, type, binding, visibility, section, name[@version].
    exported = {row[7].split("@")[0] for row in rows if len(row) > 7 and row[6] != "UND" and row[0] != "Num:"}
    assert len(exported) > 50
    assert not {symbol for symbol in exported if not re.fullmatch(EXPORTS[name], symbol)}
    assert not [row for row in rows if len(row) > 7 and row[4] == "UNIQUE"]


@pytest.mark.parametrize("name", sorted(native()))
def test_libraries_use_the_public_c_library(name: str, record_property: pytest.RecordProperty) -> None:
    versions = re.findall(r"Name: (GLIBC_\w[\w.]*)", readelf(native()[name], "-V"))
    assert "GLIBC_PRIVATE" not in versions
    newest = max(tuple(map(int, version[6:].split("."))) for version in versions if version != "GLIBC_ABI_DT_RELR")
    record_property("glibc", ".".join(map(str, newest)))
    running = os.confstr("CS_GNU_LIBC_VERSION")
    assert running is not None
    assert newest <= tuple(map(int, running.split()[1].split(".")))


# What the C library had before 2.28, under an older version: in libpthread, libdl, librt or a header, or less exact.
OLD_FUNCTIONS = re.compile(
    r"pthread_\w+|__pthread_key_create|dl(open|close|sym|error|addr1?|info)|shm_(open|unlink)|fstat(64)?"
    r"|__isoc23_\w+|(exp2?|log2?|pow|fmod)f?"
)
# Of the compiler's runtime, which takes them where they are: it is that of the machine that builds.
RUNTIME = {"__libc_single_threaded", "_dl_find_object"}


@pytest.mark.parametrize("name", sorted(native()))
def test_only_the_machine_that_builds_keeps_libraries_from_an_older_c_library(name: str) -> None:
    """Built where the C library is 2.28, as manylinux does, they need nothing newer."""
    symbols = re.findall(r" (\w+)@(?:GLIBC_(\d+)\.(\d+))", readelf(native()[name], "--dyn-syms"))
    newer = {symbol for symbol, major, minor in symbols if (int(major), int(minor)) > (2, 28)}
    assert {symbol for symbol in newer - RUNTIME if not OLD_FUNCTIONS.fullmatch(symbol)} == set()


def excluded(path: PurePath, patterns: list[str]) -> bool:
    """Whether a path of the repository is one of ``patterns``, of which ``**/`` is any number of folders."""
    texts = [pattern.replace("**/", folders) for pattern in patterns for folders in ("", "*/")]
    return any(fnmatch.fnmatch(str(path), text) or str(path).startswith(f"{text}/") for text in texts)


def in_repository(*folders: str) -> set[str]:
    """Files that belong into version control; without that, as in an unpacked sdist, the files that are there."""
    try:
        line = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", *folders]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        if done.stdout:
            return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}
    except (OSError, subprocess.CalledProcessError):
        pass
    roots = [ROOT / folder for folder in folders] or [ROOT]
    found = (path for root in roots for path in root.rglob("*") if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if not {"__pycache__", ".git", ".venv"} & {*path.parts}}


def test_what_is_installed_is_what_the_repository_has() -> None:
    distribution = importlib.metadata.distribution("foundryd")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("this installation is editable: it uses the repository's own files")
    installed = {str(path) for path in distribution.files or [] if path.parts[0] == "foundryd"}
    installed = {path for path in installed if "__pycache__" not in path}
    built = {str(PurePath("foundryd/_native") / name) for name in native()}
    built |= {path for path in installed if fnmatch.fnmatch(path, "foundryd/_native/images/*.fatbin")}
    wanted = {path for path in in_repository("foundryd") if not excluded(PurePath(path), SETTINGS["wheel"]["exclude"])}
    assert installed - built == wanted
    assert "foundryd/capture/kernels/memory.ptx" in installed
    assert "foundryd/py.typed" in installed


def test_the_source_distribution_is_the_repository(tmp_path: Path) -> None:
    code = f"import scikit_build_core.build as build; build.build_sdist({str(tmp_path)!r})"
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    with tarfile.open(next(tmp_path.glob("foundryd-*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path for path in in_repository() if not excluded(PurePath(path), SETTINGS["sdist"]["exclude"])}
    assert wanted - packed == set()
    assert packed - wanted - {"PKG-INFO"} <= {path for path in packed if not (ROOT / path).is_file()}
    assert "foundryd/capture/kernels/memory.ptx" in packed
