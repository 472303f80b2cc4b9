# SPDX-License-Identifier: Apache-2.0
"""Stands for ``VllmConfig``: configurations as they are once vLLM has resolved its arguments."""

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.config.compilation import CompilationConfig


class HfConfig:
    """Stands for the model's configuration in the form of transformers."""

    def __init__(self, **settings: Any) -> None:
        self._settings = {"architectures": ["TinyForCausalLM"], "hidden_size": 8, "_name_or_path": "/models/tiny"}
        self._settings |= settings

    def to_dict(self) -> dict[str, Any]:
        return dict(self._settings)


@dataclass
class ModelConfig:
    hf_config: HfConfig = field(default_factory=HfConfig)
    dtype: torch.dtype = torch.float32
    quantization: str | None = None
    quantization_config: dict[str, Any] | None = None
    model_impl: str = "auto"
    disable_sliding_window: bool = False
    override_attention_dtype: str | None = None
    max_model_len: int = 64
    enforce_eager: bool = False
    enable_sleep_mode: bool = False
    enable_cumem_allocator: bool = False
    enable_return_routed_experts: bool = False
    enable_prompt_embeds: bool = False
    multimodal_config: Any = None
    is_encoder_decoder: bool = False
    runner_type: str = "generate"
    is_moe: bool = False


@dataclass
class CacheConfig:
    cache_dtype: str = "auto"
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    block_size: int = 16
    user_specified_block_size: bool = False
    kv_offloading_size: float | None = None
    kv_sharing_fast_prefill: bool = False
    calculate_kv_scales: bool = False


@dataclass
class SchedulerConfig:
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 32


@dataclass
class ParallelConfig:
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    data_parallel_rank_local: int | None = None
    data_parallel_index: int = 0
    data_parallel_backend: str = "mp"
    distributed_executor_backend: str | None = None
    nnodes: int = 1
    decode_context_parallel_size: int = 1
    prefill_context_parallel_size: int = 1
    enable_expert_parallel: bool = False
    expert_placement_strategy: str = "linear"
    all2all_backend: str = "allgather_reducescatter"
    disable_nccl_for_dp_synchronization: bool = True
    enable_dbo: bool = False
    ubatch_size: int = 0
    enable_eplb: bool = False
    enable_elastic_ep: bool = False
    disable_custom_all_reduce: bool = False

    @property
    def world_size(self) -> int:
        """Of one replica; only an external launcher's is of all of them."""
        replicas = self.data_parallel_size if self.distributed_executor_backend == "external_launcher" else 1
        return self.tensor_parallel_size * self.pipeline_parallel_size * replicas

    @property
    def nnodes_within_dp(self) -> int:
        return self.nnodes


@dataclass
class AttentionConfig:
    backend: str | None = None
    flash_attn_version: int | None = None


@dataclass
class KernelConfig:
    enable_flashinfer_autotune: bool | None = None


@dataclass
class LoRAConfig:
    max_lora_rank: int = 2
    max_loras: int = 2
    fully_sharded_loras: bool = False
    max_cpu_loras: int | None = None
    lora_dtype: torch.dtype = torch.float32
    target_modules: list[str] | None = None
    specialize_active_lora: bool = False


@dataclass
class SpeculativeConfig:
    method: str = "ngram"
    num_speculative_tokens: int = 3
    prompt_lookup_max: int = 2
    prompt_lookup_min: int = 1
    draft_model_config: ModelConfig | None = None
    quantization: str | None = None
    moe_backend: str | None = None
    attention_backend: str | None = None
    max_model_len: int | None = None
    draft_tensor_parallel_size: int | None = None
    disable_padded_drafter_batch: bool = False
    use_local_argmax_reduction: bool = False
    parallel_drafting: bool = False
    draft_sample_method: str = "greedy"


@dataclass
class UVAOffloadConfig:
    cpu_offload_gb: float = 0


@dataclass
class PrefetchOffloadConfig:
    offload_group_size: int = 0


@dataclass
class OffloadConfig:
    uva: UVAOffloadConfig = field(default_factory=UVAOffloadConfig)
    prefetch: PrefetchOffloadConfig = field(default_factory=PrefetchOffloadConfig)


@dataclass
class VllmConfig:
    model_config: ModelConfig = field(default_factory=ModelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    scheduler_config: SchedulerConfig = field(default_factory=SchedulerConfig)
    attention_config: AttentionConfig = field(default_factory=AttentionConfig)
    kernel_config: KernelConfig = field(default_factory=KernelConfig)
    offload_config: OffloadConfig = field(default_factory=OffloadConfig)
    compilation_config: CompilationConfig = field(default_factory=CompilationConfig)
    use_v2_model_runner: bool = True
    speculative_config: SpeculativeConfig | None = None
    lora_config: LoRAConfig | None = None
    kv_transfer_config: Any = None
    ec_transfer_config: Any = None
    weight_transfer_config: Any = None
