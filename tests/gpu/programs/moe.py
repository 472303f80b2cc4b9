# SPDX-License-Identifier: Apache-2.0
"""Experts spread over the ep axis: two ways for tokens to reach them, both of fixed size and deterministic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  (the name that everybody uses)
from segments import segment
from sharding import Axis, Weights
from torch import Tensor, nn

if TYPE_CHECKING:
    from models import ModelConfig


def route(h: Tensor, router: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Weights, float32, and experts, int64, of each token: [n, top_k] each."""
    weights, chosen = F.linear(h, router).float().softmax(-1).topk(top_k, -1)
    return weights / weights.sum(-1, keepdim=True), chosen


def run_experts(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Every expert of this rank on every row of ``x`` [t, hidden]: [experts, t, hidden]."""
    experts = gate_up.shape[0]
    gate, up = torch.bmm(x.expand(experts, -1, -1), gate_up.transpose(1, 2)).chunk(2, -1)
    return torch.bmm(F.silu(gate) * up, down.transpose(1, 2))


def weigh(out: Tensor, weights: Tensor, chosen: Tensor, local: Tensor | int, experts: int) -> Tensor:
    """Sum over this rank's experts, [t, hidden]; ``local`` is the first of them, or a tensor of their numbers."""
    table = weights.new_zeros(weights.shape[0], experts).scatter(1, chosen, weights)
    mine = table[:, local : local + out.shape[0]] if isinstance(local, int) else table.index_select(1, local)
    return (out.float() * mine.t()[:, :, None]).sum(0).to(out.dtype)


def pack(h: Tensor, chosen: Tensor, ranks: int, local: int) -> tuple[Tensor, Tensor]:
    """What goes to each rank: [ranks, slots, hidden] and local expert numbers [ranks, slots], -1 where nothing is sent.

    A choice has one slot in the message of every rank, so that no rank can be sent more than fits.
    """
    flat = chosen.flatten()
    slots = torch.arange(flat.shape[0], device=h.device)
    to = flat // local
    rows = h.new_zeros(ranks, flat.shape[0], h.shape[1])
    rows[to, slots] = h.repeat_interleave(chosen.shape[1], 0)
    experts = torch.full((ranks, flat.shape[0]), -1, dtype=torch.int64, device=h.device)
    experts[to, slots] = flat % local
    return rows, experts


def pick(out: Tensor, experts: Tensor) -> Tensor:
    """The row of each slot from its own expert's output, zero where the slot is empty: [slots, hidden]."""
    index = experts.clamp(min=0)[None, :, None].expand(1, -1, out.shape[2])
    return out.gather(0, index)[0] * (experts >= 0)[:, None]


def combine(back: Tensor, weights: Tensor, chosen: Tensor, local: int) -> Tensor:
    """The weighted sum of each token's choices out of [ranks, slots, hidden]."""
    n, top_k = chosen.shape
    slots = torch.arange(n * top_k, device=back.device)
    rows = back[chosen.flatten() // local, slots].view(n, top_k, -1)
    return (rows.float() * weights[..., None]).sum(1).to(back.dtype)


class Experts(nn.Module):
    """A layer's experts: a share of them on each ep rank, each split over the tp axis like a dense MLP."""

    def __init__(self, at: str, c: ModelConfig, w: Weights, tp: Axis, ep: Axis) -> None:
        super().__init__()
        inner = tp.split(c.intermediate, "columns")
        self._local = ep.split(c.experts, "experts")
        self._first = ep.rank * self._local
        self.router = w.make(f"{at}.router", (c.experts, c.hidden))
        self.gate_up = w.empty(self._local, 2 * inner, c.hidden)
        self.down = w.empty(self._local, c.hidden, inner)
        for i in range(self._local):
            name = f"{at}.experts.{self._first + i}"
            w.fill(self.gate_up.data[i, :inner], f"{name}.gate", (c.intermediate, c.hidden), tp)
            w.fill(self.gate_up.data[i, inner:], f"{name}.up", (c.intermediate, c.hidden), tp)
            w.fill(self.down.data[i], f"{name}.down", (c.hidden, c.intermediate), tp, dim=1)
        numbers = w.constant((self._local,), torch.int64, lambda: torch.arange(self._local) + self._first)
        self.register_buffer("numbers", numbers)
        self._c, self._tp, self._ep = c, tp, ep

    def forward(self, h: Tensor) -> Tensor:
        if self._c.dispatch == "all-to-all":
            return self._by_all_to_all(h)
        return self._by_all_gather(h)

    def _by_all_gather(self, h: Tensor) -> Tensor:
        """Each rank sees every token of its ep group, and adds its experts' part to each."""
        c = self._c
        every = self._ep.all_gather(h)
        weights, chosen = segment(route, c.compile)(every, self.router, c.top_k)
        out = segment(run_experts, c.compile)(every, self.gate_up, self.down)
        local = self.numbers if c.place == "runtime" else self._first
        part = segment(weigh, c.compile)(out, weights, chosen, local, c.experts)
        return self._tp.all_reduce(self._ep.reduce_scatter(part))

    def _by_all_to_all(self, h: Tensor) -> Tensor:
        """Each token goes to the ranks of its experts and comes back from them."""
        c, ranks = self._c, self._ep.size
        weights, chosen = segment(route, c.compile)(h, self.router, c.top_k)
        rows, experts = segment(pack, c.compile)(h, chosen, ranks, self._local)
        rows, experts = self._ep.all_to_all(rows), self._ep.all_to_all(experts)
        out = segment(run_experts, c.compile)(rows.view(-1, rows.shape[2]), self.gate_up, self.down)
        done = segment(pick, c.compile)(out, experts.view(-1))
        back = self._ep.all_to_all(done.view_as(rows))
        return self._tp.all_reduce(segment(combine, c.compile)(back, weights, chosen, self._local))
