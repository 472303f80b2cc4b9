# SPDX-License-Identifier: Apache-2.0
"""A rank's place on the parallel axes, and its part of the weights."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class Axis:
    """This rank's place on one parallel axis."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def split(self, count: int, what: str) -> int:
        """A rank's share of ``count``."""
        if count % self.size:
            raise ValueError(f"{count} {what} cannot be split over {self.size} ranks: choose sizes that divide")
        return count // self.size

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over the axis, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """[size * n, ...]: every rank's ``x`` [n, ...], in the order of ranks."""
        if self.size == 1:
            return x
        out = x.new_empty((self.size * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x, group=self.group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """[n, ...]: this rank's part of the sum of every rank's ``x`` [size * n, ...]."""
        if self.size == 1:
            return x
        out = x.new_empty((x.shape[0] // self.size, *x.shape[1:]))
        dist.reduce_scatter_tensor(out, x, group=self.group)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """``x`` [size, ...] with part ``p`` sent to rank ``p``; part ``p`` of the result came from rank ``p``."""
        if self.size == 1:
            return x
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=self.group)
        return out


class Weights:
    """Makes a rank's shards, empty, and fills them later.

    A tensor is drawn whole from a seed of its own and then cut, so that every way of sharding has the same model.
    Drawing needs temporaries, so it is apart from making: what is made inside an arena is the shards alone.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self._device, self._dtype, self._seed = device, dtype, seed
        self._fills: list[tuple[Tensor, str, tuple[int, ...], int, Axis, float, float]] = []
        self._constants: list[tuple[Tensor, Callable[[], Tensor]]] = []

    def empty(self, *shape: int) -> nn.Parameter:
        """A shard; give each part of it to ``fill``."""
        return nn.Parameter(torch.empty(shape, device=self._device, dtype=self._dtype), requires_grad=False)

    def fill(
        self,
        target: Tensor,
        name: str,
        shape: tuple[int, ...],
        axis: Axis | None = None,
        dim: int = 0,
        mean: float = 0.0,
    ) -> None:
        """``target`` shall be this rank's cut along ``dim`` of the tensor ``name`` of ``shape``."""
        std = 0.1 if mean else shape[-1] ** -0.5
        self._fills.append((target.data, name, shape, dim, axis or Axis(), mean, std))

    def make(self, name: str, shape: tuple[int, ...], axis: Axis | None = None, dim: int = 0) -> nn.Parameter:
        """The shard of one tensor."""
        local = list(shape)
        if axis is not None:
            local[dim] = axis.split(shape[dim], name)
        shard = self.empty(*local)
        self.fill(shard, name, shape, axis, dim)
        return shard

    def norm(self, name: str, width: int) -> nn.Parameter:
        """The weight of a normalisation, near one, on every rank alike."""
        weight = self.empty(width)
        self.fill(weight, name, (width,), mean=1.0)
        return weight

    def constant(self, shape: tuple[int, ...], dtype: torch.dtype, values: Callable[[], Tensor]) -> Tensor:
        """A tensor that is no weight but lies among them; ``values`` makes its content on the host."""
        target = torch.empty(shape, device=self._device, dtype=dtype)
        self._constants.append((target, values))
        return target

    def load(self) -> None:
        """Draws every tensor; call outside any arena."""
        for target, values in self._constants:
            target.copy_(values())
        self._constants.clear()
        generator = torch.Generator(self._device)
        for target, name, shape, dim, axis, mean, std in self._fills:
            generator.manual_seed(self._seed << 32 | zlib.crc32(name.encode()))
            whole = torch.randn(shape, generator=generator, device=self._device, dtype=self._dtype)
            whole.mul_(std).add_(mean)
            target.copy_(whole.narrow(dim, axis.rank * target.shape[dim], target.shape[dim]))
        self._fills.clear()
