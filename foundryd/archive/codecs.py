# SPDX-License-Identifier: Apache-2.0
"""How the bytes of a section are stored: ``raw``, ``zstd``, or ``columns`` for the words of a template's members.

Every decoder knows the decoded size before it allocates and refuses a stream that says otherwise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from foundryd.archive.format import SectionEntry
from foundryd.errors import ArchiveFormatError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

# 19 is slow (a few MB/s) but columns are small, and they are what every further member costs.
LEVEL = 9
COLUMNS_LEVEL = 19
_TRIAL_LEVEL = 3
_COLUMNS_TRIAL_BYTES = 32 << 20  # above this, COLUMNS_LEVEL would take minutes
_WINDOW_LOG = 27  # what the zstd command line accepts by default

# A block takes 4 bytes at least and decodes to 128 KiB at most: what a frame makes a reader allocate stays in
# proportion to the file, whatever its header says.
_MOST_FROM_A_BYTE = 1 << 15

# zstandard ignores whatever follows a frame without content, so those bytes would be under no check.
_EMPTY = "is empty, and empty sections are raw"


class Codec(Protocol):
    """One way of storing a section."""

    def encode(self, data: memoryview, params: dict[str, int]) -> tuple[Buffer, dict[str, int]]:
        """Stored bytes and the parameters that decoding needs."""

    def check(self, entry: SectionEntry) -> str | None:
        """What is impossible about the entry, if anything, without a look at its bytes."""

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        """The ``entry.length`` decoded bytes, read-only; ``ArchiveFormatError`` if the stream says otherwise."""


class _Raw:
    def encode(self, data: memoryview, params: dict[str, int]) -> tuple[Buffer, dict[str, int]]:
        _take(params)
        return data, {}

    def check(self, entry: SectionEntry) -> str | None:
        if entry.stored != entry.length or entry.stored_digest != entry.digest:
            return f"is raw, but has {entry.stored} bytes stored for {entry.length}, or two digests"
        return f"has parameters {sorted(entry.params)} that raw does not have" if entry.params else None

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        return stored


class _Zstd:
    def encode(self, data: memoryview, params: dict[str, int]) -> tuple[Buffer, dict[str, int]]:
        _take(params)
        return _compress(data, LEVEL), {}

    def check(self, entry: SectionEntry) -> str | None:
        if entry.params:
            return f"has parameters {sorted(entry.params)} that zstd does not have"
        return _impossible_frame(entry)

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        return memoryview(_decompress(stored, entry))


class _Columns:
    """A uint32 matrix [rows][cols] as differences along its rows.

    A row is one word of a template's block over all members, and most words grow with the batch size by steps that
    repeat from row to row.  ``by_column`` stores the differences of one column together, so that an equal step
    becomes a repeated run; ``shuffled`` stores the four bytes of each difference as four planes.  The encoder keeps
    whichever of the four is smallest.
    """

    PARAMS = frozenset({"rows", "cols", "by_column", "shuffled"})

    def encode(self, data: memoryview, params: dict[str, int]) -> tuple[Buffer, dict[str, int]]:
        rows, cols = _take(params, "rows", "cols")
        if rows * cols * 4 != data.nbytes:
            raise UsageError(f"{rows} rows of {cols} words are not the {data.nbytes} bytes given: pass the shape")
        matrix = np.frombuffer(data, "<u4").reshape(rows, cols)
        steps = matrix.copy()
        steps[:, 1:] -= matrix[:, :-1]
        forms = {
            (by_column, shuffled): _planes(steps.T if by_column else steps, bool(shuffled))
            for by_column in (0, 1)
            for shuffled in (0, 1)
        }
        by_column, shuffled = min(forms, key=lambda form: (len(_compress(forms[form], _TRIAL_LEVEL)), form))
        level = COLUMNS_LEVEL if data.nbytes <= _COLUMNS_TRIAL_BYTES else LEVEL
        return _compress(forms[by_column, shuffled], level), {
            "rows": rows,
            "cols": cols,
            "by_column": by_column,
            "shuffled": shuffled,
        }

    def check(self, entry: SectionEntry) -> str | None:
        if entry.params.keys() != self.PARAMS:
            return f"has parameters {sorted(entry.params)}, and columns has {sorted(self.PARAMS)}"
        rows, cols = entry.params["rows"], entry.params["cols"]
        if rows * cols * 4 != entry.length:
            return f"has {rows} rows of {cols} words, which are not its {entry.length} bytes"
        if entry.params["by_column"] > 1 or entry.params["shuffled"] > 1:
            return "has a flag that is neither 0 nor 1"
        return _impossible_frame(entry)

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        flat = np.frombuffer(_decompress(stored, entry), np.uint8)
        rows, cols = entry.params["rows"], entry.params["cols"]
        if entry.params["shuffled"]:
            flat = np.ascontiguousarray(flat.reshape(4, rows * cols).T).reshape(-1)
        steps = flat.view("<u4")
        steps = steps.reshape(cols, rows).T if entry.params["by_column"] else steps.reshape(rows, cols)
        matrix = np.empty((rows, cols), "<u4")
        np.cumsum(steps, axis=1, dtype=np.uint32, out=matrix)
        return matrix.reshape(-1).view(np.uint8).data.toreadonly()


CODECS: dict[str, Codec] = {"raw": _Raw(), "zstd": _Zstd(), "columns": _Columns()}


def _impossible_frame(entry: SectionEntry) -> str | None:
    if entry.length == 0:
        return _EMPTY
    if entry.length > entry.stored * _MOST_FROM_A_BYTE:
        return f"cannot have {entry.length} bytes in the {entry.stored} that are stored"
    return None


def _take(params: dict[str, int], *names: str) -> tuple[int, ...]:
    if params.keys() != set(names):
        raise UsageError(f"the codec takes {list(names)} and was given {sorted(params)}: correct the call")
    return tuple(params[name] for name in names)


def _planes(steps: npt.NDArray[np.uint32], shuffled: bool) -> memoryview:
    flat = np.ascontiguousarray(steps).reshape(-1).view(np.uint8)
    if shuffled:
        flat = np.ascontiguousarray(flat.reshape(-1, 4).T).reshape(-1)
    return flat.data


def _compress(data: memoryview, level: int) -> bytes:
    # The content size is in the frame, the checksum is not: the section has its digests.
    return zstandard.ZstdCompressor(level=level, write_content_size=True, write_checksum=False).compress(data)


def _decompress(stored: memoryview, entry: SectionEntry) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(stored)
        # zstandard allocates what the frame claims, whatever limit it is given.
        wide = frame.window_size > max(entry.length, 1 << _WINDOW_LOG)
        if frame.content_size != entry.length or frame.dict_id or wide:
            raise ArchiveFormatError(
                f"section {entry.name} should decode to {entry.length} bytes and its zstd frame says "
                f"{frame.content_size}: write the archive again"
            )
        data = zstandard.ZstdDecompressor().decompress(stored, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ArchiveFormatError(
            f"section {entry.name} is not the zstd that it should be ({error}): fetch the archive again"
        ) from error
    if len(data) != entry.length:
        raise ArchiveFormatError(
            f"section {entry.name} should decode to {entry.length} bytes and gave {len(data)}: write the archive again"
        )
    return data
