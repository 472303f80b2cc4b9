# SPDX-License-Identifier: Apache-2.0
"""A vLLM worker that records, restores or captures natively, on the stand-in's order of calls."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import v0_22, v0_22_v2  # noqa: E402
from foundryd.engines.vllm.adapter import WorkerGraphs  # noqa: E402
from foundryd.engines.vllm.vary import schedules  # noqa: E402
from foundryd.errors import (  # noqa: E402
    ArchiveFormatError,
    CaptureError,
    EngineUnsupported,
    IdentityMismatch,
    NotEnoughMemory,
    UsageError,
)

MIB = 1 << 20
RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def graphs():
    """The graphs of the worker that started last."""
    return v0_22._current._graphs


def fallback():
    return v0_22._current.report.fallback


def test_what_the_worker_fills_lies_in_arenas_and_the_attach_precedes_the_context(vllm):
    vllm.start("capture", **RANK)
    assert vllm.log.events[:9] == [
        ("attach", "default"),
        ("context", "default"),
        ("process groups", "default"),
        ("input buffers", "io"),
        ("parameters", "weights"),
        ("values", "default"),
        ("kernel format", "weights"),
        ("model state", "io"),
        ("profile", "default"),
    ]
    assert ("KV cache", "kv") in vllm.log.events
    assert all(arena == "default" for what, arena in vllm.log.events if what in ("warm up", "inputs of a batch"))


@pytest.mark.parametrize("counted", [None, "num_aot_compiles", "num_compiled_artifacts_saved"])
def test_a_capture_says_whether_vllm_compiled_or_loaded_its_model(vllm, monkeypatch, counted):
    """What compiling allocates another launch does not, so whoever captures launches again."""
    from vllm.compilation.counter import compilation_counter

    if counted is not None:
        monkeypatch.setattr(compilation_counter, counted, 1)
    vllm.start("capture", **RANK)
    assert graphs().cold is (counted is not None)


@pytest.mark.parametrize("cold", [False, True])
def test_a_recording_says_whether_its_caches_were_cold(monkeypatch, cold):
    monkeypatch.setattr("foundryd.engines.torch.graphset.GraphSet._examine", lambda self, recording: None)
    made, recording = WorkerGraphs.__new__(WorkerGraphs), SimpleNamespace(notes={})  # making one asks for a GPU
    made.cold = cold
    made._examine(recording)
    assert recording.notes == {"cold": cold}


def test_a_capture_records_each_batch_once_in_the_order_of_vllm_after_a_warm_up(vllm):
    worker = vllm.start("capture", **RANK)
    manager = worker.model_runner.cudagraph_manager
    assert list(graphs()._graphs) == [("FULL", n, n, 1) for n in (4, 2, 1)]
    assert "native capture" not in vllm.what()
    # Each batch gets inputs for its warm-up and a fresh state for its graph.
    assert vllm.what().count("inputs of a batch") == 6
    assert vllm.parallel.captures == 1
    assert manager._graphs_captured
    assert list(manager.graphs) == manager._capture_descs[vllm.compilation.CUDAGraphMode.FULL]
    assert graphs().vary is not None
    graphs().vary(1)
    [schedule] = schedules(worker.model_runner).values()
    assert not schedule.any()
    for n in (4, 2, 1):
        graphs().vary_graph(("FULL", n, n, 1), 1)
        assert schedule[4 : 4 + n].tolist() == [1] * n  # a token of each request


def test_a_recorded_worker_computes_what_a_native_one_does(vllm):
    native = vllm.start().model_runner.execute([3, 1])
    recorded = vllm.start("capture", **RANK).model_runner.execute([3, 1])
    assert torch.equal(native, recorded)
    assert native.abs().sum() > 0


def test_a_restore_runs_no_warm_up_of_a_graph_and_gives_vllm_every_one(vllm):
    recorded = vllm.start("capture", **RANK).model_runner.cudagraph_manager
    worker = vllm.start("restore")
    manager = worker.model_runner.cudagraph_manager
    assert fallback() is None
    assert not {"inputs of a batch", "native capture"} & set(vllm.what())
    assert [g.replay for g in manager.graphs.values()] == [g.replay for g in recorded.graphs.values()]
    assert manager.hidden_states is recorded.hidden_states
    assert manager._graphs_captured
    assert vllm.what()[-2:] == ["warm up", "warm up with replays"]
    assert graphs().vary is None


def test_what_every_graph_reads_is_bound_by_name(vllm):
    worker = vllm.start("capture", **RANK)
    names = set(v0_22_v2.filled(worker.model_runner))
    assert names >= {
        *("model.embedding", "model.scale", "model.angles", "slot_mappings", "block_table.0", "schedule.0.0", "kv.0"),
        *(f"inputs.{n}" for n in ("input_ids", "positions", "query_start_loc", "seq_lens", "dcp_local_seq_lens")),
    }


def test_vllm_gets_its_own_times_back(vllm):
    vllm.start("capture", **RANK)
    assert vllm.worker.Worker.compile_or_warm_up_model(vllm.start("restore").worker) == "times"


def test_without_a_mode_nothing_is_wrapped(vllm):
    vllm.start()
    assert not hasattr(vllm.worker.Worker.init_device, "__foundryd_real__")
    assert v0_22._current is None


# --- fallback ---------------------------------------------------------------------------------------------------------


def assert_native(vllm, worker, error, *named):
    """The worker captured by itself and serves, for this reason."""
    assert isinstance(fallback(), error)
    for words in named:
        assert words in str(fallback())
    assert vllm.what().count("native capture") == 3
    assert worker.model_runner.execute([3, 1]).abs().sum() > 0


def other_model(c):
    c.model_config.hf_config = type(c.model_config.hf_config)(hidden_size=16)


def setting(part, name, value):
    def change(config):
        setattr(getattr(config, part), name, value)

    change.__name__ = name
    return change


SETTINGS = [
    setting("scheduler_config", "max_num_seqs", 8),
    setting("scheduler_config", "max_num_batched_tokens", 64),
    setting("model_config", "max_model_len", 32),
    setting("model_config", "dtype", torch.float16),
    setting("model_config", "quantization", "fp8"),
    setting("cache_config", "cache_dtype", "fp8"),
    setting("cache_config", "gpu_memory_utilization", 0.5),
    setting("cache_config", "kv_cache_memory_bytes", 64 * MIB),
    setting("cache_config", "num_gpu_blocks_override", 100),
    setting("compilation_config", "cudagraph_capture_sizes", [1, 2]),
    setting("compilation_config", "custom_ops", ["+rms_norm"]),
]
FIELDS = {"custom_ops": "compilation", "cache_dtype": "kv_cache_dtype"}


@pytest.mark.parametrize("change", SETTINGS, ids=lambda c: c.__name__)
def test_another_setting_is_refused_by_name_and_captured_natively(vllm, caplog, change):
    vllm.start("capture", **RANK)
    config = vllm.config.VllmConfig()
    change(config)
    sizes = len(config.compilation_config.cudagraph_capture_sizes)
    with caplog.at_level(logging.WARNING, "foundryd"):
        worker = vllm.start("restore", config)
    assert isinstance(fallback(), IdentityMismatch)
    assert f"vllm.{FIELDS.get(change.__name__, change.__name__)} is " in str(fallback())
    assert vllm.what().count("native capture") == sizes
    assert [r.message for r in caplog.records] == [f"capturing natively (identity): {fallback()}"]
    assert worker.model_runner.execute([3, 1]).abs().sum() > 0


def test_another_model_is_refused_and_captured_natively(vllm):
    vllm.start("capture", **RANK)
    config = vllm.config.VllmConfig()
    other_model(config)
    assert_native(vllm, vllm.start("restore", config), IdentityMismatch, "model_config is ")


def test_another_attention_backend_that_vllm_chose_by_itself_is_refused(vllm, monkeypatch):
    vllm.start("capture", **RANK)
    monkeypatch.setattr(vllm.runner.FlashAttention, "name", "FLASHINFER")
    worker = vllm.start("restore")
    assert_native(vllm, worker, EngineUnsupported, "the attention back-end FLASHINFER", "FLASH_ATTN")


def test_batches_that_vllm_resolved_otherwise_are_refused(vllm, monkeypatch):
    vllm.start("capture", **RANK)
    real = vllm.graphs.CudaGraphManager.__init__

    def fewer(self, *arguments):
        real(self, *arguments)
        self._capture_descs[vllm.compilation.CUDAGraphMode.FULL].pop(1)

    monkeypatch.setattr(vllm.graphs.CudaGraphManager, "__init__", fewer)
    vllm.start("restore")
    assert isinstance(fallback(), IdentityMismatch)
    assert "vllm.graphs is (('FULL', 1, 1, 1), ('FULL', 4, 4, 1)) and the archive has" in str(fallback())
    assert vllm.what().count("native capture") == 2


def test_an_unsupported_configuration_attaches_to_nothing(vllm, caplog):
    config = vllm.config.VllmConfig(kv_transfer_config=object())
    with caplog.at_level(logging.WARNING, "foundryd"):
        worker = vllm.start("restore", config)
    assert_native(vllm, worker, EngineUnsupported, "cache transfer")
    assert "attach" not in vllm.what()
    assert {arena for _, arena in vllm.log.events} == {"default"}
    assert len(caplog.records) == 1


def test_an_unsupported_configuration_ends_a_capture(vllm):
    with pytest.raises(EngineUnsupported, match="cache transfer"):
        vllm.start("capture", vllm.config.VllmConfig(kv_transfer_config=object()), **RANK)


def test_an_error_while_finishing_a_restore_does_not_end_the_worker(vllm, monkeypatch):
    vllm.start("capture", **RANK)
    with monkeypatch.context() as patched:
        fails = UsageError("no")
        patched.setattr(type(graphs()), "bind", lambda *_: (_ for _ in ()).throw(fails))
        assert_native(vllm, vllm.start("restore"), UsageError)


def test_graphs_of_any_batch_are_recorded_and_restored_by_tokens_and_requests(vllm):
    config = vllm.config.VllmConfig()
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode.FULL
    config.compilation_config.cudagraph_capture_sizes = [1, 4, 7]
    keys = [("FULL", 7, 4, 0), ("FULL", 4, 4, 0), ("FULL", 1, 1, 0)]
    native = vllm.start("", config).model_runner.execute([3, 1, 2, 5, 4])
    recorded = vllm.start("capture", config, **RANK).model_runner
    assert list(graphs()._graphs) == keys
    assert torch.equal(recorded.execute([3, 1, 2, 5, 4]), native)
    restored = vllm.start("restore", config).model_runner
    assert fallback() is None
    assert "native capture" not in vllm.what()
    assert torch.equal(restored.execute([3, 1, 2, 5, 4]), native)


def test_a_graph_of_more_tokens_than_requests_gets_a_schedule_of_its_requests(vllm):
    config = vllm.config.VllmConfig()
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode.FULL
    config.compilation_config.cudagraph_capture_sizes = [1, 4, 7]
    recorded = vllm.start("capture", config, **RANK).model_runner
    graphs().vary(0)
    graphs().vary_graph(("FULL", 7, 4, 0), 0)
    [schedule] = schedules(recorded).values()
    assert schedule[4:8].tolist() == [1] * 4


# --- pieces of a model ------------------------------------------------------------------------------------------------


def in_pieces(vllm):
    config = vllm.config.VllmConfig()
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode.FULL_AND_PIECEWISE
    return config


PIECES = [("PIECE", index, tokens, 0) for tokens in (4, 2, 1) for index in (0, 1)]


def test_pieces_are_recorded_before_whole_graphs_and_vllm_captures_none(vllm):
    native = vllm.start("", in_pieces(vllm)).model_runner.execute_pieces([3, 1])
    worker = vllm.start("capture", in_pieces(vllm), **RANK)
    assert list(graphs()._graphs) == [*PIECES, *(("FULL", n, n, 1) for n in (4, 2, 1))]
    assert not {"native capture", "native capture of a piece"} & set(vllm.what())
    assert torch.equal(worker.model_runner.execute_pieces([3, 1]), native)
    assert vllm.what()[-2:] == ["replay of a piece"] * 2
    assert native.abs().sum() > 0


def test_restored_pieces_replay_and_return_what_was_recorded(vllm):
    recorded = vllm.start("capture", in_pieces(vllm), **RANK).model_runner.model
    model = vllm.start("restore", in_pieces(vllm)).model_runner.model
    assert fallback() is None
    assert not {"inputs of a batch", "native capture of a piece"} & set(vllm.what())
    for old, new in zip(recorded.pieces, model.pieces, strict=True):
        before, after = old.concrete_cudagraph_entries, new.concrete_cudagraph_entries
        assert list(before) == list(after)
        for batch in before:
            assert after[batch].cudagraph.replay == before[batch].cudagraph.replay
            assert after[batch].output[0].data_ptr() == before[batch].output[0].data_ptr()
            assert after[batch].input_addresses == before[batch].input_addresses != []
    assert v0_22._current.report.graphs == 9


def test_a_served_request_calls_the_wrapper_of_vllm_itself(vllm):
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    own = CUDAGraphWrapper.__call__
    vllm.start("capture", in_pieces(vllm), **RANK)
    assert CUDAGraphWrapper.__call__ is own


def test_a_capture_in_which_vllm_captures_a_piece_itself_is_refused(vllm, monkeypatch):
    real = vllm.loader.Tiny.__init__

    def bypassed(self, *arguments):
        real(self, *arguments)
        wrapper = self.pieces[1]
        self.pieces[1] = wrapper.runnable
        self.kept = wrapper

    monkeypatch.setattr(vllm.loader.Tiny, "__init__", bypassed)
    with pytest.raises(CaptureError, match=r"vLLM captured 3 of 9 graphs by itself, \('PIECE', 1, 1, 0\) for one"):
        vllm.start("capture", in_pieces(vllm), **RANK)


def test_an_archive_whose_graphs_cannot_be_given_out_is_not_half_used(vllm, monkeypatch):
    vllm.start("capture", **RANK)
    damaged = ArchiveFormatError("the outputs of a graph are described in a way that no writer uses")
    real = type(graphs()).capture_or_restore

    def gives(self, key, fn, **named):
        if self.session is not None and key == ("FULL", 1, 1, 1):
            raise damaged
        return real(self, key, fn, **named)

    monkeypatch.setattr(type(graphs()), "capture_or_restore", gives)
    assert_native(vllm, vllm.start("restore"), ArchiveFormatError)
    assert v0_22._current.report.way == "native"


@pytest.mark.parametrize(
    ("place", "words"), [(None, "a piece without a place"), (1, "two pieces at place 1"), ("gone", "has no pieces")]
)
def test_pieces_that_cannot_be_told_apart_are_left_to_vllm(vllm, monkeypatch, place, words):
    vllm.start("capture", in_pieces(vllm), **RANK)
    real = vllm.loader.Tiny.__init__

    def changed(self, *arguments):
        real(self, *arguments)
        if place == "gone":
            self.pieces = [piece.runnable for piece in self.pieces]
        else:
            self.pieces[0].runnable.piecewise_compile_index = place

    monkeypatch.setattr(vllm.loader.Tiny, "__init__", changed)
    assert_native(vllm, vllm.start("restore", in_pieces(vllm)), EngineUnsupported, words)
    with pytest.raises(EngineUnsupported, match=words):
        vllm.start("capture", in_pieces(vllm), **RANK)


# --- the KV cache -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reserve", "blocks"), [(None, 768), ("0", 1024), ("24", 896), ("960", 64)])
def test_a_capture_leaves_a_reserve_and_a_restore_takes_the_same_blocks(vllm, monkeypatch, reserve, blocks):
    chosen = {} if reserve is None else {"FOUNDRYD_KV_RESERVE": reserve}
    vllm.start("capture", **RANK, **chosen)
    assert v0_22._current.report.kv_blocks == blocks
    monkeypatch.setattr(vllm.worker, "free_bytes", 3 << 30)
    vllm.start("restore")
    assert fallback() is None
    assert v0_22._current.report.kv_blocks == blocks


def test_launches_of_a_capture_that_measure_a_little_otherwise_have_the_same_blocks(vllm, monkeypatch):
    found = []
    for more in (50, 53, 47):
        monkeypatch.setattr(vllm.worker, "free_bytes", (1 << 30) + more * MIB)
        vllm.start("capture", **RANK)
        found.append((v0_22._current.report.kv_blocks, graphs().sizes))
    assert found == [(768, {"kv_cache_bytes": 768 * MIB})] * 3


def test_a_worker_without_the_memory_is_refused_with_both_sizes_and_takes_what_there_is(vllm, monkeypatch):
    vllm.start("capture", **RANK)
    monkeypatch.setattr(vllm.worker, "free_bytes", 700 * MIB)
    worker = vllm.start("restore")
    assert_native(vllm, worker, NotEnoughMemory, f"{768 * MIB:,}", f"{700 * MIB:,}", "FOUNDRYD_KV_RESERVE")
    assert v0_22._current.report.kv_blocks == 700


def test_bytes_that_the_user_fixed_are_taken_as_they_are(vllm):
    config = vllm.config.VllmConfig()
    config.cache_config.kv_cache_memory_bytes = 500 * MIB
    for mode in ("capture", "restore"):
        vllm.start(mode, config, **RANK)
        assert v0_22._current.report.kv_blocks == 500
        assert fallback() is None


# --- ranks ------------------------------------------------------------------------------------------------------------


def test_a_capture_of_another_place_in_the_world_is_refused(vllm):
    with pytest.raises(UsageError, match="captured as rank 1 of 2 and vLLM's worker is rank 0 of 1"):
        vllm.start("capture", RANK="1", WORLD_SIZE="2")


def test_a_rank_without_peers_waits_for_no_reader_and_no_node(vllm):
    config = vllm.config.VllmConfig()
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.disable_custom_all_reduce = True
    vllm.start("capture", config, RANK="0", WORLD_SIZE="2", VLLM_ALLREDUCE_USE_SYMM_MEM="0")
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    assert MessageQueue.create_from_process_group("group", 1, 1) is None
    group = SimpleNamespace(size=lambda: 2)
    assert vllm.parallel.in_the_same_node_as(group, source_rank=0) == [True, True]


def test_communicators_of_vllm_are_declared_in_the_order_of_its_groups(vllm):
    def group(handle, ranks, available=True):
        communicator = SimpleNamespace(comm=SimpleNamespace(value=handle), available=available)
        made = SimpleNamespace(ranks=ranks, device_communicator=SimpleNamespace(pynccl_comm=communicator))
        return lambda: made

    groups = {
        "world:0": lambda: SimpleNamespace(ranks=[0, 1], device_communicator=None),
        "tp:0": group(0x10, [0, 1]),
        "gone:0": lambda: None,
        "pp:0": group(0x20, [0], available=False),
        "ep:0": group(0x30, [1, 0]),
    }
    vllm.parallel._groups = groups
    assert list(v0_22.pynccl_communicators()) == [(0x10, [0, 1]), (0x30, [1, 0])]


# --- the report -------------------------------------------------------------------------------------------------------

PHASES = ["attach", "init_device", "load_model", "profile", "kv_cache", "graphs", "warm_up"]


def test_every_way_of_starting_reports_the_same_phases(vllm, tmp_path):
    reports = {}
    for mode, way in (("", "native"), ("capture", "captured"), ("restore", "restored")):
        vllm.start(mode, **RANK, FOUNDRYD_STARTUP_REPORT=tmp_path / way)
        reports[way] = json.loads((tmp_path / way / "rank-0.json").read_text())
        assert reports[way]["way"] == way
        assert list(reports[way]["phases_ms"]) == PHASES
        assert all(ms >= 0 for ms in reports[way]["phases_ms"].values())
        assert reports[way]["fallback"] is None
    assert [reports[way]["graphs"] for way in reports] == [0, 3, 3]
    assert reports["restored"]["restore_ms"] == {"layout": 1.0, "graphs": 2.0}


def test_the_report_of_a_fallback_names_its_reason(vllm, tmp_path):
    vllm.start("capture", **RANK)
    config = vllm.config.VllmConfig()
    config.scheduler_config.max_num_seqs = 8
    vllm.start("restore", config, FOUNDRYD_STARTUP_REPORT=tmp_path)
    report = json.loads((tmp_path / "rank-0.json").read_text())
    assert (report["way"], report["fallback"]["reason"]) == ("native", "identity")
    assert "vllm.max_num_seqs is 8 and the archive has 4" in report["fallback"]["message"]


def test_a_report_that_cannot_be_written_disturbs_nothing(vllm, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "foundryd"):
        vllm.start("", FOUNDRYD_STARTUP_REPORT=tmp_path / "file" / "reports")
    assert "the start-up report cannot be written" in caplog.text
