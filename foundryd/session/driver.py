# SPDX-License-Identifier: Apache-2.0
"""The one checked path from Python to the CUDA driver."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

from cuda.bindings import driver

from foundryd.errors import DriverCallFailed


def call(name: str, *arguments: Any) -> Any:
    """Calls ``cuda.bindings.driver.<name>``; returns its value, a tuple of values, or None.

    Raises ``DriverCallFailed`` with the call's name and the driver's name for the error.
    """
    code, *values = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise DriverCallFailed(
            f"{name} failed with {driver.CUresult(code).name}: see the driver's manual for this call"
        )
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


@lru_cache(maxsize=1)
def software_driver() -> bool:
    """Whether the ``libcuda.so.1`` of this process is the software driver."""
    return hasattr(ctypes.CDLL("libcuda.so.1"), "softcuda_counters")
