# SPDX-License-Identifier: Apache-2.0
"""LoRA: graphs of batches with adapters, which are good for any adapters, and the states that they are proven in."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import v0_22, v0_22_lora, v0_22_v1, v0_22_v2  # noqa: E402
from foundryd.errors import IdentityMismatch  # noqa: E402

RANK = {"RANK": "0", "WORLD_SIZE": "1"}
SOME = 3  # two places for adapters, and tokens without one
WHOLE = [("FULL", n, n, 1, *adapters) for n in (4, 2, 1) for adapters in ((SOME,), ())]
PIECES = [("PIECE", i, n, 0, *adapters) for n in (4, 2, 1) for adapters in ((SOME,), ()) for i in (0, 1)]


def configured(vllm, mode="FULL_DECODE_ONLY", second=False, **lora):
    config = vllm.config.VllmConfig(use_v2_model_runner=second, lora_config=vllm.config.LoRAConfig(**lora))
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode[mode]
    return config


def graphs():
    """The graphs of the worker that started last."""
    return v0_22._current._graphs


def fallback():
    return v0_22._current.report.fallback


def weights(seed):
    """Two adapters' values by their numbers."""
    random = torch.Generator().manual_seed(seed)
    return {n: (torch.randn(2, 8, generator=random), torch.randn(8, 2, generator=random)) for n in (5, 6)}


def answers(runner, seed):
    """What a runner computes for batches without adapters, with one, and with two and none."""
    found = [runner.execute([3, 1])]
    for numbers in ([5, 5], [5, 0], [6, 5, 0]):
        runner.request(numbers, weights(seed))
        found.append(runner.execute([3, 1, 2][: len(numbers)], with_adapters=True))
        runner.lora_manager._adapter_manager.remove_all_adapters()
    return found


@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_batch_is_recorded_with_adapters_and_without(vllm, mode):
    vllm.start("capture", configured(vllm, mode), **RANK)
    assert list(graphs()._graphs) == [*(PIECES if mode == "FULL_AND_PIECEWISE" else []), *WHOLE]
    assert not {"native capture", "native capture of a piece"} & set(vllm.what())
    assert ("adapters", "weights") in vllm.log.events


def test_without_a_graph_of_its_own_a_batch_without_adapters_has_none(vllm):
    config = configured(vllm)
    config.compilation_config.cudagraph_specialize_lora = False
    vllm.start("capture", config, **RANK)
    assert list(graphs()._graphs) == [("FULL", n, n, 1, SOME) for n in (4, 2, 1)]


def test_recorded_graphs_are_good_for_any_adapters(vllm):
    native = vllm.start("", configured(vllm)).model_runner
    recorded = vllm.start("capture", configured(vllm), **RANK).model_runner
    found = [answers(recorded, seed) for seed in (1, 2)]
    assert all(
        torch.equal(a, b)
        for seed, ours in zip((1, 2), found, strict=True)
        for a, b in zip(ours, answers(native, seed), strict=True)
    )
    plain, *adapted = found[0]
    assert not torch.equal(plain, adapted[0])
    assert not any(torch.equal(a, b) for a, b in zip(adapted, found[1][1:], strict=True))
    assert torch.equal(adapted[1][1], plain[1])  # the second token has none


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_restore_gives_vllm_every_graph_for_the_batches_that_it_will_ask_for(vllm, mode, second):
    recorded = vllm.start("capture", configured(vllm, mode, second), **RANK).model_runner
    restored = vllm.start("restore", configured(vllm, mode, second)).model_runner
    assert fallback() is None
    assert not {"native capture", "native capture of a piece", "inputs of a batch"} & set(vllm.what())
    before, after = ([entries(part) for part in parts(r, second)] for r in (recorded, restored))
    assert [list(part) for part in before] == [list(part) for part in after]
    for old, new in zip(before, after, strict=True):
        assert all(new[batch].cudagraph is old[batch].cudagraph for batch in old)
        assert all(batch.has_lora for batch in old) or not second
    assert sum(map(len, before)) == (0 if second else 6) + (0 if mode == "FULL_DECODE_ONLY" else 6 if second else 12)


def parts(runner, second):
    """A runner's wrappers, and what has none."""
    return [*runner.model.pieces, *(() if second else (runner.model,))]


def entries(part):
    return getattr(part, "concrete_cudagraph_entries", {})


def test_kernels_of_adapters_are_loaded_where_no_capture_loads_them(vllm):
    vllm.start("capture", configured(vllm), **RANK)
    runner = vllm.start("restore", configured(vllm)).model_runner
    assert vllm.what().count("dummy run with adapters") == 3
    assert "native capture" not in vllm.what()
    vllm.start("restore", configured(vllm))
    order = [what for what in vllm.what() if what in ("dummy run with adapters", "workspace locked")]
    assert order[-1] == "workspace locked"
    assert runner.lora_manager._adapter_manager.lora_slots == 2
    config = vllm.config.VllmConfig(use_v2_model_runner=False)
    vllm.start("capture", config, **RANK)
    vllm.start("restore", config)
    assert "dummy run with adapters" not in vllm.what()


def test_the_second_runner_has_adapters_in_every_graph(vllm):
    native = vllm.start("", configured(vllm, second=True)).model_runner
    recorded = vllm.start("capture", configured(vllm, second=True), **RANK).model_runner
    assert list(graphs()._graphs) == [("FULL", n, n, 1) for n in (4, 2, 1)]
    for numbers in ([5, 6], [0, 6]):
        found = []
        for runner in (native, recorded):
            runner.request(numbers, weights(1))
            found.append(runner.execute([3, 1]))
            runner.lora_manager._adapter_manager.remove_all_adapters()
        assert torch.equal(*found)


