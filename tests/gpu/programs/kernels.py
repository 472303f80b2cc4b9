# SPDX-License-Identifier: Apache-2.0
"""A Triton kernel written by hand: the residual added and the sum normalised, one program a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(x, delta, weight, total, normed, width, eps, BLOCK: tl.constexpr):  # noqa: N803  (Triton's convention)
    row = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    a = tl.load(x + at, mask=inside, other=0.0)
    b = tl.load(delta + at, mask=inside, other=0.0)
    both = (a.to(tl.float32) + b.to(tl.float32)).to(total.dtype.element_ty)
    tl.store(total + at, both, mask=inside)
    wide = both.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    scaled = (wide * scale).to(normed.dtype.element_ty) * tl.load(weight + column, mask=inside, other=0.0)
    tl.store(normed + at, scaled, mask=inside)


def fused_add_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``models.add_norm`` in one launch; ``x`` and ``delta`` [n, width], contiguous."""
    total, normed = torch.empty_like(x), torch.empty_like(x)
    width = x.shape[1]
    _add_norm[(x.shape[0],)](x, delta, weight, total, normed, width, eps, BLOCK=triton.next_power_of_2(width))
    return total, normed
