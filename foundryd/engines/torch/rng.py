# SPDX-License-Identifier: Apache-2.0
"""Random numbers inside graphs.

A kernel in a graph reads Philox seed and offset through two pointers that PyTorch keeps for each generator; before a
replay it writes the generator's current values there and moves the generator on by what the graph consumes.  A
restored graph does the same with the recorded addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from foundryd.engines.torch.outputs import storage_at
from foundryd.errors import CaptureError

# No program uses these by chance, and neither value is one that the other memory holds.
_PROBE_SEED = 0x5EEDF00DCAFE1234
_PROBE_OFFSET = 0x1D0C5EED8


@dataclass(frozen=True)
class Cells:
    """Addresses of a generator's seed and offset, 8 bytes each."""

    seed: int
    offset: int


class Cell:
    """Eight bytes of device memory that somebody else owns."""

    def __init__(self, address: int, device: torch.device) -> None:
        self._tensor = torch.empty(0, dtype=torch.int64, device=device).set_(storage_at(address, 8, device), 0, (1,))

    def fill(self, value: int) -> None:
        """Writes an unsigned value on the current stream."""
        self._tensor.fill_(value - (1 << 64) if value >> 63 else value)

    def read(self) -> int:
        """The value; waits for the device."""
        return int(self._tensor.item()) % (1 << 64)


class Registered:
    """A generator that graphs of this process were captured with."""

    def __init__(self, generator: torch.Generator, device: torch.device) -> None:
        self.generator = generator
        before = _eight_byte_blocks()
        # As long as one graph is registered, the generator keeps its cells.
        self._anchor = torch.cuda.CUDAGraph()
        self._anchor.register_generator_state(generator)
        made = sorted(_eight_byte_blocks() - before)
        if len(made) != 2:
            raise CaptureError(
                f"registering a generator with a graph made {len(made)} blocks of 8 bytes instead of 2: create the "
                "GraphSet before any other graph, or use a torch that this version knows"
            )
        self.cells = self._tell_apart(made, device)

    def consumed(self, graph: torch.cuda.CUDAGraph) -> int:
        """By how much a replay moves the generator on; replays the graph once and puts the generator back."""
        state = self.generator.get_state()
        before = self.generator.get_offset()
        graph.replay()
        torch.cuda.synchronize()
        moved = int(self.generator.get_offset() - before)
        self.generator.set_state(state)
        return moved

    def _tell_apart(self, made: list[int], device: torch.device) -> Cells:
        """Which of the two cells holds the seed: asked of a graph that draws one number."""
        state = self.generator.get_state()
        try:
            with torch.cuda.graph(self._anchor, capture_error_mode="thread_local"):
                torch.rand(1, device=device, generator=self.generator)
            self.generator.manual_seed(_PROBE_SEED)
            self.generator.set_offset(_PROBE_OFFSET)
            self._anchor.replay()
            torch.cuda.synchronize()
        finally:
            self.generator.set_state(state)
        found = {Cell(address, device).read(): address for address in made}
        if found.keys() != {_PROBE_SEED, _PROBE_OFFSET}:
            raise CaptureError(
                f"a replay wrote {sorted(found)} where a generator's seed {_PROBE_SEED} and offset {_PROBE_OFFSET} "
                "were expected: use a torch that this version knows"
            )
        return Cells(found[_PROBE_SEED], found[_PROBE_OFFSET])


class Prologue:
    """What happens before each replay of a restored graph: a generator's values go to its cells, and it moves on."""

    def __init__(self, generator: torch.Generator, cells: Cells, consumed: int, device: torch.device) -> None:
        self._generator = generator
        self._seed, self._offset = Cell(cells.seed, device), Cell(cells.offset, device)
        self._consumed = consumed

    def run(self) -> None:
        """On the current stream; does not wait."""
        offset = self._generator.get_offset()
        self._seed.fill(self._generator.initial_seed())
        self._offset.fill(offset)
        self._generator.set_offset(offset + self._consumed)


def prologues(
    described: Sequence[Sequence[int]],
    cells: Sequence[Sequence[int]],
    generators: Sequence[torch.Generator],
    device: torch.device,
) -> list[Prologue]:
    """For each (place among the generators, what a replay consumes) of a graph that consumes something."""
    return [
        Prologue(generators[place], Cells(*cells[place]), consumed, device) for place, consumed in described if consumed
    ]


def _eight_byte_blocks() -> set[int]:
    found: set[int] = set()
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot(include_traces=False)
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated" and block["requested_size"] == 8:
                found.add(block["address"])
    return found
