# SPDX-License-Identifier: Apache-2.0
"""Where the native parts lie: the hook, the software driver, the NCCL stubs, kernel images, extension modules."""

from __future__ import annotations

from pathlib import Path

from foundryd.errors import UsageError


def find(name: str) -> Path:
    """Path of a native file, ``libfoundryd_hook.so`` or ``soft/libcuda.so.1`` for example.

    An editable install keeps Python and native files in two folders, so every folder of the package is looked at.
    """
    for folder in __path__:
        path = Path(folder) / name
        if path.exists():
            return path
    raise UsageError(f"the native file {name} is not in {list(__path__)}: install foundryd again from a complete build")


def hook_library() -> Path:
    """The library to preload."""
    return find("libfoundryd_hook.so")


def soft_folder() -> Path:
    """Folder of the software driver and its NCCL, for ``LD_LIBRARY_PATH``."""
    return find("soft/libcuda.so.1").parent


def fake_nccl() -> Path:
    """The NCCL stub for capture, to preload after the hook."""
    return find("fake/libnccl.so.2")


def image(name: str) -> Path:
    """A fat binary with kernels for the software driver, by its name without the ending."""
    return find(f"images/{name}.fatbin")
