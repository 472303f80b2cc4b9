# SPDX-License-Identifier: Apache-2.0
"""Addresses of module globals become relocations: the driver places modules where it likes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from foundryd._native import _rankpatch
from foundryd.archive import index as ix
from foundryd.capture.canonical import Graph, Numbering, wide_words
from foundryd.capture.modules import GlobalRange, RecordedModules


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

    def replace_in_graphs(self, graphs: Sequence[Graph], functions: Sequence[ix.Function]) -> np.ndarray:
        """Zeroes addresses of globals in parameters; their relocations, of one block a graph."""
        layouts = [f.fields for f in functions]
        rows = []
        for block, graph in enumerate(graphs if self._owners else []):
            places = wide_words(graph, layouts) - graph.param_start()
            rows += self._replace(block, graph.params, places, graph.param_start())
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
                rows += self._replace(block, own, np.arange(first, len(own) - 7, 8), 0)
                block += 1
        return _table(rows)

    def _replace(self, block: int, data: np.ndarray, places: np.ndarray, start: int) -> list[tuple[int, ...]]:
        """Zeroes each 8-byte word of ``data`` at ``places`` that is an address; ``start`` is where its block has it."""
        values = np.ascontiguousarray(data[places[:, None] + np.arange(8)]).view(np.uint64).reshape(-1)
        owners = np.searchsorted(self._starts, values, side="right") - 1
        rows: list[tuple[int, ...]] = []
        for hit in np.flatnonzero((owners >= 0) & (values < self._ends[np.maximum(owners, 0)])).tolist():
            place, owner = int(places[hit]), int(owners[hit])
            addend = int(values[hit]) - int(self._starts[owner])
            rows.append((block, start + place, self._numbers.of(self._owners[owner]), 0, addend))
            data[place : place + 8] = 0
        return rows


def _table(rows: list[tuple[int, ...]]) -> np.ndarray:
    return np.array(rows, _rankpatch.relocation_dtype)
