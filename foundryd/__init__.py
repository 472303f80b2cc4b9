# SPDX-License-Identifier: Apache-2.0
"""Restore the CUDA graphs of LLM engines instead of capturing them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foundryd.errors import FoundrydError

if TYPE_CHECKING:
    from foundryd.session.arena import arena
    from foundryd.session.arrays import DeviceArray
    from foundryd.session.graphset import GraphSet
    from foundryd.session.policy import RestorePolicy
    from foundryd.session.session import Session, attach

__all__ = ["DeviceArray", "FoundrydError", "GraphSet", "RestorePolicy", "Session", "__version__", "arena", "attach"]

__version__ = "0.1.0"

# Loaded when first asked for: the daemon and the command line need no CUDA.
_LAZY = {
    "arena": "foundryd.session.arena",
    "attach": "foundryd.session.session",
    "DeviceArray": "foundryd.session.arrays",
    "GraphSet": "foundryd.session.graphset",
    "RestorePolicy": "foundryd.session.policy",
    "Session": "foundryd.session.session",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'foundryd' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
