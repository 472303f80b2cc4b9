# SPDX-License-Identifier: Apache-2.0
"""Outputs of a captured function: what they are, and how they pass through an archive."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from foundryd.errors import ArchiveFormatError, CaptureError


@dataclass(frozen=True)
class DeviceArray:
    """A contiguous array in device memory, for any library that knows ``__cuda_array_interface__``.

    Attributes
    ----------
    address : device address in bytes.
    shape : elements along each axis.
    dtype : NumPy type string, ``<f4`` or ``float32``.
    """

    address: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": np.dtype(self.dtype).str,
            "data": (self.address, False),
            "version": 3,
            "strides": None,
        }


def encode_outputs(outputs: Any) -> Any:
    """Turns nested tuples, lists and dicts of ``DeviceArray`` and scalars into what msgpack holds."""
    if outputs is None or isinstance(outputs, bool | int | float | str | bytes):
        return {"v": outputs}
    if isinstance(outputs, DeviceArray):
        return {"a": [outputs.address, list(outputs.shape), outputs.dtype]}
    if isinstance(outputs, tuple):
        return {"t": [encode_outputs(o) for o in outputs]}
    if isinstance(outputs, list):
        return {"l": [encode_outputs(o) for o in outputs]}
    if isinstance(outputs, dict) and all(isinstance(k, str) for k in outputs):
        return {"d": {k: encode_outputs(o) for k, o in outputs.items()}}
    raise CaptureError(
        f"a captured function returned a {type(outputs).__name__}, which an archive cannot hold: "
        "return DeviceArray, numbers, text, or tuples, lists and dicts of them"
    )


def decode_outputs(encoded: Any) -> Any:
    """The inverse of ``encode_outputs``; raises ``ArchiveFormatError`` for anything else."""
    match encoded:
        case {"v": value}:
            return value
        case {"a": [int(address), [*shape], str(dtype)]}:
            return DeviceArray(address, tuple(int(s) for s in shape), dtype)
        case {"t": [*items]}:
            return tuple(decode_outputs(i) for i in items)
        case {"l": [*items]}:
            return [decode_outputs(i) for i in items]
        case {"d": dict(items)}:
            return {k: decode_outputs(i) for k, i in items.items()}
    raise ArchiveFormatError(
        f"the outputs of a graph are described by {encoded!r}, which no writer makes: capture again"
    )


def freeze_key(key: Any) -> Any:
    """A graph's key as something hashable, whether it came from the engine or from msgpack."""
    return tuple(freeze_key(k) for k in key) if isinstance(key, list | tuple) else key
