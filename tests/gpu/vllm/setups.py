# SPDX-License-Identifier: Apache-2.0
"""Models of random weights, and the options that vLLM gets on every side of a comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 1 << 30
DRAFTS = 3  # tokens of a request that are drafted
RANK = 8  # of adapters, less than what vLLM is told to have room for
WORKERS = Path(__file__).with_name("workers")  # only a start of several ranks has it on its path
ATTENTION = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 40960,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "intermediate_size": 6144}
DENSE = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "intermediate_size": 6144}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}


@dataclass(frozen=True)
class Model:
    """Shapes of Qwen3, with experts or without, or of Llama; ``head`` is one that drafts from hidden states (EAGLE)."""

    layers: int
    vocabulary: int = 151936
    experts: bool = False
    llama: bool = False
    head: bool = False

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        depth = {"num_hidden_layers": self.layers, "max_window_layers": self.layers, "vocab_size": self.vocabulary}
        kind = LLAMA if self.llama else EXPERTS if self.experts else DENSE
        return {**ATTENTION, **kind, **depth}

    @property
    def name(self) -> str:
        """What its folder is called."""
        kind = "llama" if self.llama else "qwen3"
        return f"{kind}{'-moe' * self.experts}{'-head' * self.head}-{self.layers}-{self.vocabulary}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Its parameters, as a checkpoint names them."""
        config = self.config
        hidden, head = config["hidden_size"], config["head_dim"]
        q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
        found: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, hidden),
            "model.norm.weight": (hidden,),
        }
        if self.head:
            # It has the other model's words, and joins what they are with its hidden states.
            found = {"fc.weight": (hidden, 2 * hidden)}
        for i in range(self.layers):
            at = f"{'' if self.head else 'model.'}layers.{i}"
            found |= {
                f"{at}.self_attn.q_proj.weight": (q, hidden),
                f"{at}.self_attn.k_proj.weight": (kv, hidden),
                f"{at}.self_attn.v_proj.weight": (kv, hidden),
                f"{at}.self_attn.o_proj.weight": (hidden, q),
                f"{at}.post_attention_layernorm.weight": (hidden,),
            }
            if not self.llama:
                found |= {f"{at}.self_attn.{name}_norm.weight": (head,) for name in "qk"}
            if not (self.head and i == 0):
                found[f"{at}.input_layernorm.weight"] = (hidden,)
            if self.experts:
                found[f"{at}.mlp.gate.weight"] = (config["num_experts"], hidden)
                for expert in range(config["num_experts"]):
                    found |= _feed_forward(f"{at}.mlp.experts.{expert}", hidden, config["moe_intermediate_size"])
            else:
                found |= _feed_forward(f"{at}.mlp", hidden, config["intermediate_size"])
        return found

    def written(self, folder: Path) -> Path:
        """The folder of the model below ``folder``, written if it is not there."""
        import torch
        from safetensors.torch import save_file

        path = folder / self.name
        if (path / "config.json").exists():
            return path
        generator = torch.Generator().manual_seed(1)
        weights = {}
        for name, shape in self.shapes().items():
            # Dummy weights of vLLM would be too small for attention to matter.
            values = torch.ones(shape)
            if len(shape) > 1:
                values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            weights[name] = values.bfloat16()
        path.mkdir(parents=True, exist_ok=True)
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(self.config, indent=2))
        return path

    def adapter(self, folder: Path, number: int) -> Path:
        """The folder of a LoRA adapter of the model below ``folder``, written if it is not there."""
        import torch
        from safetensors.torch import save_file

        path = folder / f"{self.name}-adapter-{number}"
        if (path / "adapter_config.json").exists():
            return path
        generator = torch.Generator().manual_seed(1000 + number)
        wanted = ("q_proj", "v_proj", "o_proj", "down_proj")
        values = {}
        for name, (out, into) in ((n, s) for n, s in self.shapes().items() if n.split(".")[-2] in wanted):
            at = f"base_model.model.{name.removesuffix('.weight')}"
            # vLLM adds parts of a sum over columns in whatever order they come, so with more than one value in a row no
            # two starts would have to answer alike.
            columns = torch.randint(0, into, (RANK, 1), generator=generator)
            values[f"{at}.lora_A.weight"] = torch.zeros((RANK, into)).scatter_(1, columns, 1.0)
            # Large enough for other tokens to come of it.
            values[f"{at}.lora_B.weight"] = torch.randn((out, RANK), generator=generator) * RANK**-0.5
        path.mkdir(parents=True, exist_ok=True)
        save_file({name: value.bfloat16() for name, value in values.items()}, path / "adapter_model.safetensors")
        settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": list(wanted), "bias": "none"}
        (path / "adapter_config.json").write_text(json.dumps(settings, indent=2))
        return path


