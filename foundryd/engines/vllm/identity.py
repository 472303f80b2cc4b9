# SPDX-License-Identifier: Apache-2.0
"""What of vLLM and its configuration must be the same where graphs are restored.

Known before a GPU context exists, so these are the settings as vLLM resolved them from its arguments.  What it decides
later (attention back-ends, blocks of the KV cache, the batches it captures) the adapter compares before it restores.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any

from foundryd.archive.identity import Value

# Of a model's configuration: where it came from and what wrote it.
_CONFIG_IGNORED = frozenset({"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "torch_dtype"})

_DEEPEST = 4

# VLLM_ variables that neither kernels nor memory depend on: logs, network, start of processes, places of files.
_ENVIRONMENT_IGNORED = re.compile(
    r"VLLM_((DEBUG_)?LOG.*|CONFIGURE_LOGGING|HOST_IP|PORT|API_KEY|RPC_.*|HTTP_.*|ENGINE_.*|EXECUTE_MODEL_.*|NO_USAGE.*"
    r"|USAGE_.*|DO_NOT_TRACK|PLUGINS|WORKER_MULTIPROC_METHOD|ENABLE_V1_MULTIPROCESSING|CACHE_ROOT|CONFIG_ROOT"
    r"|ASSETS_.*|MEDIA_.*|KEEP_ALIVE.*|SKIP_MODEL_NAME_VALIDATION|NCCL_SO_PATH|LOADING.*|DP_.*|DEBUG_DUMP_PATH"
    r"|MODEL_REDIRECT_PATH|SERVER_DEV_MODE|RINGBUFFER_.*|IMAGE_.*|VIDEO_.*|AUDIO_.*|ALLOW_RUNTIME_LORA_UPDATING)"
)

# Of the model's configuration: how vLLM makes the model that the digest of its own configuration describes.
_MODEL = ("model_impl", "quantization_config", "disable_sliding_window", "override_attention_dtype")

# Fields of the compilation's configuration that choose what is compiled or captured.
_COMPILATION = (
    "mode",
    "backend",
    "custom_ops",
    "splitting_ops",
    "compile_sizes",
    "compile_ranges_endpoints",
    "inductor_compile_config",
    "inductor_passes",
    "cudagraph_copy_inputs",
    "use_inductor_graph_partition",
    "pass_config",
    "dynamic_shapes_config",
    "cudagraph_specialize_lora",
)

# Of the configuration of drafts: what may choose kernels, memory or outputs of the model that checks them.
_SPECULATIVE = (
    "quantization",
    "moe_backend",
    "attention_backend",
    "max_model_len",
    "draft_tensor_parallel_size",
    "disable_padded_drafter_batch",
    "use_local_argmax_reduction",
    "parallel_drafting",
    "draft_sample_method",
)

# Of the configuration of adapters: how many a host keeps, which graphs do not see.
_LORA_IGNORED = frozenset({"max_loras", "max_lora_rank", "max_cpu_loras"})


class VllmFacts:
    """Facts of a vLLM and its resolved configuration (a ``Provider`` of ``foundryd.archive.identity``)."""

    def __init__(self, version: str, config: Any, environ: Mapping[str, str] | None = None) -> None:
        self._version = version
        self._config = config
        self._environ = os.environ if environ is None else environ

    def identity_facts(self) -> Mapping[str, Value]:
        """``engine``, ``model_config`` and ``vllm.`` facts, one for each setting, so that a refusal names it."""
        config = self._config
        model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
        parallel, compilation, attention = config.parallel_config, config.compilation_config, config.attention_config
        lora, speculative = config.lora_config, config.speculative_config
        facts: dict[str, Any] = {
            "model_runner": "V2" if config.use_v2_model_runner else "V1",
            "dtype": model.dtype,
            "quantization": model.quantization,
            "model": digest({name: getattr(model, name) for name in _MODEL}),
            "max_model_len": model.max_model_len,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "kv_cache_dtype": cache.cache_dtype,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "kv_cache_memory_bytes": cache.kv_cache_memory_bytes,
            "num_gpu_blocks_override": cache.num_gpu_blocks_override,
            "block_size": cache.block_size if cache.user_specified_block_size else None,
            "attention_backend": attention.backend,
            "attention": digest(_fields(attention, without=frozenset({"backend"}))),
            "cudagraph_mode": compilation.cudagraph_mode,
            "cudagraph_capture_sizes": [str(size) for size in compilation.cudagraph_capture_sizes or ()],
            "compilation": digest({name: getattr(compilation, name) for name in _COMPILATION}),
            "kernels": digest(_fields(config.kernel_config)),
            "tensor_parallel_size": parallel.tensor_parallel_size,
            "pipeline_parallel_size": parallel.pipeline_parallel_size,
            "data_parallel_size": parallel.data_parallel_size,
            "enable_expert_parallel": parallel.enable_expert_parallel,
            "expert_placement_strategy": parallel.expert_placement_strategy,
            "all2all_backend": parallel.all2all_backend,
            "max_loras": None if lora is None else lora.max_loras,
            "max_lora_rank": None if lora is None else lora.max_lora_rank,
            "lora": None if lora is None else digest(_fields(lora, without=_LORA_IGNORED)),
            # Where drafts come from graphs do not see.
            "speculative_method": None if speculative is None else speculative.method,
            "num_speculative_tokens": None if speculative is None else speculative.num_speculative_tokens,
            "speculative": None if speculative is None else _speculative(speculative),
            "disable_custom_all_reduce": parallel.disable_custom_all_reduce,
            "environment": environment(self._environ),
        }
        named = {f"vllm.{name}": _value(value) for name, value in facts.items()}
        return {"engine": f"vLLM {self._version}", "model_config": model_digest(model), **named}


def model_digest(model: Any) -> str:
    """A digest of architecture, shapes and everything else of a model's configuration but where it came from."""
    return digest(_without_origin(model.hf_config.to_dict()))


