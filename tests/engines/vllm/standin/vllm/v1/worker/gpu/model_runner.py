# SPDX-License-Identifier: Apache-2.0
"""Stands for the V2 model runner: buffers that it fills in its constructor, block tables beside the KV cache."""

from types import SimpleNamespace

import torch

from vllm.compilation.decorators import compiled
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.log import note
from vllm.model_executor.model_loader.base_loader import DummyModelLoader
from vllm.v1.worker.gpu.attn_utils import Builder
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin


def init_model_state(vllm_config, model, encoder_cache, device):
    note("model state")
    return SimpleNamespace()


class FlashAttention:
    name = "FLASH_ATTN"

    @classmethod
    def get_name(cls):
        return cls.name


class Group:
    """Stands for layers of one attention, with a builder that keeps the schedule of a batch in a buffer of its own."""

    def __init__(self, requests):
        self._builder = Builder(requests)

    def get_metadata_builder(self, ubatch_id):
        return self._builder


class GPUModelRunner(LoRAModelRunnerMixin):
    def __init__(self, vllm_config, device):
        note("input buffers")
        self.vllm_config, self.device = vllm_config, torch.device("cpu")
        self.lora_config = vllm_config.lora_config
        requests = vllm_config.scheduler_config.max_num_seqs
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.vocab_size = 16
        self.input_buffers = SimpleNamespace(
            input_ids=torch.zeros(tokens, dtype=torch.int32),
            positions=torch.zeros(tokens, dtype=torch.int64),
            query_start_loc=torch.zeros(requests + 1, dtype=torch.int32),
            seq_lens=torch.zeros(requests, dtype=torch.int32),
            dcp_local_seq_lens=torch.zeros(requests, dtype=torch.int32),
        )

    def load_model(self, load_dummy_weights=False):
        config = self.vllm_config
        self.model = DummyModelLoader().load_model(vllm_config=config, model_config=config.model_config)
        if self.lora_config:
            self.model = self.load_lora_model(self.model, config, self.device)
        self.model_state = init_model_state(config, self.model, None, None)

    def profile_run(self):
        compiled(self.model)
        if self.lora_config:
            # A batch without adapters, whose kernels run all the same; so they do while graphs are captured.
            self._select_dummy_adapters(4, 0)
            manager = self.lora_manager._adapter_manager
            manager.remove_all_adapters()
            for wrapper in manager.punica_wrapper_mapping.values():
                wrapper.token_mapping_meta.no_lora_flag_cpu[0] = False

    def profile_cudagraph_memory(self):
        return 0

    def initialize_kv_cache(self, kv_cache_config):
        note("KV cache")
        config = self.vllm_config
        block, requests = config.cache_config.block_size, config.scheduler_config.max_num_seqs
        self.kv_cache_config = kv_cache_config
        self.attn_backends = {"layer": FlashAttention}
        self.attn_groups = [[Group(requests)]]
        self.block_tables = SimpleNamespace(
            block_sizes=[block],
            kernel_block_sizes=[block],
            input_block_tables=[torch.zeros((requests, -(-self.max_model_len // block)), dtype=torch.int32)],
            slot_mappings=torch.zeros((1, config.scheduler_config.max_num_batched_tokens), dtype=torch.int64),
        )
        self.cudagraph_manager = ModelCudaGraphManager(config, None, config.compilation_config.cudagraph_mode, 1)
        self.kv_caches = [torch.zeros(2, kv_cache_config.num_blocks, block, 1, 2)]

    def capture_model(self):
        self.cudagraph_manager.capture(
            self.model, self.input_buffers, self.kv_caches, has_lora=self.lora_config is not None
        )
        return 0

    @torch.inference_mode()
    def execute(self, tokens):
        """Not of vLLM: one step of decoding through a graph."""
        manager = self.cudagraph_manager
        batch = next(b for b in reversed(manager._capture_descs[manager.modes.FULL]) if b.num_tokens >= len(tokens))
        self.input_buffers.input_ids[: len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        manager.graphs[batch].replay()
        return manager.hidden_states[: len(tokens)].clone()

    @torch.inference_mode()
    def execute_pieces(self, tokens):
        """Not of vLLM: one step through graphs of pieces, for exactly as many tokens as one was captured for."""
        inputs, n = self.input_buffers, len(tokens)
        inputs.input_ids[:n] = torch.tensor(tokens, dtype=torch.int32)
        batch = BatchDescriptor(num_tokens=n, has_lora=self.lora_config is not None)
        with set_forward_context(self.cudagraph_manager.modes.PIECEWISE, n, batch):
            return self.model(inputs.input_ids[:n], inputs.positions[:n], self.kv_caches[0]).clone()
