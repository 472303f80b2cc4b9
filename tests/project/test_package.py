# SPDX-License-Identifier: Apache-2.0
"""What is installed is what the repository has, and its libraries fit into others' programs and older systems."""

from __future__ import annotations

import fnmatch
import importlib.metadata
import json
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
# The one that wheels run on, as manylinux_2_28 says.
OLDEST = (2, 28)
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


@pytest.fixture
def images(tmp_path: Path) -> dict[str, Path]:
    """The shared object in each image for the software driver: it is loaded by the C library too."""
    out = {}
    for folder in _native.__path__:
        for image in sorted(Path(folder).glob("images/*.fatbin")):
            container = image.read_bytes()
            out[image.name] = tmp_path / image.name
            out[image.name].write_bytes(container[container.index(b"\x7fELF") :])
    return out


def check_dependencies(path: Path) -> None:
    dynamic = readelf(path, "-d")
    needed = set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic))
    assert needed <= C_LIBRARY
    assert needed
    assert not re.findall(r"\((?:RPATH|RUNPATH)\).*", dynamic)
    assert not re.findall(r"\(TEXTREL\)", dynamic)


@pytest.mark.parametrize("name", sorted(native()))
def test_libraries_need_nothing_but_the_c_library(name: str) -> None:
    check_dependencies(native()[name])


def test_images_need_nothing_but_the_c_library(images: dict[str, Path]) -> None:
    assert len(images) >= 8
    for path in images.values():
        check_dependencies(path)


@pytest.mark.parametrize("name", sorted(EXPORTS))
def test_libraries_that_are_preloaded_export_their_interface_alone(name: str) -> None:
    rows = [line.split() for line in readelf(native()[name], "--dyn-syms").splitlines()]
    # Number, value, size, type, binding, visibility, section, name[@version].
    exported = {row[7].split("@")[0] for row in rows if len(row) > 7 and row[6] != "UND" and row[0] != "Num:"}
    assert len(exported) > 50
    assert not {symbol for symbol in exported if not re.fullmatch(EXPORTS[name], symbol)}
    assert not [row for row in rows if len(row) > 7 and row[4] == "UNIQUE"]


@pytest.mark.parametrize("name", sorted(native()))
def test_python_modules_export_their_initialiser_alone(name: str) -> None:
    if name in EXPORTS:
        pytest.skip("this one is no Python module")
    rows = [line.split() for line in readelf(native()[name], "--dyn-syms").splitlines()]
    exported = {row[7] for row in rows if len(row) > 7 and row[6] != "UND" and row[0] != "Num:"}
    assert exported == {f"PyInit_{name.split('.')[0]}"}


# What headers of a newer C library choose in place of an old function; nothing here can choose otherwise.
CHOSEN = re.compile(r"__isoc23_\w+|fmodf?")


def newer(path: Path) -> set[str]:
    """What a library needs of a C library newer than the oldest that wheels run on."""
    used = re.findall(r" (\w+)@+GLIBC_(\w[\w.]*)", readelf(path, "--dyn-syms"))
    assert used
    assert "PRIVATE" not in {version for _, version in used}
    return {f"{name}@{version}" for name, version in used if tuple(map(int, version.split(".")))[:2] > OLDEST}


@pytest.mark.parametrize("name", sorted(native()))
def test_libraries_run_on_an_older_c_library(name: str) -> None:
    """Whatever the machine that builds has; a function that is new here gets a row in cmake/glibc/moved.S."""
    assert {symbol for symbol in newer(native()[name]) if not CHOSEN.match(symbol)} == set()


def test_images_run_on_an_older_c_library(images: dict[str, Path]) -> None:
    with_versions = [path for path in images.values() if "GLIBC_" in readelf(path, "--dyn-syms")]
    assert with_versions
    assert {path.name: symbols for path in with_versions if (symbols := newer(path))} == {}


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
