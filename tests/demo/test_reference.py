# SPDX-License-Identifier: Apache-2.0
"""The expected tokens say something: they vary, and every expert has a part in them."""

from __future__ import annotations

import numpy as np

from foundryd.demo.config import DemoConfig
from foundryd.demo.numerics import SPECIAL_TOKENS
from foundryd.demo.reference import expected
from foundryd.rankpatch.mesh import Mesh

SMALL = DemoConfig(mesh=Mesh(ep=8), batch_sizes=(1, 4, 16), steps=8)


def test_tokens_vary_over_cells_requests_and_steps() -> None:
    tokens = expected(SMALL).tokens
    assert set(tokens) == {(cell, batch) for cell in range(8) for batch in SMALL.batch_sizes}
    assert len({tokens[cell, 16].tobytes() for cell in range(8)}) == 8
    every = np.concatenate([t.ravel() for t in tokens.values()])
    values, counts = np.unique(every, return_counts=True)
    assert len(values) > SMALL.vocab // 2
    assert counts.max() < len(every) // 10
    assert all(len(np.unique(row)) > 2 for row in tokens[0, 16])


def test_special_tokens_are_never_sampled() -> None:
    assert min(t.min() for t in expected(SMALL).tokens.values()) >= SPECIAL_TOKENS


def test_every_expert_of_every_layer_is_used() -> None:
    load = expected(SMALL).expert_load
    assert load.sum() == SMALL.layers * SMALL.top_k * 8 * (1 + 4 + 16) * SMALL.steps
    assert load.min() > load.mean() / 4


def test_tokens_depend_on_the_seed() -> None:
    one = expected(SMALL).tokens[0, 16]
    two = expected(DemoConfig(mesh=Mesh(ep=8), batch_sizes=(1, 4, 16), steps=8, seed=2)).tokens[0, 16]
    assert not np.array_equal(one, two)


def test_a_request_does_not_depend_on_its_neighbours() -> None:
    """So the reference may decode all of them at once, whatever rank they are on."""
    alone = expected(DemoConfig(mesh=Mesh(ep=8), batch_sizes=(4,), steps=8))
    together = expected(SMALL)
    assert all(np.array_equal(alone.tokens[cell, 4], together.tokens[cell, 4]) for cell in range(8))
