# SPDX-License-Identifier: Apache-2.0
"""Stands for the graphs of the V2 runner: one for each batch, all writing into hidden states that the first makes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.log import note


@dataclass(frozen=True)
class BatchExecutionDescriptor:
    cg_mode: CUDAGraphMode
    num_tokens: int
    num_reqs: int | None
    uniform_token_count: int | None = None


@dataclass
class NativeGraph:
    """Stands for ``torch.cuda.CUDAGraph``: what it launched is launched again."""

    replay: Callable[[], None]


class CudaGraphManager:
    modes = CUDAGraphMode

    def __init__(self, vllm_config, device, cudagraph_mode, decode_query_len):
        self.vllm_config, self.device, self.cudagraph_mode = vllm_config, device, cudagraph_mode
        self.graphs, self._graphs_captured = {}, False
        sizes = sorted(vllm_config.compilation_config.cudagraph_capture_sizes, reverse=True)
        self._capture_descs = {
            CUDAGraphMode.FULL: [BatchExecutionDescriptor(CUDAGraphMode.FULL, n, n, 1) for n in sizes]
        }
        if cudagraph_mode is CUDAGraphMode.FULL:
            # One graph for any spread of its tokens over requests.
            most = vllm_config.scheduler_config.max_num_seqs
            whole = [BatchExecutionDescriptor(CUDAGraphMode.FULL, n, min(n, most)) for n in sizes]
            self._capture_descs[CUDAGraphMode.FULL] = whole
        if cudagraph_mode is CUDAGraphMode.FULL_AND_PIECEWISE:
            pieces = [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, n, None) for n in sizes]
            self._capture_descs[CUDAGraphMode.PIECEWISE] = pieces

    @torch.inference_mode()
    def capture(self, create_forward_fn, progress_bar_desc="Capturing CUDA graphs"):
        states = {}
        with graph_capture(device=self.device):
            for batch in self._capture_descs.get(CUDAGraphMode.PIECEWISE, []):
                forward, states[batch] = create_forward_fn(batch)
                forward(CUDAGraphMode.NONE)
                forward(CUDAGraphMode.PIECEWISE)
            for batch in self._capture_descs[CUDAGraphMode.FULL]:
                forward, _ = create_forward_fn(batch)
                forward(CUDAGraphMode.NONE)
                forward, states[batch] = create_forward_fn(batch)
                note("native capture")
                forward(CUDAGraphMode.NONE)
                self.graphs[batch] = NativeGraph(lambda forward=forward: forward(CUDAGraphMode.NONE))
        self._graphs_captured = True
        return states


class ModelCudaGraphManager(CudaGraphManager):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.hidden_states, self.aux_hidden_states = None, []

    def capture(self, model, input_buffers, kv_caches, has_lora=False):
        def create_forward_fn(batch):
            n, inputs = batch.num_tokens, input_buffers
            inputs.seq_lens[:n] = 1
            note("inputs of a batch")

            def forward(mode):
                with set_forward_context(mode, n, BatchDescriptor(num_tokens=n, has_lora=has_lora)):
                    hidden = model(inputs.input_ids[:n], inputs.positions[:n], kv_caches[0])
                if mode is CUDAGraphMode.PIECEWISE:
                    return
                if self.hidden_states is None:
                    self.hidden_states = torch.empty_like(hidden)
                self.hidden_states[:n] = hidden

            return forward, "state"

        return super().capture(create_forward_fn)
