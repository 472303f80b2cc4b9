# SPDX-License-Identifier: Apache-2.0
"""The whole model in NumPy, unsplit and without a device: the tokens that every rank must produce.

Requests do not influence each other, so all of them, of every cell and every batch size, go through at once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foundryd.demo import weights
from foundryd.demo.config import DemoConfig
from foundryd.demo.numerics import (
    ACTIVATION,
    DECAY_STEPS,
    EXPERT,
    F32,
    RESIDUAL,
    ROPE,
    SPECIAL_TOKENS,
    decay_table,
    prompts,
    quantise,
    rope_table,
)

I32 = NDArray[np.int32]
ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class Expected:
    """What the world produces.

    Attributes
    ----------
    tokens : for each cell and batch size, the token sampled at each step for each request: int32 [batch, steps].
    expert_load : tokens that each expert got, int64 [layers, experts].
    """

    tokens: dict[tuple[int, int], I32]
    expert_load: NDArray[np.int64]


def expected(c: DemoConfig) -> Expected:
    """Decodes every request of the world."""
    keys = [(cell, batch) for cell in range(c.cells) for batch in c.batch_sizes]
    given = np.concatenate([prompts(c.seed, cell, batch, c.prompt, c.vocab) for cell, batch in keys])
    model = _Model(c)
    sampled = np.concatenate([model.decode(given[at : at + ROWS_AT_ONCE]) for at in range(0, len(given), ROWS_AT_ONCE)])
    ends = np.cumsum([batch for _, batch in keys])
    return Expected(dict(zip(keys, np.split(sampled, ends[:-1]), strict=True)), model.load)


class _Model:
    def __init__(self, config: DemoConfig) -> None:
        self.c = config
        self.w = weights.whole(config)
        self.decay = decay_table()
        self.rope = rope_table(config.max_seq, config.head_dim // 2)
        self.load = np.zeros((config.layers, config.experts), dtype=np.int64)

    def decode(self, given: I32) -> I32:
        """Feeds the prompts, then what was sampled; int32 [rows, prompt] to int32 [rows, steps]."""
        c = self.c
        cache = np.zeros((c.layers, 2, len(given), c.steps, c.kv_heads, c.head_dim), dtype=np.float32)
        sampled: list[I32] = []
        for step in range(c.steps):
            sampled.append(self._step(given[:, step] if step < c.prompt else sampled[-1], step, cache))
        return np.stack(sampled, axis=1)

    def _step(self, tokens: I32, position: int, cache: F32) -> I32:
        c, w = self.c, self.w
        x = w["embed"][tokens]
        for layer in range(c.layers):
            at = f"layers.{layer}."
            h = self._norm(x, w[at + "attention_norm"])
            attended = self._attention(h, at, position, cache[layer]) @ w[at + "wo"].T
            x = quantise(x + np.floor(attended * np.float32(c.scales.attention) + np.float32(0.5)), RESIDUAL)
            h = self._norm(x, w[at + "moe_norm"])
            mixed, total = self._experts(h, at, layer)
            mean = mixed * np.float32(c.scales.experts) / total[:, None]
            x = quantise(x + np.floor(mean + np.float32(0.5)), RESIDUAL)
        logits = self._norm(x, w["norm"]) @ w["lm_head"].T
        logits[:, :SPECIAL_TOKENS] = -np.inf
        best: I32 = np.argmax(logits, axis=1).astype(np.int32)
        return best

    def _norm(self, x: F32, gain: F32) -> F32:
        mean = np.sum(x * x, axis=1, dtype=np.float32) / np.float32(self.c.hidden)
        root = np.sqrt(mean + np.float32(0.0625))
        return quantise(x * gain / root[:, None], ACTIVATION)

    def _attention(self, h: F32, at: str, position: int, cache: F32) -> F32:
        c, w = self.c, self.w
        rows = len(h)

        def heads(name: str, count: int) -> F32:
            projected = quantise(h @ w[at + name].T * np.float32(c.scales.project), ACTIVATION)
            return projected.reshape(rows, count, c.head_dim)

        q = self._rotate(heads("wq", c.heads), position)
        cache[0][:, position] = self._rotate(heads("wk", c.kv_heads), position)
        cache[1][:, position] = heads("wv", c.kv_heads)
        group = c.heads // c.kv_heads
        keys, values = (np.repeat(part[:, : position + 1], group, axis=2) for part in cache)
        scores = np.floor(np.einsum("rhd,rphd->rhp", q, keys) * np.float32(c.scales.score) + np.float32(0.5))
        share = self._weights(scores)
        out = np.einsum("rhp,rphd->rhd", share, values) / share.sum(axis=2, dtype=np.float32)[:, :, None]
        return quantise(out, ACTIVATION).reshape(rows, -1)

    def _rotate(self, x: F32, position: int) -> F32:
        cos, sin = self.rope[position, :, 0], self.rope[position, :, 1]
        even, odd = x[..., 0::2], x[..., 1::2]
        out = np.empty_like(x)
        out[..., 0::2] = quantise((even * cos - odd * sin) / np.float32(ROPE), ACTIVATION)
        out[..., 1::2] = quantise((even * sin + odd * cos) / np.float32(ROPE), ACTIVATION)
        return out

    def _weights(self, scores: F32) -> F32:
        """Unnormalised softmax of scores in steps of the decay table, over the last axis."""
        below = scores.max(axis=-1, keepdims=True) - scores
        share: F32 = self.decay[np.minimum(below, DECAY_STEPS - 1).astype(np.int64)]
        return share

    def _experts(self, h: F32, at: str, layer: int) -> tuple[F32, F32]:
        """The weighted sum of the chosen experts and the sum of the weights."""
        c, w = self.c, self.w
        logits = h @ w[at + "router"].T
        chosen = np.argsort(-logits, axis=1, kind="stable")[:, : c.top_k]
        picked = np.take_along_axis(logits, chosen, axis=1)
        below = np.floor((picked[:, :1] - picked) * np.float32(c.scales.router) + np.float32(0.5))
        share = self._weights(-below)
        mixed = np.zeros_like(h)
        for expert in range(c.experts):
            rows, choice = np.nonzero(chosen == expert)
            self.load[layer, expert] += len(rows)
            gate_up = w[at + "gate_up"][expert].reshape(2 * c.intermediate, c.hidden)
            inner = quantise(h[rows] @ gate_up.T * np.float32(c.scales.project), ACTIVATION)
            gate, up = inner[:, : c.intermediate], inner[:, c.intermediate :]
            active = quantise(np.maximum(gate, np.float32(0)) * up * np.float32(c.scales.gate), EXPERT)
            mixed[rows] += share[rows, choice, None] * (active @ w[at + "down"][expert].T)
        return mixed, share.sum(axis=1, dtype=np.float32)
