# SPDX-License-Identifier: Apache-2.0
"""Stands for the V1 model runner: the model is in a wrapper of its own, and a dummy run captures where it may."""

from types import SimpleNamespace

import torch

from vllm.compilation import monitor
from vllm.compilation.backends import set_model_tag
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.compilation.decorators import compiled
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import set_forward_context
from vllm.log import note
from vllm.model_executor.model_loader.base_loader import DummyModelLoader
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.worker.dp_utils import coordinate_batch_across_dp
from vllm.v1.worker.gpu.attn_utils import Builder
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin
from vllm.v1.worker.workspace import current_workspace_manager, lock_workspace


class FlashAttention:
    name = "FLASH_ATTN"

    @classmethod
    def get_name(cls):
        return cls.name


class Buffer:
    """Stands for a buffer on the CPU with its copy on the device."""

    def __init__(self, *shape, dtype):
        self.cpu, self.gpu = torch.zeros(*shape, dtype=dtype), torch.zeros(*shape, dtype=dtype)


class Group:
    """Stands for layers of one attention."""

    backend = FlashAttention

    def __init__(self, requests):
        self._builder = Builder(requests)

    def get_metadata_builder(self, ubatch_id):
        return self._builder


class Drafter:
    """Stands for a model that drafts: it may have graphs of pieces, which its pass beside the other's captures."""

    def __init__(self, vllm_config):
        self._config, self._method = vllm_config, vllm_config.speculative_config.method
        self.cudagraph_dispatcher = CudagraphDispatcher(vllm_config)
        self.uses_mrope, self.max_model_len = False, vllm_config.model_config.max_model_len
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.input_ids = torch.zeros(tokens, dtype=torch.int32)
        self.positions = torch.zeros(tokens, dtype=torch.int64)
        self.hidden_states = torch.zeros(tokens, 4)

    def load_model(self, target):
        draft = self._config.speculative_config.draft_model_config
        with set_model_tag("draft_model" if self._method == "draft_model" else "eagle_head"):
            self.model = DummyModelLoader().load_model(vllm_config=self._config, model_config=draft)

    def initialize_cudagraph_keys(self, mode):
        pieces = mode.mixed_mode() in (CUDAGraphMode.PIECEWISE, CUDAGraphMode.FULL)
        self.cudagraph_dispatcher.initialize_cudagraph_keys(CUDAGraphMode.PIECEWISE if pieces else CUDAGraphMode.NONE)

    def dummy_run(self, tokens, use_cudagraphs):
        note("draft")
        has = use_cudagraphs and any(
            tokens == b.num_tokens for _, bs in self.cudagraph_dispatcher.get_capture_descs() for b in bs
        )
        return self.forward(tokens, CUDAGraphMode.PIECEWISE if has else CUDAGraphMode.NONE)

    def forward(self, tokens, mode):
        with set_forward_context(mode, tokens):
            return self.model(
                tokens=self.input_ids[:tokens], positions=self.positions[:tokens], cache=self.hidden_states[:tokens]
            )


