# SPDX-License-Identifier: Apache-2.0
"""Lays an ELF file out anew after sections became shorter."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import astuple, replace
from itertools import pairwise

from foundryd.capture.images import elf
from foundryd.errors import UnreadableImage

_PHDR, _LOAD = 6, 1  # p_type
_OFFSETS = 32  # in the header: of the program headers and of the section headers


class _Places:
    """Where the parts of a file come to lie.

    Parts keep their order, each its remainder by its alignment, and what lay between two and was more than that asks
    for.  From the first part behind the last that became shorter all move alike, by a multiple of every alignment, so
    that segments without one keep their shape.
    """

    def __init__(self, parts: list[tuple[int, int, int, int]], align: int) -> None:
        """``parts``: (begin, end, alignment, new size) by place; ``align`` is the largest alignment."""
        self._starts = [start for start, _, _, _ in parts]
        self._ends = [end for _, end, _, _ in parts]
        last = max(i for i, (start, end, _, size) in enumerate(parts) if size < end - start)
        self._new: list[tuple[int, int]] = []  # (begin, end)
        old = new = 0  # ends of the part before
        for i, (start, end, own, size) in enumerate(parts):
            step = own if i <= last else align
            at = new + (start - new) % step + (start - old) // step * step
            old, new = end, at + size
            self._new.append((at, new))

    @property
    def size(self) -> int:
        """Bytes of the new file."""
        return self._new[-1][1]

    def of_part(self, start: int) -> int:
        """Where the part that began at an offset does now."""
        return self._new[bisect.bisect_left(self._starts, start)][0]

    def begin(self, offset: int) -> int:
        """Where something begins that holds the parts from an offset on, if any."""
        after = bisect.bisect_left(self._starts, offset)
        return self._new[after][0] if self._starts[after : after + 1] == [offset] else self.end(offset)

    def end(self, offset: int) -> int:
        """Where something ends that holds the parts up to an offset."""
        after = bisect.bisect_left(self._starts, offset)
        if after == 0:
            return offset
        if offset < self._ends[after - 1]:
            raise UnreadableImage(f"something begins or ends at {offset}, in the midst of a part of it")
        moved = self._new[after - 1][1] + offset - self._ends[after - 1]
        return min(moved, self._new[after][0]) if after < len(self._new) else moved


def shortened(data: bytes, file: elf.File, sizes: Mapping[int, int]) -> bytes:
    """A file of which some sections have only their first bytes; ``sizes`` says how many.

    The symbols in them become no larger than they.  Segments hold the sections that they held.
    Raises ``UnreadableImage`` for a file whose parts have addresses or lie over each other.
    """
    sections, segments = file.sections, file.segments()
    if any(s.address for s in sections) or any(s.address or s.physical for s in segments):
        raise UnreadableImage("its sections or segments have addresses")
    new_size = {i: sizes.get(i, s.size) for i, s in enumerate(sections)}
    filled = [i for i, s in enumerate(sections) if s.type not in (elf.NULL, elf.NOBITS) and s.size]
    parts = [(0, elf.HEADER.size, 1, elf.HEADER.size)]
    parts += [(at, at + size, 8, size) for at, size in file.tables() if size]
    parts += [
        (sections[i].offset, sections[i].offset + sections[i].size, max(sections[i].align, 1), new_size[i])
        for i in filled
    ]
    parts.sort()
    for (_, end, _, _), (start, _, _, _) in pairwise(parts):
        if start < end:
            raise UnreadableImage(f"its parts lie over each other at {start}")
        if any(data[end:start]):
            raise UnreadableImage(f"it has bytes between {end} and {start} that are in no section")
    places = _Places(parts, max(8, *(s.align for s in sections)))

    out = bytearray(places.size)
    (section_table, _), (segment_table, segment_bytes) = file.tables()
    out[: elf.HEADER.size] = data[: elf.HEADER.size]
    heads = places.of_part(segment_table) if segment_bytes else segment_table, places.of_part(section_table)
    out[_OFFSETS : _OFFSETS + 16] = b"".join(at.to_bytes(8, "little") for at in heads)
    for i in filled:
        at = places.of_part(sections[i].offset)
        out[at : at + new_size[i]] = data[sections[i].offset : sections[i].offset + new_size[i]]
    for i, section in enumerate(sections):
        place = section.offset if section.type == elf.NULL else places.begin(section.offset)
        elf.SECTION.pack_into(
            out, heads[1] + i * elf.SECTION.size, *astuple(replace(section, offset=place, size=new_size[i]))
        )
    for i, segment in enumerate(segments):
        moved = _moved(segment, places, (segment_table, segment_bytes))
        elf.SEGMENT.pack_into(out, heads[0] + i * elf.SEGMENT.size, *astuple(moved))
    for i in filled:
        if sections[i].type == elf.SYMTAB:
            _shorten_symbols(out, places.of_part(sections[i].offset), sections[i].size, sizes)
    return bytes(out)


def _moved(segment: elf.Segment, places: _Places, table: tuple[int, int]) -> elf.Segment:
    if segment.type not in (_PHDR, _LOAD):
        raise UnreadableImage(f"it has a segment of type {segment.type:#x}")
    if segment.type == _PHDR and (segment.offset, segment.size) != table:
        raise UnreadableImage(f"its program headers are said to be at {segment.offset} and are at {table[0]}")
    if segment.memory < segment.size:
        raise UnreadableImage(f"it has a segment of {segment.size} bytes that takes {segment.memory} in memory")
    at = places.begin(segment.offset)
    size = places.end(segment.offset + segment.size) - at if segment.size else 0
    # What has no bytes in the file comes behind what has.
    return replace(segment, offset=at, size=size, memory=size + segment.memory - segment.size)


def _shorten_symbols(out: bytearray, start: int, size: int, sizes: Mapping[int, int]) -> None:
    for at in range(start, start + size, elf.SYMBOL.size):
        *head, section, value, length = elf.SYMBOL.unpack_from(out, at)
        if section in sizes:
            # Functions within a kernel stay where they were, behind its end: nothing but its own code calls them.
            elf.SYMBOL.pack_into(out, at, *head, section, value, min(length, sizes[section]))
