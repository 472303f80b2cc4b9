# SPDX-License-Identifier: Apache-2.0
"""Decoders of the shapes that engines serve, sharded by tensor and expert parallelism, whose steps can be captured.

One step decodes one token of each of ``n`` requests.  Everything that changes between replays (tokens, positions) is
read from static tensors; nothing reads device memory from the host.  Collectives are called eagerly between segments,
and ``compile`` wraps each segment in ``torch.compile``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
from moe import Experts
from segments import add_norm, attention, best_of, embed_baked, embed_runtime, gumbel, mlp, rms_norm, segment
from sharding import Axis, Weights
from torch import Tensor, nn


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the whole model, before sharding.

    Attributes
    ----------
    kind : ``dense`` or ``moe``.
    intermediate : width of the MLP, or of each expert.
    dispatch : how tokens reach experts, ``all-gather`` (and reduce-scatter) or ``all-to-all``.
    place : how a rank's part of vocabulary and experts gets into kernels: ``baked`` as Python integers, which end up
        in parameters or, compiled, in code; ``runtime`` as a tensor beside the weights.
    head : ``argmax`` joins each rank's best token, ``gather`` joins the logits.
    norm : ``torch`` or ``triton``, a hand-written kernel that adds the residual and normalises.
    sampling : draws the token with the Philox generator instead of taking the best.
    """

    kind: str = "dense"
    layers: int = 2
    hidden: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocab: int = 151936
    max_batch: int = 64
    max_seq: int = 512
    experts: int = 8
    top_k: int = 2
    dispatch: str = "all-gather"
    place: str = "baked"
    head: str = "argmax"
    norm: str = "torch"
    compile: bool = False
    sampling: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 1
    eps: float = 1e-6
    rope_theta: float = 1e6


