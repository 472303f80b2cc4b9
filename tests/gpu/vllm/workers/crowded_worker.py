# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM 0.22.1 that shares the first GPU with its peers: ``--worker-cls crowded_worker.Worker``.

vLLM gives each worker of a host a GPU of its own and does not start with fewer.  NCCL refuses two ranks of a host on
one GPU, so it takes each for one of another host, and connects them by sockets.
"""

from __future__ import annotations

import os
from typing import Any
from unittest.mock import patch

import counted_worker
import torch


class Worker(counted_worker.Worker):
    """A worker on the first GPU, whatever its rank, with counts as in every world of several ranks."""

    @property
    def local_rank(self) -> int:
        """The number of its GPU."""
        return 0

    @local_rank.setter
    def local_rank(self, counted: int) -> None:
        """vLLM counts workers of a replica, and later adds those of other replicas; neither changes the GPU."""

    def init_device(self) -> Any:
        """As every worker, with as many GPUs for vLLM to count as its replica has workers."""
        parallel = self.vllm_config.parallel_config
        # NCCL reads it when the first communicator is made, which is inside.
        rank = int(parallel.data_parallel_index) * int(parallel.world_size) + int(self.rank)
        os.environ["NCCL_HOSTID"] = f"host-of-rank-{rank}"
        count = max(torch.accelerator.device_count(), int(parallel.local_world_size))
        with patch.object(torch.accelerator, "device_count", lambda: count):
            return super().init_device()
