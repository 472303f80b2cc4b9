# SPDX-License-Identifier: Apache-2.0
"""Which NCCL is installed as a package beside foundryd."""

from __future__ import annotations

from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

_PACKAGES = ("nvidia-nccl-cu12", "nvidia-nccl-cu13")


def installed_nccl() -> str | None:
    """The number of the NCCL that is installed beside foundryd, 22809 for 2.28.9; None if there is none or two differ.

    The stub takes its place while capturing and answers with this version, which a restoring engine must then have.
    """
    found = set()
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            found.add(version(package))
    numbers = found.pop().split(".")[:3] if len(found) == 1 else []
    if len(numbers) != 3 or not all(n.isdecimal() for n in numbers):
        return None
    major, minor, patch = map(int, numbers)
    return str(major * 10000 + minor * 100 + patch)


def nccl_folder() -> Path | None:
    """Where a package's ``libnccl.so.2`` is; None if none is.  A system may have another version, too."""
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            library = Path(str(distribution(package).locate_file("nvidia/nccl/lib/libnccl.so.2")))
            if library.exists():
                return library.parent
    return None
