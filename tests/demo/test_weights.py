# SPDX-License-Identifier: Apache-2.0
"""The ranks' shards are the whole model, cut along the mesh."""

from __future__ import annotations

import numpy as np
import pytest

from foundryd.demo import weights
from foundryd.demo.config import DemoConfig
from foundryd.rankpatch.mesh import Mesh


@pytest.mark.parametrize("mesh", ["tp=1", "ep=8", "dp=2,tp=4", "tp=2,ep=4"])
def test_shards_are_slices_of_the_whole(mesh: str) -> None:
    config = DemoConfig(mesh=Mesh.parse(mesh), layers=1)
    whole = weights.whole(config)
    tp, ep = config.mesh.tp, config.mesh.ep
    for rank in range(config.mesh.world):
        place = config.mesh.place(rank)
        shard = weights.shard(config, rank)
        qkv = [np.split(whole[f"layers.0.{name}"], tp)[place["tp"]] for name in ("wq", "wk", "wv")]
        assert np.array_equal(shard["layers.0.wqkv"], np.concatenate(qkv))
        assert np.array_equal(shard["embed"], np.split(whole["embed"], tp)[place["tp"]])
        assert np.array_equal(shard["layers.0.wo"], np.split(whole["layers.0.wo"], tp, axis=1)[place["tp"]])
        experts = np.split(whole["layers.0.gate_up"], ep)[place["ep"]]
        assert np.array_equal(shard["layers.0.gate_up"], np.split(experts, tp, axis=2)[place["tp"]])
        experts = np.split(whole["layers.0.down"], ep)[place["ep"]]
        assert np.array_equal(shard["layers.0.down"], np.split(experts, tp, axis=2)[place["tp"]])
        assert np.array_equal(shard["layers.0.router"], whole["layers.0.router"])


def test_weights_are_bounded_whole_numbers_of_every_value() -> None:
    for tensor in weights.tensors(DemoConfig()):
        values = weights.make(tensor, 1, {}, {})
        assert values.dtype == np.float32
        assert values.shape == tensor.shape
        assert np.array_equal(np.unique(values), np.arange(tensor.low, tensor.high + 1)) or values.size < 512
        assert tensor.low <= values.min() <= values.max() <= tensor.high


def test_another_seed_gives_other_weights() -> None:
    one, two = (weights.whole(DemoConfig(seed=seed, layers=1)) for seed in (1, 2))
    assert all(not np.array_equal(one[name], two[name]) for name in one)
