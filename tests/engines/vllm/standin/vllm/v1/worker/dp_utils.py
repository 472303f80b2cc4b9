# SPDX-License-Identifier: Apache-2.0
"""Stands for how replicas of the V1 runner agree on a step: each fills its column of a table, which are added up.

A step runs graphs only if every replica would, and then has as many tokens as that with the most.
"""

import torch
import torch.distributed as dist


def _run_ar(should_ubatch, orig_num_tokens_per_ubatch, padded_num_tokens_per_ubatch, cudagraph_mode, parallel_config):
    table = torch.zeros(4, parallel_config.data_parallel_size, dtype=torch.int32)
    own = (orig_num_tokens_per_ubatch, padded_num_tokens_per_ubatch, int(should_ubatch), cudagraph_mode)
    table[:, parallel_config.data_parallel_rank] = torch.tensor(own, dtype=torch.int32)
    dist.all_reduce(table, group=None)
    return table


def coordinate_batch_across_dp(
    num_tokens_unpadded,
    allow_microbatching,
    parallel_config,
    num_tokens_padded=None,
    uniform_decode=None,
    cudagraph_mode=0,
):
    if parallel_config.data_parallel_size == 1:
        return False, None, cudagraph_mode
    table = _run_ar(False, num_tokens_unpadded, num_tokens_padded, cudagraph_mode, parallel_config)
    mode, tokens = int(table[3].min()), table[1]
    return False, torch.full_like(tokens, int(tokens.max())) if mode else tokens, mode
