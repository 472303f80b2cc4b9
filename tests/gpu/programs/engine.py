# SPDX-License-Identifier: Apache-2.0
"""The engine around a decoder: process groups, arenas, a graph for each batch size; alike in every mode."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from models import Cache, Decoder, ModelConfig
from sharding import Axis
from torch import Tensor

import foundryd.engines.torch as fdy
from foundryd._native import _hook
from foundryd.errors import FoundrydError
from foundryd.rankpatch.mesh import AXES, Mesh
from foundryd.session.session import Session
from foundryd.settings import Mode, settings

# What a restoring engine can do differently, so that a test sees it refused.
DISTURBANCES = ("swap-weights", "extra-io", "larger-kv", "other-torch")

SIZES: dict[str, dict[str, int]] = {
    "small": {"hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "intermediate": 3072, "vocab": 32768},
    # For worlds of up to 64 ranks, each with a head of its own.
    "64-heads": {"hidden": 1024, "heads": 64, "kv_heads": 64, "head_dim": 64, "intermediate": 4096, "vocab": 32768},
    "qwen3-8b": {"hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "intermediate": 12288, "vocab": 151936},
}


def batch_sizes(text: str) -> tuple[int, ...]:
    """Reads ``1,2,8`` and ``1-64``; ascending, each once."""
    sizes: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        sizes.update(range(int(first), int(last or first) + 1))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a batch size below 1")
    return tuple(sorted(sizes))


def pairs(text: str) -> tuple[tuple[int, int], ...]:
    """Reads pairs of batch sizes, ``3:4,7:8``, in the order in which they are given."""
    found = tuple(tuple(map(int, pair.split(":"))) for pair in text.split(","))
    if any(len(pair) != 2 or pair[0] == pair[1] or min(pair) < 1 for pair in found):
        raise argparse.ArgumentTypeError(f"{text!r} are no pairs of batch sizes: give them as in 3:4,7:8")
    return tuple((first, second) for first, second in found)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say what model and which graphs; all modes must be given the same."""
    parser.add_argument("--model", choices=("dense", "moe"), default="dense")
    parser.add_argument("--size", choices=tuple(SIZES), default="small")
    parser.add_argument("--vocabulary", type=int, help="tokens; those of the size by default")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--dispatch", choices=("all-gather", "all-to-all"), default="all-gather")
    parser.add_argument("--mesh", default="tp=1", help="as in tp=8 or dp=2,tp=4")
    parser.add_argument("--batch-sizes", type=batch_sizes, default=(1, 2, 4, 8), help="as in 1,2,8 or 1-64")
    parser.add_argument("--max-seq", type=int, default=512)
    parser.add_argument("--embedding", choices=("baked", "runtime"), default="baked")
    parser.add_argument("--head", choices=("argmax", "gather"), default="argmax")
    parser.add_argument("--norm", choices=("torch", "triton"), default="torch")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--rng", action="store_true", help="draw tokens with the Philox generator")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--disturb", choices=DISTURBANCES, help="what to do differently when restoring, and only then")


def config_of(args: argparse.Namespace) -> ModelConfig:
    """The model that the arguments describe."""
    size = dict(SIZES[args.size])
    if args.vocabulary is not None:
        size["vocab"] = args.vocabulary
    if args.model == "moe":
        size["intermediate"] //= 4  # of each expert
    return ModelConfig(
        kind=args.model,
        layers=args.layers,
        **size,
        max_batch=max(args.batch_sizes),
        max_seq=args.max_seq,
        experts=args.experts,
        top_k=args.top_k,
        dispatch=args.dispatch,
        place=args.embedding,
        head=args.head,
        norm=args.norm,
        compile=args.compile,
        sampling=args.rng,
        seed=args.seed,
    )


def make_axes(mesh: Mesh, rank: int) -> dict[str, Axis]:
    """This rank's place on each axis; every rank makes every group, in one order, as torch demands."""
    axes: dict[str, Axis] = {}
    for name in AXES:
        axes[name] = Axis()
        if getattr(mesh, name) == 1:
            continue
        for ranks in sorted({mesh.group(r, (name,)) for r in range(mesh.world)}):
            group = dist.new_group(list(ranks))
            if rank in ranks:
                axes[name] = Axis(ranks.index(rank), len(ranks), group)
    return axes


