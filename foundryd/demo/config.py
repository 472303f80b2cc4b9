# SPDX-License-Identifier: Apache-2.0
"""What the demo engine runs: dimensions, seed, mesh and batch sizes, each of them a flag."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from foundryd.demo import numerics
from foundryd.errors import UsageError
from foundryd.rankpatch.mesh import Mesh

DISPATCHES = ("all-to-all", "allgather")


@dataclass(frozen=True)
class Scales:
    """Powers of two that bring each product back to small whole numbers."""

    project: float  # hidden to queries, keys and values, and to the inside of an expert
    score: float  # a query times a key, in steps of the decay table
    attention: float  # attention output to the residual stream
    router: float  # a router logit, in steps of the decay table
    gate: float  # gate times up
    experts: float  # the experts' weighted mean to the residual stream


@dataclass(frozen=True)
class DemoConfig:
    """A model, the mesh it is spread over, and the decoding that is asked of it.

    A *cell* is a place on the dp and ep axes: the tp ranks of one cell share its requests, and every cell has as many
    requests as the batch size says.  So a step at batch size ``bs`` decodes ``dp * ep * bs`` requests in all.
    Attention heads, the vocabulary and the intermediate width of every expert are split over tp; whole experts are
    split over ep; dp replicates the weights.

    Attributes
    ----------
    top_k : experts for each token.
    max_seq : positions of the KV cache for each request.
    batch_sizes : requests of a cell for which there is a decode graph.
    prompt : tokens of a request that are given; they are fed one a step.
    steps : decode steps of each batch size, ``prompt`` among them.
    dispatch : how tokens reach their experts: ``all-to-all`` there and back, or ``allgather`` and reduce-scatter.
    """

    vocab: int = 256
    hidden: int = 64
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 8
    layers: int = 2
    experts: int = 8
    top_k: int = 2
    intermediate: int = 64
    max_seq: int = 32
    seed: int = 1
    prompt: int = 2
    steps: int = 4
    dispatch: str = "all-to-all"
    batch_sizes: tuple[int, ...] = tuple(range(1, 65))
    mesh: Mesh = field(default_factory=Mesh)

    def __post_init__(self) -> None:
        for name in (f.name for f in fields(self) if f.type == "int"):
            if getattr(self, name) < (0 if name == "seed" else 1):
                raise UsageError(f"{name} is {getattr(self, name)}: it must be positive")
        if not self.batch_sizes or min(self.batch_sizes) < 1 or len(set(self.batch_sizes)) != len(self.batch_sizes):
            raise UsageError(f"the batch sizes are {self.batch_sizes}: give different numbers from 1")
        if self.dispatch not in DISPATCHES:
            raise UsageError(f"the dispatch is {self.dispatch!r}: use {' or '.join(DISPATCHES)}")
        if self.mesh.pp != 1 or self.mesh.ep_spans:
            raise UsageError(f"the demo has no pipeline and gives ep an axis of its own, the mesh is {self.mesh}")
        if self.heads % self.kv_heads or self.head_dim % 2 or self.top_k > self.experts:
            raise UsageError(
                f"heads {self.heads} must be a multiple of kv-heads {self.kv_heads}, head-dim {self.head_dim} even, "
                f"and top-k {self.top_k} at most experts {self.experts}"
            )
        if self.head_dim > 256 or self.vocab < 2 * numerics.SPECIAL_TOKENS or self.vocab > numerics.EXACT:
            raise UsageError(
                f"head-dim {self.head_dim} must be at most 256 and vocab {self.vocab} between "
                f"{2 * numerics.SPECIAL_TOKENS} and {numerics.EXACT}"
            )
        if not self.prompt <= self.steps <= self.max_seq:
            raise UsageError(f"prompt {self.prompt} <= steps {self.steps} <= max-seq {self.max_seq} must hold")
        for what, count, axis in (
            ("heads", self.heads, "tp"),
            ("kv-heads", self.kv_heads, "tp"),
            ("vocab", self.vocab, "tp"),
            ("intermediate", self.intermediate, "tp"),
            ("experts", self.experts, "ep"),
        ):
            if count % getattr(self.mesh, axis):
                size = getattr(self.mesh, axis)
                raise UsageError(f"{axis}={size} does not divide {what} {count}: change one of them")
        numerics.check_exact(
            {
                "the sum of squares of hidden": self.hidden * numerics.RESIDUAL**2,
                "a product over hidden": self.hidden * numerics.ACTIVATION * numerics.WEIGHT,
                "an attention score": self.head_dim * numerics.ACTIVATION**2,
                "an attention sum": self.max_seq * numerics.DECAY * numerics.ACTIVATION,
                "the attention output": self.heads * self.head_dim * numerics.ACTIVATION * numerics.WEIGHT,
                "the experts' sum": self.top_k * numerics.DECAY * self.intermediate * numerics.EXPERT * numerics.WEIGHT,
            }
        )

    @property
    def max_batch(self) -> int:
        """The largest batch size."""
        return max(self.batch_sizes)

    @property
    def cells(self) -> int:
        """Places on the dp and ep axes."""
        return self.mesh.dp * self.mesh.ep

    @property
    def scales(self) -> Scales:
        """Scales for these dimensions; 32 is the spread after a norm, 2.6 that of the weights."""
        scale = numerics.power_scale
        return Scales(
            project=scale(self.hidden, 32 * 2.6, 32),
            score=scale(self.head_dim, 32 * 32, 12),
            attention=scale(self.heads * self.head_dim, 20 * 2.6, 8),
            router=scale(self.hidden, 32 * 2.6, 12),
            gate=scale(1, 32 * 32 / 1.4, 8),
            experts=scale(self.intermediate, 8 * 2.6, 10),
        )

    def cell(self, rank: int) -> int:
        """The cell whose requests ``rank`` decodes."""
        place = self.mesh.place(rank)
        return place["dp"] * self.mesh.ep + place["ep"]

    def to_args(self) -> list[str]:
        """The flags that give this configuration."""
        args: list[str] = []
        for name in (f.name for f in fields(self) if f.name not in ("mesh", "batch_sizes")):
            args += [f"--{name.replace('_', '-')}", str(getattr(self, name))]
        return [*args, "--batch-sizes", format_sizes(self.batch_sizes), "--parallel", str(self.mesh)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds every flag of ``DemoConfig``; ``--parallel`` defaults to the empty text."""
    for f in fields(DemoConfig):
        flag = f"--{f.name.replace('_', '-')}"
        if f.type == "int":
            parser.add_argument(flag, type=int, default=f.default)
    parser.add_argument("--dispatch", choices=DISPATCHES, default=DISPATCHES[0])
    parser.add_argument("--batch-sizes", type=parse_sizes, default=DemoConfig().batch_sizes, metavar="1-64")
    parser.add_argument("--parallel", default="", metavar="tp=2,ep=4")


def from_args(args: argparse.Namespace, *, world: int) -> DemoConfig:
    """The configuration that the flags give; raises ``UsageError`` where the mesh is not of ``world`` ranks."""
    mesh = Mesh.parse(args.parallel) if args.parallel else Mesh(ep=world)
    if mesh.world != world:
        raise UsageError(f"the mesh {mesh} has {mesh.world} ranks and WORLD_SIZE is {world}: make them agree")
    names = {f.name for f in fields(DemoConfig)} - {"mesh"}
    return DemoConfig(mesh=mesh, **{name: getattr(args, name) for name in names})


def parse_sizes(text: str) -> tuple[int, ...]:
    """Reads ``1-8,16,32``."""
    sizes: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UsageError(f"the batch sizes {text!r} have {part!r}: write them as 1-8,16,32")
        sizes += range(int(first), int(last or first) + 1)
    return tuple(sizes)


def format_sizes(sizes: Iterable[int]) -> str:
    """Writes what ``parse_sizes`` reads."""
    runs: list[list[int]] = []
    for size in sizes:
        if runs and runs[-1][-1] + 1 == size:
            runs[-1].append(size)
        else:
            runs.append([size])
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
