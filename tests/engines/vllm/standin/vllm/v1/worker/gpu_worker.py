# SPDX-License-Identifier: Apache-2.0
"""Stands for the GPU worker: which step makes the context, loads, measures, allocates, warms up and captures."""

from vllm.log import note
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

free_bytes = 1 << 30  # what profiling finds


class Worker:
    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.local_rank, self.rank = local_rank, rank

    def init_device(self):
        note("context")
        note("process groups")
        self.model_runner = GPUModelRunner(self.vllm_config, None)

    def load_model(self, *, load_dummy_weights=False):
        self.model_runner.load_model(load_dummy_weights=load_dummy_weights)

    def determine_available_memory(self):
        note("profile")
        return self.cache_config.kv_cache_memory_bytes or free_bytes

    def initialize_from_config(self, kv_cache_config):
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self):
        note("warm up")
        if not self.vllm_config.model_config.enforce_eager:
            self.model_runner.capture_model()
        note("warm up with replays")
        return "times"

    def shutdown(self):
        note("shutdown")
