# SPDX-License-Identifier: Apache-2.0
"""Processes of vLLM: which one has a worker, how many workers it has, and how they end."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import v0_22  # noqa: E402

RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def graphs():
    """The graphs of the worker that started last."""
    return v0_22._current._graphs


def test_a_worker_that_was_spawned_and_loads_plugins_as_it_is_made_restores_too(vllm):
    """As with several ranks under ``vllm serve``."""
    vllm.start("capture", **RANK)
    worker = vllm.start("restore", spawned=True)
    assert vllm.what()[:2] == ["attach", "context"]
    assert v0_22._current.report.way == "restored"
    assert "native capture" not in vllm.what()
    assert worker.model_runner.execute([3, 1]).abs().sum() > 0


def test_a_runner_of_another_worker_is_left_to_vllm(vllm):
    """The seams are in a process whose worker, of another device, never attached."""
    vllm.start("capture", **RANK)
    v0_22._current = None
    runner = vllm.runner.GPUModelRunner(vllm.config.VllmConfig(), None)
    runner.load_model()
    runner.initialize_kv_cache(SimpleNamespace(num_blocks=10))
    runner.capture_model()
    assert vllm.what().count("native capture") == 3
    assert runner.execute([3, 1]).abs().sum() > 0


def test_the_graphs_are_closed_before_vllm_frees_its_memory(vllm):
    worker = vllm.start("capture", **RANK)
    made, closed_at = graphs(), []
    made.close = lambda: closed_at.append(len(vllm.log.events))
    worker.shutdown()
    assert closed_at == [vllm.what().index("shutdown")]


def test_a_worker_that_ends_leaves_the_graphs_of_another_of_its_process(vllm):
    vllm.start("capture", **RANK)
    first = vllm.start("restore")
    of_first = graphs()
    second = importlib.import_module("vllm.engine").start(vllm.config.VllmConfig())
    of_second = graphs()
    first.shutdown()
    assert (of_first.closed, of_second.closed) == (True, False)
    second.shutdown()
    assert of_second.closed


def test_vllm_frees_its_memory_even_if_the_device_fails_when_graphs_are_closed(vllm):
    worker = vllm.start("capture", **RANK)

    def fails():
        raise RuntimeError("an illegal memory access was encountered")

    graphs().close = fails
    with pytest.raises(RuntimeError, match="illegal memory access"):
        worker.shutdown()
    assert vllm.what()[-1] == "shutdown"
