# SPDX-License-Identifier: Apache-2.0
"""Stands for adapters on the device: buffers with places for some of them, and tensors that say which token has which.

A place is what the device knows an adapter by, and a number what requests do.
"""

import torch

from vllm.log import note


class LoRAKernelMeta:
    """Stands for what kernels read: rows sorted by places, and where each place's rows are; place -1 is none."""

    def __init__(self, places, tokens):
        self.token_lora_mapping = torch.full((tokens,), 7, dtype=torch.int32)
        self.token_indices_sorted_by_lora_ids = torch.full((tokens,), 7, dtype=torch.int32)
        self.active_lora_ids = torch.full((places + 1,), 7, dtype=torch.int32)
        self.num_tokens_per_lora = torch.zeros(places + 1, dtype=torch.int32)
        self.lora_token_start_loc = torch.zeros(places + 2, dtype=torch.int32)
        self.no_lora_flag_cpu = torch.tensor([False])
        self.num_active_loras_cpu = torch.tensor([0], dtype=torch.int32)
        self.default_num_active_loras_cpu = torch.tensor([places + 1], dtype=torch.int32)

    def prepare_tensors(self, mapping):
        self.active_lora_ids.fill_(-1)
        self.num_tokens_per_lora.zero_()
        self.lora_token_start_loc.zero_()
        self.no_lora_flag_cpu[0] = bool((mapping == -1).all())
        if self.no_lora_flag_cpu:
            return
        found, counts = mapping.unique(return_counts=True)
        self.token_lora_mapping[: len(mapping)] = mapping
        self.token_indices_sorted_by_lora_ids[: len(mapping)] = mapping.argsort(stable=True)
        self.active_lora_ids[: len(found)] = found
        self.num_tokens_per_lora[: len(found)] = counts
        self.lora_token_start_loc[1 : 1 + len(found)] = counts.cumsum(0)


class PunicaWrapper:
    def __init__(self, places, tokens):
        self._embeddings_indices = torch.full((2, tokens), 7, dtype=torch.int64)
        self.token_mapping_meta = LoRAKernelMeta(places, tokens)
        self.prompt_mapping_meta = LoRAKernelMeta(places, tokens)

    def update_metadata(self, mapping, numbers, vocab_size):
        places = torch.tensor([numbers.index(n) if n else -1 for n in mapping.index_mapping])
        self._embeddings_indices[0, : len(places)] = 0
        self._embeddings_indices[1, : len(places)] = places.clamp(min=0) * vocab_size
        self.token_mapping_meta.prepare_tensors(places)
        self.prompt_mapping_meta.prepare_tensors(
            torch.tensor([numbers.index(n) if n else -1 for n in mapping.prompt_mapping])
        )

    def add_lora_linear(self, out, x, first, second):
        """Stands for the kernels, whose grid has one more than there are places, whatever a batch has."""
        meta = self.token_mapping_meta
        if meta.no_lora_flag_cpu:
            return
        for i in range(int(meta.default_num_active_loras_cpu)):
            place, count = int(meta.active_lora_ids[i]), int(meta.num_tokens_per_lora[i])
            if place == -1 or count == 0:
                continue
            start = int(meta.lora_token_start_loc[i])
            rows = meta.token_indices_sorted_by_lora_ids[start : start + count].long()
            assert int(rows.max()) < len(x), "a row of another batch"
            out[rows] += x[rows] @ first[0][place, 0].T @ second[0][place, 0].T


class Linear(torch.nn.Module):
    """Stands for a layer with adapters: a tuple of buffers, since some layers are several in one."""

    def __init__(self, config, hidden):
        super().__init__()
        rank, places = config.max_lora_rank, config.max_loras
        self.lora_a_stacked = (torch.zeros(places, 1, rank, hidden),)
        self.lora_b_stacked = (torch.zeros(places, 1, hidden, rank),)
        self.punica_wrapper = None

    def set_lora(self, place, first, second):
        self.lora_a_stacked[0][place], self.lora_b_stacked[0][place] = first, second


class LoRAModelManager:
    def __init__(self, model, vllm_config):
        note("adapters")
        config = self.lora_config = vllm_config.lora_config
        self.vocab_size = model.embedding.shape[0]
        wrapper = PunicaWrapper(config.max_loras, vllm_config.scheduler_config.max_num_batched_tokens)
        self.punica_wrapper_mapping = {"language_model": wrapper, "alias": wrapper}
        layer = Linear(config, model.embedding.shape[1])
        layer.punica_wrapper = wrapper
        model.adapted = layer
        self.modules = {"adapted": layer}
        self.lora_index_to_id = [None] * config.max_loras

    @property
    def lora_slots(self):
        return self.lora_config.max_loras

    def activate_adapter(self, number, first, second):
        if number not in self.lora_index_to_id:
            place = self.lora_index_to_id.index(None)
            self.lora_index_to_id[place] = number
            for module in self.modules.values():
                module.set_lora(place, first, second)

    def _set_adapter_mapping(self, mapping):
        self.punica_wrapper_mapping["language_model"].update_metadata(mapping, self.lora_index_to_id, self.vocab_size)

    def remove_all_adapters(self):
        self.lora_index_to_id = [None] * self.lora_slots
