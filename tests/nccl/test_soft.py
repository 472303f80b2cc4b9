# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

RunRanks = Callable[..., list[str]]

WORLDS = [2, 4, pytest.param(8, marks=pytest.mark.slow)]


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize(
    "check",
    [
        "check_collectives_equal_numpy",
        "check_reductions_equal_numpy_in_every_type_and_operator",
        "check_captured_calls_replay_among_eager_ones",
        "check_sends_and_receives",
        "check_splits_group_by_colour_and_order_by_key",
    ],
)
def test_soft(check: str, size: int, run_ranks: RunRanks) -> None:
    run_ranks("soft_program", check, size)


@pytest.mark.parametrize(
    ("check", "size"),
    [
        ("check_special_floats_are_rounded_like_numpy", 2),
        ("check_a_scaled_sum_multiplies_each_ranks_input", 3),
        ("check_nodes_of_a_communicator_are_chained_and_followers_need_the_kernel_only", 2),
        ("check_a_group_is_one_kernel_however_large", 2),
        ("check_two_communicators_do_not_wait_for_each_other", 4),
        ("check_shrinking_leaves_the_excluded_ranks_out", 4),
        ("check_captured_sends_replay", 3),
        ("check_a_captured_call_replays_from_other_graphs", 2),
        ("check_graph_usage_mode_of_the_configuration_is_obeyed", 2),
        ("check_abort_ends_a_waiting_kernel_without_a_cuda_error", 2),
        ("check_calls_that_differ_between_ranks_are_an_error_that_names_both", 2),
        ("check_messages_that_differ_in_size_are_an_error", 2),
        ("check_a_replay_after_the_communicator_is_destroyed_is_an_error", 2),
        ("check_nothing_is_left_after_communicators_and_graphs", 2),
    ],
)
def test_soft_at_one_size(check: str, size: int, run_ranks: RunRanks) -> None:
    run_ranks("soft_program", check, size)


def test_replay_without_graph_mixing_is_the_kernel_alone(run_ranks: RunRanks) -> None:
    run_ranks("soft_program", "check_captured_calls_replay_among_eager_ones", 2, NCCL_GRAPH_MIXING_SUPPORT="0")


def test_init_in_a_group_and_for_all_devices(run_ranks: RunRanks) -> None:
    run_ranks("soft_program", "check_init_in_a_group_and_for_all_devices", 1, SOFTCUDA_DEVICES="2")


def test_a_killed_peer_is_an_error_and_not_a_hang(run_ranks: RunRanks) -> None:
    # Survivors notice the death itself: the deadline is far beyond the test's own.
    run_ranks(
        "soft_program", "check_a_killed_peer_is_an_error_and_not_a_hang", 3, killed=(2,), FOUNDRYD_NCCL_TIMEOUT="3600"
    )


@pytest.mark.parametrize(
    "check",
    [
        "check_a_peer_that_does_not_come_is_an_error_after_the_deadline",
        "check_a_receive_without_sender_is_an_error_after_the_deadline",
        "check_a_rank_that_never_joins_is_an_error_after_the_deadline",
        "check_ranks_that_disagree_on_the_size_are_told",
    ],
)
def test_a_deadline_ends_a_wait(check: str, run_ranks: RunRanks) -> None:
    run_ranks("soft_program", check, 2, FOUNDRYD_NCCL_TIMEOUT="1.5")


def test_segments_of_killed_processes_are_removed_and_those_of_live_ones_are_not(
    cuda_nccl: ModuleType, run_ranks: RunRanks, tmp_path: Path
) -> None:
    nccl = cuda_nccl.Nccl(cuda_nccl.soft_nccl())

    def wait_alone() -> tuple[subprocess.Popen[bytes], Path]:
        """A process that waits for a second rank, and its segment, which looks old."""
        unique = nccl.unique_id().raw()
        program = Path(__file__).parent / "soft_program.py"
        arguments = ["check_a_rank_waits_until_it_is_killed", "0", "2", unique.hex(), tmp_path]
        child = subprocess.Popen([sys.executable, "-P", program, *arguments], env=cuda_nccl.environment())
        segment = Path("/dev/shm") / f"foundryd-nccl-{unique[8:24].hex()}"
        end = time.monotonic() + 60
        while not segment.exists() or segment.stat().st_size == 0:
            assert time.monotonic() < end, "no segment appeared"
            time.sleep(0.01)
        os.utime(segment, (0, 0))
        return child, segment

    killed, stale = wait_alone()
    alive, fresh = wait_alone()
    try:
        killed.kill()
        killed.wait()
        assert stale.exists()
        run_ranks("soft_program", "check_a_communicator_of_one", 1)
        assert not stale.exists()
        assert fresh.exists()
    finally:
        alive.kill()
        alive.wait()
        fresh.unlink()


def test_bad_timeouts_are_refused(run_ranks: RunRanks) -> None:
    for text in ("0", "soon", "-1"):
        with pytest.raises(AssertionError, match=f"FOUNDRYD_NCCL_TIMEOUT is '{text}'"):
            run_ranks("soft_program", "check_collectives_equal_numpy", 1, FOUNDRYD_NCCL_TIMEOUT=text)
