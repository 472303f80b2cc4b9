# SPDX-License-Identifier: Apache-2.0
"""Outputs of a captured function: what they are, and how they pass through an archive."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from foundryd.errors import ArchiveFormatError, CaptureError

_SCALARS = (type(None), bool, int, float, str, bytes)


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
    """Turns nested tuples, lists and dicts of ``DeviceArray`` and scalars into what msgpack holds.

    Raises ``CaptureError`` for anything that would not come back as it went: subclasses, such as named tuples, too.
    """
    kind = type(outputs)
    if kind in _SCALARS and (kind is not int or -(2**63) <= outputs < 2**64):
        return {"v": outputs}
    if kind is DeviceArray:
        return {"a": [outputs.address, list(outputs.shape), outputs.dtype]}
    if kind is tuple:
        return {"t": [encode_outputs(o) for o in outputs]}
    if kind is list:
        return {"l": [encode_outputs(o) for o in outputs]}
    if kind is dict and all(type(k) is str for k in outputs):
        return {"d": {k: encode_outputs(o) for k, o in outputs.items()}}
    what = f"the {outputs.bit_length()}-bit int {outputs}" if kind is int else f"a {kind.__name__}"
    raise CaptureError(
        f"a captured function returned {what}, which an archive cannot hold: return DeviceArray, numbers of 64 bits, "
        "text, or plain tuples, lists and dicts of them"
    )


def decode_outputs(encoded: Any) -> Any:
    """The inverse of ``encode_outputs``; raises ``ArchiveFormatError`` for anything else."""
    # Patterns would take three times as long, and a restore decodes the outputs of every graph.
    kind, value = next(iter(encoded.items())) if type(encoded) is dict and len(encoded) == 1 else ("", None)
    if kind == "v":
        return value
    if kind == "d" and isinstance(value, dict):
        return {k: decode_outputs(i) for k, i in value.items()}
    if isinstance(value, list | tuple):
        if kind == "l":
            return [decode_outputs(i) for i in value]
        if kind == "t":
            return tuple([decode_outputs(i) for i in value])
        match value:
            case [int(address), [*shape], str(dtype)] if kind == "a":
                return DeviceArray(address, tuple(int(s) for s in shape), dtype)
    raise ArchiveFormatError(
        f"the outputs of a graph are described by {encoded!r}, which no writer makes: capture again"
    )


def freeze_key(key: Any) -> Any:
    """A graph's key as something hashable, whether it came from the engine or from msgpack."""
    return tuple(freeze_key(k) for k in key) if isinstance(key, list | tuple) else key
