# SPDX-License-Identifier: Apache-2.0
"""Stands for the loader: parameters on the device first, then their values, then their form for kernels."""

import torch

from vllm.compilation.backends import VllmBackend
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.log import note


def initialize_model(vllm_config, *, prefix="", model_class=None, model_config=None):
    note("parameters")
    return Tiny(vllm_config, model_config.hf_config.to_dict()["hidden_size"])


def process_weights_after_loading(model, model_config, target_device):
    note("kernel format")
    model.scale = torch.nn.Parameter(model.scale * 2, requires_grad=False)


class Piece:
    """Stands for a compiled piece of the model, which knows its place in it and returns a tuple."""

    def __init__(self, index, fn):
        self.piecewise_compile_index, self._fn = index, fn
        self.vllm_backend = VllmBackend()

    def __call__(self, *arguments):
        return (self._fn(*arguments),)


class Tiny(torch.nn.Module):
    """Two pieces, and attention between them: tokens and positions to hidden states, through the KV cache."""

    def __init__(self, vllm_config, hidden):
        super().__init__()
        self.embedding = torch.nn.Parameter(torch.zeros(16, hidden), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(hidden), requires_grad=False)
        self.register_buffer("angles", torch.arange(64).float())
        self.buffer = torch.zeros(32, hidden)  # stands for the memory of the graphs
        self.adapted, self.with_aux = None, False
        self.pieces = [Piece(0, self._first), Piece(1, self._second)]
        if vllm_config.compilation_config.cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE:
            options = [CUDAGraphOptions(weak_ref_output=last) for last in (False, True)]
            self.pieces = [
                CUDAGraphWrapper(piece, vllm_config, CUDAGraphMode.PIECEWISE, option)
                for piece, option in zip(self.pieces, options, strict=True)
            ]

    def _first(self, tokens):
        out = self.buffer[: len(tokens)]
        out.copy_(self.embedding[tokens.long()] * self.scale)
        if self.adapted is not None:
            layer = self.adapted
            layer.punica_wrapper.add_lora_linear(out, out.clone(), layer.lora_a_stacked, layer.lora_b_stacked)
        return out

    def _second(self, hidden, positions):
        out = self.buffer[: len(hidden)]
        out.copy_(hidden + self.angles[positions, None])
        return out

    def forward(self, tokens, positions, cache):
        [hidden] = self.pieces[0](tokens)
        hidden.add_(cache.sum())
        aux = hidden.clone()
        [hidden] = self.pieces[1](hidden, positions)
        return (hidden.clone(), [aux]) if self.with_aux else hidden.clone()


class DummyModelLoader:
    def load_weights(self, model, model_config):
        note("values")
        model.embedding.copy_(torch.arange(model.embedding.numel()).view_as(model.embedding))

    def load_model(self, vllm_config, model_config, prefix=""):
        model = initialize_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
        self.load_weights(model, model_config)
        process_weights_after_loading(model, model_config, torch.device("cpu"))
        return model.eval()
