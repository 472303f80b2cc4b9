# SPDX-License-Identifier: Apache-2.0
"""Deterministic weights: a value follows from the seed, the tensor's name and its index, so a shard is made alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foundryd.demo.config import DemoConfig
from foundryd.demo.numerics import EMBEDDING, F32, WEIGHT, hashed


@dataclass(frozen=True)
class Tensor:
    """A tensor of the whole model: ``split`` gives the mesh axis that cuts each dimension, ``""`` for none."""

    name: str
    shape: tuple[int, ...]
    split: tuple[str, ...]
    low: int
    high: int


def tensors(c: DemoConfig) -> list[Tensor]:
    """Every tensor of the model, in the order in which they are allocated."""

    def matrix(name: str, *dims: tuple[int, str]) -> Tensor:
        return Tensor(name, tuple(d for d, _ in dims), tuple(a for _, a in dims), -WEIGHT, WEIGHT)

    def gain(name: str) -> Tensor:
        return Tensor(name, (c.hidden,), ("",), 24, 40)

    out = [Tensor("embed", (c.vocab, c.hidden), ("tp", ""), -EMBEDDING, EMBEDDING)]
    for layer in range(c.layers):
        at = f"layers.{layer}."
        out += [
            gain(at + "attention_norm"),
            matrix(at + "wq", (c.heads * c.head_dim, "tp"), (c.hidden, "")),
            matrix(at + "wk", (c.kv_heads * c.head_dim, "tp"), (c.hidden, "")),
            matrix(at + "wv", (c.kv_heads * c.head_dim, "tp"), (c.hidden, "")),
            matrix(at + "wo", (c.hidden, ""), (c.heads * c.head_dim, "tp")),
            gain(at + "moe_norm"),
            matrix(at + "router", (c.experts, ""), (c.hidden, "")),
            matrix(at + "gate_up", (c.experts, "ep"), (2, ""), (c.intermediate, "tp"), (c.hidden, "")),
            matrix(at + "down", (c.experts, "ep"), (c.hidden, ""), (c.intermediate, "tp")),
        ]
    return [*out, gain("norm"), matrix("lm_head", (c.vocab, "tp"), (c.hidden, ""))]


def make(tensor: Tensor, seed: int, place: dict[str, int], sizes: dict[str, int]) -> F32:
    """The part of a tensor that belongs at ``place`` of axes of the given sizes, float32."""
    index: NDArray[np.uint64] = np.zeros((), dtype=np.uint64)
    for dim, axis in zip(tensor.shape, tensor.split, strict=True):
        count = dim // sizes.get(axis, 1)
        first = place.get(axis, 0) * count
        index = np.asarray(index[..., None] * np.uint64(dim) + np.arange(first, first + count, dtype=np.uint64))
    span = np.uint64(tensor.high - tensor.low + 1)
    return ((hashed(seed, tensor.name, index) % span).astype(np.float32) + np.float32(tensor.low)).astype(np.float32)


def whole(c: DemoConfig) -> dict[str, F32]:
    """The unsplit model, for the reference."""
    return {t.name: make(t, c.seed, {}, {}) for t in tensors(c)}


def shard(c: DemoConfig, rank: int) -> dict[str, F32]:
    """What ``rank`` holds; wq, wk and wv are joined to one ``wqkv``."""
    sizes = {"tp": c.mesh.tp, "ep": c.mesh.ep}
    place = {axis: c.mesh.place(rank)[axis] for axis in sizes}
    out: dict[str, F32] = {}
    for t in tensors(c):
        value = make(t, c.seed, place, sizes)
        stem, _, leaf = t.name.rpartition(".")
        if leaf in ("wq", "wk", "wv"):
            joined = f"{stem}.wqkv"
            out[joined] = np.concatenate([out[joined], value]) if joined in out else value
        else:
            out[t.name] = value
    return out
