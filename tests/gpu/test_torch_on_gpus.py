# SPDX-License-Identifier: Apache-2.0
"""PyTorch programs on real GPUs: restored exactly, or refused by name and captured natively, never anything between."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

# Also for programs that Python starts with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

from launch import Program, RunFailed, capture, daemon, devices, foundryd, native, restore
from matrix import CASES, differences, not_restored, rules_text, run_case

GPUS = devices()
LIMIT = 900  # seconds of one test

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(LIMIT + 60),
    pytest.mark.skipif(GPUS == 0, reason="no NVIDIA GPU answers"),
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed"),
]

SHORT = ("--steps", "8", "--replays", "4", "--batch-sizes", "1,4")
DENSE = Program("decode.py", SHORT)
ASYNC = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}


def needs(count):
    if count > GPUS:
        pytest.skip(f"{GPUS} GPU(s), and each of {count} ranks needs its own")


def assert_restored_like(restored, natives):
    """Every rank restored, and every digest of every replay is a native run's."""
    assert not_restored(restored) == []
    assert differences(restored, natives) == []


def assert_captured_natively(reports, natives, error, *named):
    """Every rank refused with ``error`` and its words, and then put out what a native run does."""
    for report in reports:
        assert not report["restored"], "it restored what it should have refused"
        assert report["fallback"].startswith(f"{error}: "), report["fallback"]
        for words in named:
            assert words in report["fallback"], report["fallback"]
    assert differences(reports, natives) == []


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """An archive of the dense decoder for one rank."""
    archive = tmp_path_factory.mktemp("archives") / "dense.foundry"
    capture(DENSE, "tp=1", 1, archive, timeout=LIMIT)
    return archive


@pytest.fixture(scope="module")
def dense_native():
    return native(DENSE, 1, timeout=LIMIT)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """An archive of the dense decoder for two tensor-parallel ranks."""
    program = DENSE.with_arguments("--mesh", "tp=2")
    archive = tmp_path_factory.mktemp("archives") / "pair.foundry"
    capture(program, "tp=2", 2, archive, timeout=LIMIT)
    return program, archive


@pytest.mark.parametrize("case", [c for c in CASES if c.world <= 8], ids=lambda c: c.name)
def test_what_one_gpu_captured_is_restored_on_as_many_as_there_are_ranks(case, tmp_path):
    needs(case.world)
    outcome = run_case(case, GPUS, tmp_path, limit=LIMIT)
    assert outcome.verdict == "ok", outcome.detail


@pytest.mark.parametrize("case", [c for c in CASES if c.world >= 8], ids=lambda c: c.name)
def test_one_gpu_captures_worlds_that_do_not_fit(case, tmp_path, record_property):
    """Rules found on a few ranks give another rank's graphs byte for byte, and the archive verifies."""
    if case.world <= GPUS:
        pytest.skip("the world fits, so the case is captured and restored by another test")
    outcome = run_case(case, GPUS, tmp_path, limit=LIMIT, jobs=4)
    assert outcome.verdict == "captured", outcome.detail
    record_property("rules", rules_text(outcome.capture))
    record_property("captured_ranks", outcome.capture["captured_ranks"])
    record_property("heldout_ranks", outcome.capture["heldout_ranks"])
    assert outcome.capture["rules"], outcome.capture
    if case.sample:
        asked = {int(rank) for rank in case.sample.split(",")}
        assert asked <= set(outcome.capture["captured_ranks"]), outcome.capture
        assert asked.isdisjoint(outcome.capture["heldout_ranks"]), outcome.capture


@pytest.mark.parametrize(
    ("disturbance", "named"),
    [
        ("swap-weights", "the address of the tensor 'model.norms.0'"),
        ("extra-io", "arena 'io' holds 3 tensors here and 2 in the archive"),
        ("larger-kv", "'keys.0'"),
    ],
)
def test_a_tensor_that_is_not_where_it_was_is_named_and_nothing_is_restored(dense, dense_native, disturbance, named):
    with daemon([dense]) as runtime:
        reports = restore(dense, DENSE.with_arguments("--disturb", disturbance), "tp=1", 1, runtime)
    assert_captured_natively(reports, dense_native, "LayoutDiverged", named)


def test_a_capture_with_the_driver_s_pools_is_refused_by_name(tmp_path):
    with pytest.raises(RunFailed, match=r"back-end is cudaMallocAsync.*take backend out of PYTORCH_CUDA_ALLOC_CONF"):
        capture(DENSE, "tp=1", 1, tmp_path / "async.foundry", timeout=LIMIT, environment=ASYNC)
    assert not (tmp_path / "async.foundry").exists()


def test_a_restore_with_the_driver_s_pools_captures_natively(dense, dense_native):
    with daemon([dense]) as runtime:
        reports = restore(dense, DENSE, "tp=1", 1, runtime, environment=ASYNC)
    assert_captured_natively(reports, dense_native, "IdentityMismatch", "backend:cudaMallocAsync", "not set")


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (("--disturb", "other-torch"), {}, ("torch is 0.0.1", "the archive has 2.")),
        ((), {"NCCL_ALGO": "Ring"}, ("env.NCCL_ALGO is Ring and the archive has not set",)),
        ((), {"NCCL_P2P_DISABLE": "1"}, ("env.NCCL_P2P_DISABLE is 1 and the archive has not set",)),
    ],
    ids=["torch", "NCCL_ALGO", "NCCL_P2P_DISABLE"],
)
def test_another_identity_is_refused_with_both_values_before_a_context_exists(
    dense, dense_native, arguments, environment, named
):
    with daemon([dense]) as runtime:
        reports = restore(dense, DENSE.with_arguments(*arguments), "tp=1", 1, runtime, environment=environment)
    assert_captured_natively(reports, dense_native, "IdentityMismatch", *named)
    assert [r["contexts_at_fallback"] for r in reports] == [0]


