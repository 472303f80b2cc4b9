# SPDX-License-Identifier: Apache-2.0
"""The decoders of the GPU programs give the same however they are sharded; on the CPU, where PyTorch is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed; it is no dependency of foundryd nor of its tests"
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CHECK = Path(__file__).with_name("programs") / "shard_check.py"


@pytest.fixture
def decoded(script):
    """What each rank of a world decoded."""
    reserved_port = script("launch").reserved_port

    def decoded(folder, world, axis, **fields):
        files = [folder / f"{axis}{world}-{rank}.pt" for rank in range(world)]
        with reserved_port() as port:
            shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-P", str(CHECK), str(file), axis, *(f"{k}={v}" for k, v in fields.items())],
                    env=os.environ | shared | {"RANK": str(rank), "OMP_NUM_THREADS": "1"},
                    stderr=subprocess.PIPE,
                    text=True,
                )
                for rank, file in enumerate(files)
            ]
            try:
                errors = [rank.communicate(timeout=100)[1] for rank in ranks]
            finally:
                for rank in ranks:
                    rank.kill()
        assert not any(rank.returncode for rank in ranks), errors
        return [torch.load(file) for file in files]

    return decoded


def same_logits(left, right):
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["baked", "runtime"])
@pytest.mark.parametrize("head", ["argmax", "gather"])
def test_two_tensor_parallel_ranks_decode_what_one_does(decoded, tmp_path, place, head):
    (alone,) = decoded(tmp_path, 1, "tp", place=place, head=head)
    halves = decoded(tmp_path, 2, "tp", place=place, head=head)
    same_logits(torch.cat([half["logits"] for half in halves], -1), alone["logits"])
    for half in halves:
        assert half["tokens"].equal(alone["tokens"])


@pytest.mark.parametrize("place", ["baked", "runtime"])
@pytest.mark.parametrize("dispatch", ["all-gather", "all-to-all"])
def test_two_expert_parallel_ranks_decode_what_one_does(decoded, tmp_path, place, dispatch):
    (alone,) = decoded(tmp_path, 1, "ep", kind="moe", place=place, dispatch=dispatch)
    halves = decoded(tmp_path, 2, "ep", kind="moe", place=place, dispatch=dispatch)
    for name in ("tokens", "logits"):
        same_logits(torch.cat([half[name] for half in halves], 1), alone[name])


def test_experts_split_by_columns_decode_what_whole_ones_do(decoded, tmp_path):
    (alone,) = decoded(tmp_path, 1, "tp", kind="moe")
    halves = decoded(tmp_path, 2, "tp", kind="moe")
    same_logits(torch.cat([half["logits"] for half in halves], -1), alone["logits"])


def test_both_ways_to_reach_experts_decode_the_same(decoded, tmp_path):
    ways = [decoded(tmp_path, 2, "ep", kind="moe", dispatch=d) for d in ("all-gather", "all-to-all")]
    for left, right in zip(*ways, strict=True):
        assert left["tokens"].equal(right["tokens"])
        same_logits(left["logits"], right["logits"])


def test_compiled_segments_decode_what_eager_ones_do(decoded, tmp_path):
    if not os.environ.get("CXX") and subprocess.run(["which", "g++"], capture_output=True, check=False).returncode:
        pytest.skip("torch.compile needs a C++ compiler on the CPU, and there is none")
    (eager,) = decoded(tmp_path, 1, "tp", kind="moe")
    (compiled,) = decoded(tmp_path, 1, "tp", kind="moe", compile=1)
    same_logits(compiled["logits"], eager["logits"])


def test_the_cache_holds_what_was_decoded(decoded, tmp_path):
    (whole,) = decoded(tmp_path, 1, "tp")
    (other,) = decoded(tmp_path, 1, "tp", rope_theta=100)
    # The first position sees itself alone, so no angle matters; later ones see the cache.
    same_logits(whole["logits"][0], other["logits"][0])
    assert not whole["logits"][1].isclose(other["logits"][1], atol=1e-3).all()
