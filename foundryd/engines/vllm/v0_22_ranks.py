# SPDX-License-Identifier: Apache-2.0
"""Where a worker of vLLM 0.22.1 is among all ranks, and what stands for its peers where it is captured alone.

vLLM counts a worker's rank and device within its replica, and adds what data parallelism makes of them only later.  It
knows two kinds of replicas:

- Those of a dense model share nothing.  vLLM's engine core makes each a world of its own before it has workers, and
  keeps in mind only which one it is.
- Those of a model with experts exchange tokens in every layer.  They are one world, replica by replica.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from foundryd.engines.vllm.seam import Seam
from foundryd.errors import UsageError
from foundryd.settings import Mode, Settings


@dataclass(frozen=True)
class Place:
    """A worker's place.

    Attributes
    ----------
    rank, world : among the ranks that it communicates with.
    local_rank : its device.
    replica : which of several worlds that share nothing it belongs to.
    """

    rank: int
    local_rank: int
    world: int
    replica: int = 0

    @classmethod
    def of(cls, worker: Any) -> Place:
        """The place that vLLM will give a worker whose device it has not made ready yet."""
        parallel = worker.vllm_config.parallel_config
        rank, local_rank, world = int(worker.rank), int(worker.local_rank), int(parallel.world_size)
        if parallel.distributed_executor_backend == "external_launcher":
            # The launcher counts all ranks, and so does vLLM then.
            return cls(rank, local_rank, world)
        index, local = int(parallel.data_parallel_index), parallel.data_parallel_rank_local
        if (
            parallel.distributed_executor_backend != "ray"
            and parallel.data_parallel_backend != "ray"
            and parallel.nnodes_within_dp == 1
        ):
            ranks = int(parallel.pipeline_parallel_size) * int(parallel.tensor_parallel_size)
            local_rank += ranks * (index if local is None else int(local))
        replicas = int(parallel.data_parallel_size)
        if replicas > 1:
            return cls(int(parallel.data_parallel_rank) * world + rank, local_rank, world * replicas)
        return cls(rank, local_rank, world, index)


def worker_settings(config: Settings, worker: Any) -> Settings:
    """The process's settings with the worker's place in the world, which only vLLM knows; a capture's is given.

    A replica that shares nothing with the others has a group of its own: in each there is a rank 0.

    Raises ``UsageError`` if a capture is of another place.
    """
    place = Place.of(worker)
    if config.mode is Mode.CAPTURE and (config.rank, config.world_size) != (place.rank, place.world):
        raise UsageError(
            f"this is captured as rank {config.rank} of {config.world_size} and vLLM's worker is rank {place.rank} of "
            f"{place.world}: give vLLM the parallel sizes of --variant, and start it with python -m "
            "foundryd.engines.vllm.capture"
        )
    group = f"{config.group}-{place.replica}" if place.replica else config.group
    return replace(
        config,
        rank=place.rank,
        local_rank=place.local_rank,
        local_rank_unused=True,  # it is the worker's device, which no kernel of what is supported is told
        world_size=place.world,
        group=group,
    )


def pynccl_communicators() -> Iterator[tuple[int, Sequence[int]]]:
    """(handle, ranks) of vLLM's own NCCL communicators, in the order in which its groups were made."""
    groups = importlib.import_module("vllm.distributed.parallel_state")._groups
    for reference in list(groups.values()):
        group = reference()
        communicator = getattr(getattr(group, "device_communicator", None), "pynccl_comm", None)
        if communicator is not None and communicator.available:
            handle = communicator.comm
            yield int(getattr(handle, "value", handle)), list(group.ranks)


# --- without peers ----------------------------------------------------------------------------------------------------


def _no_message_queue(real: Callable[..., Any], *_: Any, **__: Any) -> None:
    """A rank without peers has no readers to wait for."""


def _same_node(real: Callable[..., Any], pg: Any, source_rank: int = 0) -> list[bool]:
    """The ranks that a capture stands for are on one node; more nodes are not known yet."""
    return [True] * int(pg.size() if callable(getattr(pg, "size", None)) else pg.world_size)


def _same_batch(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Replicas agree on how many tokens a step has, and whether graphs run it; here all of them have this rank's.

    Each fills its own column of a table, and the tables are added up.  With nobody else's columns vLLM would find that
    the others run no graph, and run none itself.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    own = distributed.all_reduce

    def all_reduce(table: Any, *_: Any, **__: Any) -> None:
        table.copy_(table.sum(dim=1, keepdim=True).expand_as(table))

    distributed.all_reduce = all_reduce
    try:
        return real(*arguments, **named)
    finally:
        distributed.all_reduce = own


# Only where a rank is captured, which has no peers.
LONE = (
    Seam(
        "vllm.distributed.device_communicators.shm_broadcast",
        "MessageQueue",
        "create_from_process_group",
        ("pg", "max_chunk_bytes", "max_chunks"),
        _no_message_queue,
    ),
    Seam("vllm.distributed.parallel_state", "", "in_the_same_node_as", ("pg", "source_rank"), _same_node),
    Seam(
        "vllm.v1.worker.dp_utils",
        "",
        "_run_ar",
        ("should_ubatch", "orig_num_tokens_per_ubatch", "padded_num_tokens_per_ubatch", "cudagraph_mode"),
        _same_batch,
    ),
)

# The same for the V2 runner, which agrees in a way of its own.
LONE_V2 = (
    Seam(
        "vllm.v1.worker.gpu.dp_utils",
        "",
        "sync_cudagraph_and_dp_padding",
        ("cudagraph_manager", "desired_batch_desc", "num_tokens", "num_reqs"),
        _same_batch,
    ),
)
