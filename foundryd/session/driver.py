# SPDX-License-Identifier: Apache-2.0
"""The one checked path from Python to the CUDA driver."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from cuda.bindings import driver

from foundryd._native import _hook
from foundryd.errors import DriverCallFailed

_clock: _hook.Hook | None = None


def time_calls(hook: _hook.Hook | None) -> None:
    """Has the hook time the driver calls of this process, those through ``call`` included; None ends it.

    What the bindings of Python take for a call is in its time: some microseconds.
    """
    global _clock
    if (switched := hook or _clock) is not None:
        switched.time_driver(hook is not None)
    _clock = hook


def driver_ms() -> float:
    """Milliseconds that this thread was in the driver while calls were timed."""
    return 0.0 if _clock is None else _clock.report().driver_ns / 1e6


def call(name: str, *arguments: Any) -> Any:
    """Calls ``cuda.bindings.driver.<name>``; returns its value, a tuple of values, or None.

    Raises ``DriverCallFailed`` with the call's name and the driver's name for the error.
    """
    code, *values = getattr(driver, name)(*arguments) if _clock is None else _timed(_clock, name, arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        error = DriverCallFailed(
            f"{name} failed with {driver.CUresult(code).name}: see the driver's manual for this call"
        )
        error.code = int(code)
        raise error
    if not values:
        return None
    return values[0] if len(values) == 1 else tuple(values)


def _timed(clock: _hook.Hook, name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    function = getattr(driver, name)
    clock.driver_enter()
    try:
        answer: tuple[Any, ...] = function(*arguments)
    finally:
        clock.driver_leave()
    return answer


@contextmanager
def made_current(context: Any) -> Iterator[None]:
    """The thread's context inside is ``context``; afterwards it is the one before."""
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Calls inside disturb no capture, whichever thread captures.

    The driver's manual (cuThreadExchangeStreamCaptureMode): as long as some thread captures in global mode, what may
    allocate or synchronise is prohibited to every thread whose own mode is not relaxed; the call fails, and the capture
    is lost.  Instantiating a graph is such a call (row ``flight.elsewhere`` of the conformance tests).
    """
    before = call("cuThreadExchangeStreamCaptureMode", driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


@lru_cache(maxsize=1)
def software_driver() -> bool:
    """Whether the ``libcuda.so.1`` of this process is the software driver."""
    return hasattr(ctypes.CDLL("libcuda.so.1"), "softcuda_counters")
