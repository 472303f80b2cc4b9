# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel into a fresh environment without a compiler and runs the command and the demo there.

    python packaging/smoke.py dist/foundryd-*-cp311-cp311-manylinux_2_28_x86_64.whl

Everything but the wheel comes from the package index, as wheels alone.  ``PATH`` is the environment's own folder.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Any

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "ld", "cmake", "ninja", "make")
# What pip needs to find the package index; nothing else of this process's environment is passed on.
KEPT = ("PIP_", "SSL_", "REQUESTS_", "HTTP_", "HTTPS_", "NO_PROXY", "http_", "https_", "no_proxy")
DEMO = ("demo", "--driver", "soft", "--ranks", "2", "--batch-sizes", "1-4", "--layers", "1", "--json")


class Fresh:
    """An environment that has what the wheel asks for, and no compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "venv/bin"
        self.environment = {k: v for k, v in os.environ.items() if k.startswith(KEPT)}
        self.environment |= {"PATH": str(self.programs), "HOME": str(folder), "TMPDIR": str(folder)}
        venv.create(folder / "venv", with_pip=True, symlinks=True)
        for name in COMPILERS:
            if shutil.which(name, path=str(self.programs)):
                sys.exit(f"{self.programs} has {name}: the environment is not without a compiler")

    def run(self, *line: str | Path, timeout: float = 300) -> str:
        """What a program of the environment prints; ends this one if it fails."""
        program = self.programs / line[0]
        done = subprocess.run(
            [program, *line[1:]], env=self.environment, cwd=self.folder, capture_output=True, text=True, timeout=timeout
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(map(str, line))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


def smoke(wheel: Path, others: list[str]) -> dict[str, Any]:
    """What the wheel's command said, installed beside other packages."""
    # A path that leaves room for names of sockets.
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as folder:
        fresh = Fresh(Path(folder))
        fresh.run("python", "-m", "pip", "install", "--quiet", "--only-binary", ":all:", wheel.absolute(), *others)
        version = fresh.run("foundryd", "--version").strip()
        findings = json.loads(fresh.run("foundryd", "doctor", "--json"))
        demo = json.loads(fresh.run("foundryd", *DEMO))
    return {"wheel": wheel.name, "version": version, "doctor": findings, "demo": demo}


def main() -> None:
    """Prints one object for each wheel."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--with", dest="others", action="append", default=[], help="a package to install beside it")
    options = parser.parse_args()
    for wheel in options.wheels:
        print(json.dumps(smoke(wheel, options.others)), flush=True)


if __name__ == "__main__":
    main()
