# SPDX-License-Identifier: Apache-2.0
"""What runs between two collectives: functions of tensors, which can be compiled each on its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square normalisation over the last dimension, in float32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The residual stream with ``delta`` added, and its normalisation."""
    x = x + delta
    return x, rms_norm(x, weight, eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of ``x`` [n, heads, dim] by angles [n, 1, dim / 2]."""
    a, b = x.float().chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def attention(
    h: Tensor,
    w: dict[str, Tensor],
    tables: dict[str, Tensor],
    positions: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
) -> Tensor:
    """This rank's heads; the sum over tensor-parallel ranks is the layer's output.

    With one query a request, the query heads that share a key head can be that head's queries: no head is repeated.
    """
    n, dim, kv = h.shape[0], keys.shape[3], keys.shape[2]
    qkv = F.linear(h, w["qkv"]).view(n, -1, dim)
    q, k, v = qkv.split([qkv.shape[1] - 2 * kv, kv, kv], 1)
    cos, sin = tables["cos"][positions][:, None], tables["sin"][positions][:, None]
    q = rotate(rms_norm(q, w["q_norm"], eps), cos, sin)
    k = rotate(rms_norm(k, w["k_norm"], eps), cos, sin)
    rows = tables["rows"][:n]
    keys[rows, positions] = k
    values[rows, positions] = v
    seen = (tables["slots"] <= positions[:, None])[:, None, None]
    out = F.scaled_dot_product_attention(
        q.view(n, kv, -1, dim), keys[:n].transpose(1, 2), values[:n].transpose(1, 2), attn_mask=seen
    )
    return F.linear(out.reshape(n, -1), w["out"])


def mlp(h: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """This rank's part of a SwiGLU MLP."""
    gate, up = F.linear(h, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def embed_baked(tokens: Tensor, table: Tensor, first: int) -> Tensor:
    """This rank's rows of the embedding, zero for tokens of other ranks; the range is part of the code."""
    mine = (tokens >= first) & (tokens < first + table.shape[0])
    return F.embedding(torch.where(mine, tokens - first, 0), table) * mine[:, None]


def embed_runtime(tokens: Tensor, table: Tensor, first: Tensor) -> Tensor:
    """The same with the range's start in device memory."""
    mine = (tokens >= first) & (tokens < first + table.shape[0])
    return F.embedding(torch.where(mine, tokens - first, 0), table) * mine[:, None]


def best_of(logits: Tensor, first: int | Tensor) -> Tensor:
    """Each row's highest logit and its token in the whole vocabulary, float32 [n, 2]; tokens stay below 2**24."""
    value, index = logits.float().max(-1)
    return torch.stack((value, (index + first).float()), -1)


def gumbel(logits: Tensor, generator: torch.Generator | None) -> Tensor:
    """Logits whose maximum is a draw from their softmax."""
    uniform = torch.rand(logits.shape, generator=generator, device=logits.device)
    return logits.float() - torch.log(-torch.log(uniform))


@cache
def segment(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    """``function``, compiled once for all layers if asked."""
    return torch.compile(function, fullgraph=True) if compiled else function
