# SPDX-License-Identifier: Apache-2.0
"""Stands for the dispatcher: which batches have graphs, and of which kind, largest first.

With LoRA a batch with adapters has another graph than one without, which is captured first.
"""

from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor


class CudagraphDispatcher:
    def __init__(self, vllm_config):
        self._config = vllm_config
        self.cudagraph_mode, self._batches = CUDAGraphMode.NONE, {}

    def _adapters(self):
        lora = self._config.lora_config
        if lora is None:
            return [0]
        some = lora.max_loras + 1
        return [some, 0] if self._config.compilation_config.cudagraph_specialize_lora else [some]

    def initialize_cudagraph_keys(self, mode, uniform_decode_query_len=1):
        self.cudagraph_mode = mode
        sizes = sorted(self._config.compilation_config.cudagraph_capture_sizes, reverse=True)
        most = self._config.scheduler_config.max_num_seqs

        def batches(describe, wanted=sizes):
            return [describe(n)._replace(has_lora=a > 0, num_active_loras=a) for n in wanted for a in self._adapters()]

        if mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.PIECEWISE):
            self._batches[CUDAGraphMode.PIECEWISE] = batches(BatchDescriptor)
        if mode is CUDAGraphMode.FULL:
            self._batches[CUDAGraphMode.FULL] = batches(lambda n: BatchDescriptor(n, min(n, most)))
        elif mode in (CUDAGraphMode.FULL_AND_PIECEWISE, CUDAGraphMode.FULL_DECODE_ONLY):
            each = uniform_decode_query_len
            decoding = [n for n in sizes if each <= n <= each * most]
            assert not any(n % each for n in decoding)
            self._batches[CUDAGraphMode.FULL] = batches(lambda n: BatchDescriptor(n, n // each, True), decoding)

    def get_capture_descs(self):
        return list(self._batches.items())
