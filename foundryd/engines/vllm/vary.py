# SPDX-License-Identifier: Apache-2.0
"""Other valid states of a vLLM worker, for the proofs of a capture (``GraphSet.finish(vary=…)``)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from foundryd.engines.vllm.v0_22_pieces import Key

_BLOCKS = 4  # of the KV cache, that a request of such a state has at most
_PAD = -1  # a slot of no token
_LENGTHS = 2  # sets of lengths that schedules are made for


class Ahead(Protocol):
    """What graphs read beside schedules that is computed ahead of a step, for its batch.

    Attributes
    ----------
    buffers : where it lies, one axis each; with zeros nothing is to do for any graph.
    """

    buffers: Mapping[str, torch.Tensor]

    def enter(self, seed: int) -> None:
        """Brings what is the same for all graphs into the state of that seed."""

    def build(self, key: Key, seed: int) -> None:
        """Fills ``buffers`` for one graph; they are zero."""


def schedules(runner: Any) -> dict[str, torch.Tensor]:
    """The buffers of schedules that attention back-ends compute ahead of a step, by the places of their builders."""
    found = {}
    for i, groups in enumerate(runner.attn_groups):
        for j, group in enumerate(groups):
            buffer = getattr(group.get_metadata_builder(0), "scheduler_metadata", None)
            if isinstance(buffer, torch.Tensor):
                found[f"{i}.{j}"] = buffer
    return found


def build_schedule(runner: Any, key: Key) -> None:
    """Lets vLLM's builders fill their schedules for that graph's batch, as they did when it was captured.

    Lengths and starts are those that the runner's input buffers have.
    """
    tokens, requests = key[1], key[2]
    # As vLLM spreads the tokens of a batch that it captures.
    longest = tokens // requests + tokens % requests
    buffers, tables = runner.input_buffers, runner.block_tables
    starts = torch.clamp(torch.arange(requests + 1, dtype=torch.int32), max=tokens)
    importlib.import_module("vllm.v1.worker.gpu.attn_utils").build_attn_metadata(
        attn_groups=runner.attn_groups,
        num_reqs=requests,
        num_tokens=tokens,
        query_start_loc_gpu=buffers.query_start_loc[: requests + 1],
        query_start_loc_cpu=starts,
        max_query_len=longest,
        seq_lens=buffers.seq_lens,
        max_seq_len=int(runner.max_model_len),
        block_tables=[table[:requests] for table in tables.input_block_tables],
        slot_mappings=tables.slot_mappings[:, :tokens],
        kv_cache_config=runner.kv_cache_config,
        for_cudagraph_capture=True,
    )


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", copy=True)


def _beginning(buffer: torch.Tensor) -> torch.Tensor:
    """What of a buffer is not zero to its end, on the CPU: most are as long as the longest batch needs."""
    values = _copied(buffer)
    used = values.nonzero()
    return values[: int(used.max()) + 1 if len(used) else 0].clone()


def _each(keys: Iterable[Key]) -> int:
    """How many tokens of a request a state has: as many as all graphs with attention run, or one."""
    counts = {key[3] for key in keys if key[0] == "FULL"}
    return max(1, counts.pop()) if len(counts) == 1 else 1


class States:
    """States in which every captured batch decodes, as if it had served requests before.

    Requests have one token each, or as many as graphs are captured for where vLLM speculates.

    Each request has blocks of its own, between one token and ``_BLOCKS`` blocks of them; those that the KV cache has
    no room for are padding, as vLLM pads.

    **Schedules.**  FlashAttention 3 computes ahead of a step how its thread blocks share the work, and every graph
    reads that from the same buffer, each as if it were of its own batch size: where a row is, how many splits each
    request has, and the counter that thread blocks take their turns from.  With another size's schedule a graph would
    take a counter for a request's number and write outside of its outputs.  So a state has none (``rest``), as vLLM
    leaves what is behind a schedule, and attention has nothing to do; ``enter_for`` brings the one of a single graph.

    That one is safe because vLLM's own builder computes it as it did for the capture: with the same number of requests
    and of tokens, the same bounds of lengths and of splits, so that rows are where the captured kernels look for them.
    Only what the device has is the state's: lengths and where queries start, and those are within the bounds.  While
    serving, vLLM changes more than that.  Kernels that combine the splits put the counter back at the end of each
    layer, and whoever replays puts all memory back.

    The builder allocates, so schedules are computed when this is made, before anyone looks at memory: for ``_LENGTHS``
    sets of lengths, of which the seed of a state says which it has.  Nothing is allocated on the device afterwards.
    ``keys`` are the graphs that ``enter_for`` may be asked for, and ``build`` lets the worker's builders fill their
    buffers for one of them, as ``build_schedule`` does for the V2 runner.  ``ahead`` is treated as schedules are, and
    for graphs of pieces too.
    """

    def __init__(
        self,
        runner: Any,
        keys: Iterable[Key] = (),
        build: Callable[[Key], None] | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        keys = list(keys)
        self._runner = runner
        self._build = build or (lambda key: build_schedule(runner, key))
        buffers, tables = runner.input_buffers, runner.block_tables
        self._requests = int(buffers.seq_lens.shape[0])
        smallest = min(int(size) for size in tables.kernel_block_sizes)
        longest = min(_BLOCKS * smallest, int(runner.max_model_len))
        self._blocks = -(-longest // smallest)
        self._longest = longest
        self._each = min(_each(keys), longest)
        room = (int(runner.kv_cache_config.num_blocks) - 1) // self._blocks  # block 0 is vLLM's own
        self._real = max(0, min(self._requests, room, len(buffers.input_ids) // self._each))
        self._generator = torch.Generator(buffers.input_ids.device)
        self._schedules = schedules(runner)
        self._ahead = ahead
        self._buffers = {f"schedule.{name}": buffer for name, buffer in self._schedules.items()}
        if ahead is not None:
            self._buffers |= {f"ahead.{name}": buffer for name, buffer in ahead.buffers.items()}
        self._computed = self._compute([key for key in keys if ahead is not None or key[0] == "FULL"])

    def rest(self) -> None:
        """Leaves the worker as it is, but for what is computed for one batch, which no other may read."""
        for buffer in self._buffers.values():
            buffer.zero_()

    def enter(self, seed: int) -> None:
        """Puts the worker into the state of that seed, in which every graph can be replayed and attention rests."""
        self.rest()
        random = torch.Generator().manual_seed(seed)
        lengths = self._lengths(seed)
        self._inputs(lengths, random)
        for group, table in enumerate(self._runner.block_tables.input_block_tables):
            self._tables(group, table, lengths)
        self._generator.manual_seed(seed)
        for cache in self._runner.kv_caches:
            self._content(cache)
        if self._ahead is not None:
            self._ahead.enter(seed)

    def enter_for(self, key: Any, seed: int) -> None:
        """Gives the graph ``key`` its schedule for the state of that seed; no other graph may be replayed then."""
        self.rest()
        for name, values in self._computed[seed % _LENGTHS].get(tuple(key), {}).items():
            self._buffers[name][: len(values)].copy_(values)

    def _lengths(self, seed: int) -> torch.Tensor:
        random = torch.Generator().manual_seed(seed % _LENGTHS)
        return torch.randint(self._each, self._longest + 1, (self._real,), generator=random)

    def _compute(self, keys: list[Key]) -> list[dict[Key, dict[str, torch.Tensor]]]:
        """For each set of lengths the schedules of each graph, on the CPU; leaves the worker as it is."""
        buffers = self._runner.input_buffers
        touched = [buffers.query_start_loc, buffers.seq_lens, *self._buffers.values()]
        before = [_copied(tensor) for tensor in touched]
        computed = []
        for seed in range(_LENGTHS):
            self._starts(self._lengths(seed))
            of_keys: dict[Key, dict[str, torch.Tensor]] = {}
            for key in keys if self._buffers else ():
                self.rest()
                if self._schedules and key[0] == "FULL":
                    self._build(key)
                if self._ahead is not None:
                    self._ahead.build(key, seed)
                of_keys[key] = {name: _beginning(buffer) for name, buffer in self._buffers.items()}
            computed.append(of_keys)
        for tensor, values in zip(touched, before, strict=True):
            tensor.copy_(values)
        return computed

    def _positions(self, lengths: torch.Tensor) -> torch.Tensor:
        """Of the tokens of each request, which are its last: [request][token]."""
        return lengths[:, None] - self._each + torch.arange(self._each)[None, :]

    def _inputs(self, lengths: torch.Tensor, random: torch.Generator) -> None:
        buffers, real = self._runner.input_buffers, self._real * self._each
        tokens = torch.zeros(buffers.input_ids.shape, dtype=buffers.input_ids.dtype)
        tokens[:real] = torch.randint(0, int(self._runner.vocab_size), (real,), generator=random)
        positions = torch.zeros(buffers.positions.shape, dtype=buffers.positions.dtype)
        positions[:real] = self._positions(lengths).flatten()
        buffers.input_ids.copy_(tokens)
        buffers.positions.copy_(positions)
        self._starts(lengths)

    def _starts(self, lengths: torch.Tensor) -> None:
        """Where queries start, and how long their requests are."""
        buffers, real = self._runner.input_buffers, self._real
        starts = torch.arange(self._requests + 1, dtype=buffers.query_start_loc.dtype).clamp_(max=real) * self._each
        seen = torch.zeros(self._requests, dtype=buffers.seq_lens.dtype)
        seen[:real] = lengths
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
        slots = torch.full(tables.slot_mappings[group].shape, _PAD, dtype=tables.slot_mappings[group].dtype)
        last = self._positions(lengths)
        taken = blocks[torch.arange(real)[:, None], last // size].long() * size + last % size
        slots[: taken.numel()] = taken.flatten()
        tables.slot_mappings[group].copy_(slots)

    def _content(self, cache: torch.Tensor) -> None:
        """Values that are read, in the blocks that requests have; blocks are the second axis."""
        used = cache[:, 1 : 1 + self._real * self._blocks]
        if used.dtype.itemsize == 1:
            # Of an 8-bit float these bits are small numbers.
            used.view(torch.uint8).random_(0, 0x30, generator=self._generator)
        else:
            used.normal_(generator=self._generator)
