# SPDX-License-Identifier: Apache-2.0
"""Stands for the GPU worker: which step makes the context, loads, measures, allocates, warms up and captures."""

import importlib

from vllm.config.compilation import CUDAGraphMode
from vllm.log import note
from vllm.v1.worker.workspace import init_workspace_manager

free_bytes = 1 << 30  # what profiling finds


def kernel_warmup(worker):
    note("warm up")


def warmup_kernels(model_runner, worker_execute_model, worker_sample_tokens):
    note("warm up with replays")


class Worker:
    def __init__(self, vllm_config, local_rank, rank, distributed_init_method, is_driver_worker=False):
        self.vllm_config = vllm_config
        self.cache_config = vllm_config.cache_config
        self.local_rank, self.rank = local_rank, rank

    def init_device(self):
        parallel = self.vllm_config.parallel_config
        if parallel.distributed_executor_backend != "external_launcher":
            replica = parallel.data_parallel_rank_local
            replica = parallel.data_parallel_index if replica is None else replica
            self.local_rank += replica * parallel.tensor_parallel_size
        note("context")
        note("process groups")
        init_workspace_manager()
        second = self.vllm_config.use_v2_model_runner
        module = "vllm.v1.worker.gpu.model_runner" if second else "vllm.v1.worker.gpu_model_runner"
        self.model_runner = importlib.import_module(module).GPUModelRunner(self.vllm_config, None)

    def load_model(self, *, load_dummy_weights=False):
        self.model_runner.load_model(load_dummy_weights=load_dummy_weights)

    def determine_available_memory(self):
        note("profile")
        self.model_runner.profile_run()
        self.model_runner.profile_cudagraph_memory()
        return self.cache_config.kv_cache_memory_bytes or free_bytes

    def initialize_from_config(self, kv_cache_config):
        self.model_runner.initialize_kv_cache(kv_cache_config)

    def compile_or_warm_up_model(self):
        kernel_warmup(self)
        if not self.vllm_config.model_config.enforce_eager:
            self.model_runner.capture_model()
        if self.vllm_config.use_v2_model_runner:
            warmup_kernels(self.model_runner, None, None)
        else:
            self.model_runner._dummy_run(1, CUDAGraphMode.NONE)
            note("warm up of the sampler")
        return "times"

    def shutdown(self):
        note("shutdown")
