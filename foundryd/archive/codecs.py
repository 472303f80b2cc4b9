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
_FAST_LEVEL = 1  # for a file that is read once and then gone
_TRIAL_LEVEL = 3
_TRIAL_BYTES = 8 << 20  # of each form, to choose among them
_COLUMNS_MOST_BYTES = 4 << 20  # above this, COLUMNS_LEVEL would take seconds, and above several of it minutes
_WINDOW_LOG = 27  # what the zstd command line accepts by default

# A block takes 4 bytes at least and decodes to 128 KiB at most: what a frame makes a reader allocate stays in
# proportion to the file, whatever its header says.
_MOST_FROM_A_BYTE = 1 << 15

# zstandard ignores whatever follows a frame without content, so those bytes would be under no check.
_EMPTY = "is empty, and empty sections are raw"


class Codec(Protocol):
    """One way of storing a section."""

    def encode(self, data: memoryview, params: dict[str, int], *, fast: bool) -> tuple[Buffer, dict[str, int]]:
        """Stored bytes and the parameters that decoding needs; ``fast`` is for files that are soon gone."""

    def check(self, entry: SectionEntry) -> str | None:
        """What is impossible about the entry, if anything, without a look at its bytes."""

    def workspace(self, entry: SectionEntry) -> int:
        """Bytes of memory that decoding takes at once, with what it returns."""

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        """The ``entry.length`` decoded bytes, read-only; ``ArchiveFormatError`` if the stream says otherwise."""


class _Raw:
    def encode(self, data: memoryview, params: dict[str, int], *, fast: bool) -> tuple[Buffer, dict[str, int]]:
        _take(params)
        return data, {}

    def check(self, entry: SectionEntry) -> str | None:
        if entry.stored != entry.length or entry.stored_digest != entry.digest:
            return f"is raw, but has {entry.stored} bytes stored for {entry.length}, or two digests"
        return f"has parameters {sorted(entry.params)} that raw does not have" if entry.params else None

    def workspace(self, entry: SectionEntry) -> int:
        return 0

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        return stored


class _Zstd:
    def encode(self, data: memoryview, params: dict[str, int], *, fast: bool) -> tuple[Buffer, dict[str, int]]:
        _take(params)
        return _compress(data, _FAST_LEVEL if fast else LEVEL), {}

    def check(self, entry: SectionEntry) -> str | None:
        if entry.params:
            return f"has parameters {sorted(entry.params)} that zstd does not have"
        return _impossible_frame(entry)

    def workspace(self, entry: SectionEntry) -> int:
        return entry.length

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        return memoryview(_decompress(stored, entry))


class _Columns:
    """A uint32 matrix [rows][cols] as differences along its rows.

    A row is one word of a template's block over all members, and most words grow with the batch size by steps that
    repeat from row to row.  ``by_column`` stores the differences of one column together, so that an equal step
    becomes a repeated run; ``shuffled`` stores the four bytes of each difference as four planes.  The encoder keeps
    whichever of the four is smallest.  With ``interleaved`` the section has the matrix column by column: rows of a
    table, whose fields are the rows here.
    """

    PARAMS = frozenset({"rows", "cols", "by_column", "shuffled"})

    def encode(self, data: memoryview, params: dict[str, int], *, fast: bool) -> tuple[Buffer, dict[str, int]]:
        interleaved = params.pop("interleaved", 0)
        rows, cols = _take(params, "rows", "cols")
        if rows * cols * 4 != data.nbytes:
            raise UsageError(f"{rows} rows of {cols} words are not the {data.nbytes} bytes given: pass the shape")
        words = np.frombuffer(data, "<u4")
        matrix = np.ascontiguousarray(words.reshape(cols, rows).T) if interleaved else words.reshape(rows, cols)
        steps = matrix.copy()
        steps[:, 1:] -= matrix[:, :-1]
        by_column, shuffled = (0, 0) if fast else _smallest_form(steps)
        level = _FAST_LEVEL if fast else COLUMNS_LEVEL if data.nbytes <= _COLUMNS_MOST_BYTES else LEVEL
        form = _planes(steps.T if by_column else steps, bool(shuffled))
        shape = {"rows": rows, "cols": cols, "by_column": by_column, "shuffled": shuffled}
        return _compress(form, level), shape | ({"interleaved": 1} if interleaved else {})

    def check(self, entry: SectionEntry) -> str | None:
        if entry.params.keys() - {"interleaved"} != self.PARAMS:
            return f"has parameters {sorted(entry.params)}, and columns has {sorted(self.PARAMS)}"
        rows, cols = entry.params["rows"], entry.params["cols"]
        if rows * cols * 4 != entry.length:
            return f"has {rows} rows of {cols} words, which are not its {entry.length} bytes"
        if any(entry.params.get(flag, 0) > 1 for flag in ("by_column", "shuffled", "interleaved")):
            return "has a flag that is neither 0 nor 1"
        return _impossible_frame(entry)

    def workspace(self, entry: SectionEntry) -> int:
        return (3 if entry.params.get("interleaved") else 2) * entry.length

    def decode(self, stored: memoryview, entry: SectionEntry) -> memoryview:
        flat = np.frombuffer(_decompress(stored, entry), np.uint8)
        rows, cols = entry.params["rows"], entry.params["cols"]
        if entry.params["shuffled"]:
            flat = np.ascontiguousarray(flat.reshape(4, rows * cols).T).reshape(-1)
        steps = flat.view("<u4")
        steps = steps.reshape(cols, rows).T if entry.params["by_column"] else steps.reshape(rows, cols)
        matrix = np.empty((rows, cols), "<u4")
        np.cumsum(steps, axis=1, dtype=np.uint32, out=matrix)
        if entry.params.get("interleaved"):
            matrix = np.ascontiguousarray(matrix.T)
        return matrix.reshape(-1).view(np.uint8).data.toreadonly()


CODECS: dict[str, Codec] = {"raw": _Raw(), "zstd": _Zstd(), "columns": _Columns()}


def _smallest_form(steps: npt.NDArray[np.uint32]) -> tuple[int, int]:
    """``by_column`` and ``shuffled`` of the form of the steps that takes least; of many, judged by some."""
    cols = steps.shape[1]
    some = steps[: max(1, _TRIAL_BYTES // 4 // max(cols, 1))][:, : _TRIAL_BYTES // 4]
    forms = [(by_column, shuffled) for by_column in (0, 1) for shuffled in (0, 1)]

    def size(form: tuple[int, int]) -> int:
        by_column, shuffled = form
        return len(_compress(_planes(some.T if by_column else some, bool(shuffled)), _TRIAL_LEVEL))

    return min(forms, key=lambda form: (size(form), form))


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
