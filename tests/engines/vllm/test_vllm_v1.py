# SPDX-License-Identifier: Apache-2.0
"""The V1 model runner that records, restores or captures natively, on the stand-in's order of calls."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import v0_22, v0_22_v1  # noqa: E402
from foundryd.engines.vllm.vary import schedules  # noqa: E402
from foundryd.errors import CaptureError, EngineUnsupported, IdentityMismatch  # noqa: E402

RANK = {"RANK": "0", "WORLD_SIZE": "1"}
WHOLE = [("FULL", n, n, 1) for n in (4, 2, 1)]
PIECES = [("PIECE", index, tokens, 0) for tokens in (4, 2, 1) for index in (0, 1)]


def configured(vllm, mode="FULL_DECODE_ONLY", sizes=(1, 2, 4)):
    config = vllm.config.VllmConfig(use_v2_model_runner=False)
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode[mode]
    config.compilation_config.cudagraph_capture_sizes = list(sizes)
    return config


def graphs():
    """The graphs of the worker that started last."""
    return v0_22._current._graphs


def fallback():
    return v0_22._current.report.fallback


def test_a_capture_records_each_batch_once_and_vllm_captures_none(vllm):
    worker = vllm.start("capture", configured(vllm), **RANK)
    assert list(graphs()._graphs) == WHOLE
    assert not {"native capture", "trial capture"} & set(vllm.what())
    assert vllm.parallel.captures == 1
    assert ("input buffers", "io") in vllm.log.events
    assert ("KV cache", "kv") in vllm.log.events
    # A warm-up and the capture of each batch, and the sampler's.
    assert vllm.what().count("dummy run") == 7
    assert len(worker.model_runner.model.concrete_cudagraph_entries) == 3
    assert not vllm.monitor.cudagraph_capturing_enabled


def test_trial_captures_stay_where_nothing_is_restored(vllm, tmp_path):
    vllm.start("", configured(vllm), FOUNDRYD_STARTUP_REPORT=tmp_path)
    assert vllm.what().count("trial capture") == 1
    assert vllm.what().count("native capture") == 3


def test_what_every_graph_reads_is_bound_by_name(vllm):
    worker = vllm.start("capture", configured(vllm), **RANK)
    names = set(graphs().bound)
    assert names == set()  # the stand-in's tensors are not on a device
    assert set(v0_22_v1.filled(worker.model_runner)) == {
        *("model.embedding", "model.scale", "model.angles", "slot_mapping.0", "block_table.0", "schedule.0.0", "kv.0"),
        *(f"inputs.{n}" for n in ("input_ids", "positions", "query_start_loc", "seq_lens")),
    }


@pytest.mark.parametrize("mode", ["capture", "restore"])
def test_scratch_memory_lies_in_an_arena_while_the_worker_starts(vllm, mode):
    from vllm.v1.worker.workspace import WorkspaceManager, current_workspace_manager

    own = WorkspaceManager._ensure_workspace_size
    vllm.start("capture", configured(vllm), **RANK)
    vllm.start(mode, configured(vllm), **RANK)
    assert [arena for what, arena in vllm.log.events if what == "workspace"] == ["io", "io"]
    # Nothing is asked of an arena where nothing is made, as while a graph is captured.
    assert {arena for what, arena in vllm.log.events if what == "workspace as it is"} == {"default"}
    assert v0_22._workspaces() == {"workspace.0": current_workspace_manager()._current_workspaces[0]}
    assert WorkspaceManager._ensure_workspace_size is own


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"])
def test_recorded_and_restored_workers_compute_what_a_native_one_does(vllm, mode):
    native = vllm.start("", configured(vllm, mode)).model_runner.execute([3, 1])
    recorded = vllm.start("capture", configured(vllm, mode), **RANK).model_runner.execute([3, 1])
    restored = vllm.start("restore", configured(vllm, mode)).model_runner.execute([3, 1])
    assert fallback() is None
    assert vllm.what()[-1] == "replay"
    assert torch.equal(native, recorded)
    assert torch.equal(native, restored)
    assert native.abs().sum() > 0


def test_a_restore_runs_nothing_for_a_graph_and_leaves_vllm_as_after_its_own_capture(vllm):
    recorded = vllm.start("capture", configured(vllm), **RANK).model_runner.model
    worker = vllm.start("restore", configured(vllm))
    assert fallback() is None
    assert not {"native capture", "trial capture"} & set(vllm.what())
    assert vllm.what()[-4:] == ["workspace locked", "dummy run", "workspace as it is", "warm up of the sampler"]
    assert vllm.what().count("dummy run") == 1
    assert not vllm.monitor.cudagraph_capturing_enabled
    before, after = recorded.concrete_cudagraph_entries, worker.model_runner.model.concrete_cudagraph_entries
    assert list(before) == list(after)
    for batch in before:
        assert after[batch].cudagraph is before[batch].cudagraph
        assert after[batch].output is before[batch].output


def test_pieces_come_before_whole_graphs_and_are_restored_with_their_addresses(vllm):
    recorded = vllm.start("capture", configured(vllm, "FULL_AND_PIECEWISE"), **RANK).model_runner
    assert list(graphs()._graphs) == [*PIECES, *WHOLE]
    assert not {"native capture", "native capture of a piece"} & set(vllm.what())
    restored = vllm.start("restore", configured(vllm, "FULL_AND_PIECEWISE")).model_runner
    assert fallback() is None
    for old, new in zip(recorded.get_model().pieces, restored.get_model().pieces, strict=True):
        before, after = old.concrete_cudagraph_entries, new.concrete_cudagraph_entries
        assert list(before) == list(after)
        for batch in before:
            assert after[batch].input_addresses == before[batch].input_addresses != []
    # The stand-in's tensors of a restored worker lie elsewhere, so only those that were recorded can be replayed.
    pieces = vllm.compilation.CUDAGraphMode.PIECEWISE
    output = recorded.execute([3, 1], pieces)
    assert vllm.what()[-2:] == ["replay of a piece"] * 2
    assert torch.equal(output, recorded.execute([3, 1]))


@pytest.mark.parametrize(("mode", "key"), [("FULL_DECODE_ONLY", ("FULL", 4, 4, 1)), ("FULL", ("FULL", 7, 4, 0))])
def test_a_graph_gets_the_schedule_of_its_own_batch_and_the_host_keeps_its_starts(vllm, mode, key):
    sizes = (1, 4) if mode == "FULL_DECODE_ONLY" else (1, 4, 7)
    runner = vllm.start("capture", configured(vllm, mode, sizes), **RANK).model_runner
    assert key in graphs()._graphs
    assert not runner.query_start_loc.cpu.any()
    graphs().vary(1)
    [schedule] = schedules(runner).values()
    assert not schedule.any()
    graphs().vary_graph(key, 1)
    assert schedule[4:8].tolist() == [1] * 4  # a token of each request
    assert bool(runner.seq_lens.all())
    assert runner.input_batch.block_table.block_tables[0].slot_mapping.gpu[:4].unique().numel() == 4


def native(vllm, worker, error, *named):
    """The worker captured by itself and serves, for this reason."""
    assert isinstance(fallback(), error)
    for words in named:
        assert words in str(fallback())
    assert vllm.what().count("native capture") == 3
    assert worker.model_runner.execute([3, 1]).abs().sum() > 0


def test_another_attention_backend_that_vllm_chose_by_itself_is_refused(vllm, monkeypatch):
    vllm.start("capture", configured(vllm), **RANK)
    monkeypatch.setattr(vllm.first_runner.FlashAttention, "name", "FLASHINFER")
    native(vllm, vllm.start("restore", configured(vllm)), EngineUnsupported, "the attention back-end FLASHINFER")


def test_batches_that_vllm_resolved_otherwise_are_refused(vllm, monkeypatch):
    vllm.start("capture", configured(vllm), **RANK)
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    real = CudagraphDispatcher.get_capture_descs
    monkeypatch.setattr(CudagraphDispatcher, "get_capture_descs", lambda self: [(m, b[1:]) for m, b in real(self)])
    vllm.start("restore", configured(vllm))
    assert isinstance(fallback(), IdentityMismatch)
    assert "vllm.graphs is (('FULL', 1, 1, 1), ('FULL', 2, 2, 1)) and the archive has" in str(fallback())
    assert vllm.what().count("native capture") == 2


def test_the_runner_is_looked_at_after_the_attach_and_one_that_is_otherwise_is_left_to_vllm(vllm, monkeypatch):
    """vLLM imports this runner when it makes the device ready, and its imports may touch the device."""
    vllm.start("capture", configured(vllm), **RANK)
    seen = []
    real = type(graphs()).__init__

    def attached(self, *arguments):
        seen.append("vllm.v1.worker.gpu_model_runner" in sys.modules)
        real(self, *arguments)

    monkeypatch.setattr(type(graphs()), "__init__", attached)
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu_model_runner")
    vllm.start("restore", configured(vllm))
    assert fallback() is None
    assert seen == [False]
    monkeypatch.delitem(sys.modules, "vllm.v1.worker.gpu_model_runner")
    changed = [replace(row, parameters=("self", "other")) if row.name == "capture_model" else row for row in v0_22.V1]
    monkeypatch.setattr(v0_22, "V1", tuple(changed))
    worker = vllm.start("restore", configured(vllm))
    native(vllm, worker, EngineUnsupported, "capture_model takes self and its version should take self, other first")
    assert vllm.what().count("trial capture") == 1


def test_an_archive_of_one_runner_is_refused_for_the_other(vllm):
    vllm.start("capture", configured(vllm), **RANK)
    vllm.start("restore")
    assert isinstance(fallback(), IdentityMismatch)
    assert "vllm.model_runner is V2 and the archive has V1" in str(fallback())


def test_positions_of_several_axes_are_refused(vllm, monkeypatch):
    vllm.start("capture", configured(vllm), **RANK)
    real = vllm.first_runner.GPUModelRunner.__init__

    def changed(self, vllm_config, device):
        real(self, vllm_config, device)
        self.uses_mrope = True

    monkeypatch.setattr(vllm.first_runner.GPUModelRunner, "__init__", changed)
    native(vllm, vllm.start("restore", configured(vllm)), EngineUnsupported, "M-RoPE")
    with pytest.raises(EngineUnsupported, match="M-RoPE"):
        vllm.start("capture", configured(vllm), **RANK)


def test_graphs_that_another_kind_of_wrapper_keeps_are_refused(vllm, monkeypatch):
    real = vllm.first_runner.GPUModelRunner.load_model

    class Other:
        def __init__(self, wrapper):
            self.runnable = wrapper.runnable

    def changed(self, **named):
        real(self, **named)
        self.model = Other(self.model)

    monkeypatch.setattr(vllm.first_runner.GPUModelRunner, "load_model", changed)
    with pytest.raises(EngineUnsupported, match="whole model in Other"):
        vllm.start("capture", configured(vllm), **RANK)


def test_a_capture_past_the_recording_is_refused(vllm, monkeypatch):
    real = vllm.first_runner.GPUModelRunner._dummy_run

    def skipped(self, num_tokens, cudagraph_runtime_mode=None, batch=None):
        if num_tokens != 2:
            real(self, num_tokens, cudagraph_runtime_mode, batch)

    monkeypatch.setattr(vllm.first_runner.GPUModelRunner, "_dummy_run", skipped)
    with pytest.raises(CaptureError, match=r"vLLM captured 1 of 3 graphs by itself, \('FULL', 2, 2, 1\) for one"):
        vllm.start("capture", configured(vllm), **RANK)


def test_a_runner_of_another_worker_is_left_to_vllm(vllm):
    vllm.start("capture", configured(vllm), **RANK)
    v0_22._current = None
    runner = vllm.first_runner.GPUModelRunner(configured(vllm), None)
    runner.load_model()
    runner.profile_run()
    runner.initialize_kv_cache(SimpleNamespace(num_blocks=10))
    runner.capture_model()
    assert vllm.what().count("native capture") == 3
    assert runner.execute([3, 1]).abs().sum() > 0