def _speculative(speculative: Any) -> str:
    """A digest of how drafts are made, and of the model that makes them."""
    model = speculative.draft_model_config
    settings = {name: getattr(speculative, name) for name in _SPECULATIVE}
    return digest(settings | {"model": None if model is None else model_digest(model)})


def _without_origin(settings: Any) -> Any:
    if not isinstance(settings, Mapping):
        return settings
    return {name: _without_origin(value) for name, value in settings.items() if name not in _CONFIG_IGNORED}


def environment(environ: Mapping[str, str]) -> list[str]:
    """The ``VLLM_`` variables that may choose kernels or memory, as ``NAME=value``."""
    return [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith("VLLM_") and not _ENVIRONMENT_IGNORED.fullmatch(name)
    ]


def digest(thing: Any) -> str:
    """A short digest of nested settings; the order of names does not matter, that of lists does."""
    return hashlib.sha256(json.dumps(_plain(thing), sort_keys=True).encode()).hexdigest()[:32]


def _fields(config: Any, without: frozenset[str] = frozenset()) -> dict[str, Any]:
    """The fields of one of vLLM's configurations."""
    names = [f.name for f in dataclasses.fields(config)] if dataclasses.is_dataclass(config) else list(vars(config))
    return {name: getattr(config, name) for name in names if name not in without and not name.startswith("_")}


def _plain(thing: Any, depth: int = 0) -> Any:
    """``thing`` as JSON holds it, equal for equal settings in any process."""
    if isinstance(thing, Enum):
        return thing.name
    if isinstance(thing, bool | int | float | str) or thing is None:
        return thing
    if isinstance(thing, Mapping):
        return {str(name): _plain(value, depth + 1) for name, value in thing.items()}
    if isinstance(thing, set | frozenset):
        return sorted(str(_plain(value, depth + 1)) for value in thing)
    if isinstance(thing, list | tuple):
        return [_plain(value, depth + 1) for value in thing]
    if callable(thing) and hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    if hasattr(thing, "__dict__") or dataclasses.is_dataclass(thing):
        # Objects that refer to one another have no end; what settings are made of is not that deep.
        fields = {} if depth > _DEEPEST else _plain(_fields(thing), depth + 1)
        return {"": type(thing).__qualname__, **fields}
    return str(thing)


def _value(value: Any) -> Value:
    """A setting as an archive's identity holds it."""
    if isinstance(value, list):
        return [str(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return "default" if value is None else str(value).removeprefix("torch.")