def test_all_ranks_capture_natively_if_one_machine_is_not_the_archive_s(pair):
    needs(2)
    program, archive = pair
    environment = {"NCCL_ALGO": "Ring"}
    with daemon([archive]) as runtime:
        reports = restore(archive, program, "tp=2", 2, runtime, environment=environment)
    natives = native(program, 2, environment=environment)
    assert_captured_natively(reports, natives, "IdentityMismatch", "env.NCCL_ALGO")


def test_a_restored_rank_calls_nothing_and_captures_nothing(dense):
    with daemon([dense]) as runtime:
        (report,) = restore(dense, DENSE, "tp=1", 1, runtime)
    assert not_restored([report]) == []
    assert report["steps_called"] == 0
    assert report["counters"]["engine"]["captures"] == 0
    assert report["counters"]["communication"]["captures"] == 0
    assert report["counters"]["engine"]["graph_launches"] > 0


def test_restored_ranks_capture_only_collectives_that_are_issued_again(pair):
    needs(2)
    program, archive = pair
    with daemon([archive]) as runtime:
        reports = restore(archive, program, "tp=2", 2, runtime)
    assert not_restored(reports) == []
    for report in reports:
        assert report["steps_called"] == 0
        assert report["counters"]["engine"]["captures"] == 0
        assert report["counters"]["communication"]["captures"] > 0


@pytest.mark.parametrize("world", [1, 2])
def test_a_restored_process_needs_no_more_than_a_native_one_s_memory_and_a_twentieth(tmp_path, world, record_property):
    needs(world)
    program = Program(
        "decode.py",
        (
            "--mesh",
            f"tp={world}",
            "--size",
            "qwen3-8b",
            "--layers",
            "8",
            "--batch-sizes",
            "1,2,4,8,16,32",
            "--steps",
            "4",
        ),
    )
    archive = tmp_path / "memory.foundry"
    capture(program, f"tp={world}", world, archive, timeout=LIMIT)
    with daemon([archive]) as runtime:
        restored = restore(archive, program, f"tp={world}", world, runtime)
    natives = native(program, world)
    assert_restored_like(restored, natives)
    for rank, (mine, theirs) in enumerate(zip(restored, natives, strict=True)):
        used, allowed = mine["memory"]["device_used"], theirs["memory"]["device_used"]
        record_property(f"rank {rank}", f"restored {used / 1e6:.0f} MB, native {allowed / 1e6:.0f} MB")
        assert used <= 1.05 * allowed, f"rank {rank} uses {used:,} bytes restored and {allowed:,} natively"


@pytest.mark.parametrize(
    ("variant", "world", "more"),
    [
        ("tp=1", 1, ()),
        ("tp=1", 1, ("--rng",)),
        ("tp=2", 2, ()),
        ("ep=2", 2, ("--model", "moe", "--dispatch", "all-to-all")),
    ],
    ids=["one", "one-sampled", "tp2", "moe-ep2"],
)
def test_a_thousand_replays_of_changing_batches_and_inputs_are_native_ones(tmp_path, variant, world, more):
    """Eager collectives go between the replays; their sums are known."""
    needs(world)
    arguments = ("--mesh", variant, "--layers", "2", "--batch-sizes", "1,3,8", "--steps", "8", "--replays", "1000")
    program = Program("decode.py", (*arguments, *more))
    archive = tmp_path / "thousand.foundry"
    capture(program, variant, world, archive, timeout=LIMIT)
    with daemon([archive]) as runtime:
        restored = restore(archive, program, variant, world, runtime)
    assert_restored_like(restored, native(program, world))
    for report in restored:
        assert {len(digests) for digests in report["digests"].values()} == {1008}
        assert (report["eager_collectives"] > 1000) == (world > 1)


def test_processes_one_after_another_restore_the_same_archive(dense, dense_native):
    """Twice from one daemon, and again from another that was started anew."""
    with daemon([dense]) as runtime:
        for _ in range(2):
            assert_restored_like(restore(dense, DENSE, "tp=1", 1, runtime), dense_native)
    with daemon([dense]) as runtime:
        assert_restored_like(restore(dense, DENSE, "tp=1", 1, runtime), dense_native)


def test_a_daemon_that_is_stopped_and_started_in_place_serves_the_same(dense, dense_native):
    with daemon([dense]) as runtime:
        assert_restored_like(restore(dense, DENSE, "tp=1", 1, runtime), dense_native)
        foundryd("stop", "--runtime-dir", str(runtime))
        foundryd("start", "--runtime-dir", str(runtime), str(dense), timeout=400)
        assert_restored_like(restore(dense, DENSE, "tp=1", 1, runtime), dense_native)
