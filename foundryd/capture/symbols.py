# SPDX-License-Identifier: Apache-2.0
"""Addresses of module globals become relocations: the driver places modules where it likes.

They are looked for at every byte, since a packed struct may have a pointer anywhere, and so may two numbers of 4 bytes.
The end of a global counts as an address of it: that is how a range is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foundryd._native import _rankpatch
from foundryd.archive import index as ix
from foundryd.capture.canonical import Graph, Numbering
from foundryd.capture.modules import GlobalRange, RecordedModules

_PIECE = 1 << 26  # bytes that are looked at together


class Symbols:
    """Finds addresses of globals among words, and numbers the symbols that it found."""

    def __init__(self, ranges: Sequence[GlobalRange]) -> None:
        ordered = sorted(ranges, key=lambda r: r.address)
        self._owners = [r.symbol for r in ordered]
        self._starts = np.array([r.address for r in ordered], np.uint64)
        self._ends = np.array([r.address + r.bytes for r in ordered], np.uint64)
        self._numbers = Numbering()

    @property
    def used(self) -> list[ix.Symbol]:
        """The symbols that relocations refer to."""
        return list(self._numbers.numbers)

    def replace_in_graphs(self, graphs: Sequence[Graph]) -> np.ndarray:
        """Zeroes addresses of globals in parameters; their relocations, of one block a graph."""
        rows = []
        for block, graph in enumerate(graphs):
            rows += self._replace(block, graph.params, graph.param_start())
        return _table(rows)

    def replace_in_globals(self, modules: RecordedModules) -> np.ndarray:
        """The same in changed globals; ``block`` is the place in the list of all modules' changed globals."""
        rows, block = [], 0
        addresses = {r.symbol: r.address for r in modules.ranges}
        for slot, module in enumerate(modules.records):
            for i, (name, data) in enumerate(module.globals):
                own = np.array(data)
                module.globals[i] = (name, own)
                first = -addresses[ix.Symbol(slot, name)] % 8
                rows += self._replace(block, own, 0, first)
                block += 1
        return _table(rows)

    def mentioned(self, data: np.ndarray) -> set[ix.Symbol]:
        """The symbols of which ``data`` (uint8) holds an address."""
        return {self._owners[owner] for owner in self._find(data)[1].tolist()}

    def first_in(self, data: np.ndarray) -> tuple[int, ix.Symbol] | None:
        """The first of the aligned words of ``data`` (uint8), which may be large, that is an address of a symbol."""
        for begin in range(0, len(data), _PIECE):
            places, owners = self._hits(data[begin : begin + _PIECE], 0)
            if len(places):
                return begin + int(places[0]), self._owners[int(owners[0])]
        return None

    def _hits(self, data: np.ndarray, shift: int) -> tuple[np.ndarray, np.ndarray]:
        """Those places a multiple of 8 behind ``shift`` where ``data`` has an address, and the places of its ranges."""
        if not self._owners:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        values = np.ascontiguousarray(data[shift:][: (len(data) - shift) // 8 * 8]).view(np.uint64)
        near = np.flatnonzero((values >= self._starts[0]) & (values <= self._ends.max()))
        owner = np.searchsorted(self._starts, values[near], side="right") - 1
        inside = values[near] <= self._ends[owner]
        return 8 * near[inside] + shift, owner[inside]

    def _find(self, data: np.ndarray, first: int = 0) -> tuple[np.ndarray, np.ndarray]:
        """Where 8 bytes of ``data`` (uint8 [n]) are an address, and the place of its range; no two overlap.

        Where they could, the place that is a multiple of 8 from ``first`` counts, and then the lower one.
        """
        found = [self._hits(data, shift) for shift in range(min(8, len(data) + 1))]
        places, owners = (np.concatenate(part) for part in zip(*found, strict=True))
        occupied = np.zeros(len(data), bool)
        taken: list[int] = []
        for hit in np.lexsort((places, (places - first) % 8 != 0)).tolist():
            own = occupied[places[hit] : places[hit] + 8]
            if not own.any():
                own[:] = True
                taken.append(hit)
        chosen = np.array(sorted(taken), np.int64)
        return places[chosen], owners[chosen]

    def _replace(self, block: int, data: np.ndarray, start: int, first: int = 0) -> list[tuple[int, ...]]:
        """Zeroes each address in ``data``; ``start`` is where its block has it."""
        rows: list[tuple[int, ...]] = []
        for place, owner in zip(*(found.tolist() for found in self._find(data, first)), strict=True):
            word = data[place : place + 8]
            addend = int.from_bytes(word.tobytes(), "little") - int(self._starts[owner])
            rows.append((block, start + place, self._numbers.of(self._owners[owner]), 0, addend))
            word[:] = 0
        return rows


def _table(rows: list[tuple[int, ...]]) -> np.ndarray:
    return np.array(rows, _rankpatch.relocation_dtype)