def parse_mesh(text: str, world: int) -> Mesh:
    """The mesh of ``--mesh``; these models have no pipeline stages."""
    mesh = Mesh.parse(text)
    if mesh.world != world:
        raise ValueError(f"--mesh {mesh} has {mesh.world} ranks and WORLD_SIZE is {world}: make them equal")
    if mesh.pp > 1 or mesh.ep_spans:
        raise ValueError(f"--mesh {mesh}: these models have neither pipeline stages nor an ep axis over dp and tp")
    return mesh


class Graphs(fdy.GraphSet):
    """Also tells how many contexts there were when it gave up restoring."""

    contexts_at_fallback: int | None = None

    def _fall_back(self, error: FoundrydError) -> None:
        if self._hook is not None:
            self.contexts_at_fallback = self._hook.report().contexts
        super()._fall_back(error)


class Timings(dict[str, float]):
    """Milliseconds by phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a block, and what it launched."""
        started = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self[name] = (time.perf_counter() - started) * 1e3


# What a rank mostly waits for others in, and what no graph needs; NCCL's own time is in ``communication``.
_NOT_OURS = ("attach", "identity", "agreement", "communication", "done")


def cpu(session: Session | None) -> dict[str, Any] | None:
    """Milliseconds of a restore in the driver and outside it, up to all executables; None unless both were timed."""
    if session is None or not session.driver_ms or session.background_driver_ms is None:
        return None
    driver_ms = {name: ms for name, ms in session.driver_ms.items() if name not in _NOT_OURS}
    own_ms = {name: session.phases[name] - ms for name, ms in driver_ms.items()}
    driver_ms["background"] = session.background_driver_ms
    own_ms["background"] = (session.background_ms or 0.0) - session.background_driver_ms
    return {
        "driver_ms": sum(driver_ms.values()),
        "own_ms": sum(own_ms.values()),
        "driver": driver_ms,
        "own": own_ms,
    }


def swap(a: Tensor, b: Tensor) -> None:
    """Exchanges where two weights of one size lie; each keeps its values."""
    values = a.clone()
    a.copy_(b)
    b.copy_(values)
    a.data, b.data = b.data, a.data


def counters() -> dict[str, dict[str, int]]:
    """Driver calls so far, of the engine and of communication; empty without the hook."""
    if not _hook.available():
        return {}
    report = _hook.Hook().report()
    return {"engine": dict(report.engine), "communication": dict(report.communication)}


class Requests:
    """A model with the state of its requests, and the step that is captured.

    Attributes
    ----------
    tokens, positions : int64 [max_batch]: what a replay reads; it leaves the next tokens in ``tokens``.
    """

    config: ModelConfig
    device: torch.device
    generator: torch.Generator | None
    model: Decoder
    caches: list[Cache]
    tokens: Tensor
    positions: Tensor
    steps_called: int

    def reset(self) -> None:
        """Forgets every request and starts the generator again."""
        for cache in self.caches:
            cache.keys.zero_()
            cache.values.zero_()
        self.tokens.zero_()
        self.positions.zero_()
        if self.generator is not None:
            self.generator.manual_seed(self.config.seed)

    def vary(self, seed: int) -> None:
        """Puts inputs and caches into the state of requests that are under way, another for each seed."""
        c = self.config
        generator = torch.Generator(self.device).manual_seed(seed)
        for cache in self.caches:
            cache.keys.normal_(generator=generator)
            cache.values.normal_(generator=generator)
        self.tokens.random_(0, c.vocab, generator=generator)
        self.positions.random_(0, c.max_seq, generator=generator)

    def step(self, batch: int) -> dict[str, Tensor]:
        """Decodes one token of the first ``batch`` requests."""
        self.steps_called += 1
        with torch.no_grad():
            out = self.model(self.tokens[:batch], self.positions[:batch], self.caches)
            self.tokens[:batch].copy_(out["tokens"])
        return out


