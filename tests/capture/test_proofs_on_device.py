# SPDX-License-Identifier: Apache-2.0
"""The proofs on device memory, in a process with the hook: on the software driver, and on a GPU where there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from foundryd import _native
from foundryd.cli.environment import device_answers

HERE = Path(__file__).parent


def child(script, argument, driver, *, hook=True):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("FOUNDRYD_", "SOFTCUDA_", "LD_PRELOAD"))}
    env["OPENBLAS_NUM_THREADS"] = "1"
    if driver == "soft":
        env["LD_LIBRARY_PATH"] = str(_native.soft_folder())
    if hook:
        env |= {"LD_PRELOAD": str(_native.hook_library()), "FOUNDRYD_MODE": "capture"}
    done = subprocess.run(
        [sys.executable, "-P", HERE / script, argument],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(not device_answers(), reason="no CUDA driver answers with a device"),
)


@pytest.fixture(params=["soft", pytest.param("cuda", marks=on_gpu)])
def driver(request):
    return request.param


@pytest.fixture
def scene(driver):
    return lambda name: child("device_scenes.py", name, driver)


@pytest.fixture
def slack(driver):
    """How much device memory may come and go beside what is looked at: a GPU's driver takes some for itself."""
    return 0 if driver == "soft" else 64 << 20


def test_the_kernels_agree_with_numpy():
    figures = child("kernel_check.py", "0", "soft", hook=False)
    assert figures["software"]
    assert figures["surveyed"] > 100
    assert figures["put"] > 100
    assert min(figures["judged"]) > 100


def test_dead_is_what_is_written_before_it_is_read(scene):
    assert scene("written_before_read") == ["a", "c"]


def test_a_partly_overwritten_range_is_alive_where_the_rest_is_read(scene):
    assert scene("partly_written") == ["a"]


def test_ranges_that_are_harmless_only_alone_are_not_dead_together(scene):
    assert scene("only_alone") < 2


def test_a_range_is_alive_in_whatever_order_graphs_come(scene):
    assert scene("any_order_of_graphs") == [["b"], ["b"]]


def test_a_live_index_is_never_overwritten_with_nonsense(scene):
    assert scene("an_index_is_never_nonsense") == [[], True]


def test_only_addresses_in_allocations_keep_a_range_from_being_tried(scene):
    assert scene("addresses_are_not_tried") == ["b", "c"]


def test_device_and_pinned_memory_are_afterwards_as_they_were(scene):
    assert scene("everything_is_put_back") == [True] * 4


def test_a_big_and_sparse_cache_takes_little_room(scene, slack):
    dead, little, content, left = scene("big_and_sparse")
    assert dead == ["a"]
    assert little
    assert content == 1000
    assert left <= slack


@pytest.mark.parametrize(("name", "after"), [("wild_write_into_sameness", 0), ("wild_write_into_content", True)])
def test_a_range_that_sends_a_replay_elsewhere_is_alive_and_what_it_wrote_is_put_back(scene, name, after):
    assert scene(name) == [[], after]


def test_a_replay_that_cannot_be_undone_ends_the_control_run(scene):
    reason, message = scene("wild_write_without_room")
    assert reason == "state_lost"
    assert "wrote 1 chunks" in message
    assert "5 chunks with content found no room" in message


def test_scarce_room_goes_to_what_the_graphs_write(scene):
    assert scene("room_goes_to_what_replays_write") == [["a"], True]


def test_a_word_can_be_noise_in_one_state_and_not_in_another(scene):
    assert scene("noise_in_one_state_only") == [[0, 8], [8]]


def test_every_graph_is_proven_in_a_state_of_its_own(scene):
    resting, working, rested, worked, put_back = scene("each_graph_in_its_own_state")
    assert resting == ["a", "b"]
    assert working == ["b"]
    assert rested == [[i, 0, 0] for i in range(3)]
    assert worked == [[i, i + 1, i + 1] for i in range(3)]
    assert put_back


def test_a_state_of_one_graph_that_finds_no_room_ends_the_control_run(scene):
    reason, message = scene("a_state_without_room")
    assert reason == "state_lost"
    assert message.startswith("another state wrote")


def test_snapshots_give_their_memory_back(scene, slack):
    assert scene("snapshots_are_given_back") <= slack


@pytest.mark.gpu
@pytest.mark.skipif(not device_answers(), reason="no CUDA driver answers with a device")
def test_proofs_over_gigabytes_take_seconds():
    dead, seconds = child("device_scenes.py", "seconds_for_gigabytes", "cuda")
    assert dead == 16
    assert seconds < 20
