# SPDX-License-Identifier: Apache-2.0
"""A configuration survives its flags, and refuses what it cannot compute exactly."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundryd.demo.config import DISPATCHES, DemoConfig, add_arguments, format_sizes, from_args, parse_sizes
from foundryd.errors import UsageError
from foundryd.rankpatch.mesh import Mesh


@given(st.lists(st.integers(1, 200), min_size=1, unique=True))
def test_batch_sizes_survive_their_text(sizes: list[int]) -> None:
    assert parse_sizes(format_sizes(sizes)) == tuple(sizes)


@given(
    seed=st.integers(0, 1 << 40),
    mesh=st.sampled_from(["tp=1", "ep=8", "dp=2,tp=4", "tp=2,ep=4", "dp=2,ep=2,tp=2"]),
    dispatch=st.sampled_from(DISPATCHES),
    layers=st.integers(1, 5),
)
def test_a_configuration_survives_its_flags(seed: int, mesh: str, dispatch: str, layers: int) -> None:
    config = DemoConfig(seed=seed, mesh=Mesh.parse(mesh), dispatch=dispatch, layers=layers, batch_sizes=(1, 2, 3, 8))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert from_args(parser.parse_args(config.to_args()), world=config.mesh.world) == config


def test_the_default_mesh_is_expert_parallel() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert from_args(parser.parse_args([]), world=4).mesh == Mesh(ep=4)


def test_a_mesh_of_another_world_is_refused() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(UsageError, match=r"has 8 ranks and WORLD_SIZE is 4"):
        from_args(parser.parse_args(["--parallel", "ep=8"]), world=4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 8192}, "the sum of squares of hidden can reach"),
        ({"head_dim": 8, "heads": 8192, "kv_heads": 8}, "the attention output can reach"),
        ({"max_seq": 16384, "steps": 4}, "an attention sum can reach"),
        ({"intermediate": 8192}, "the experts' sum can reach"),
        ({"intermediate": 1024, "top_k": 9, "experts": 16}, "the experts' sum can reach"),
        ({"vocab": 1 << 25}, "vocab 33554432 between"),
        ({"head_dim": 7}, "head-dim 7 even"),
        ({"top_k": 9}, "top-k 9 at most experts 8"),
        ({"steps": 1}, "prompt 2 <= steps 1"),
        ({"steps": 33}, "steps 33 <= max-seq 32"),
        ({"mesh": Mesh(ep=3)}, "ep=3 does not divide experts 8"),
        ({"mesh": Mesh(tp=16)}, "tp=16 does not divide kv-heads 8"),
        ({"mesh": Mesh(pp=2)}, "no pipeline"),
        ({"mesh": Mesh(dp=2, tp=2, ep_spans=True)}, "an axis of its own"),
        ({"dispatch": "magic"}, "use all-to-all or allgather"),
        ({"batch_sizes": (1, 1)}, "different numbers"),
        ({"layers": 0}, "layers is 0"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        DemoConfig(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "a", "1-", "-3", "1,,2"])
def test_batch_sizes_that_are_not_numbers_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="the batch sizes"):
        parse_sizes(text)
