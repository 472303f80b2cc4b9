# SPDX-License-Identifier: Apache-2.0
"""The NCCL that is installed as a package: its version is the stub's, and the demo on a GPU runs with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from foundryd import _native
from foundryd.demo.launch import driver_environment
from foundryd.nccl import installed_nccl, nccl_folder

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs packages, by name and version, where nothing else is; their NCCL is the software driver's."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def install(packages: dict[str, str], *, library: bool = True) -> Path:
        folder = tmp_path / "nvidia" / "nccl" / "lib"
        folder.mkdir(parents=True)
        if library:
            shutil.copy(_native.soft_folder() / "libnccl.so.2", folder)
        for package, version in packages.items():
            info = tmp_path / f"{package.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        return folder

    return install


@pytest.mark.parametrize(
    ("packages", "number"),
    [
        ({"nvidia-nccl-cu13": "2.28.9"}, "22809"),
        ({"nvidia-nccl-cu12": "2.27.3"}, "22703"),
        ({"nvidia-nccl-cu12": "2.28.9", "nvidia-nccl-cu13": "2.28.9"}, "22809"),
        ({"nvidia-nccl-cu12": "2.27.3", "nvidia-nccl-cu13": "2.28.9"}, None),
        ({"nvidia-nccl-cu12": "2.28.9.post1"}, "22809"),
        ({"nvidia-nccl-cu12": "2.x.9"}, None),
        ({}, None),
    ],
)
def test_the_stub_answers_with_the_version_that_is_installed(
    install: Install, packages: dict[str, str], number: str | None
) -> None:
    install(packages)
    assert installed_nccl() == number


@pytest.mark.parametrize("package", ["nvidia-nccl-cu12", "nvidia-nccl-cu13"])
def test_a_rank_of_the_demo_on_a_gpu_has_the_package_s_nccl_and_not_the_system_s(
    install: Install, package: str, tmp_path: Path
) -> None:
    """A capture says the package's version, and a restore with another one is refused."""
    system = tmp_path / "system"
    system.mkdir()
    shutil.copy(_native.fake_nccl(), system / "libnccl.so.2")
    ours = install({package: "2.28.9"})
    env = driver_environment("cuda", {"LD_LIBRARY_PATH": str(system)})
    assert env["LD_LIBRARY_PATH"].split(os.pathsep) == [str(ours), str(system)]
    loaded = "import ctypes; ctypes.CDLL('libnccl.so.2'); print(open('/proc/self/maps').read())"
    done = subprocess.run(
        [sys.executable, "-P", "-c", loaded],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert str(ours / "libnccl.so.2") in done.stdout
    assert str(system / "libnccl.so.2") not in done.stdout


@pytest.mark.parametrize("packages", [{}, {"nvidia-nccl-cu13": "2.28.9"}], ids=["no package", "without its library"])
def test_without_a_package_the_system_s_is_used(install: Install, packages: dict[str, str]) -> None:
    install(packages, library=False)
    assert nccl_folder() is None
    assert "LD_LIBRARY_PATH" not in driver_environment("cuda", {})
    with_a_path = driver_environment("cuda", {"LD_LIBRARY_PATH": "/elsewhere"})
    assert with_a_path["LD_LIBRARY_PATH"] == "/elsewhere"
