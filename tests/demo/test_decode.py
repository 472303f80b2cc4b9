# SPDX-License-Identifier: Apache-2.0
"""Every rank's tokens are the reference's, in every mesh; and they are not when anything of a rank is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from foundryd.demo.config import DISPATCHES, DemoConfig
from foundryd.demo.launch import (
    WorkerFailed,
    driver_environment,
    launch_ranks,
    mismatches,
    rank_environment,
    worker_command,
)
from foundryd.demo.reference import expected
from foundryd.rankpatch.mesh import Mesh

SIZES = (1, 2, 5, 8)
MUTANT = Path(__file__).with_name("mutant.py")


def soft() -> dict[str, str]:
    """An environment with the software driver and nothing of foundryd's modes."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FOUNDRYD_") and k != "LD_PRELOAD"}
    return driver_environment("soft", env)


def config(mesh: str, **changes: Any) -> DemoConfig:
    return DemoConfig(mesh=Mesh.parse(mesh), **{"batch_sizes": SIZES, **changes})


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(
    "mesh", ["tp=1", "ep=2", "tp=2", "dp=2", "ep=4", "tp=2,ep=2", "ep=8", "dp=2,tp=4", "tp=2,ep=4"]
)
def test_every_rank_decodes_the_tokens_of_the_reference(mesh: str, dispatch: str) -> None:
    world = config(mesh, dispatch=dispatch)
    results = launch_ranks(world, soft(), timeout=100)
    assert [r["rank"] for r in results] == list(range(world.mesh.world))
    assert mismatches(world, results, expected(world)) == []
    for result in results:
        engine = result["counters"]["engine"]
        assert result["mode"] == "off"
        assert engine["captures"] == engine["instantiations"] == len(SIZES)
        assert engine["graph_launches"] == len(SIZES) * world.steps


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden": 96, "heads": 4, "kv_heads": 4, "head_dim": 24, "layers": 3},
        {"experts": 16, "top_k": 4, "intermediate": 40, "vocab": 1000},
        {"steps": 32, "prompt": 7, "batch_sizes": (3,)},
        {"seed": 12345678901},
        {"top_k": 8},
    ],
)
def test_other_dimensions_are_as_exact(changes: dict[str, Any]) -> None:
    world = config("tp=2,ep=2", **changes)
    assert mismatches(world, launch_ranks(world, soft(), timeout=100), expected(world)) == []


@pytest.mark.slow
def test_eight_ranks_decode_every_batch_size() -> None:
    world = DemoConfig(mesh=Mesh(ep=8))
    results = launch_ranks(world, soft(), timeout=110)
    assert mismatches(world, results, expected(world)) == []
    assert all(r["graphs"] == 64 for r in results)


def test_memory_allocated_late_does_no_harm() -> None:
    world = config("ep=2")
    results = launch_ranks(world, soft(), flags=["--late-bytes", str(1 << 20)], timeout=100)
    assert mismatches(world, results, expected(world)) == []


def mutated(name: str, world: DemoConfig) -> list[str]:
    def command(store: Path) -> list[str]:
        return [sys.executable, "-P", str(MUTANT), name, *world.to_args(), "--store", str(store)]

    return mismatches(world, launch_ranks(world, soft(), command=command, timeout=100), expected(world))


@pytest.mark.parametrize("name", ["nothing", "grid of one block", "wide blocks", "other stale pointers"])
def test_what_does_not_matter_changes_no_token(name: str) -> None:
    assert mutated(name, config("ep=2")) == []


@pytest.mark.parametrize(
    "name", ["argument: vocabulary start", "image: first token", "global: slice start", "no all-reduce"]
)
def test_a_wrong_place_on_the_tp_axis_changes_tokens(name: str) -> None:
    assert mutated(name, config("tp=2"))


@pytest.mark.parametrize(
    "name",
    [
        "argument: first expert",
        "image: first expert",
        "global: place",
        "global: decay",
        "address of a global",
        "constant table",
        "memset",
        "memcpy from the host",
        "memcpy to the input",
    ],
)
def test_a_wrong_place_on_the_ep_axis_or_a_stale_buffer_changes_tokens(name: str) -> None:
    assert mutated(name, config("ep=2"))


def test_a_bad_flag_is_one_sentence() -> None:
    with pytest.raises(WorkerFailed, match=r"rank 0 ended with status 1: .*ep=1 has 1 ranks|tp=1 has 1 ranks"):
        launch_ranks(
            config("ep=2"), soft(), command=lambda store: worker_command(config("tp=1"), store=store), timeout=60
        )


def test_a_world_of_one_needs_no_rendezvous() -> None:
    world = config("tp=1")
    env = rank_environment(soft(), 0, 1)
    done = subprocess.run(worker_command(world), env=env, capture_output=True, timeout=60, check=True)
    assert b'"tokens"' in done.stdout


def test_a_rank_without_peers_gives_up_in_time() -> None:
    world = config("ep=2")
    with pytest.raises(WorkerFailed, match="the communicator ep/0 cannot be made: nobody set nccl/ep/0 in 1 s"):
        launch_ranks(world, soft(), ranks=[1], flags=["--timeout", "1"], timeout=60)
