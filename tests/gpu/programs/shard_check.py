# SPDX-License-Identifier: Apache-2.0
"""One rank of a small float32 decoder on the CPU, to compare ways of sharding: saves what it decodes.

``shard_check.py FILE AXIS [FIELD=VALUE...]``: ``AXIS`` is tp or ep, of all ranks; fields are those of ``ModelConfig``.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from models import Decoder, ModelConfig
from sharding import Axis

SMALL = ModelConfig(
    layers=2,
    hidden=64,
    heads=8,
    kv_heads=4,
    head_dim=16,
    intermediate=96,
    vocab=128,
    max_batch=8,
    max_seq=16,
    dtype=torch.float32,
)


def decode(
    config: ModelConfig, axes: dict[str, Axis], first: int, count: int, steps: int = 5
) -> dict[str, torch.Tensor]:
    """``count`` requests from number ``first``: tokens [steps, count] and logits [steps, count, vocab / tp]."""
    model = Decoder(config, torch.device("cpu"), **axes)
    model.load()
    caches = model.cache()
    for cache in caches:
        cache.keys.zero_()
        cache.values.zero_()
    tokens = torch.arange(first, first + count) * 7 % config.vocab
    outputs = []
    for step in range(steps):
        outputs.append(model(tokens, torch.full((count,), step), caches))
        tokens = outputs[-1]["tokens"]
    return {name: torch.stack([out[name] for out in outputs]) for name in ("tokens", "logits")}


def main() -> None:
    path, axis, *fields = sys.argv[1:]
    changes = {name: value if not value.isdigit() else int(value) for name, value in (f.split("=") for f in fields)}
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    config = replace(SMALL, **changes)
    # Ranks of ep decode different requests, which are the halves of what one rank alone decodes.
    first, count = (0, 4) if axis == "tp" else (4 // world * rank, 4 // world)
    torch.save(decode(config, {axis: Axis(rank, world, dist.group.WORLD)}, first, count), path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
