# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: graphs for several tokens of a request, and models that draft, with graphs or without."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import v0_22, v0_22_v1  # noqa: E402
from foundryd.engines.vllm.vary import schedules  # noqa: E402
from foundryd.errors import CaptureError, EngineUnsupported, IdentityMismatch  # noqa: E402

RANK = {"RANK": "0", "WORLD_SIZE": "1"}
WHOLE = [("FULL", 8, 2, 4), ("FULL", 4, 1, 4)]
PIECES = [(kind, i, n, 0) for n in (8, 4) for kind in ("PIECE", "DRAFT") for i in (0, 1)]


def configured(vllm, mode="FULL_DECODE_ONLY", sizes=(4, 8), method="ngram", count=3):
    config = vllm.config.VllmConfig(use_v2_model_runner=False)
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode[mode]
    config.compilation_config.cudagraph_capture_sizes = list(sizes)
    config.speculative_config = vllm.config.SpeculativeConfig(method=method, num_speculative_tokens=count)
    if method != "ngram":
        settings = vllm.config.HfConfig(hidden_size=4)
        config.speculative_config.draft_model_config = vllm.config.ModelConfig(hf_config=settings)
    return config


def graphs():
    """The graphs of the worker that started last."""
    return v0_22._current._graphs


def fallback():
    return v0_22._current.report.fallback


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_graphs_for_drafts_that_are_looked_up_are_named_by_tokens_of_a_request(vllm, mode):
    config = configured(vllm, mode)
    runner = vllm.start("capture", config, **RANK).model_runner
    assert list(graphs()._graphs)[-2:] == WHOLE
    graphs().vary(1)
    assert runner.query_start_loc.gpu.tolist() == [0, 4, 8, 12, 16]
    [schedule] = schedules(runner).values()
    for key in WHOLE:
        # The stand-in's builder fails for a query of more tokens than it is told of.
        graphs().vary_graph(key, 1)
        assert schedule[4 : 4 + key[2]].tolist() == [4] * key[2]
    restored = vllm.start("restore", config).model_runner
    assert fallback() is None
    assert [batch.num_tokens for batch in restored.model.concrete_cudagraph_entries] == [8, 4]


def test_another_number_of_drafts_is_refused(vllm):
    vllm.start("capture", configured(vllm, sizes=(12,)), **RANK)
    vllm.start("restore", configured(vllm, sizes=(12,), count=2))
    assert isinstance(fallback(), IdentityMismatch)
    assert "vllm.num_speculative_tokens is 2 and the archive has 3" in str(fallback())


# --- models that draft ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "mode"),
    [(m, "FULL_DECODE_ONLY") for m in ("draft_model", "eagle", "eagle3", "mtp")]
    + [("draft_model", m) for m in ("FULL", "FULL_AND_PIECEWISE")],
)
def test_a_model_that_drafts_without_graphs_is_left_to_vllm_beside_those_of_the_other(vllm, method, mode):
    config = configured(vllm, mode, method=method)
    runners = [vllm.start(way, config, **(RANK if way else {})).model_runner for way in ("", "capture", "restore")]
    assert fallback() is None
    assert not any(key[0] == "DRAFT" for key in graphs().recorded["resolved"]["graphs"])
    assert not {"native capture", "native capture of a piece"} & set(vllm.what())
    assert vllm.what().count("draft") == 1  # of the last warm-up, as natively
    assert [arena for what, arena in vllm.log.events if what == "parameters"] == ["weights"] * 2
    native, recorded, restored = ((runner.execute([3, 1]), runner.aux) for runner in runners)
    assert len(native[1]) == (1 if method == "eagle3" else 0)
    for ours in (recorded, restored):
        assert torch.equal(ours[0], native[0])
        assert all(torch.equal(a, b) for a, b in zip(ours[1], native[1], strict=True))