class GPUModelRunner(LoRAModelRunnerMixin):
    def __init__(self, vllm_config, device):
        note("input buffers")
        self.vllm_config, self.device = vllm_config, torch.device("cpu")
        self.lora_config, self.speculative_config = vllm_config.lora_config, vllm_config.speculative_config
        self.max_num_tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._requests = vllm_config.scheduler_config.max_num_seqs
        self._tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.uses_mrope, self.uses_xdrope_dim = False, 0
        self.input_ids = Buffer(self._tokens, dtype=torch.int32)
        self.positions = torch.zeros(self._tokens, dtype=torch.int64)
        self.query_start_loc = Buffer(self._requests + 1, dtype=torch.int32)
        self.seq_lens = torch.zeros(self._requests, dtype=torch.int32)
        self.cudagraph_dispatcher = CudagraphDispatcher(vllm_config)
        if self.speculative_config is not None and self.speculative_config.method != "ngram":
            self.drafter = Drafter(vllm_config)

    def load_model(self, load_dummy_weights=False):
        config = self.vllm_config
        self.model = DummyModelLoader().load_model(vllm_config=config, model_config=config.model_config)
        if self.lora_config:
            self.model = self.load_lora_model(self.model, config, self.device)
        if hasattr(self, "drafter"):
            self.drafter.load_model(self.model)
            self.model.with_aux = self.speculative_config.method == "eagle3"
        if config.compilation_config.cudagraph_mode is not CUDAGraphMode.NONE:
            options = CUDAGraphOptions(weak_ref_output=True)
            self.model = CUDAGraphWrapper(self.model, config, CUDAGraphMode.FULL, options)

    def get_model(self):
        return self.model.runnable

    def profile_run(self):
        compiled(self.get_model())
        # Stands for experts, whose custom operation asks for scratch memory.
        for size in (64, 256):
            current_workspace_manager()._ensure_workspace_size(size)

    def profile_cudagraph_memory(self):
        """Stands for captures with a KV cache of a few blocks, which is given up again."""
        self.initialize_kv_cache(SimpleNamespace(num_blocks=2), is_profiling=True)
        note("trial capture")
        self.attn_groups, self.kv_caches = [], []
        return 1 << 20

    def initialize_kv_cache(self, kv_cache_config, is_profiling=False):
        note("KV cache")
        config = self.vllm_config
        block = config.cache_config.block_size
        self.kv_cache_config = kv_cache_config
        self.attn_groups = [[Group(self._requests)]]
        self._init_block_sizes, self._kernel_block_sizes = [block], [block]
        table = SimpleNamespace(
            block_table=Buffer((self._requests, -(-self.max_model_len // block)), dtype=torch.int32),
            slot_mapping=Buffer(self._tokens, dtype=torch.int64),
        )
        self.input_batch = SimpleNamespace(vocab_size=16, block_table=SimpleNamespace(block_tables=[table]))
        drafts = 0 if self.speculative_config is None else self.speculative_config.num_speculative_tokens
        self.cudagraph_dispatcher.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode, 1 + drafts)
        if hasattr(self, "drafter") and self.speculative_config.method != "draft_model":
            self.drafter.initialize_cudagraph_keys(config.compilation_config.cudagraph_mode)
        self.kv_caches = [torch.zeros(2, kv_cache_config.num_blocks, block, 1, 2)]

    @torch.inference_mode()
    def capture_model(self):
        monitor.set_cudagraph_capturing_enabled(True)
        with graph_capture(device=self.device):
            for mode, batches in self.cudagraph_dispatcher.get_capture_descs():
                self._capture_cudagraphs(batch_descriptors=batches, cudagraph_runtime_mode=mode)
        monitor.set_cudagraph_capturing_enabled(False)
        lock_workspace()
        return 1 << 20

    def _capture_cudagraphs(self, batch_descriptors, cudagraph_runtime_mode):
        for batch in batch_descriptors:
            adapters = {"num_active_loras": batch.num_active_loras, "remove_lora": False} if batch.has_lora else {}
            self._dummy_run(batch.num_tokens, CUDAGraphMode.NONE, **adapters)
            self._dummy_run(batch.num_tokens, cudagraph_runtime_mode, batch, **adapters)
        if self.lora_config:
            self.lora_manager._adapter_manager.remove_all_adapters()

    def _dummy_run(
        self,
        num_tokens,
        cudagraph_runtime_mode=None,
        batch=None,
        skip_eplb=False,
        remove_lora=True,
        num_active_loras=0,
    ):
        note("dummy run with adapters" if num_active_loras else "dummy run")
        if self.lora_config:
            self._select_dummy_adapters(num_tokens, num_active_loras)
        self._agree(num_tokens, cudagraph_runtime_mode)
        current_workspace_manager()._ensure_workspace_size(num_tokens)
        self.seq_lens[:num_tokens] = 1
        output = self._forward(num_tokens, cudagraph_runtime_mode, batch)
        if hasattr(self, "drafter"):
            self.drafter.dummy_run(num_tokens, cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE)
        if self.lora_config and remove_lora:
            self.lora_manager._adapter_manager.remove_all_adapters()
        return output

    def _agree(self, tokens, mode):
        """Stands for what the mode of a step is once replicas have agreed; a capture insists on its own."""
        own = (mode or CUDAGraphMode.NONE).value
        found = coordinate_batch_across_dp(
            tokens, False, self.vllm_config.parallel_config, num_tokens_padded=tokens, cudagraph_mode=own
        )
        assert found[2] == own, "a replica that is captured runs no graph, for it believes that the others run none"
        assert found[1] is None or found[1].tolist() == [tokens] * len(found[1])

    def _forward(self, tokens, mode, batch):
        with set_forward_context(mode, tokens, batch):
            return self.model(
                tokens=self.input_ids.gpu[:tokens], positions=self.positions[:tokens], cache=self.kv_caches[0]
            )

    def _build_attention_metadata(
        self,
        num_tokens,
        num_reqs,
        max_query_len,
        num_tokens_padded,
        for_cudagraph_capture,
        slot_mappings,
        use_spec_decode=False,
    ):
        assert for_cudagraph_capture
        assert use_spec_decode == (self.speculative_config is not None)
        starts = self.query_start_loc
        assert torch.equal(starts.cpu[: num_reqs + 1], starts.gpu[: num_reqs + 1])
        for i, groups in enumerate(self.attn_groups):
            assert len(slot_mappings[i]) == num_tokens == num_tokens_padded
            for group in groups:
                group.get_metadata_builder(0).build_for_cudagraph_capture(
                    SimpleNamespace(
                        num_reqs=num_reqs,
                        query_start_loc=starts.gpu[: num_reqs + 1],
                        seq_lens=self.seq_lens[:num_reqs],
                        max_query_len=max_query_len,
                        max_seq_len=self.max_model_len,
                    )
                )

    @torch.inference_mode()
    def execute(self, tokens, mode=CUDAGraphMode.FULL, with_adapters=False):
        """Not of vLLM: one step through the graph of the smallest batch that has room."""
        [batches] = [b for m, b in self.cudagraph_dispatcher.get_capture_descs() if m is mode]
        fit = [b for b in reversed(batches) if b.num_tokens >= len(tokens) and b.has_lora == with_adapters]
        batch = fit[0]
        self.input_ids.gpu[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        output = self._forward(batch.num_tokens, mode, batch)
        hidden, aux = output if isinstance(output, tuple) else (output, [])
        self.aux = [part[: len(tokens)].clone() for part in aux]
        return hidden[: len(tokens)].clone()
