# SPDX-License-Identifier: Apache-2.0
"""What collectives must give, in NumPy: reductions in rank order, in the documented precision, rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def storage(dtype: str) -> npt.DTypeLike:
    """NumPy has no bfloat16: its bits are uint16."""
    return np.uint16 if dtype == "bfloat16" else np.dtype(dtype)


def widen_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow_bfloat16(values: Array) -> Array:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def random(dtype: str, count: int, seed: int) -> Array:
    generator = np.random.default_rng(seed)
    if dtype == "bfloat16":
        return narrow_bfloat16(generator.normal(size=count))
    if np.issubdtype(np.dtype(dtype), np.floating):
        return generator.normal(size=count).astype(dtype)
    info = np.iinfo(dtype)
    return generator.integers(info.min, info.max, count, dtype=dtype, endpoint=True)


def reduce(dtype: str, op: str, inputs: list[Array]) -> Array:
    if dtype == "bfloat16":
        return narrow_bfloat16(_fold(op, [widen_bfloat16(a) for a in inputs]))
    if dtype == "float16":
        with np.errstate(over="ignore"):
            return _fold(op, [a.astype(np.float32) for a in inputs]).astype(np.float16)
    if np.issubdtype(np.dtype(dtype), np.floating):
        return _fold(op, inputs)
    wide = np.int64 if np.issubdtype(np.dtype(dtype), np.signedinteger) else np.uint64
    return _fold(op, [a.astype(wide) for a in inputs]).astype(dtype)


def _fold(op: str, inputs: list[Array]) -> Array:
    functions: dict[str, Any] = {
        "sum": np.add,
        "avg": np.add,
        "prod": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
    }
    total = inputs[0]
    with np.errstate(over="ignore"):
        for other in inputs[1:]:
            total = functions[op](total, other)
    if op != "avg":
        return total
    if np.issubdtype(total.dtype, np.floating):
        return (total / total.dtype.type(len(inputs))).astype(total.dtype)
    magnitude = np.abs(total) // len(inputs) if np.issubdtype(total.dtype, np.signedinteger) else total // len(inputs)
    return (np.sign(total) * magnitude if np.issubdtype(total.dtype, np.signedinteger) else magnitude).astype(
        total.dtype
    )


def collective(name: str, dtype: str, op: str, inputs: list[Array], root: int) -> list[Array | None]:
    """What every rank receives; None where it must not be written.  ``inputs`` are the ranks' send buffers."""
    size = len(inputs)
    slices = [a.reshape(size, -1) for a in inputs] if name in {"ReduceScatter", "AlltoAll", "Scatter"} else []
    everyone = range(size)
    if name == "AllReduce":
        return [reduce(dtype, op, inputs)] * size
    if name == "Reduce":
        return [reduce(dtype, op, inputs) if rank == root else None for rank in everyone]
    if name == "ReduceScatter":
        return [reduce(dtype, op, [s[rank] for s in slices]) for rank in everyone]
    if name == "AllGather":
        return [np.concatenate(inputs)] * size
    if name == "Gather":
        return [np.concatenate(inputs) if rank == root else None for rank in everyone]
    if name == "AlltoAll":
        return [np.concatenate([s[rank] for s in slices]) for rank in everyone]
    if name == "Broadcast":
        return [inputs[root]] * size
    assert name == "Scatter"
    return [slices[root][rank] for rank in everyone]