@pytest.mark.parametrize("method", ["eagle", "eagle3", "mtp"])
def test_pieces_of_both_models_are_recorded_and_restored_apart(vllm, method):
    config = configured(vllm, "FULL_AND_PIECEWISE", method=method)
    recorded = vllm.start("capture", config, **RANK).model_runner
    assert list(graphs()._graphs) == [*PIECES, *WHOLE]
    assert "native capture of a piece" not in vllm.what()
    restored = vllm.start("restore", config).model_runner
    assert fallback() is None
    assert not {"native capture", "native capture of a piece"} & set(vllm.what())
    seen = set()
    for model in ("get_model", "draft"):
        old, new = (r.get_model() if model == "get_model" else r.drafter.model for r in (recorded, restored))
        for before, after in zip(old.pieces, new.pieces, strict=True):
            assert list(before.concrete_cudagraph_entries) == list(after.concrete_cudagraph_entries)
            for batch, entry in before.concrete_cudagraph_entries.items():
                assert after.concrete_cudagraph_entries[batch].cudagraph is entry.cudagraph
                seen.add(id(entry.cudagraph))
    assert len(seen) == 8  # none is of two


def test_a_recorded_model_that_drafts_computes_what_a_native_one_does(vllm):
    config, found = configured(vllm, "FULL_AND_PIECEWISE", method="eagle"), []
    for way in ("", "capture"):
        drafter = vllm.start(way, config, **(RANK if way else {})).model_runner.drafter
        drafter.input_ids[:8] = torch.arange(8)
        drafter.hidden_states[:8] = 0.5
        with torch.inference_mode():
            found.append(drafter.forward(8, vllm.compilation.CUDAGraphMode.PIECEWISE).clone())
        assert vllm.what()[-2:] == ["replay of a piece"] * 2
    assert torch.equal(*found)
    assert found[0].abs().sum() > 0


def test_what_graphs_of_drafts_read_is_bound_and_brought_into_other_states(vllm):
    runner = vllm.start("capture", configured(vllm, "FULL_AND_PIECEWISE", method="eagle"), **RANK).model_runner
    own = {name for name in v0_22_v1.filled(runner) if name.startswith("draft")}
    assert own == {
        *("draft.embedding", "draft.scale", "draft.angles"),
        *("drafts.input_ids", "drafts.positions", "drafts.hidden_states"),
    }
    drafter, states = runner.drafter, []
    for seed in (1, 2, 1):
        graphs().vary(seed)
        states.append([drafter.input_ids.clone(), drafter.positions.clone(), drafter.hidden_states.clone()])
        assert 0 <= int(drafter.input_ids.min()) <= int(drafter.input_ids.max()) < 16
        assert 0 <= int(drafter.positions.min()) <= int(drafter.positions.max()) < drafter.max_model_len
    for one, other, again in zip(*states, strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
    modes = vllm.compilation.CUDAGraphMode
    for key, (graph, _) in graphs()._graphs.items():
        graphs().vary_graph(key, 1)
        with torch.inference_mode(), vllm.context.set_forward_context(modes.NONE, 1):
            graph.replay()
    without = vllm.start("capture", configured(vllm, method="eagle"), **RANK).model_runner
    assert not any(name.startswith("draft") for name in v0_22_v1.filled(without))


def test_graphs_of_drafts_that_vllm_captures_itself_are_missed(vllm, monkeypatch):
    real = vllm.first_runner.Drafter.dummy_run
    monkeypatch.setattr(
        vllm.first_runner.Drafter, "dummy_run", lambda self, n, graphs: real(self, n, graphs and n != 4)
    )
    with pytest.raises(CaptureError, match=r"vLLM captured 2 of 8 graphs by itself, \('DRAFT', 0, 4, 0\) for one"):
        vllm.start("capture", configured(vllm, "FULL_AND_PIECEWISE", method="eagle"), **RANK)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda drafter, mode: drafter.cudagraph_dispatcher.initialize_cudagraph_keys(mode), "none of the same kind"),
        (lambda drafter, _: setattr(drafter, "uses_mrope", True), "M-RoPE"),
        (lambda drafter, _: setattr(drafter.model, "pieces", []), "no pieces of the model that drafts"),
    ],
)
def test_graphs_of_drafts_that_are_not_as_expected_are_left_to_vllm(vllm, monkeypatch, change, words):
    """Whatever the configuration said: what there is is looked at."""
    real = vllm.first_runner.Drafter.initialize_cudagraph_keys

    def changed(self, mode):
        real(self, mode)
        change(self, mode)

    config = configured(vllm, "FULL_AND_PIECEWISE", method="eagle")
    monkeypatch.setattr(vllm.first_runner.Drafter, "initialize_cudagraph_keys", changed)
    with pytest.raises(EngineUnsupported, match=words):
        vllm.start("capture", config, **RANK)
