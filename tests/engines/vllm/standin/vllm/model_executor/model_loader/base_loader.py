# SPDX-License-Identifier: Apache-2.0
"""Stands for the loader: parameters on the device first, then their values, then their form for kernels."""

import torch

from vllm.log import note


def initialize_model(vllm_config, *, prefix="", model_class=None, model_config=None):
    note("parameters")
    return Tiny(model_config.hf_config.to_dict()["hidden_size"])


def process_weights_after_loading(model, model_config, target_device):
    note("kernel format")
    model.scale = torch.nn.Parameter(model.scale * 2, requires_grad=False)


class Tiny(torch.nn.Module):
    """One layer: tokens and positions to hidden states, through the KV cache."""

    def __init__(self, hidden):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(16, hidden), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(hidden), requires_grad=False)
        self.register_buffer("angles", torch.arange(64).float())

    def forward(self, tokens, positions, cache):
        return self.embedding[tokens.long()] * self.scale + self.angles[positions, None] + cache.sum()


class DummyModelLoader:
    def load_weights(self, model, model_config):
        note("values")
        model.embedding.copy_(torch.arange(model.embedding.numel()).view_as(model.embedding))

    def load_model(self, vllm_config, model_config, prefix=""):
        model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self.load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()
