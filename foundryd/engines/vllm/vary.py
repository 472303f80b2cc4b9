# SPDX-License-Identifier: Apache-2.0
"""Other valid states of a vLLM worker, for the proofs of a capture (``GraphSet.finish(vary=…)``)."""

from __future__ import annotations

from typing import Any

import torch

_BLOCKS = 4  # of the KV cache, that a request of such a state has at most
_PAD = -1  # a slot of no token


def schedules(runner: Any) -> dict[str, torch.Tensor]:
    """The buffers of schedules that attention back-ends compute ahead of a step, by the places of their builders."""
    found = {}
    for i, groups in enumerate(runner.attn_groups):
        for j, group in enumerate(groups):
            buffer = getattr(group.get_metadata_builder(0), "scheduler_metadata", None)
            if isinstance(buffer, torch.Tensor):
                found[f"{i}.{j}"] = buffer
    return found


class States:
    """States in which every captured batch decodes one token a request, as if it had served requests before.

    Each request has blocks of its own, between one token and ``_BLOCKS`` blocks of them; those that the KV cache has
    no room for are padding, as vLLM pads.  Nothing is allocated on the device: what is computed, is on the CPU.

    The schedules that FlashAttention 3 computes ahead are for one batch, and every graph reads the same buffer: with
    another batch's it would write outside of its outputs.  So they are empty in every state, as vLLM leaves what is
    behind a schedule, and attention has nothing to do while a capture proves.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        buffers, tables = runner.input_buffers, runner.block_tables
        self._requests = int(buffers.seq_lens.shape[0])
        smallest = min(int(size) for size in tables.kernel_block_sizes)
        longest = min(_BLOCKS * smallest, int(runner.max_model_len))
        self._blocks = -(-longest // smallest)
        self._longest = longest
        room = (int(runner.kv_cache_config.num_blocks) - 1) // self._blocks  # block 0 is vLLM's own
        self._real = max(0, min(self._requests, room))
        self._generator = torch.Generator(buffers.input_ids.device)

    def rest(self) -> None:
        """Leaves the worker as it is, but for schedules of one batch, which no other may read."""
        for schedule in schedules(self._runner).values():
            schedule.zero_()

    def enter(self, seed: int) -> None:
        """Puts the worker into the state of that seed."""
        self.rest()
        random = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, self._longest + 1, (self._real,), generator=random)
        self._inputs(lengths, random)
        for group, table in enumerate(self._runner.block_tables.input_block_tables):
            self._tables(group, table, lengths)
        self._generator.manual_seed(seed)
        for cache in self._runner.kv_caches:
            self._content(cache)

    def _inputs(self, lengths: torch.Tensor, random: torch.Generator) -> None:
        buffers, real = self._runner.input_buffers, self._real
        tokens = torch.zeros(buffers.input_ids.shape, dtype=buffers.input_ids.dtype)
        tokens[:real] = torch.randint(0, int(self._runner.vocab_size), (real,), generator=random)
        positions = torch.zeros(buffers.positions.shape, dtype=buffers.positions.dtype)
        positions[:real] = lengths - 1
        starts = torch.arange(self._requests + 1, dtype=buffers.query_start_loc.dtype).clamp_(max=real)
        seen = torch.zeros(self._requests, dtype=buffers.seq_lens.dtype)
        seen[:real] = lengths
        buffers.input_ids.copy_(tokens)
        buffers.positions.copy_(positions)
        buffers.query_start_loc.copy_(starts)
        buffers.seq_lens.copy_(seen)

    def _tables(self, group: int, table: torch.Tensor, lengths: torch.Tensor) -> None:
        """Block tables and the slots of the tokens, which are the last of their requests."""
        tables, real = self._runner.block_tables, self._real
        size = int(tables.kernel_block_sizes[group])
        width = min(self._blocks, int(table.shape[1]))
        blocks = torch.zeros(table.shape, dtype=table.dtype)
        first = 1 + torch.arange(real)[:, None] * self._blocks
        blocks[:real, :width] = (first + torch.arange(width)[None, :]).to(table.dtype)
        table.copy_(blocks)
        slots = torch.full(tables.slot_mappings[group].shape, _PAD, dtype=tables.slot_mappings.dtype)
        last = lengths - 1
        slots[:real] = blocks[torch.arange(real), last // size].long() * size + last % size
        tables.slot_mappings[group].copy_(slots)

    def _content(self, cache: torch.Tensor) -> None:
        """Values that are read, in the blocks that requests have; blocks are the second axis."""
        used = cache[:, 1 : 1 + self._real * self._blocks]
        if used.dtype.itemsize == 1:
            # Of an 8-bit float these bits are small numbers.
            used.view(torch.uint8).random_(0, 0x30, generator=self._generator)
        else:
            used.normal_(generator=self._generator)
