# SPDX-License-Identifier: Apache-2.0
"""Which versions of vLLM are known, and which module has their seams."""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, cast

from foundryd.errors import EngineUnsupported


class Seams(Protocol):
    """A module with the seams of a range of versions."""

    def install(self) -> None:
        """Lets every worker of this process have the seams; a second call changes nothing."""


@dataclass(frozen=True)
class Range:
    """Versions from ``first`` up to, and without, ``before``."""

    first: str
    before: str
    module: str


# The one table.  A range is a promise: each of its releases was read, and its seams are where the module says.
RANGES = (Range("0.22.1", "0.22.2", "foundryd.engines.vllm.v0_22"),)


def installed() -> str:
    """The version of the vLLM that is installed; raises ``EngineUnsupported`` where there is none."""
    try:
        return version("vllm")
    except PackageNotFoundError:
        raise EngineUnsupported("vLLM is not installed as a package, so its version is not known: install it") from None


def seams_of(found: str) -> Seams:
    """The module for a version; raises ``EngineUnsupported`` for one that is in no range."""
    numbers = _release(found)
    for known in RANGES:
        if numbers is not None and _release(known.first) <= numbers < _release(known.before):  # type: ignore[operator]
            return cast(Seams, importlib.import_module(known.module))
    ranges = ", ".join(f"{r.first} up to and without {r.before}" for r in RANGES)
    raise EngineUnsupported(
        f"vLLM is {found} and this foundryd knows {ranges}: install a release that it knows, or a newer foundryd"
    )


def _release(text: str) -> tuple[int, ...] | None:
    """``0.22.1`` or ``0.22.1+cu130`` as numbers; None for what is no release, such as ``0.22.1rc2``."""
    if not re.fullmatch(r"\d{1,6}(\.\d{1,6}){1,3}(\+[a-zA-Z0-9.]+)?", text):
        return None
    return tuple(int(part) for part in text.split("+")[0].split("."))
