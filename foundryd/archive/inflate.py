# SPDX-License-Identifier: Apache-2.0
"""Writing an archive out with every section raw, into a memfd that ranks map and use without decoding."""

from __future__ import annotations

import os
from typing import Any, Protocol

import msgspec

from foundryd.archive.format import Frame, Header
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import write_at
from foundryd.errors import ArchiveDigestError, ArchiveError


class HasFileno(Protocol):
    """A file object."""

    def fileno(self) -> int:
        """Its descriptor."""


def inflated_size(reader: ArchiveReader) -> int:
    """Exact bytes that ``inflate`` will write; nothing is decoded to know it."""
    return _plan(reader)[1].file_length


def inflate(reader: ArchiveReader, target: int | HasFileno) -> int:
    """Writes the same archive, every section raw, into ``target``, and returns its size.

    ``target`` is emptied first.  At most one decoded section is in memory at a time; digests are checked unless the
    reader is trusted.

    Raises
    ------
    ArchiveError
        ``target`` cannot be written.
    ArchiveDigestError, ArchiveFormatError
        A section is damaged; what is in ``target`` then is not an archive.
    """
    reader.forget()  # what was decoded before, so that no more than ``decoding_bytes`` are taken beside ``target``
    fd = target if isinstance(target, int) else target.fileno()
    frame, header, directory = _plan(reader)
    try:
        # Emptied, it reads as zero wherever nothing is written: the padding.
        os.ftruncate(fd, 0)
        os.ftruncate(fd, header.file_length)
        for raw in frame.entries:
            write_at(fd, reader.decode(reader.entry(raw.name), check=not reader.trusted), raw.offset)
        write_at(fd, memoryview(directory), header.index_offset)
        # Last, so that an unfinished copy is not taken for an archive.
        write_at(fd, memoryview(header.pack()), 0)
    except OSError as error:
        raise ArchiveError(
            f"inflating {reader.name} to {header.file_length} bytes failed ({error.strerror}): make room for it"
        ) from error
    return header.file_length


def check_inflated(original: ArchiveReader, copy: ArchiveReader) -> None:
    """Raises ``ArchiveDigestError`` unless ``copy`` has the header and the index that inflating ``original`` writes.

    Both name every section with its digest, so what is left to check are the digests: ``copy.verify()``.
    """
    header, directory = _plan(original)[1:]
    if copy.header != header or copy.stored_directory() != directory:
        raise ArchiveDigestError(
            f"{copy.name} has header and index {copy.header.index_digest.hex()[:16]}, and inflating {original.name} "
            f"gives {header.index_digest.hex()[:16]}: it is a copy of another archive"
        )


def _plan(reader: ArchiveReader) -> tuple[Frame, Header, bytes]:
    frame = Frame()
    for entry in reader.sections.values():
        frame.append(
            msgspec.structs.replace(
                entry,
                offset=frame.next_offset,
                stored=entry.length,
                codec="raw",
                stored_digest=entry.digest,
                params={},
            )
        )
    index: dict[str, Any] = reader.raw_index()
    header, directory = frame.close(index, minor=reader.header.minor, min_reader=reader.header.min_reader)
    return frame, header, directory
