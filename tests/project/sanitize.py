# SPDX-License-Identifier: Apache-2.0
"""Builds the native parts with sanitizers and runs tests of theirs on that build.

    python tests/project/sanitize.py undefined              # everything that it can run
    python tests/project/sanitize.py address tests/driver   # only these tests
    python tests/project/sanitize.py thread --build /tmp/thread

The build is a package of its own beside the installed one, in ``--build``, where the next run finds it again.  Needs
the requirements of a build (``pip install 'scikit-build-core' pybind11 ninja cmake``) and GCC's sanitizer libraries.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = ["tests/rankpatch/test_core_agrees_with_numpy.py", "tests/rankpatch/test_core_takes_any_array.py"]
HOOK = ["tests/driver", "tests/hook"]
# Another allocator in front of malloc, which is the sanitizer's own.
OWN_MALLOC = ["--deselect=tests/hook/test_beside_others.py"]
# Of the thread sanitizer's memory: where the driver's is, and how much there is of it; places of arenas and of
# reservations that it does not let programs have.
OWN_PLACES = [
    "--deselect=tests/hook/test_engine_memory.py",
    "--deselect=tests/hook/test_engine_memory_restored.py",
    "--deselect=tests/hook/test_arenas.py::test_the_choice_of_an_arena_nests_and_belongs_to_the_thread",
    "--deselect=tests/hook/test_arenas.py::test_base_and_stride_come_from_the_environment",
    "--deselect=tests/driver/test_processes_differ.py::test_addresses_differ_and_leave_fixed_ranges_alone",
    "--deselect=tests/driver/test_sharing.py::test_nothing_leaks_over_many_allocations",
]
TESTS = {
    "undefined": [*CORE, *HOOK],
    "address": [*CORE, *HOOK, *OWN_MALLOC],
    "address,undefined": [*CORE, *HOOK, *OWN_MALLOC],
    "thread": [*CORE, *HOOK, *OWN_MALLOC, *OWN_PLACES],
}
# Memory that is alive at the end is the interpreter's.  An abort is what a test sees as a failure.
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:detect_stack_use_after_return=0:verify_asan_link_order=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    "TSAN_OPTIONS": "halt_on_error=1:abort_on_error=1:ignore_noninstrumented_modules=1",
}
# The address sanitizer has its heap where arenas lie by default: they come before it, and before the software driver's.
# The thread sanitizer lets programs have memory at few addresses: here from 0x550000000000 to where programs lie.
ARENA_BASE = {"address": "0x110000000000", "address,undefined": "0x110000000000", "thread": "0x550000000000"}
# Arenas, windows of peers and reservations take 110 strides: 14 of the 15 TiB before the software driver, and 220 GiB.
ARENA_STRIDE = {"address": str(128 << 30), "address,undefined": str(128 << 30), "thread": str(2 << 30)}
LIBRARIES = {"address": "libasan.so", "thread": "libtsan.so", "undefined": "libubsan.so"}


def build(sanitizer: str, folder: Path) -> Path:
    """Builds and installs into an environment of its own; its interpreter."""
    environment = folder / "venv"
    python = environment / "bin/python"
    if not python.exists():
        venv.create(environment, with_pip=False, symlinks=True)
    site = next(environment.glob("lib/python*/site-packages"))
    # What this interpreter has, without what its own .pth files do: an editable install would come first.
    (site / "dependencies.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    shutil.copytree(ROOT / "foundryd", site / "foundryd", dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.so*"))
    run("cmake", "-S", str(ROOT), "-B", str(folder / "cmake"), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=None",
        "-DCMAKE_CXX_FLAGS=-O1", f"-DFOUNDRYD_SANITIZE={sanitizer}", f"-DPython_EXECUTABLE={python}",
        f"-DCMAKE_INSTALL_PREFIX={site}", f"-Dpybind11_DIR={pybind11_folder()}")  # fmt: skip
    run("cmake", "--build", str(folder / "cmake"))
    run("cmake", "--install", str(folder / "cmake"))
    return python


def pybind11_folder() -> str:
    """Where pybind11's CMake files are."""
    line = [sys.executable, "-m", "pybind11", "--cmakedir"]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def preload(sanitizer: str) -> str:
    """What has to come before everything in a process that is not itself instrumented."""
    names = [LIBRARIES[each] for each in sanitizer.split(",")] + ["libstdc++.so.6"]
    compiler = os.environ.get("CXX", "c++")
    found = []
    for name in names:
        line = [compiler, f"-print-file-name={name}"]
        path = subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
        if path == name:
            sys.exit(f"the compiler {compiler} has no {name}: install its sanitizer libraries, or set CXX")
        found.append(os.path.realpath(path))
    return ":".join(found)


def run(*line: str, env: dict[str, str] | None = None) -> None:
    """Runs a command; ends this program if it fails."""
    print("+", " ".join(line), flush=True)
    done = subprocess.run(line, cwd=ROOT, env=env, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode if done.returncode > 0 else 1)


def main() -> None:
    """Ends with the status of what failed, else 0."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("sanitizer", choices=sorted(TESTS))
    parser.add_argument("tests", nargs="*", help="[default: those that the sanitizer can run]")
    parser.add_argument("--build", type=Path, help="[default: build/sanitize-SANITIZER]")
    options = parser.parse_args()
    folder = (options.build or ROOT / f"build/sanitize-{options.sanitizer.replace(',', '-')}").absolute()
    python = build(options.sanitizer, folder)
    first = preload(options.sanitizer)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | OPTIONS
    # Tests that start programs of their own take the second one over.
    env |= {"LD_PRELOAD": first, "SANITIZER_PRELOAD": first, "PYTHONMALLOC": "malloc"}
    for name, values in (("ARENA_BASE", ARENA_BASE), ("ARENA_STRIDE", ARENA_STRIDE)):
        if options.sanitizer in values:
            env[f"SANITIZER_{name}"] = values[options.sanitizer]
    tests = options.tests or TESTS[options.sanitizer]
    # The thread sanitizer of older compilers does not know the addresses of a system that chooses them freely.
    start = ["setarch", "-R"] if options.sanitizer == "thread" else []
    run(*start, str(python), "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "timeout=600", *tests, env=env)


if __name__ == "__main__":
    main()
