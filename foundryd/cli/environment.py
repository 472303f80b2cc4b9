# SPDX-License-Identifier: Apache-2.0
"""What a command puts into the environment of the engines it starts."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from foundryd import _native
from foundryd.errors import UsageError


def driver_environment(choice: str, env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Variables that select the driver: ``soft``, ``cuda``, or ``auto``, which is cuda where a device answers."""
    env = os.environ if env is None else env
    if choice not in ("auto", "cuda", "soft"):
        raise UsageError(f"the driver {choice!r} is not known: use auto, cuda or soft")
    if choice == "cuda" or (choice == "auto" and device_answers()):
        return {}
    before = env.get("LD_LIBRARY_PATH", "")
    soft = str(_native.soft_folder())
    return {"LD_LIBRARY_PATH": f"{soft}:{before}" if before else soft}


def device_answers() -> bool:
    """Whether a CUDA driver is here and sees a device; makes no context."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return library.cuInit(0) == 0 and library.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def restore_environment(env: Mapping[str, str], *, archive: str, group: str, variant: str) -> dict[str, str]:
    """Variables with which an engine restores; the hook goes before whatever is preloaded already."""
    from foundryd.capture.runs import preload

    out = {
        "FOUNDRYD_MODE": "restore",
        "FOUNDRYD_ARCHIVE": archive,
        "FOUNDRYD_GROUP": group,
        "LD_PRELOAD": preload(env, _native.hook_library()),
        "NCCL_GRAPH_REGISTER": "0",
        "NCCL_RUNTIME_CONNECT": "0",
    }
    if variant:
        out["FOUNDRYD_VARIANT"] = variant
    return out
