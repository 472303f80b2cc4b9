# SPDX-License-Identifier: Apache-2.0
"""Stands for what both runners have of adapters: the manager, and dummy adapters for runs without requests."""

from types import SimpleNamespace

import torch

from vllm.lora.layers import LoRAMapping
from vllm.lora.model_manager import LoRAModelManager


class LoRAModelRunnerMixin:
    def load_lora_model(self, model, vllm_config, device):
        self.lora_manager = SimpleNamespace(_adapter_manager=LoRAModelManager(model, vllm_config))
        return model

    def _select_dummy_adapters(self, tokens, adapters):
        """Stands for the adapters of a dummy run: of all places, one after another, or none."""
        manager = self.lora_manager._adapter_manager
        for number in range(1, manager.lora_slots + 1):
            manager.activate_adapter(number, torch.tensor(0.5), torch.tensor(0.5))
        numbers = tuple(1 + i % manager.lora_slots if adapters else 0 for i in range(tokens))
        manager._set_adapter_mapping(LoRAMapping(numbers, numbers, is_prefill=True))

    def request(self, numbers, weights):
        """Not of vLLM: what a step of requests with these adapters does ahead; ``weights`` are theirs by number."""
        manager = self.lora_manager._adapter_manager
        for number in sorted({n for n in numbers if n}):
            manager.activate_adapter(number, *weights[number])
        manager._set_adapter_mapping(LoRAMapping(tuple(numbers), tuple(numbers), is_prefill=True))
