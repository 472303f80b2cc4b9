# SPDX-License-Identifier: Apache-2.0
"""Collections of garbage while a worker starts: what they look at, and what the report says of them."""

from __future__ import annotations

import gc
import json
import weakref

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import collector, v0_22
from foundryd.engines.vllm.report import StartUp

RANK = {"RANK": "0", "WORLD_SIZE": "1"}


class Node:
    """Something that only the collector can free."""

    def __init__(self):
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_frozen():
    gc.unfreeze()  # Python 3.12 starts with some
    yield
    collector.thaw()
    gc.unfreeze()


def dropped():
    return weakref.ref(Node())


@pytest.fixture
def seen(vllm, monkeypatch):
    """Objects that are out of collections, at each step that vLLM's worker makes."""
    counts = {}
    worker = vllm.worker
    for name in ("init_device", "load_model", "initialize_from_config", "compile_or_warm_up_model"):
        real = getattr(worker.Worker, name)

        def step(self, *arguments, name=name, real=real, **named):
            counts[name] = gc.get_freeze_count()
            return real(self, *arguments, **named)

        step.__signature__ = __import__("inspect").signature(real)
        monkeypatch.setattr(worker.Worker, name, step)
    return counts


def test_a_restoring_worker_spares_collections_what_was_there_before_its_context_and_after_profiling(vllm, seen):
    vllm.start("capture", **RANK)
    assert set(seen.values()) == {0}
    worker = vllm.start("restore")
    assert seen["init_device"] > 1000
    assert seen["load_model"] <= seen["init_device"]
    assert seen["initialize_from_config"] > seen["init_device"]
    worker.shutdown()
    assert gc.get_freeze_count() == 0


def test_a_worker_that_falls_back_collects_as_vllm_does(vllm, seen):
    vllm.start("capture", **RANK)
    config = vllm.config.VllmConfig()
    config.scheduler_config.max_num_seqs = 8
    vllm.start("restore", config)
    assert set(seen.values()) == {0}


@pytest.mark.parametrize("late", ["kv_cache", "graphs"])
def test_a_worker_that_gives_up_late_collects_whole_before_it_captures(vllm, monkeypatch, late):
    vllm.start("capture", **RANK)
    frozen, other = [], vllm.graphs.BatchExecutionDescriptor
    real = vllm.graphs.CudaGraphManager.capture
    monkeypatch.setattr(
        vllm.graphs.CudaGraphManager,
        "capture",
        lambda self, create_forward_fn, progress_bar_desc="": (
            frozen.append(gc.get_freeze_count()),
            real(self, create_forward_fn),
        )[1],
    )
    if late == "kv_cache":
        monkeypatch.setattr(vllm.runner.FlashAttention, "name", "FLASHINFER")
    else:
        monkeypatch.setattr(vllm.graphs, "BatchExecutionDescriptor", lambda *named: other(*named[:2], 1))
    vllm.start("restore")
    assert v0_22._current.report.way == "native"
    assert frozen == [0]


def test_what_is_frozen_stays_and_is_collected_once_thawed():
    gc.collect()
    lost = dropped()
    collector.freeze()
    gc.collect()
    assert lost() is not None
    late = dropped()
    gc.collect()
    assert late() is None
    collector.collect()
    assert lost() is None


def test_only_a_restoring_worker_loads_the_compiled_model_without_collections(vllm, monkeypatch):
    from vllm.compilation import backends

    enabled = []
    monkeypatch.setattr(backends, "note", lambda _: enabled.append(gc.isenabled()))
    vllm.start("capture", **RANK)
    vllm.start("restore")
    assert enabled == [True, False]
    assert gc.isenabled()


def test_a_pause_leaves_a_collector_off_that_was_off():
    gc.disable()
    try:
        with collector.paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_python_froze_when_it_started_keeps_nobody_from_freezing(monkeypatch):
    """Python 3.12 starts with 375 frozen objects."""
    with monkeypatch.context() as patched:
        patched.setattr(gc, "get_freeze_count", lambda: 375)
        collector.freeze()
    assert gc.get_freeze_count() > 10_000
    collector.thaw()
    assert gc.get_freeze_count() == 0


def test_what_the_program_froze_itself_stays_frozen():
    gc.freeze()
    before = gc.get_freeze_count()
    collector.freeze()
    collector.thaw()
    assert gc.get_freeze_count() >= before - 100


def test_collections_are_counted_to_the_phase_they_come_in():
    report = StartUp("engine", 0)
    gc.collect()
    with report.phase("outer"):
        with report.phase("inner"):
            gc.collect()
        with report.part("piece"):
            pass
    with report.part("of nothing"):
        pass
    assert list(report.collections) == ["inner"]
    assert 0 < report.collections["inner"] <= report.phases["inner"]
    assert list(report.parts) == ["outer.piece"]
    report.publish(None)
    with report.phase("outer"):
        gc.collect()
    assert list(report.collections) == ["inner"]


PARTS = {
    "init_device.runner",
    "load_model.parameters",
    "load_model.kernel_format",
    "load_model.model_state",
    "profile.load_compiled",
    "profile.split_and_compile",
    "profile.run",
    "warm_up.kernels",
    "warm_up.steps",
}
RESTORED = {f"graphs.{name}" for name in ("tidy", "bind", "keys", "restore", "outputs", "give", "background")}


def test_the_report_says_what_phases_are_made_of(vllm, tmp_path):
    parts = {}
    for mode, way in (("", "native"), ("capture", "captured"), ("restore", "restored")):
        vllm.start(mode, **RANK, FOUNDRYD_STARTUP_REPORT=tmp_path / way)
        report = json.loads((tmp_path / way / "rank-0.json").read_text())
        parts[way] = set(report["parts_ms"])
        assert all(ms >= 0 for ms in report["parts_ms"].values())
        assert set(report["collector_ms"]) <= set(report["phases_ms"])
    assert parts == {
        "native": PARTS | {"graphs.vllm"},
        "captured": PARTS | {"graphs.bind", "graphs.vllm"},
        "restored": PARTS | RESTORED,
    }
