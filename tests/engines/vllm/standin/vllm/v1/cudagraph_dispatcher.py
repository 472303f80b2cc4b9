# SPDX-License-Identifier: Apache-2.0
"""Stands for the dispatcher: which batches have graphs, and of which kind, largest first."""

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor


class CudagraphDispatcher:
    def __init__(self, vllm_config):
        self._config = vllm_config
        self.cudagraph_mode, self._batches = CUDAGraphMode.NONE, {}

    def initialize_cudagraph_keys(self, mode):
        self.cudagraph_mode = mode
        sizes = sorted(self._config.compilation_config.cudagraph_capture_sizes, reverse=True)
        most = self._config.scheduler_config.max_num_seqs
        if mode is CUDAGraphMode.FULL_AND_PIECEWISE:
            self._batches[CUDAGraphMode.PIECEWISE] = [BatchDescriptor(n) for n in sizes]
        if mode is CUDAGraphMode.FULL:
            self._batches[CUDAGraphMode.FULL] = [BatchDescriptor(n, min(n, most)) for n in sizes]
        else:
            self._batches[CUDAGraphMode.FULL] = [BatchDescriptor(n, n, True) for n in sizes if n <= most]

    def get_capture_descs(self):
        return list(self._batches.items())
