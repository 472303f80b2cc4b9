# SPDX-License-Identifier: Apache-2.0
"""What the store needs of an archive and its plans, as values that can be replaced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from foundryd.archive.index import Index


class Reader(Protocol):
    """The part of ``foundryd.archive.reader.ArchiveReader`` that is used here."""

    @property
    def index(self) -> Index:
        """The archive's typed index."""

    def close(self) -> None:
        """Frees the mapping."""


@dataclass(frozen=True)
class ArchiveTools:
    """Functions on archives.

    Attributes
    ----------
    open : reader of a file.
    view : reader of a buffer that was verified, which must outlive it.
    view_unverified : the same of a buffer that may hold anything.
    compare : raises ``ArchiveDigestError`` unless the second reader's buffer says of every section what inflating the
        first one's archive would have written; ``verify`` of the second one then tells that all bytes are those.
    digest : hexadecimal digest that names the content of a reader's archive.
    verify : raises ``ArchiveError`` unless every byte of the reader's archive is what was written.
    verifying_bytes, decoding_bytes : bytes that verifying takes at most, and inflating beside what it writes.
    inflated_size, inflate : bytes of the inflated archive, and writing it to a descriptor of that size.
    compute_plan : bytes of the plan of (reader, variant name, rank), in pieces.
    """

    open: Callable[[Path], Any]
    view: Callable[[memoryview], Any]
    view_unverified: Callable[[memoryview], Any]
    compare: Callable[[Any, Any], None]
    digest: Callable[[Any], str]
    verify: Callable[[Any], object]
    verifying_bytes: Callable[[Any], int]
    decoding_bytes: Callable[[Any], int]
    inflated_size: Callable[[Any], int]
    inflate: Callable[[Any, int], object]
    compute_plan: Callable[[Any, str, int], Sequence[bytes | memoryview]]

    @classmethod
    def default(cls) -> ArchiveTools:
        """Those of ``foundryd.archive`` and ``foundryd.rankpatch``; imported here since they pull in native code."""
        from foundryd.archive.inflate import check_inflated, inflate, inflated_size
        from foundryd.archive.reader import ArchiveReader
        from foundryd.archive.verify import verify
        from foundryd.rankpatch.plan import compute_plan

        return cls(
            open=ArchiveReader.open,
            view=lambda view: ArchiveReader(view, trusted=True),  # verified when it was inflated, sealed since
            view_unverified=lambda view: ArchiveReader(view, name="the memory of a rank"),
            compare=check_inflated,
            digest=lambda reader: reader.content_digest,
            verify=verify,
            verifying_bytes=lambda reader: reader.reading_bytes,
            decoding_bytes=lambda reader: reader.decoding_bytes,
            inflated_size=inflated_size,
            inflate=inflate,
            compute_plan=lambda reader, variant, rank: compute_plan(reader, variant, rank).pieces(),
        )
