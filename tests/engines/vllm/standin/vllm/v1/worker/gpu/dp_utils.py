# SPDX-License-Identifier: Apache-2.0
"""Stands for how replicas of the V2 runner agree on a step; see that of the V1 runner."""

import torch
import torch.distributed as dist

from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor


def sync_cudagraph_and_dp_padding(
    cudagraph_manager, desired_batch_desc, num_tokens, num_reqs, uniform_token_count, dp_size, dp_rank
):
    table = torch.zeros(3, dp_size, dtype=torch.int32)
    own = (num_tokens, desired_batch_desc.cg_mode.value, uniform_token_count or 0)
    table[:, dp_rank] = torch.tensor(own, dtype=torch.int32)
    dist.all_reduce(table, group=None)
    modes = type(desired_batch_desc.cg_mode)
    if modes(int(table[1].min())) is modes.NONE:
        return BatchExecutionDescriptor(modes.NONE, num_tokens, num_reqs), table[0]
    return desired_batch_desc, torch.full_like(table[0], desired_batch_desc.num_tokens)