def _feed_forward(at: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.gate_proj.weight": (inner, hidden),
        f"{at}.up_proj.weight": (inner, hidden),
        f"{at}.down_proj.weight": (hidden, inner),
    }


@dataclass(frozen=True)
class Setup:
    """A model with the options of ``vllm serve`` and of ``vllm.LLM``, alike for capture, native start and restore.

    ``environment`` are variables that all of them get, ``adapters`` how many LoRA adapters prompts have in turns,
    ``draft`` the model that drafts.
    """

    name: str
    model: Model
    options: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    adapters: int = 0
    draft: Model | None = None

    def drafting(self, folder: str) -> Setup:
        """The same with the folder of the model that drafts, which its options lack."""
        assert self.draft is not None
        method = "eagle" if self.draft.head else "draft_model"
        speculative = {"method": method, "model": folder, "num_speculative_tokens": DRAFTS}
        return replace(self, options={**self.options, "speculative_config": speculative})

    @property
    def replicas(self) -> int:
        """How many replicas it has."""
        return int(self.options.get("data_parallel_size", 1))

    @property
    def variant(self) -> str:
        """What ``foundryd capture`` calls it: replicas are part of a world if they have experts in common."""
        together = f"dp={self.replicas}," if self.model.experts and self.replicas > 1 else ""
        return f"{together}tp={self.options.get('tensor_parallel_size', 1)}"

    @property
    def workers(self) -> list[str]:
        """The names of its workers' start-up reports."""
        ranks, replicas = int(self.options.get("tensor_parallel_size", 1)), self.replicas
        if self.model.experts:
            ranks, replicas = ranks * replicas, 1
        before = ["" if replica == 0 else f"replica-{replica}-" for replica in range(replicas)]
        return [f"{name}rank-{rank}" for name in before for rank in range(ranks)]

    @property
    def ranks(self) -> int:
        """How many GPUs it takes."""
        return len(self.workers)

    @property
    def flags(self) -> list[str]:
        """The options as a command line."""
        found = []
        for name, value in self.options.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                found.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                found += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
        return found

    def changed(
        self, *, model: Model | None = None, environment: Mapping[str, str] | None = None, **options: Any
    ) -> Setup:
        """The same with other options."""
        return replace(
            self,
            model=model or self.model,
            options={**self.options, **options},
            environment={**self.environment, **(environment or {})},
        )

    def counted(self) -> Setup:
        """The same with workers that count their replays; for starts, which are to show that graphs were used."""
        path = os.pathsep.join(filter(None, [str(WORKERS), os.environ.get("PYTHONPATH")]))
        return self.changed(environment={"PYTHONPATH": path}, worker_cls="counted_worker.Worker")

    def crowded(self, cache: Path) -> Setup:
        """Counted, with all workers on the first GPU; for starts, since a capture has each rank alone anyway.

        vLLM keeps compiled models by rank, each for the device of that rank, so these have a ``cache`` of their own.
        """
        return self.counted().changed(
            environment={"VLLM_CACHE_ROOT": str(cache)},
            worker_cls="crowded_worker.Worker",
            # What vLLM chooses by itself, but where it counts fewer GPUs than ranks.
            distributed_executor_backend="mp",
        )


def graphs(mode: str, sizes: list[int] | None = None, **others: Any) -> dict[str, Any]:
    """A ``compilation_config`` with these CUDA graphs."""
    chosen = {"cudagraph_capture_sizes": sizes} if sizes else {}
    return {"cudagraph_mode": mode, **chosen, **others}


