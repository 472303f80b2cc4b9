# SPDX-License-Identifier: Apache-2.0
"""Lays an ELF file out anew after sections became shorter or were left out."""

from __future__ import annotations

import bisect
import struct
from collections.abc import Iterable, Mapping, Set
from dataclasses import astuple, replace
from itertools import pairwise

from foundryd.capture.images import elf
from foundryd.errors import UnreadableImage

_PHDR, _LOAD = 6, 1  # p_type
_WRITTEN = 2  # p_flags
# In the header: offsets of program headers and of section headers; number of program headers; number of section
# headers and which of them names them.
_OFFSETS, _SEGMENTS, _SECTIONS = 32, 56, 60


class _Places:
    """Where the parts of a file come to lie.

    Parts keep their order, each its remainder by its alignment, and what lay between two and was more than that asks
    for.  From the first part behind the last that changed its size all move alike, by a multiple of every alignment, so
    that segments without one keep their shape.  A part that is left out has no bytes, and ends where it begins.
    """

    def __init__(self, parts: list[tuple[int, int, int, int | None]], align: int) -> None:
        """``parts``: (begin, end, alignment, new size or None) by place; ``align`` is the largest alignment."""
        self._starts = [start for start, _, _, _ in parts]
        self._ends = [end for _, end, _, _ in parts]
        last = max((i for i, (start, end, _, size) in enumerate(parts) if size != end - start), default=-1)
        self._new: list[tuple[int, int]] = []  # (begin, end)
        old = new = 0  # ends of the part before
        for i, (start, end, own, size) in enumerate(parts):
            at = new
            if size is not None:
                step = own if i <= last else align
                at += (start - new) % step + (start - old) // step * step
                new = at + size
            old = end
            self._new.append((at, new))
        # What begins with a part that is left out begins with the next.
        following = new
        for i, (_, _, _, size) in reversed(list(enumerate(parts))):
            self._new[i] = following if size is None else self._new[i][0], self._new[i][1]
            following = self._new[i][0]

    @property
    def size(self) -> int:
        """Bytes of the new file."""
        return max(end for _, end in self._new)

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


def rewritten(
    data: bytes, file: elf.File, contents: Mapping[int, bytes | None], headers: Mapping[int, elf.Section] | None = None
) -> bytes:
    """A file of which some sections have another content, or, where that is None, are left out with their headers.

    ``headers`` are those that sections shall have, but for place and size.  Segments hold what is left of the sections
    that they held; one that holds nothing any more is left out.
    Raises ``UnreadableImage`` for a file whose parts have addresses or lie over each other.
    """
    sections = file.sections
    if any(s.address for s in sections) or any(s.address or s.physical for s in file.segments()):
        raise UnreadableImage("its sections or segments have addresses")
    gone = {i for i, content in contents.items() if content is None}
    kept = [i for i in range(len(sections)) if i not in gone]
    filled = {
        i: contents.get(i, data[s.offset : s.offset + s.size])
        for i, s in enumerate(sections)
        if s.type not in (elf.NULL, elf.NOBITS) and s.size
    }
    segments = [s for s in file.segments() if not gone or _stays(s, file, gone)]
    (section_table, section_bytes), table = file.tables()
    sizes = len(kept) * elf.SECTION.size, len(segments) * elf.SEGMENT.size
    parts: list[tuple[int, int, int, int | None]] = [(0, elf.HEADER.size, 1, elf.HEADER.size)]
    for (at, before), now in zip(((section_table, section_bytes), table), sizes, strict=True):
        if before:
            parts.append((at, at + before, 8, now))
    for i, content in filled.items():
        start, size = sections[i].offset, sections[i].size
        parts.append((start, start + size, max(sections[i].align, 1), None if content is None else len(content)))
    parts.sort(key=lambda part: part[:3])
    for (_, end, _, _), (start, _, _, _) in pairwise(parts):
        if start < end:
            raise UnreadableImage(f"its parts lie over each other at {start}")
        if any(data[end:start]):
            raise UnreadableImage(f"it has bytes between {end} and {start} that are in no section")
    places = _Places(parts, max(8, *(s.align for s in sections)))

    out = bytearray(places.size)
    heads = places.of_part(table[0]) if table[1] else table[0], places.of_part(section_table)
    out[: elf.HEADER.size] = data[: elf.HEADER.size]
    struct.pack_into("<QQ", out, _OFFSETS, *heads)
    struct.pack_into("<H", out, _SEGMENTS, len(segments))
    struct.pack_into("<HH", out, _SECTIONS, len(kept), bisect.bisect_left(kept, file.names_in))
    for i, content in filled.items():
        if content is not None:
            at = places.of_part(sections[i].offset)
            out[at : at + len(content)] = content
    for place, i in enumerate(kept):
        section = sections[i]
        at = section.offset
        if section.type != elf.NULL:
            # What has no bytes stays with what is before it, as the end of its segment does.
            at = places.end(at) if section.type == elf.NOBITS else places.begin(at)
        size = len(filled[i] or b"") if i in filled else section.size
        header = replace((headers or {}).get(i, section), offset=at, size=size)
        elf.SECTION.pack_into(out, heads[1] + place * elf.SECTION.size, *astuple(header))
    for i, segment in enumerate(segments):
        elf.SEGMENT.pack_into(out, heads[0] + i * elf.SEGMENT.size, *astuple(_moved(segment, places, file, gone)))
    return bytes(out)


