# SPDX-License-Identifier: Apache-2.0
"""The demo's arithmetic: small integers in float32, so that every sum is exact in any order.

Weights and activations are whole numbers.  A dot product of bounded whole numbers stays below 2**24, where float32
counts exactly, so neither the order of an all-reduce nor a fused multiply-add can change it.  After a sum comes one
of: scaling by a power of two, an IEEE division or square root; then rounding by ``floor(x + 0.5)`` and clamping to
the next bound.  No library function is used whose result differs between machines.  ``kernels/portable.h`` is the
other half of this file.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foundryd.errors import UsageError

EXACT = 1 << 24  # float32 counts in whole numbers up to here
ACTIVATION = 127  # bound of activations
EXPERT = 31  # bound inside an expert
RESIDUAL = 63  # bound of the residual stream
EMBEDDING = 24  # bound of the embedding table
WEIGHT = 4  # bound of weight matrices
DECAY = 16  # first value of the decay table
DECAY_STEPS = 128  # its length
DECAY_OCTAVE = 8  # steps in which it halves
ROPE = 64  # what 1.0 is in the RoPE table
SPECIAL_TOKENS = 16  # the first tokens of the vocabulary are never sampled

F32 = NDArray[np.float32]


def check_exact(bounds: Mapping[str, int]) -> None:
    """Raises ``UsageError`` for the first sum that float32 might round."""
    for what, bound in bounds.items():
        if bound >= EXACT:
            raise UsageError(f"{what} can reach {bound}, float32 is exact below {EXACT}: choose smaller dimensions")


def quantise(x: NDArray[Any], bound: int) -> F32:
    """Rounds to the nearest whole number, halves up, and clamps to ``[-bound, bound]``."""
    out: F32 = np.clip(np.floor(x + np.float32(0.5)), np.float32(-bound), np.float32(bound))
    return out


def power_scale(terms: int, spread: float, wanted: float) -> float:
    """The power of two that brings a sum of ``terms`` values of standard deviation ``spread`` near ``wanted``."""
    return float(2.0 ** -round(math.log2(math.sqrt(terms) * spread / wanted)))


def decay_table() -> F32:
    """``round(DECAY * 2 ** (-i / DECAY_OCTAVE))``: the softmax's exponential, float32 [DECAY_STEPS]."""
    steps = np.arange(DECAY_STEPS, dtype=np.float64)
    return np.floor(DECAY * 2.0 ** (-steps / DECAY_OCTAVE) + 0.5).astype(np.float32)


def rope_table(positions: int, half: int) -> F32:
    """Cosine and sine for each position and pair, whole numbers up to ROPE, float32 [positions, half, 2].

    Wavelengths are powers of two from 8 to 1024 tokens, so that a phase is exact.
    """
    wavelength = np.array([1 << (3 + pair * 8 // half) for pair in range(half)], dtype=np.int64)
    place = np.arange(positions, dtype=np.int64)[:, None] % wavelength
    turns = place.astype(np.float32) / wavelength.astype(np.float32)
    cos, sin = _sine(turns + np.float32(0.25)), _sine(turns)
    return np.stack([quantise(cos * np.float32(ROPE), ROPE), quantise(sin * np.float32(ROPE), ROPE)], axis=-1)


def _sine(turns: NDArray[Any]) -> F32:
    """Sine of a number of turns in [0, 2): a polynomial on a quarter, each operation rounded on its own."""
    quarters = turns * np.float32(4)
    quadrant = np.floor(quarters)
    part = quarters - quadrant
    index = quadrant.astype(np.int64) % 4
    part = np.where(index % 2 == 1, np.float32(1) - part, part)
    square = part * part
    value = np.float32(0.07969262) - square * np.float32(0.00468175)
    value = np.float32(0.64596409) - square * value
    value = np.float32(1.57079632) - square * value
    value = part * value
    return np.where(index >= 2, -value, value).astype(np.float32)


def hashed(seed: int, name: str, index: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """A number for each index, the same on every machine and NumPy version (splitmix64)."""
    with np.errstate(over="ignore"):
        x = index + np.uint64((seed << 32 | zlib.crc32(name.encode())) & 0xFFFFFFFFFFFFFFFF)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        out: NDArray[np.uint64] = x ^ (x >> np.uint64(29))
        return out


def prompts(seed: int, cell: int, batch: int, length: int, vocab: int) -> NDArray[np.int32]:
    """Prompts of a cell's requests at one batch size, int32 [batch, length], none of them a special token."""
    index = np.arange(batch * length, dtype=np.uint64)
    numbers = hashed(seed, f"prompt/{cell}/{batch}", index) % np.uint64(vocab - SPECIAL_TOKENS)
    return (numbers.astype(np.int32) + SPECIAL_TOKENS).reshape(batch, length)
