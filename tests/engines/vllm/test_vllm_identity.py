# SPDX-License-Identifier: Apache-2.0
"""Which configurations are one archive's, which are refused, and what graphs are called."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.archive.identity import MachineIdentity, check  # noqa: E402
from foundryd.engines.torch.memory import Arenas, Bound  # noqa: E402
from foundryd.engines.vllm import collector, support, v0_22_pieces, v0_22_v2  # noqa: E402
from foundryd.engines.vllm.adapter import WorkerGraphs, compare  # noqa: E402
from foundryd.engines.vllm.identity import VllmFacts, digest, environment, model_digest  # noqa: E402
from foundryd.errors import EngineUnsupported, IdentityMismatch, LayoutDiverged, RestoreError  # noqa: E402


def facts(config, environ=None):
    return VllmFacts("0.22.1", config, environ or {}).identity_facts()


def differing(vllm, change):
    """Names of the facts that a change of the configuration changes."""
    config = vllm.config.VllmConfig()
    before = facts(config)
    change(config)
    after = facts(config)
    assert before.keys() == after.keys()
    return {name for name in before if before[name] != after[name]}


def test_equal_configurations_have_equal_facts_in_any_process(vllm, standin):
    program = """
from vllm.config import VllmConfig
from foundryd.engines.vllm.identity import VllmFacts
import json
print(json.dumps(dict(VllmFacts("0.22.1", VllmConfig(), {}).identity_facts()), sort_keys=True))
"""
    for seed in ("1", "2"):
        path = ":".join([*standin, *filter(None, [os.environ.get("PYTHONPATH")])])
        env = os.environ | {"PYTHONPATH": path, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=100, check=True
        )
        assert json.loads(done.stdout) == facts(vllm.config.VllmConfig())


PARTS = {
    "cache_config": {
        "block_size": set(),
        "kv_offloading_size": set(),
        "calculate_kv_scales": set(),
        "kv_sharing_fast_prefill": set(),
    },
    "parallel_config": {
        name: set()
        for name in (
            "enable_dbo",
            "ubatch_size",
            "enable_eplb",
            "enable_elastic_ep",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
            # Where a worker is, which is its rank's affair, and how it is started.
            "data_parallel_rank",
            "data_parallel_rank_local",
            "data_parallel_index",
            "data_parallel_backend",
            "distributed_executor_backend",
            "nnodes",
            # How replicas agree on a step, outside of graphs.
            "disable_nccl_for_dp_synchronization",
        )
    },
    "scheduler_config": {},
    "compilation_config": {},
    "attention_config": {},
    "kernel_config": {},
}


def other(value):
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, 7]
    if isinstance(value, dict):
        return {**value, "x": 1}
    return SimpleNamespace(name="OTHER")


@pytest.mark.parametrize("part", PARTS)
def test_each_setting_that_graphs_may_depend_on_changes_one_fact(vllm, part):
    """Those that may not are refused before anything (``support``), or named here."""
    for field in dataclasses.fields(getattr(vllm.config.VllmConfig(), part)):

        def change(config, name=field.name):
            settings = getattr(config, part)
            setattr(settings, name, other(getattr(settings, name)))

        found = differing(vllm, change)
        expected = PARTS[part].get(field.name)
        if expected is None and field.name != "user_specified_block_size":
            assert len(found) == 1, field.name
        elif expected is not None:
            assert found == expected, field.name


def test_each_setting_of_adapters_changes_one_fact_but_for_how_many_the_host_keeps(vllm):
    for field in dataclasses.fields(vllm.config.LoRAConfig):

        def change(config, name=field.name):
            settings = config.lora_config
            setattr(settings, name, other(getattr(settings, name)))

        plain = vllm.config.VllmConfig(lora_config=vllm.config.LoRAConfig())
        before = facts(plain)
        change(plain)
        found = {name for name, value in facts(plain).items() if before[name] != value}
        own = f"vllm.{field.name}" if field.name in ("max_loras", "max_lora_rank") else "vllm.lora"
        assert found == (set() if field.name == "max_cpu_loras" else {own}), field.name
    without, config = facts(vllm.config.VllmConfig()), vllm.config.VllmConfig(lora_config=vllm.config.LoRAConfig())
    assert {name for name, value in facts(config).items() if without[name] != value} == {
        *("vllm.max_loras", "vllm.max_lora_rank", "vllm.lora")
    }


def test_each_setting_of_drafts_changes_one_fact_but_for_where_they_are_looked_up(vllm):
    def drafted(**settings):
        return facts(vllm.config.VllmConfig(speculative_config=vllm.config.SpeculativeConfig(**settings)))

    before, model = drafted(), vllm.config.ModelConfig()
    named = {"method": "vllm.speculative_method", "num_speculative_tokens": "vllm.num_speculative_tokens"}
    for field in dataclasses.fields(vllm.config.SpeculativeConfig):
        value = model if field.name == "draft_model_config" else other(field.default)
        after = drafted(**{field.name: value})
        changed = {name for name in before if before[name] != after[name]}
        expected = set() if field.name.startswith("prompt_") else {named.get(field.name, "vllm.speculative")}
        assert changed == expected, field.name
    model.hf_config = vllm.config.HfConfig(_name_or_path="/elsewhere")
    elsewhere = drafted(draft_model_config=model)
    assert elsewhere == drafted(draft_model_config=vllm.config.ModelConfig())
    model.hf_config = vllm.config.HfConfig(eagle_aux_hidden_state_layer_ids=[1])
    assert drafted(draft_model_config=model) != elsewhere
    assert facts(vllm.config.VllmConfig())["vllm.speculative_method"] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_impl", "transformers"),
        ("quantization_config", {"linear": {"weight": "fp8"}}),
        ("disable_sliding_window", True),
        ("override_attention_dtype", "float32"),
    ],
)
def test_how_vllm_makes_the_model_counts(vllm, name, value):
    assert differing(vllm, set_to(f"model_config.{name}", value)) == {"vllm.model"}


def test_a_block_size_counts_if_the_user_chose_it(vllm):
    def chosen(config):
        config.cache_config.user_specified_block_size = True

    assert differing(vllm, chosen) == {"vllm.block_size"}


def test_a_models_digest_follows_its_settings_and_not_where_it_came_from(vllm):
    def model(**settings):
        return SimpleNamespace(hf_config=vllm.config.HfConfig(**settings))

    here = model_digest(model())
    assert model_digest(model(_name_or_path="/elsewhere", transformers_version="9")) == here
    assert model_digest(model(text_config={"_name_or_path": "a", "n": 1})) == model_digest(
        model(text_config={"n": 1, "_name_or_path": "b"})
    )
    others = [model(hidden_size=16), model(architectures=["OtherForCausalLM"]), model(text_config={"n": 1})]
    assert len({here, *map(model_digest, others)}) == 4


def test_digests_tell_values_and_kinds_apart_and_not_orders_of_names():
    assert digest({"a": 1, "b": [1, 2]}) == digest({"b": [1, 2], "a": 1})
    things = [{}, {"a": 1}, {"a": "1"}, {"a": True}, {"a": None}, {"a": [1]}, {"a": {"b": 1}}, {"a": 1.5}, {"b": 1}]
    assert len({digest(thing) for thing in things}) == len(things)
    assert digest({"a": [1, 2]}) != digest({"a": [2, 1]})
    assert digest({"a": {"x", "y"}}) == digest({"a": {"y", "x"}})


def test_objects_that_refer_to_one_another_have_a_digest():
    a, b = SimpleNamespace(), SimpleNamespace()
    a.other, b.other = b, a
    assert digest({"a": a}) == digest({"a": a})


def test_variables_of_logs_and_network_do_not_count_and_those_of_kernels_do():
    ignored = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_PORT": "1", "VLLM_HOST_IP": "::1", "HOME": "/root"}
    ignored |= {"VLLM_DP_RANK": "1", "VLLM_DP_RANK_LOCAL": "1", "VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_PORT": "1"}
    assert environment(ignored) == []
    counted = {"VLLM_USE_TRITON_AWQ": "1", "VLLM_ATTENTION_BACKEND": "X", **ignored}
    assert environment(counted) == ["VLLM_ATTENTION_BACKEND=X", "VLLM_USE_TRITON_AWQ=1"]


def test_a_refusal_names_the_setting_both_values_and_what_to_do(vllm):
    config = vllm.config.VllmConfig()
    archived = MachineIdentity.of(facts(config)).fields
    config.scheduler_config.max_num_seqs = 9
    with pytest.raises(IdentityMismatch) as caught:
        check(archived, MachineIdentity.of(facts(config)), "model")
    assert "vllm.max_num_seqs is 9 and the archive has 4" in str(caught.value)
    assert "the vLLM setting has to be the same: start vLLM as it was captured" in str(caught.value)


def test_another_vllm_is_refused(vllm):
    config = vllm.config.VllmConfig()
    archived = MachineIdentity.of(facts(config)).fields
    with pytest.raises(IdentityMismatch, match=r"engine is vLLM 0\.22\.9 and the archive has vLLM 0\.22\.1"):
        check(archived, MachineIdentity.of(VllmFacts("0.22.9", config, {}).identity_facts()))


# --- what vLLM decided ------------------------------------------------------------------------------------------------


def test_what_was_decided_alike_is_accepted_however_it_was_stored():
    compare({"graphs": [["FULL", 1, 1, 1]], "n": 1}, {"n": 1, "graphs": [("FULL", 1, 1, 1)]})


@pytest.mark.parametrize(
    ("then", "now", "name"),
    [({"n": 1}, {"n": 2}, "n"), ({"n": 1}, {}, "n"), ({}, {"n": 1}, "n"), ({"a": 1, "b": 1}, {"a": 1, "b": 2}, "b")],
)
def test_what_was_decided_otherwise_is_named(then, now, name):
    with pytest.raises(IdentityMismatch, match=rf"vllm\.{name} is .* and the archive has "):
        compare(then, now)


def bare_graphs(**resolved):
    graphs = WorkerGraphs.__new__(WorkerGraphs)  # making one asks for a GPU
    graphs.resolved, graphs.sizes = resolved, {"kv_cache_bytes": 5}
    graphs._bound, graphs._arenas, graphs._registered = Bound(), Arenas(torch.device("cpu")), []
    return graphs


def test_an_archive_of_another_program_is_refused():
    with pytest.raises(RestoreError, match="the archive was not captured by vLLM"):
        bare_graphs()._check_engine({"torch": {"bound": {}, "blocks": {}, "rng": []}})


def test_a_worker_collects_before_it_refuses_memory_that_garbage_holds(monkeypatch):
    """Natively vLLM collects before it captures; a worker that restores looks again after it did."""
    graphs, answers = bare_graphs(num_gpu_blocks=7), [LayoutDiverged("a tensor lies elsewhere"), None]
    recorded = graphs._describe_engine()

    def check(*_):
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    collected = []
    monkeypatch.setattr("foundryd.engines.torch.graphset.check", check)
    monkeypatch.setattr(collector, "collect", lambda: collected.append(len(answers)))
    graphs._check_engine(recorded)
    assert (collected, answers) == ([1], [])
    answers.extend([LayoutDiverged("first"), LayoutDiverged("second")])
    with pytest.raises(LayoutDiverged, match="second"):
        graphs._check_engine(recorded)


def test_a_worker_finds_again_what_it_described_and_nothing_else():
    recorded = bare_graphs(num_gpu_blocks=7)._describe_engine()
    bare_graphs(num_gpu_blocks=7)._check_engine(recorded)
    with pytest.raises(IdentityMismatch, match=r"vllm\.num_gpu_blocks is 8 and the archive has 7"):
        bare_graphs(num_gpu_blocks=8)._check_engine(recorded)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_key_says_what_a_batch_is_and_nothing_of_the_process(vllm):
    batch, modes = vllm.graphs.BatchExecutionDescriptor, vllm.compilation.CUDAGraphMode
    keys = [
        v0_22_v2.key_of(batch(modes.FULL, 8, 8, 1)),
        v0_22_v2.key_of(batch(modes.FULL, 8, 4, 2)),
        v0_22_v2.key_of(batch(modes.FULL, 8, 8)),
        v0_22_v2.key_of(batch(modes.PIECEWISE, 8, None)),
        v0_22_v2.key_of(batch(modes.FULL, 16, 8, 1)),
    ]
    assert keys[0] == ("FULL", 8, 8, 1)
    assert keys[3] == ("PIECEWISE", 8, 0, 0)
    assert len(set(keys)) == len(keys)


def test_a_whole_graph_of_the_first_runner_is_told_apart_by_tokens_requests_and_uniformity(vllm):
    batch = vllm.context.BatchDescriptor
    batches = [batch(8, 8, True), batch(8, 8), batch(8, 4), batch(16, 8, True)]
    keys = [v0_22_pieces.key_of_whole(b) for b in batches]
    assert keys[0] == ("FULL", 8, 8, 1)
    assert keys[1] == ("FULL", 8, 8, 0)
    assert len(set(keys)) == len(keys)


def test_a_batch_with_adapters_has_a_graph_of_its_own(vllm):
    batch = vllm.context.BatchDescriptor(8, 8, True)
    with_adapters = batch._replace(has_lora=True, num_active_loras=3)
    assert v0_22_pieces.key_of_whole(with_adapters) == (*v0_22_pieces.key_of_whole(batch), 3)
    assert v0_22_pieces.key_of(1, 8, 3) == (*v0_22_pieces.key_of(1, 8), 3)
    assert v0_22_pieces.tokens_of(v0_22_pieces.key_of(1, 8, 3)) == 8
    assert v0_22_pieces.tokens_of(v0_22_pieces.key_of_whole(batch)) == 8


def test_a_whole_graph_says_how_many_tokens_of_a_request_it_decodes(vllm):
    assert v0_22_pieces.key_of_whole(vllm.context.BatchDescriptor(8, 2, True)) == ("FULL", 8, 2, 4)


# --- what is refused before anything ----------------------------------------------------------------------------------


def set_to(path, value):
    def change(config):
        *parts, name = path.split(".")
        for part in parts:
            config = getattr(config, part)
        setattr(config, name, value)

    return change


def several(config):
    config.parallel_config.tensor_parallel_size = 2


def experts(config):
    """Two replicas of a model with experts, which are supported as they are."""
    config.model_config.is_moe = True
    config.parallel_config.data_parallel_size = 2


def through_ray(config):
    config.parallel_config.data_parallel_index = 1
    config.parallel_config.data_parallel_backend = "ray"


def other_tokens(config):
    experts(config)
    config.parallel_config.all2all_backend = "deepep_low_latency"


def adapters(on=None, **settings):
    def change(config):
        names = {"max_loras": 2, "max_lora_rank": 8, "specialize_active_lora": False}
        config.lora_config = SimpleNamespace(**(names | settings))
        if on is not None:
            on(config)

    return change


def first(config):
    config.use_v2_model_runner = False


def whole(config):
    first(config)
    config.compilation_config.cudagraph_mode = SimpleNamespace(
        name="FULL", mixed_mode=lambda: SimpleNamespace(name="FULL")
    )


def drafts(method, *changes):
    def change(config):
        config.speculative_config = SimpleNamespace(method=method, num_speculative_tokens=3)
        for more in changes:
            more(config)

    return change


def fused(config, what="fuse_allreduce_rms"):
    several(config)
    config.parallel_config.disable_custom_all_reduce = True
    setattr(config.compilation_config.pass_config, what, True)


# For each row of the table, a configuration that it refuses.
REFUSED = [
    set_to("model_config.enforce_eager", True),
    set_to("parallel_config.pipeline_parallel_size", 2),
    set_to("parallel_config.data_parallel_size", 2),
    through_ray,
    other_tokens,
    set_to("parallel_config.decode_context_parallel_size", 2),
    set_to("parallel_config.enable_eplb", True),
    set_to("parallel_config.ubatch_size", 2),
    drafts("suffix"),
    drafts("eagle"),
    drafts("mtp", whole),
    drafts("draft_model", first, several),
    adapters(on=drafts("ngram")),
    adapters(on=several),
    adapters(on=set_to("model_config.is_moe", True)),
    adapters(specialize_active_lora=True),
    set_to("kv_transfer_config", object()),
    set_to("weight_transfer_config", object()),
    set_to("offload_config.uva.cpu_offload_gb", 1),
    set_to("model_config.enable_sleep_mode", True),
    set_to("model_config.multimodal_config", object()),
    set_to("model_config.is_encoder_decoder", True),
    set_to("model_config.runner_type", "pooling"),
    set_to("model_config.enable_return_routed_experts", True),
    set_to("model_config.enable_prompt_embeds", True),
    set_to("cache_config.kv_sharing_fast_prefill", True),
    set_to("model_config.max_model_len", -1),
    set_to("cache_config.calculate_kv_scales", True),
    set_to("compilation_config.use_inductor_graph_partition", True),
    set_to("compilation_config.cudagraph_copy_inputs", True),
    set_to("compilation_config.cudagraph_mode", SimpleNamespace(name="NONE")),
    several,
    fused,
    partial(fused, what="fuse_gemm_comms"),
]


def test_the_defaults_of_the_stand_in_are_supported(vllm):
    support.check(vllm.config.VllmConfig(), {})


@pytest.mark.parametrize(("row", "change"), list(zip(support.REFUSED, REFUSED, strict=True)), ids=lambda x: "")
def test_every_row_refuses_its_configuration_and_no_other_does_before_it(vllm, row, change):
    config = vllm.config.VllmConfig()
    change(config)
    with pytest.raises(EngineUnsupported) as caught:
        support.check(config, {})
    assert str(caught.value) == f"{row.what} cannot be restored yet: {row.advice}"


def test_symmetric_memory_is_refused_where_ranks_communicate(vllm):
    config = vllm.config.VllmConfig()
    several(config)
    config.parallel_config.disable_custom_all_reduce = True
    with pytest.raises(EngineUnsupported, match="VLLM_ALLREDUCE_USE_SYMM_MEM=0"):
        support.check(config, {})
    support.check(config, {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"})


def test_replicas_need_no_setting_of_all_reduce_but_ranks_that_share_a_tensor_do(vllm):
    config = vllm.config.VllmConfig()
    experts(config)
    support.check(config, {})
    config.parallel_config.tensor_parallel_size = 2
    with pytest.raises(EngineUnsupported, match="custom all-reduce"):
        support.check(config, {})


@pytest.mark.parametrize("name", ["VLLM_DISABLE_PYNCCL", "VLLM_USE_NCCL_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"])
def test_other_ways_to_communicate_are_refused_where_ranks_do(vllm, name):
    config = vllm.config.VllmConfig()
    support.check(config, {name: "1"})
    experts(config)
    support.check(config, {name: "0"})
    with pytest.raises(EngineUnsupported, match=f"start without {name}"):
        support.check(config, {name: "1"})


def test_adapters_on_a_stream_of_their_own_are_refused(vllm):
    config, name = vllm.config.VllmConfig(), "VLLM_LORA_ENABLE_DUAL_STREAM"
    support.check(config, {name: "1"})
    adapters()(config)
    support.check(config, {name: "0"})
    with pytest.raises(EngineUnsupported, match=f"start without {name}"):
        support.check(config, {name: "1"})


def test_graphs_with_breaks_are_refused(vllm):
    with pytest.raises(EngineUnsupported, match="without VLLM_USE_BREAKABLE_CUDAGRAPH"):
        support.check(vllm.config.VllmConfig(), {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"})


def test_the_other_runner_is_another_fact(vllm):
    assert differing(vllm, set_to("use_v2_model_runner", False)) == {"vllm.model_runner"}


def test_attention_backends_are_known_by_name():
    support.check_backends(frozenset({"FLASH_ATTN"}))
    with pytest.raises(EngineUnsupported, match="back-end TRITON_ATTN"):
        support.check_backends(frozenset({"FLASH_ATTN", "TRITON_ATTN"}))
