# SPDX-License-Identifier: Apache-2.0
"""Stands for the engine core and an executor of one process: the order in which a worker's steps are called."""

from types import SimpleNamespace

from vllm.plugins import load_general_plugins
from vllm.v1.worker.worker_base import WorkerWrapperBase

BLOCK_BYTES = 1 << 20


def start(config, rank=0, local_rank=0, spawned=False):
    """The worker once the engine would serve; in its own process, which was spawned for it, or in the engine's."""
    if not spawned:
        load_general_plugins()
    wrapper = WorkerWrapperBase()
    given = {"vllm_config": config, "rank": rank, "local_rank": local_rank, "distributed_init_method": "tcp://"}
    wrapper.init_worker(all_kwargs=[given])
    wrapper.init_device()
    wrapper.load_model()
    memory = wrapper.determine_available_memory()
    blocks = config.cache_config.num_gpu_blocks_override or memory // BLOCK_BYTES
    wrapper.initialize_from_config(SimpleNamespace(num_blocks=blocks))
    wrapper.compile_or_warm_up_model()
    return wrapper
