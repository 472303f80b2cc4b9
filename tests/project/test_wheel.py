# SPDX-License-Identifier: Apache-2.0
"""What is installed is a manylinux wheel, and works where there is no compiler.

``PACKAGE=1`` builds the source distribution and a wheel from it, and tests that one too.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from base64 import urlsafe_b64encode
from hashlib import sha256
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
PLATFORM = "manylinux_2_28_x86_64"
# What pip adds to the files of a wheel.
OF_PIP = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}


def packed(distribution: importlib.metadata.Distribution, folder: Path) -> Path:
    """The wheel that an installation came from, put together again."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    out = folder / f"foundryd-{distribution.version}-{tag}-{tag}-{platform}.whl"
    record = []
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in distribution.files or []:
            if path.parts[0] == ".." or "__pycache__" in path.parts or path.name in OF_PIP:
                continue
            content = Path(str(path.locate())).read_bytes()
            digest = urlsafe_b64encode(sha256(content).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(content)}")
            archive.writestr(str(path), content)
        name = f"foundryd-{distribution.version}.dist-info/RECORD"
        archive.writestr(name, "\n".join([*record, f"{name},,", ""]))
    return out


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    distribution = importlib.metadata.distribution("foundryd")
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        pytest.skip("this installation is editable, so it did not come from a wheel: pip install .")
    return packed(distribution, tmp_path_factory.mktemp("wheel"))


def policy(path: Path) -> tuple[str, dict[str, str]]:
    """Which platform auditwheel finds a wheel fit for, and what it would have to take along."""
    line = [sys.executable, "-P", "-m", "auditwheel", "show", "--json", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    return shown["overall_tag"], shown["external_libs"]


def smoke(path: Path, *options: str) -> None:
    """Installs and runs a wheel in a fresh environment without a compiler, and looks at what it said."""
    line = [sys.executable, "-P", str(PACKAGING / "smoke.py"), *options, str(path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    said = json.loads(done.stdout)
    assert said["version"] == f"foundryd {importlib.metadata.version('foundryd')}"
    found = {each["check"]: each["level"] for each in said["doctor"]["findings"]}
    assert found["hook"] == "ok"
    assert "error" not in found.values()
    demo = said["demo"]
    assert (demo["ok"], demo["tokens_match"], demo["fallbacks"], demo["graphs"]) == (True, True, [], 4)


def test_the_installed_wheel_keeps_the_rules_of_the_platform(wheel: Path) -> None:
    name, taken = policy(wheel)
    # Or an older one, which is as good.
    version = tuple(map(int, name.split("_")[1:3]))
    assert name.startswith("manylinux_")
    assert version <= (2, 28)
    assert taken == {}


def test_the_rules_refuse_what_needs_a_newer_c_library(wheel: Path, tmp_path: Path) -> None:
    """So that the test above can fail: the same wheel, its hook after another version of one function."""
    spoilt = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(spoilt, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            new.writestr(item, with_newer_version(content) if item.filename.endswith("_hook.so") else content)
    name, _ = policy(spoilt)
    assert not name.startswith("manylinux_")


def with_newer_version(elf: bytes) -> bytes:
    """A library that says to need GLIBC_2.99 for what it needed GLIBC_2.14 for (memcpy)."""
    assert elf.count(b"GLIBC_2.14\0") == 1
    return elf.replace(b"GLIBC_2.14\0", b"GLIBC_2.99\0")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("generation", [12, 13])
def test_the_installed_wheel_works_without_a_compiler(wheel: Path, generation: int) -> None:
    """With the bindings of either generation of CUDA: the hook is the same file."""
    smoke(wheel, "--with", f"cuda-python=={generation}.*")


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_source_distribution_makes_a_wheel_that_works(tmp_path: Path) -> None:
    if os.environ.get("PACKAGE") != "1":
        pytest.skip("builds everything again: set PACKAGE=1 to run it")
    line = [sys.executable, "-P", str(PACKAGING / "build.py"), "--out", str(tmp_path)]
    done = subprocess.run(line, capture_output=True, text=True, timeout=2400, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    [source] = tmp_path.glob("*.tar.gz")
    [made] = tmp_path.glob("*.whl")
    assert made.name.endswith(f"-{PLATFORM}.whl")
    with tarfile.open(source) as archive:
        assert any(name.endswith("/cmake/StaticRuntime.cmake") for name in archive.getnames())
    smoke(made)
