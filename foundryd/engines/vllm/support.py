# SPDX-License-Identifier: Apache-2.0
"""Configurations of vLLM that are refused by name before anything is done, since nobody has shown that they work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from foundryd.errors import EngineUnsupported


@dataclass(frozen=True)
class Refused:
    """One row: ``what`` is refused where ``when`` holds for the configuration, and what to do about it."""

    what: str
    when: Callable[[Any], bool]
    advice: str


def _sliced(config: Any) -> int:
    """How many ranks have slices of one tensor; only they add up their results."""
    return int(config.parallel_config.tensor_parallel_size)


def _replicas(config: Any) -> int:
    """How many replicas are one world.  Of a dense model each is one, and vLLM has said so by now."""
    return int(config.parallel_config.data_parallel_size)


def _is_replica(config: Any) -> bool:
    return _replicas(config) > 1 or int(config.parallel_config.data_parallel_index) > 0


# Ways of speculative decoding in which a model drafts; vLLM calls every kind of MTP alike.
_DRAFTING = ("draft_model", "eagle", "eagle3", "mtp")


def _drafts(config: Any) -> bool:
    return config.speculative_config is not None and config.speculative_config.method in _DRAFTING


def _fuses_otherwise(passes: Any) -> bool:
    return bool(passes.fuse_gemm_comms or passes.fuse_minimax_qk_norm)


_LATER = "start without it"

REFUSED = (
    Refused("enforce_eager", lambda c: c.model_config.enforce_eager, "there are no graphs then: start without it"),
    Refused(
        "pipeline_parallel_size above 1", lambda c: c.parallel_config.pipeline_parallel_size > 1, "use tensor parallel"
    ),
    # Only other launchers than vLLM's own do this: they put replicas that share nothing into one world.
    Refused(
        "data_parallel_size above 1 in one world of a model without experts",
        lambda c: _replicas(c) > 1 and not c.model_config.is_moe,
        "capture one replica, with a --variant without dp",
    ),
    Refused(
        "data_parallel_backend ray",
        lambda c: c.parallel_config.data_parallel_backend == "ray" and _is_replica(c),
        "use --data-parallel-backend mp",
    ),
    # The others put tokens into peers' memory by themselves, past NCCL.
    Refused(
        "an all2all_backend other than allgather_reducescatter",
        lambda c: _replicas(c) > 1 and c.parallel_config.all2all_backend != "allgather_reducescatter",
        "use --all2all-backend allgather_reducescatter",
    ),
    Refused(
        "context parallelism",
        lambda c: (
            c.parallel_config.decode_context_parallel_size > 1 or c.parallel_config.prefill_context_parallel_size > 1
        ),
        _LATER,
    ),
    Refused(
        "enable_dbo, enable_eplb or enable_elastic_ep",
        lambda c: c.parallel_config.enable_dbo or c.parallel_config.enable_eplb or c.parallel_config.enable_elastic_ep,
        _LATER,
    ),
    # The same as enable_dbo, by another setting.
    Refused("ubatch_size above 1", lambda c: c.parallel_config.ubatch_size > 1, _LATER),
    Refused(
        "another way of speculative decoding than ngram, draft_model, eagle, eagle3 and mtp",
        lambda c: c.speculative_config is not None and c.speculative_config.method not in ("ngram", *_DRAFTING),
        _LATER,
    ),
    # Its graphs draw tokens and move their own inputs on, which no proof brings into another state yet.
    Refused(
        "a model that drafts in the V2 runner",
        lambda c: _drafts(c) and c.use_v2_model_runner,
        "set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
    # Its graphs are of pieces, and the other's loop over its batches, which captures them, has none then.
    Refused(
        "a model that drafts with graphs of its own in cudagraph_mode FULL",
        lambda c: (
            _drafts(c)
            and c.speculative_config.method != "draft_model"
            and c.compilation_config.cudagraph_mode.mixed_mode().name == "FULL"
        ),
        "choose FULL_AND_PIECEWISE or FULL_DECODE_ONLY",
    ),
    Refused(
        "a model that drafts in a world of several ranks",
        lambda c: _drafts(c) and _sliced(c) * _replicas(c) > 1,
        "use one GPU",
    ),
    Refused(
        "speculative decoding with LoRA",
        lambda c: c.speculative_config is not None and c.lora_config is not None,
        "start without one of them",
    ),
    Refused(
        "LoRA in a world of several ranks",
        lambda c: c.lora_config is not None and _sliced(c) * _replicas(c) > 1,
        "use one GPU",
    ),
    # Their kernels get the adapters of tokens in a way of their own.
    Refused("LoRA of experts", lambda c: c.lora_config is not None and c.model_config.is_moe, _LATER),
    # Then the host decides for each batch how many adapters its kernels look at.
    Refused(
        "specialize_active_lora",
        lambda c: c.lora_config is not None and c.lora_config.specialize_active_lora,
        _LATER,
    ),
    Refused(
        "KV or encoder cache transfer",
        lambda c: c.kv_transfer_config is not None or c.ec_transfer_config is not None,
        _LATER,
    ),
    Refused("online weight transfer", lambda c: c.weight_transfer_config is not None, _LATER),
    Refused(
        "offloading",
        lambda c: (
            c.offload_config.uva.cpu_offload_gb > 0
            or c.offload_config.prefetch.offload_group_size > 0
            or c.cache_config.kv_offloading_size is not None
        ),
        _LATER,
    ),
    # Its allocator moves memory that graphs refer to.
    Refused(
        "sleep mode",
        lambda c: c.model_config.enable_sleep_mode or c.model_config.enable_cumem_allocator,
        _LATER,
    ),
    Refused("a multimodal model", lambda c: c.model_config.multimodal_config is not None, "use a text model"),
    Refused("an encoder-decoder model", lambda c: c.model_config.is_encoder_decoder, "use a decoder"),
    Refused("a pooling model", lambda c: c.model_config.runner_type != "generate", "use a model that generates"),
    # Graphs write them into buffers that no arena has.
    Refused("enable_return_routed_experts", lambda c: c.model_config.enable_return_routed_experts, _LATER),
    Refused("enable_prompt_embeds", lambda c: c.model_config.enable_prompt_embeds, _LATER),
    Refused("kv_sharing_fast_prefill", lambda c: c.cache_config.kv_sharing_fast_prefill, _LATER),
    Refused("max_model_len -1", lambda c: c.model_config.max_model_len <= 0, "give a length"),
    Refused("calculate_kv_scales", lambda c: c.cache_config.calculate_kv_scales, _LATER),
    Refused(
        "use_inductor_graph_partition",
        lambda c: bool(c.compilation_config.use_inductor_graph_partition),
        _LATER,
    ),
    # Then the compiled model copies inputs into buffers that no arena has, ahead of the graphs that read them.
    Refused("cudagraph_copy_inputs", lambda c: bool(c.compilation_config.cudagraph_copy_inputs), _LATER),
    Refused("cudagraph_mode NONE", lambda c: c.compilation_config.cudagraph_mode.name == "NONE", "choose another mode"),
    # They exchange addresses with peers that a capture does not have.
    Refused(
        "custom all-reduce in a world of several ranks",
        lambda c: _sliced(c) > 1 and not c.parallel_config.disable_custom_all_reduce,
        "add --disable-custom-all-reduce",
    ),
    Refused(
        "fused all-reduce in a world of several ranks",
        lambda c: _sliced(c) > 1 and bool(c.compilation_config.pass_config.fuse_allreduce_rms),
        """add --compilation-config '{"pass_config": {"fuse_allreduce_rms": false}}'""",
    ),
    # These read and write the memory of peers as well; both are off unless they are asked for.
    Refused(
        "fuse_gemm_comms or fuse_minimax_qk_norm in a world of several ranks",
        lambda c: _sliced(c) > 1 and _fuses_otherwise(c.compilation_config.pass_config),
        _LATER,
    ),
)

# Variables that are off by default and let ranks communicate in another way than graphs are restored for.
_OTHER_WAYS = ("VLLM_DISABLE_PYNCCL", "VLLM_USE_NCCL_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER")

# Attention back-ends whose buffers were followed from where they are made to the graphs that read them.
BACKENDS = frozenset({"FLASH_ATTN"})


def check(config: Any, environ: dict[str, str]) -> None:
    """Raises ``EngineUnsupported`` for the first row of ``REFUSED`` that holds, or a variable."""
    for row in REFUSED:
        if row.when(config):
            raise EngineUnsupported(f"{row.what} cannot be restored yet: {row.advice}")
    if environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "0") == "1":
        raise EngineUnsupported("graphs with breaks cannot be restored yet: start without VLLM_USE_BREAKABLE_CUDAGRAPH")
    if config.lora_config is not None and environ.get("VLLM_LORA_ENABLE_DUAL_STREAM", "0") not in ("0", ""):
        raise EngineUnsupported(
            "LoRA on a stream of its own cannot be restored yet: start without VLLM_LORA_ENABLE_DUAL_STREAM"
        )
    if _sliced(config) > 1 and environ.get("VLLM_ALLREDUCE_USE_SYMM_MEM", "1") != "0":
        raise EngineUnsupported(
            "all-reduce through symmetric memory cannot be restored yet: set VLLM_ALLREDUCE_USE_SYMM_MEM=0"
        )
    for name in _OTHER_WAYS if _sliced(config) * _replicas(config) > 1 else ():
        if environ.get(name, "0").lower() not in ("0", "false", ""):
            raise EngineUnsupported(
                f"ranks that communicate otherwise than through NCCL communicators of vLLM's own cannot be restored "
                f"yet: start without {name}"
            )


def check_backends(names: frozenset[str]) -> None:
    """Raises ``EngineUnsupported`` for an attention back-end that is not known."""
    if unknown := sorted(names - BACKENDS):
        raise EngineUnsupported(
            f"the attention back-end {unknown[0]} cannot be restored yet: choose one of {', '.join(sorted(BACKENDS))} "
            "with --attention-backend"
        )
