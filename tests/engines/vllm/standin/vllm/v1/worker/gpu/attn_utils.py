# SPDX-License-Identifier: Apache-2.0
"""Stands for attention that schedules a batch ahead: its builder keeps the schedule in a buffer of its own."""

from types import SimpleNamespace

import torch


class Builder:
    """Stands for FlashAttention 3's builder.

    A schedule has a row of splits and one of queries, each with a place for every request, rounded up to four, and then
    a counter; behind it are zeros.  So where something is depends on how many requests there are.
    """

    def __init__(self, requests):
        self.scheduler_metadata = torch.zeros(1 + self.rounded(requests) * 2, dtype=torch.int32)

    @staticmethod
    def rounded(requests):
        return -(-requests // 4) * 4

    def build_for_cudagraph_capture(self, common):
        requests = self.rounded(common.num_reqs)
        schedule = torch.full((1 + 2 * requests,), 7, dtype=torch.int32)  # as an allocation has it
        queries = common.query_start_loc.diff()
        assert len(queries) == common.num_reqs == len(common.seq_lens)
        assert int(queries.max()) <= common.max_query_len
        assert int(common.seq_lens.max()) <= common.max_seq_len
        schedule[: common.num_reqs] = common.seq_lens // 16 + 1
        schedule[requests : requests + common.num_reqs] = queries
        schedule[-1] = 0
        self.scheduler_metadata[: len(schedule)] = schedule
        self.scheduler_metadata[len(schedule) :] = 0


def build_attn_metadata(
    attn_groups,
    num_reqs,
    num_tokens,
    query_start_loc_gpu,
    query_start_loc_cpu,
    max_query_len,
    seq_lens,
    max_seq_len,
    block_tables,
    slot_mappings,
    kv_cache_config,
    for_cudagraph_capture=False,
):
    assert for_cudagraph_capture
    assert len(query_start_loc_cpu) == num_reqs + 1
    for groups, table, slots in zip(attn_groups, block_tables, slot_mappings, strict=True):
        assert len(table) == num_reqs
        assert len(slots) == num_tokens
        for group in groups:
            group.get_metadata_builder(0).build_for_cudagraph_capture(
                SimpleNamespace(
                    num_reqs=num_reqs,
                    query_start_loc=query_start_loc_gpu,
                    seq_lens=seq_lens[:num_reqs],
                    max_query_len=max_query_len,
                    max_seq_len=max_seq_len,
                )
            )
