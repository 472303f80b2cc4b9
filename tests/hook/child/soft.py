# SPDX-License-Identifier: Apache-2.0
"""Driver calls of the children, each checked."""

from __future__ import annotations

from typing import Any

from cuda.bindings import driver as cu

SUCCESS = cu.CUresult.CUDA_SUCCESS


class CudaError(Exception):
    def __init__(self, code: cu.CUresult) -> None:
        super().__init__(code.name)
        self.code = code


def ok(result: tuple[Any, ...]) -> Any:
    code, *values = result
    if code != SUCCESS:
        raise CudaError(code)
    return values[0] if len(values) == 1 else tuple(values)


def start(device: int = 0) -> Any:
    """Makes the device's primary context current."""
    ok(cu.cuInit(0))
    context = ok(cu.cuDevicePrimaryCtxRetain(device))
    ok(cu.cuCtxSetCurrent(context))
    return context


def malloc(size: int) -> int:
    return int(ok(cu.cuMemAlloc(size)))


def free(address: int) -> None:
    ok(cu.cuMemFree(address))


def free_memory() -> int:
    return int(ok(cu.cuMemGetInfo())[0])