@dataclass
class Cache:
    """Keys and values of one layer, [max_batch, max_seq, kv_heads, head_dim] each."""

    keys: Tensor
    values: Tensor


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys, split by heads over the tp axis."""

    def __init__(self, at: str, c: ModelConfig, w: Weights, tp: Axis) -> None:
        super().__init__()
        q = tp.split(c.heads, "heads") * c.head_dim
        kv = tp.split(c.kv_heads, "key heads") * c.head_dim
        self.qkv = w.empty(q + 2 * kv, c.hidden)
        parts = self.qkv.data.split([q, kv, kv])
        for part, name, heads in zip(parts, "qkv", (c.heads, c.kv_heads, c.kv_heads), strict=True):
            w.fill(part, f"{at}.{name}", (heads * c.head_dim, c.hidden), tp)
        self.q_norm = w.norm(f"{at}.q_norm", c.head_dim)
        self.k_norm = w.norm(f"{at}.k_norm", c.head_dim)
        self.out = w.make(f"{at}.out", (c.hidden, c.heads * c.head_dim), tp, dim=1)
        self._c, self._tp = c, tp

    def forward(self, h: Tensor, tables: dict[str, Tensor], positions: Tensor, cache: Cache) -> Tensor:
        weights = {"qkv": self.qkv, "q_norm": self.q_norm, "k_norm": self.k_norm, "out": self.out}
        run = segment(attention, self._c.compile)
        return self._tp.all_reduce(run(h, weights, tables, positions, cache.keys, cache.values, self._c.eps))


class Mlp(nn.Module):
    """SwiGLU, split by columns and then rows over the tp axis."""

    def __init__(self, at: str, c: ModelConfig, w: Weights, tp: Axis) -> None:
        super().__init__()
        inner = tp.split(c.intermediate, "columns")
        self.gate_up = w.empty(2 * inner, c.hidden)
        for part, name in zip(self.gate_up.data.split(inner), ("gate", "up"), strict=True):
            w.fill(part, f"{at}.{name}", (c.intermediate, c.hidden), tp)
        self.down = w.make(f"{at}.down", (c.hidden, c.intermediate), tp, dim=1)
        self._compile, self._tp = c.compile, tp

    def forward(self, h: Tensor) -> Tensor:
        return self._tp.all_reduce(segment(mlp, self._compile)(h, self.gate_up, self.down))


class Decoder(nn.Module):
    """One rank's model.  Make it inside the weights arena, then call ``load`` outside.

    Parameters
    ----------
    tp, ep : places on the axes; ranks along ``ep`` decode different requests, ranks along ``tp`` the same ones.
    generator : of the device, for ``sampling``; None is the default generator.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        *,
        tp: Axis | None = None,
        ep: Axis | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tp, self.ep = config, tp or Axis(), ep or Axis()
        self.generator = generator
        c, w = config, Weights(device, config.dtype, config.seed)
        self._weights = w
        rows = self.tp.split(c.vocab, "tokens")
        self.embedding = w.make("embedding", (c.vocab, c.hidden), self.tp)
        self.attentions = nn.ModuleList(Attention(f"layers.{i}", c, w, self.tp) for i in range(c.layers))
        self.mlps = nn.ModuleList(self._feed_forward(f"layers.{i}", w) for i in range(c.layers))
        self.norms = nn.ParameterList(w.norm(f"norms.{i}", c.hidden) for i in range(2 * c.layers + 1))
        self.lm_head = w.make("lm_head", (c.vocab, c.hidden), self.tp)
        self.first_token = self.tp.rank * rows
        # On every rank, so that all allocate alike; its value is the rank's.
        self.register_buffer("first", w.constant((), torch.int64, lambda: torch.tensor(self.first_token)))
        self.tables = _tables(c, w)
        for name, table in self.tables.items():
            self.register_buffer(name, table)
        self._add_norm = self._norm_function()

    def load(self) -> None:
        """Fills weights and tables; makes temporaries."""
        self._weights.load()

    def cache(self, more: int = 0) -> list[Cache]:
        """Empty keys and values of every layer; make them in the kv arena and zero them.

        They have room for ``more`` requests than are ever decoded.
        """
        c = self.config
        shape = (c.max_batch + more, c.max_seq, c.kv_heads // self.tp.size, c.head_dim)
        empty = partial(torch.empty, shape, device=self.embedding.device, dtype=c.dtype)
        return [Cache(empty(), empty()) for _ in range(c.layers)]

    def forward(self, tokens: Tensor, positions: Tensor, caches: list[Cache]) -> dict[str, Tensor]:
        """The next ``tokens`` int64 [n] and this rank's ``logits`` [n, vocab / tp].

        ``tokens`` and ``positions`` are int64 [n]; caches are written at ``positions``.
        """
        c = self.config
        x = self.tp.all_reduce(self._embed(tokens))
        h = segment(rms_norm, c.compile)(x, self.norms[0], c.eps)
        for i, (attend, feed_forward) in enumerate(zip(self.attentions, self.mlps, strict=True)):
            x, h = self._add_norm(x, attend(h, self.tables, positions, caches[i]), self.norms[2 * i + 1], c.eps)
            x, h = self._add_norm(x, feed_forward(h), self.norms[2 * i + 2], c.eps)
        logits = F.linear(h, self.lm_head)
        return {"tokens": self._next(logits), "logits": logits}

    def _embed(self, tokens: Tensor) -> Tensor:
        if self.config.place == "runtime":
            return segment(embed_runtime, self.config.compile)(tokens, self.embedding, self.first)
        return segment(embed_baked, self.config.compile)(tokens, self.embedding, self.first_token)

    def _next(self, logits: Tensor) -> Tensor:
        c = self.config
        scores = gumbel(logits, self.generator) if c.sampling else logits
        n = logits.shape[0]
        if c.head == "gather":
            whole = self.tp.all_gather(scores).view(self.tp.size, n, -1)
            return whole.transpose(0, 1).reshape(n, -1).argmax(-1)
        best = best_of(scores, self.first if c.place == "runtime" else self.first_token)
        every = self.tp.all_gather(best).view(self.tp.size, n, 2)
        return every[..., 1].gather(0, every[..., 0].argmax(0, keepdim=True))[0].long()

    def _feed_forward(self, at: str, w: Weights) -> nn.Module:
        if self.config.kind == "dense":
            return Mlp(at, self.config, w, self.tp)
        return Experts(at, self.config, w, self.tp, self.ep)

    def _norm_function(self) -> Callable[..., tuple[Tensor, Tensor]]:
        if self.config.norm == "triton":
            from kernels import fused_add_norm

            return fused_add_norm
        return segment(add_norm, self.config.compile)


def _tables(c: ModelConfig, w: Weights) -> dict[str, Tensor]:
    """Constants of the attention: angles [max_seq, head_dim / 2], and counts of requests and of places in the cache."""

    def angles() -> Tensor:
        powers = torch.arange(0, c.head_dim, 2, dtype=torch.float64) / c.head_dim
        return torch.arange(c.max_seq, dtype=torch.float64)[:, None] / c.rope_theta**powers

    shape = (c.max_seq, c.head_dim // 2)
    return {
        "cos": w.constant(shape, torch.float32, lambda: angles().cos()),
        "sin": w.constant(shape, torch.float32, lambda: angles().sin()),
        "rows": w.constant((c.max_batch,), torch.int64, lambda: torch.arange(c.max_batch)),
        "slots": w.constant((c.max_seq,), torch.int64, lambda: torch.arange(c.max_seq)),
    }