def _stays(segment: elf.Segment, file: elf.File, gone: Set[int]) -> bool:
    """Whether anything is left of a segment that held sections."""
    end = segment.offset + segment.size
    held = {
        i
        for i, s in enumerate(file.sections)
        if s.type not in (elf.NULL, elf.NOBITS) and s.size and segment.offset <= s.offset and s.offset + s.size <= end
    } | set(_without_bytes(segment, file))
    return segment.type != _LOAD or not held or not held <= gone


def _without_bytes(segment: elf.Segment, file: elf.File) -> list[int]:
    """The sections of a segment that have no bytes in the file; only what is written to has such."""
    end = segment.offset + segment.size
    return [
        i
        for i, s in enumerate(file.sections)
        if s.type == elf.NOBITS and segment.offset <= s.offset <= end and segment.flags & _WRITTEN
    ]


def _behind(size: int, file: elf.File, sections: Iterable[int]) -> int:
    """The memory that sections without bytes take behind the bytes of a segment, which is aligned itself."""
    end = size
    for section in (file.sections[i] for i in sections):
        end += -end % max(section.align, 1) + section.size
    return end - size


def _moved(segment: elf.Segment, places: _Places, file: elf.File, gone: Set[int]) -> elf.Segment:
    _, table = file.tables()
    if segment.type not in (_PHDR, _LOAD):
        raise UnreadableImage(f"it has a segment of type {segment.type:#x}")
    if segment.type == _PHDR and (segment.offset, segment.size) != table:
        raise UnreadableImage(f"its program headers are said to be at {segment.offset} and are at {table[0]}")
    if segment.memory < segment.size:
        raise UnreadableImage(f"it has a segment of {segment.size} bytes that takes {segment.memory} in memory")
    at = places.begin(segment.offset)
    size = places.end(segment.offset + segment.size) - at if segment.size else 0
    # What has no bytes in the file comes behind what has.
    behind = segment.memory - segment.size
    empty = _without_bytes(segment, file)
    if not gone.isdisjoint(empty):
        if behind != _behind(segment.size, file, empty):
            raise UnreadableImage(
                f"it has a segment of {segment.size} bytes that takes {segment.memory} in memory, not by what is in it"
            )
        behind = _behind(size, file, [i for i in empty if i not in gone])
    return replace(segment, offset=at, size=size, memory=size + behind)