def setups(layers: int, memory: float) -> dict[str, Setup]:
    """Every setup by name; ``layers`` and ``memory`` are those of the model that is timed."""
    common = {
        "skip_tokenizer_init": True,
        "max_model_len": 4096,
        "max_num_seqs": 32,
        # What it would be by itself depends on who starts the engine.
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
    }
    timed = {**common, "gpu_memory_utilization": memory}
    # As many graphs as vLLM has by itself for that many requests: 51.
    many = {**timed, "max_num_seqs": 512, "kv_cache_memory_bytes": 16 * GIB}
    # Several of these share a GPU at a time, so they do not measure what is free.
    beside = {**common, "gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": GIB}
    small = {**beside, "max_num_seqs": 8}
    few = [1, 2, 4, 8]
    ranks = {**small, "gpu_memory_utilization": 0.2, "disable_custom_all_reduce": True}
    alone = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
    two, sixteen = Model(2, 32768), Model(2, 32768, experts=True)
    decode = "FULL_DECODE_ONLY"
    # Without flashinfer, which its sampler would import.
    first = {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    ranks |= {"compilation_config": graphs(decode, few, pass_config={"fuse_allreduce_rms": False})}
    adapters = {"compilation_config": graphs(decode, [*few, 16, 32])}
    adapters |= {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    listed = [
        Setup("decode", Model(layers), {**many, "compilation_config": graphs(decode)}),
        Setup("full", two, {**beside, "compilation_config": graphs("FULL", [1, 2, 4, 8, 16, 32, 64])}),
        Setup("pieces", two, {**beside, "compilation_config": graphs("FULL_AND_PIECEWISE", [1, 2, 4, 8, 16, 32, 64])}),
        Setup("small", two, {**small, "compilation_config": graphs(decode, few)}),
        Setup(
            "moe",
            sixteen,
            {**beside, "compilation_config": graphs(decode, [1, 2, 4, 8, 16, 32])},
            {"VLLM_USE_V2_MODEL_RUNNER": "1"},
        ),
        Setup("moe_v1", sixteen, {**beside, "compilation_config": graphs(decode, [1, 2, 4, 8, 16, 32])}, first),
        Setup("moe_v1_pieces", sixteen, {**beside, "compilation_config": graphs("FULL_AND_PIECEWISE", few)}, first),
        Setup("v1", two, {**timed, "compilation_config": graphs(decode)}, first),
        # vLLM loads the compiled model from one file of finished pieces, which it does by itself from PyTorch 2.12 on.
        Setup(
            "artifact",
            Model(layers),
            {**many, "compilation_config": graphs(decode)},
            {"VLLM_USE_MEGA_AOT_ARTIFACT": "1"},
        ),
        # Workers are spawned, as under vllm serve; those of ep2 are forked.
        Setup("tp2", two, {**ranks, "tensor_parallel_size": 2}, {**alone, "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
        Setup(
            "ep2",
            sixteen,
            {**ranks, "tensor_parallel_size": 2, "enable_expert_parallel": True},
            {**alone, **first},
        ),
        Setup("lora", two, {**beside, **adapters}, first, adapters=2),
        Setup("lora_v2", two, {**beside, **adapters}, adapters=2),
        Setup(
            "ngram",
            two,
            {
                **{**beside, "compilation_config": graphs(decode, [4, 8, 16, 32])},
                "speculative_config": {
                    **{"method": "ngram", "num_speculative_tokens": DRAFTS},
                    **{"prompt_lookup_max": 2, "prompt_lookup_min": 1},
                },
            },
            first,
        ),
        Setup(
            "draft",
            two,
            {**beside, "compilation_config": graphs(decode, [4, 8, 16, 32])},
            first,
            draft=Model(1, two.vocabulary),
        ),
        Setup(
            "eagle",
            Model(2, two.vocabulary, llama=True),
            {**beside, "compilation_config": graphs("FULL_AND_PIECEWISE", [4, 8, 16, 32])},
            first,
            draft=Model(1, two.vocabulary, llama=True, head=True),
        ),
        Setup("dp2", two, {**small, "compilation_config": graphs(decode, few), "data_parallel_size": 2}),
        Setup(
            "moe_dp2",
            sixteen,
            {**ranks, "data_parallel_size": 2, "enable_expert_parallel": True},
            first,
        ),
        # Each rank's code has its share of the vocabulary in it, and a rank that tunes that for itself may choose other
        # launches than the others, which none of these can predict.
        Setup("tp8", two, {**ranks, "tensor_parallel_size": 8}, {**alone, "TORCHINDUCTOR_DETERMINISTIC": "1"}),
    ]
    return {setup.name: setup for setup in listed}