@pytest.mark.parametrize(("second", "module"), [(False, v0_22_v1), (True, v0_22_v2)])
def test_what_graphs_read_of_adapters_is_bound_by_name(vllm, second, module):
    runner = vllm.start("capture", configured(vllm, second=second), **RANK).model_runner
    found = {name: tensor for name, tensor in module.filled(runner).items() if name.startswith("lora")}
    meta = {
        *("token_lora_mapping", "token_indices_sorted_by_lora_ids", "active_lora_ids", "num_tokens_per_lora"),
        *("lora_token_start_loc", "no_lora_flag_cpu", "num_active_loras_cpu", "default_num_active_loras_cpu"),
    }
    assert set(found) == {
        *("lora.adapted.lora_a_stacked.0", "lora.adapted.lora_b_stacked.0", "lora_tokens.0._embeddings_indices"),
        *(f"lora_tokens.0.{kind}_mapping_meta.{name}" for kind in ("token", "prompt") for name in meta),
    }
    layer = runner.lora_manager._adapter_manager.modules["adapted"]
    assert found["lora.adapted.lora_a_stacked.0"] is layer.lora_a_stacked[0]


@pytest.mark.parametrize("change", [{"max_loras": 3}, {"max_lora_rank": 4}, {"target_modules": ["o_proj"]}])
def test_other_buffers_of_adapters_are_refused_by_name(vllm, change):
    vllm.start("capture", configured(vllm), **RANK)
    vllm.start("restore", configured(vllm, **change))
    assert isinstance(fallback(), IdentityMismatch)
    assert f"vllm.{'lora' if 'target_modules' in change else next(iter(change))} is " in str(fallback())


def test_adapters_are_refused_for_an_archive_without_and_their_lack_for_one_with(vllm):
    vllm.start("capture", configured(vllm), **RANK)
    vllm.start("restore", vllm.config.VllmConfig(use_v2_model_runner=False))
    assert "vllm.lora is default and the archive has" in str(fallback())


# --- states -----------------------------------------------------------------------------------------------------------


def buffers(runner):
    [wrapper] = set(runner.lora_manager._adapter_manager.punica_wrapper_mapping.values())
    meta = wrapper.token_mapping_meta
    return {
        "rows": meta.token_indices_sorted_by_lora_ids,
        "mapping": meta.token_lora_mapping,
        "places": meta.active_lora_ids,
        "counts": meta.num_tokens_per_lora,
        "starts": meta.lora_token_start_loc,
        "words": wrapper._embeddings_indices[1],
    }


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL", "FULL_AND_PIECEWISE"])
def test_every_graph_can_be_replayed_in_every_state(vllm, mode, second):
    """The stand-in's kernel fails for a row of another batch."""
    runner = vllm.start("capture", configured(vllm, mode, second), **RANK).model_runner
    seen = set()
    for seed in (0, 1, 2):
        graphs().vary(seed)
        for key, (graph, _) in graphs()._graphs.items():
            graphs().vary_graph(key, seed)
            read = buffers(runner)
            counts = int(read["counts"].sum())
            has = second or len(key) == 5
            assert counts == ((key[1] if key[0] == "FULL" else key[2]) if has else 0)
            assert read["rows"][:counts].sort().values.tolist() == list(range(counts))
            if has:
                assert int(read["places"][: int((read["counts"] > 0).sum())].max()) >= 0  # some token has one
                seen |= set(read["mapping"][:counts].tolist())
            words = int(runner.lora_manager._adapter_manager.vocab_size)
            assert set(read["words"].tolist()) <= {0, words}
            with torch.inference_mode(), vllm.context.set_forward_context(vllm.compilation.CUDAGraphMode.NONE, 1):
                graph.replay()
    assert seen == {-1, 0, 1}


def test_a_state_has_adapters_of_its_own_and_says_of_no_token_that_it_has_one(vllm):
    runner = vllm.start("capture", configured(vllm), **RANK).model_runner
    [layer] = runner.lora_manager._adapter_manager.modules.values()
    found = []
    for seed in (1, 2, 1):
        graphs().vary(seed)
        assert not any(bool(buffer.any()) for buffer in buffers(runner).values())
        found.append([layer.lora_a_stacked[0].clone(), layer.lora_b_stacked[0].clone()])
    for one, other, again in zip(*found, strict=True):
        assert torch.equal(one, again)
        assert not torch.equal(one, other)
        assert bool(one.isfinite().all())
        assert float(one.abs().max()) > 0


def test_whichever_way_sums_over_columns_are_split_their_parts_add_up_to_the_same(vllm):
    """Thread blocks add their parts of a row as they come; all but one are zeros."""
    runner = vllm.start("capture", configured(vllm), **RANK).model_runner
    [layer] = runner.lora_manager._adapter_manager.modules.values()
    for seed in (0, 1):
        graphs().vary(seed)
        assert ((layer.lora_a_stacked[0] != 0).sum(-1) == 1).all()


def test_making_states_leaves_adapters_and_their_numbers_as_they_were(vllm):
    runner = vllm.start("capture", configured(vllm), **RANK).model_runner
    manager = runner.lora_manager._adapter_manager
    manager.lora_index_to_id = [9, None]
    before = {name: tensor.clone() for name, tensor in buffers(runner).items()}
    v0_22_v1.states(runner, list(graphs()._graphs))
    assert manager.lora_index_to_id == [9, None]
    assert all(torch.equal(before[name], tensor) for name, tensor in buffers(runner).items())


def test_a_runner_without_lora_has_nothing_of_it(vllm):
    runner = vllm.start("capture", vllm.config.VllmConfig(use_v2_model_runner=False), **RANK).model_runner
    assert v0_22_lora.filled(runner) == {}