class Engine(Requests):
    """One rank of a model, in whatever mode the environment says.

    Attributes
    ----------
    replayable : graph and outputs by batch size.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.timings = Timings()
        self.config = config_of(args)
        self.batch_sizes: Sequence[int] = args.batch_sizes
        self.replayable: dict[int, tuple[Any, dict[str, Tensor]]] = {}
        self.capturing = settings().mode is Mode.CAPTURE
        self.steps_called = 0
        self._disturbance = args.disturb if settings().mode is Mode.RESTORE else None
        if self._disturbance == "other-torch":
            torch.__version__ = "0.0.1"
        if args.compile:
            # Too few by default for a function that sees many batch sizes.
            torch._dynamo.config.recompile_limit = 256
        # Before the first context: a restore fixes addresses then.
        self.graphs = Graphs.from_env()
        self.device = self.graphs.device
        with self.timings.phase("communicators"):
            dist.init_process_group("nccl", device_id=self.device)
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.mesh = parse_mesh(args.mesh, self.world)
            self.axes = make_axes(self.mesh, self.rank)
            self._first_collectives()
        with self.timings.phase("weights"):
            self.generator = torch.Generator(self.device) if args.rng else None
            with self.graphs.arena("weights"):
                self.model = Decoder(
                    self.config, self.device, tp=self.axes["tp"], ep=self.axes["ep"], generator=self.generator
                )
            self.model.load()
            if self._disturbance == "swap-weights":
                swap(*self.model.norms[:2])
            # What drawing weights left behind must not be taken for memory that graphs use.
            torch.cuda.empty_cache()
        with self.timings.phase("memory"):
            with self.graphs.arena("kv"):
                self.caches = self.model.cache(int(self._disturbance == "larger-kv"))
            with self.graphs.arena("io"):
                self.tokens, self.positions = (
                    torch.empty(self.config.max_batch, dtype=torch.int64, device=self.device) for _ in range(2)
                )
                if self._disturbance == "extra-io":
                    self._extra = torch.zeros(8, device=self.device)
            self.reset()
        self._bind()

    def prepare(self, after_first: Callable[[], None] = lambda: None) -> None:
        """Captures or restores the graph of every batch size, the largest first, and ``after_first`` when it is there.

        Restored, every graph can be replayed then, and those that have no executable yet get one in the background.
        """
        first, *others = sorted(self.batch_sizes, reverse=True)
        with self.timings.phase("graphs"):
            with self.timings.phase("first_graph"):  # restored, the whole of restore()
                self._get(first)
            after_first()
            for batch in others:
                self._get(batch)
            self.graphs.finish(vary=self.vary)

    def _get(self, batch: int) -> None:
        generators = () if self.generator is None else (self.generator,)
        self.replayable[batch] = self.graphs.capture_or_restore(
            ("decode", batch), partial(self.step, batch), generators=generators
        )

    def replay(self, batch: int) -> dict[str, Tensor]:
        """Launches the graph of ``batch``; its outputs, which the next replay overwrites."""
        graph, outputs = self.replayable[batch]
        graph.replay()
        return outputs

    def figures(self) -> dict[str, Any]:
        """What every program reports of its engine; times in milliseconds, sizes in bytes."""
        free, total = torch.cuda.mem_get_info(self.device)
        session = self.graphs.session
        fallback = self.graphs.fallback
        return {
            "rank": self.rank,
            "world": self.world,
            "mesh": str(self.mesh),
            "mode": settings().mode.value,
            "restored": self.graphs.restored,
            "fallback": None if fallback is None else f"{type(fallback).__name__}: {fallback}",
            "contexts_at_fallback": self.graphs.contexts_at_fallback,
            "graphs": len(self.replayable),
            "steps_called": self.steps_called,
            "counters": counters(),
            "timings": dict(self.timings),
            "phases": dict(session.phases) if session is not None else {},
            "background_ms": session.background_ms if session is not None else None,
            "memory": {
                "device_used": total - free,
                "allocated": torch.cuda.memory_allocated(self.device),
                "max_allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
            },
            "versions": {"torch": torch.__version__, "nccl": list(torch.cuda.nccl.version())},
            "device": torch.cuda.get_device_name(self.device),
        }

    def close(self) -> None:
        """Ends graphs, then communicators."""
        torch.cuda.synchronize()
        self.replayable.clear()
        self.graphs.close()
        dist.destroy_process_group()

    def _first_collectives(self) -> None:
        """One collective on each communicator, so that all are connected before graphs."""
        for group in [None, *(axis.group for axis in self.axes.values() if axis.size > 1)]:
            dist.all_reduce(torch.ones(1, device=self.device), group=group)

    def _bind(self) -> None:
        self.graphs.bind("model", self.model)
        for i, cache in enumerate(self.caches):
            self.graphs.bind(f"keys.{i}", cache.keys)
            self.graphs.bind(f"values.{i}", cache.values)
        self.graphs.bind("tokens", self.tokens)
        self.graphs.bind("positions", self.positions)
