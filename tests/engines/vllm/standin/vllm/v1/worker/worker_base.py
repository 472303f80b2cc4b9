# SPDX-License-Identifier: Apache-2.0
"""Stands for what an executor holds of a worker: plug-ins are loaded before its class is."""

import importlib


class WorkerWrapperBase:
    def __init__(self, rpc_rank=0, global_rank=None):
        self.rpc_rank = rpc_rank

    def init_worker(self, all_kwargs):
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        self.vllm_config = all_kwargs[self.rpc_rank]["vllm_config"]
        worker_class = importlib.import_module("vllm.v1.worker.gpu_worker").Worker
        self.worker = worker_class(**all_kwargs[self.rpc_rank])

    def init_device(self):
        self.worker.init_device()

    def __getattr__(self, name):
        return getattr(self.worker, name)
