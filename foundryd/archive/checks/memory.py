# SPDX-License-Identifier: Apache-2.0
"""Allocations, and the content that is uploaded into them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from foundryd.archive.checks.findings import Findings, in_range
from foundryd.archive.index import Variant, Windows
from foundryd.archive.windows import ARENAS, WINDOWS, window_base

_ADDRESS_END = 2**64


def check_memory(found: Findings, variant: Variant) -> None:
    """Arenas, allocations and contents of a variant."""
    arenas = len(found.dtypes.arena)
    arenas_fit = found.need(
        variant.arena_base >= 0
        and variant.arena_stride > 0
        and variant.arena_base + arenas * variant.arena_stride <= _ADDRESS_END,
        f"its {arenas} arenas at {variant.arena_base:#x} with stride {variant.arena_stride:#x} do not fit an address "
        "space",
    )
    table = found.array(variant.allocations, found.dtypes.allocation, "allocations")
    if not arenas_fit:
        return
    if table is not None and _check_allocations(found, variant, table):
        _check_contents(found, variant, table)
    if variant.windows is not None:
        _check_windows(found, variant, variant.windows)


def _inside(table: npt.NDArray[Any], start: Any, size: Any) -> npt.NDArray[np.bool_]:
    """Which allocations lie in the ``size`` bytes from ``start``."""
    offset = table["address"] - start  # wraps below the start, and is then larger than any size
    inside: npt.NDArray[np.bool_] = (offset < size) & (table["bytes"] <= size - np.minimum(offset, size))
    return inside


def _inside_reservations(
    found: Findings, table: npt.NDArray[Any], base: np.uint64, stride: np.uint64
) -> npt.NDArray[np.bool_]:
    """Which allocations lie where the engine's own reservations of their arena do."""
    first, strides = found.dtypes.reservation_first, found.dtypes.reservation_strides
    last = first + len(found.dtypes.arena) * strides
    if int(base) + last * int(stride) > _ADDRESS_END:
        return np.zeros(len(table), dtype=np.bool_)
    place = np.uint64(first) + table["arena"].astype(np.uint64) * np.uint64(strides)
    return _inside(table, base + place * stride, np.uint64(strides) * stride)


def _check_allocations(found: Findings, variant: Variant, table: npt.NDArray[Any]) -> bool:
    arenas = len(found.dtypes.arena)
    arena = table["arena"].astype(np.uint64)
    if not found.none(arena >= arenas, "allocation", f"is in an arena that does not exist, there are {arenas}"):
        return False
    base, stride = np.uint64(variant.arena_base), np.uint64(variant.arena_stride)
    inside = _inside(table, base + arena * stride, stride)
    inside |= (arena < np.uint64(found.dtypes.arena["HOST"])) & _inside_reservations(found, table, base, stride)
    good = found.none(~inside, "allocation", "does not lie in its arena")
    good &= found.none(table["bytes"] == 0, "allocation", "has no bytes")
    good &= found.none((table["live"] > 1) | (table["reserved"] != 0), "allocation", "has a flag that does not exist")
    for number in range(arenas):
        ordinals = table["ordinal"][arena == number]
        good &= found.none(
            ordinals != np.arange(len(ordinals)), f"arena {number}: allocation", "is out of the arena's sequence"
        )
    if good:
        live = np.flatnonzero(table["live"])
        live = live[np.argsort(table["address"][live], kind="stable")]
        ends = table["address"][live] + table["bytes"][live]
        for place in np.flatnonzero(ends[:-1] > table["address"][live][1:]):
            found.add(f"allocation {live[place]} overlaps allocation {live[place + 1]}, and both are live")
            good = False
    return good


def _check_contents(found: Findings, variant: Variant, table: npt.NDArray[Any]) -> None:
    live = table[table["live"] == 1]
    live = live[np.argsort(live["address"], kind="stable")]
    ends = 0
    for number, content in sorted(enumerate(variant.contents), key=lambda pair: pair[1].address):
        here = found.inside(f"content {number}")
        if not here.need(
            0 <= content.address < _ADDRESS_END and 0 < content.bytes <= _ADDRESS_END - content.address,
            f"has {content.bytes} bytes at {content.address:#x}, which is no range",
        ):
            continue
        # The live allocation that starts last at or before the content.
        place = int(np.searchsorted(live["address"], np.uint64(content.address), side="right")) - 1
        owner = live[place] if place >= 0 else None
        here.need(
            owner is not None
            and content.address + content.bytes <= int(owner["address"]) + int(owner["bytes"])
            and content.arena == int(owner["arena"]),
            f"has {content.bytes} bytes at {content.address:#x} of arena {content.arena}, in no live allocation of it",
        )
        here.need(content.address >= ends, f"starts at {content.address:#x}, inside the content before it")
        ends = max(ends, content.address + content.bytes)
        length = here.length(content.section, "bytes")
        here.need(length in (None, content.bytes), f"has {content.bytes} bytes and its section {length}")
        if here.need(
            in_range(content.block, len(variant.blocks)),
            f"says block {content.block}, and there are {len(variant.blocks)} blocks",
        ):
            block = variant.blocks[content.block]
            here.need(
                block.kind == "content" and block.index == number,
                f"says block {content.block}, which is {block.kind} {block.index}",
            )


def _check_windows(found: Findings, variant: Variant, windows: Windows) -> None:
    table = found.array(windows.section, found.dtypes.window, "windows")
    if table is None:
        return
    found.need(len(table) > 0, "has windows, and nothing was open in them")
    ranks = max(min(variant.world, WINDOWS), 0)
    if not found.need(window_base(variant, ranks) <= _ADDRESS_END, "has windows that do not fit an address space"):
        return
    good = found.none(table["rank"] >= ranks, "window", f"is of a rank that is not one of {ranks}")
    good &= found.none(table["reserved"] != 0, "window", "has a flag that does not exist")
    good &= found.none(table["bytes"] == 0, "window", "has no bytes")
    origin = table["origin"] - np.uint64(variant.arena_base)  # wraps below the arenas
    good &= found.none(origin >= np.uint64(ARENAS * variant.arena_stride), "window", "shows memory that is in no arena")
    if good:
        stride = np.uint64(variant.arena_stride)
        start = np.array([window_base(variant, int(rank)) for rank in table["rank"]], np.uint64)
        offset = table["address"] - start  # wraps below the window, and is then larger than any stride
        outside = (offset >= stride) | (table["bytes"] > stride - np.minimum(offset, stride))
        if found.none(outside, "window", "does not lie in the window of its rank"):
            ends = table["address"] + table["bytes"]
            found.none(ends[:-1] > table["address"][1:], "window", "is not wholly before the next one")
    if found.need(
        in_range(windows.block, len(variant.blocks)),
        f"has windows in block {windows.block}, and there are {len(variant.blocks)} blocks",
    ):
        block = variant.blocks[windows.block]
        found.need(
            block.kind == "windows", f"has windows in block {windows.block}, which is {block.kind} {block.index}"
        )
