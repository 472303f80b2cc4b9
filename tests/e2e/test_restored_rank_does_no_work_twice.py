# SPDX-License-Identifier: Apache-2.0
"""A restored rank neither warms up nor captures, and issues each distinct collective once."""

from __future__ import annotations

import numpy as np
import pytest

from foundryd._native import _hook
from foundryd.archive.reader import ArchiveReader


@pytest.fixture
def counted(e2e, worlds):
    """Runs a world natively and restored; gives the archive, and the counters of every rank of both."""

    def run(captured):
        native = worlds.run(captured.config, e2e.clean_environment())
        restored = worlds.run(captured.config, captured.env())
        assert e2e.right_tokens(captured.config, native)
        assert e2e.right_tokens(captured.config, restored)
        assert [r.result["restored"] for r in restored] == [True] * captured.config.mesh.world
        assert [r.result["restored"] for r in native] == [False] * captured.config.mesh.world
        return [r.result["counters"] for r in native], [r.result["counters"] for r in restored]

    return run


def groups_in(archive):
    with ArchiveReader.open(archive) as reader:
        (variant,) = reader.index.variants
        ops = reader.array(variant.comm_ops, _hook.comm_op_dtype)
        return len(np.unique(ops["group"])), len(variant.members)


@pytest.mark.parametrize("world", ["solo", "pair"])
def test_no_warm_up_no_capture_and_each_collective_once(counted, world, request):
    captured = request.getfixturevalue(world)
    groups, graphs = groups_in(captured.path)
    steps = captured.config.steps * len(captured.config.batch_sizes)
    native, restored = counted(captured)
    for rank in native:
        # So that zeros below mean something.
        assert rank["engine"]["launches"] > 0
        assert rank["engine"]["captures"] == graphs
    for rank in restored:
        assert rank["engine"]["launches"] == 0
        assert rank["engine"]["captures"] == 0
        assert rank["engine"]["graph_launches"] == steps
        assert rank["communication"]["captures"] == groups
        assert rank["communication"]["graph_launches"] == 0
    assert (groups > 0) == (captured.config.mesh.world > 1)


def test_collectives_are_shared_between_graphs(pair):
    """Otherwise "each distinct collective once" would be no claim."""
    groups, _ = groups_in(pair.path)
    with ArchiveReader.open(pair.path) as reader:
        nodes = reader.index.notes[str(pair.config.mesh)]["comm_nodes"]
    assert 0 < groups < nodes
