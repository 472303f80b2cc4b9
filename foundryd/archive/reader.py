# SPDX-License-Identifier: Apache-2.0
"""Reading an archive from a file or from any buffer, an mmapped memfd for example, without copying what is raw."""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from foundryd.archive.codecs import CODECS
from foundryd.archive.format import (
    DEFAULT_LIMITS,
    MAGIC,
    MINOR,
    Frame,
    Header,
    Limits,
    SectionEntry,
    decode_directory,
    digest,
    excess_depth,
    unknown_fields,
)
from foundryd.archive.index import Index
from foundryd.errors import ArchiveDigestError, ArchiveError, ArchiveFormatError, NotInArchiveError

if TYPE_CHECKING:
    from typing_extensions import Buffer

T = TypeVar("T")

_CACHE_BYTES = 256 << 20  # decoded sections that a reader keeps at hand


class ArchiveReader:
    """An archive over a buffer.  May be used from several threads.

    Header, directory and the places of all sections are checked at once; a section's digests are checked when it is
    first used.

    Parameters
    ----------
    buffer : the whole file, exactly.
    name : what to call it in messages.
    limits : what is accepted before anything is allocated.
    trusted : the buffer was verified before and cannot change (sealed memory from the daemon): no digests, no search
        for unknown fields.  Places and sizes are checked all the same.

    Raises
    ------
    ArchiveFormatError, ArchiveVersionError, ArchiveDigestError
        See the classes.
    """

    def __init__(
        self, buffer: Buffer, *, name: str = "the archive", limits: Limits = DEFAULT_LIMITS, trusted: bool = False
    ) -> None:
        view = memoryview(buffer)
        self.name = name
        self.limits = limits
        self.trusted = trusted
        self._mapping: mmap.mmap | None = None
        self._view = view.cast("B").toreadonly() if view.nbytes else memoryview(b"")
        self._lock = threading.Lock()
        self._checked: set[str] = set()
        self._cache: OrderedDict[str, memoryview] = OrderedDict()
        self._cached_bytes = 0
        self.header = Header.unpack(self._view, name, limits)
        directory = self._directory()
        raw_sections, raw_index = decode_directory(directory, name, limits, trusted=trusted)
        if not trusted and (excess_depth(raw_sections, limits.depth) or excess_depth(raw_index, limits.depth)):
            raise ArchiveFormatError(f"the index of {name} nests deeper than {limits.depth} levels: capture again")
        entries = self._typed(raw_sections, list[SectionEntry])
        self.index: Index = self._typed(raw_index, Index)
        if not trusted and self.header.minor <= MINOR:
            self._refuse_unknown(raw_sections, entries, "sections")
            self._refuse_unknown(raw_index, self.index, "index")
        self._check_places(entries)
        self.sections: dict[str, SectionEntry] = {entry.name: entry for entry in entries}

    @classmethod
    def open(cls, path: Path | str, *, limits: Limits = DEFAULT_LIMITS) -> ArchiveReader:
        """Maps the file at ``path``.

        Raises
        ------
        ArchiveError
            It cannot be opened.
        """
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ArchiveError(f"{path} cannot be opened ({error.strerror}): give the path of an archive") from error
        try:
            return cls.from_fd(fd, name=str(path), limits=limits)
        finally:
            os.close(fd)

    @classmethod
    def from_fd(
        cls, fd: int, *, name: str = "the archive", limits: Limits = DEFAULT_LIMITS, trusted: bool = False
    ) -> ArchiveReader:
        """Maps the file or memfd behind ``fd``, which may be closed afterwards."""
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                raise ArchiveFormatError(
                    f"{name} is not a foundryd archive: it is not a file that starts with {MAGIC!r}: give the path of "
                    "an "
                    "archive"
                )
            mapping = mmap.mmap(fd, status.st_size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        except OSError as error:
            raise ArchiveError(f"{name} cannot be mapped ({error.strerror}): give the path of an archive") from error
        try:
            reader = cls(mapping, name=name, limits=limits, trusted=trusted)
        except BaseException:
            _close(mapping)
            raise
        reader._mapping = mapping
        return reader

    def __enter__(self) -> ArchiveReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Lets the file go.  Arrays and views that were handed out stay valid and keep it mapped until they die."""
        self.forget()
        with self._lock:
            self._view = memoryview(b"")
            if self._mapping is not None:
                _close(self._mapping)
                self._mapping = None

    @property
    def content_digest(self) -> str:
        """Digest of what the archive says, in hex; the same before and after inflation."""
        sections = [[s.name, s.length, s.digest] for s in self.sections.values()]
        return digest(msgspec.msgpack.encode([sections, self.raw_index()], order="deterministic")).hex()

    def entry(self, name: str) -> SectionEntry:
        """The section's entry; raises ``NotInArchiveError``."""
        try:
            return self.sections[name]
        except KeyError:
            raise NotInArchiveError(f"{self.name} has no section {name!r}: capture again") from None

    def section(self, name: str) -> memoryview:
        """The decoded bytes of a section, read-only; zero-copy where it is stored raw.

        Raises
        ------
        NotInArchiveError
            There is no such section.
        ArchiveDigestError
            Its bytes are not those that were written.
        ArchiveFormatError
            It does not decode to what its entry says.
        """
        entry = self.entry(name)
        with self._lock:
            if (data := self._cache.get(name)) is not None:
                self._cache.move_to_end(name)
                return data
            checked = self.trusted or name in self._checked
        data = self.decode(entry, check=not checked)
        with self._lock:
            self._checked.add(name)
            if entry.codec != "raw" and name not in self._cache:
                self._cache[name] = data
                self._cached_bytes += data.nbytes
                while self._cached_bytes > _CACHE_BYTES:
                    self._cached_bytes -= self._cache.popitem(last=False)[1].nbytes
        return data

    def array(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A section as a read-only array [n] of ``dtype``.

        Raises
        ------
        ArchiveFormatError
            Its length is no multiple of the item size; and what ``section`` raises.
        """
        data, item = self.section(name), np.dtype(dtype)
        if data.nbytes % item.itemsize:
            raise ArchiveFormatError(
                f"section {name} of {self.name} has {data.nbytes} bytes, not a multiple of the {item.itemsize} bytes "
                "of an "
                "element: capture again"
            )
        return np.frombuffer(data, item) if data.nbytes else np.frombuffer(b"", item)

    def decode(self, entry: SectionEntry, *, check: bool = True) -> memoryview:
        """Decodes one section without keeping it; ``check`` compares both digests."""
        stored = self.stored(entry)
        if check:
            self._compare(digest(stored), entry.stored_digest, f"section {entry.name} of {self.name}")
        data = CODECS[entry.codec].decode(stored, entry)
        if check and entry.codec != "raw":
            self._compare(digest(data), entry.digest, f"section {entry.name} of {self.name}, once decoded,")
        return data

    @property
    def decoding_bytes(self) -> int:
        """Bytes of memory that decoding one section after another takes at most."""
        return max((CODECS[entry.codec].workspace(entry) for entry in self.sections.values()), default=0)

    @property
    def reading_bytes(self) -> int:
        """Bytes of memory that ``section`` of each takes at most, with those that are kept at hand."""
        decoded = [entry for entry in self.sections.values() if entry.codec != "raw"]
        beside = max((CODECS[entry.codec].workspace(entry) - entry.length for entry in decoded), default=0)
        return min(sum(entry.length for entry in decoded) + beside, _CACHE_BYTES + self.decoding_bytes)

    def forget(self) -> None:
        """Drops the decoded sections that are kept at hand."""
        with self._lock:
            self._cache.clear()
            self._cached_bytes = 0

    def stored(self, entry: SectionEntry) -> memoryview:
        """The bytes of a section as they lie in the file, read-only."""
        return self._view[entry.offset : entry.offset + entry.stored]

    def stored_directory(self) -> bytes:
        """Sections and index as they lie in the file."""
        return bytes(self._directory())

    def raw_index(self) -> dict[str, Any]:
        """The index as plain objects, with fields of newer minors that ``index`` does not have."""
        return decode_directory(self._directory(), self.name, self.limits, trusted=True)[1]

    def verify(self) -> None:
        """Checks every byte of the file: each section's digest, and zero in between.

        Order, holes, overlaps and duplicates were refused when the archive was opened.

        Raises
        ------
        ArchiveDigestError
            A section's stored bytes are not those that were written.
        ArchiveFormatError
            A byte between two sections is not zero.
        """
        frame = Frame()
        for entry in self.sections.values():
            self._check_padding(frame.end, entry.offset)
            self._compare(digest(self.stored(entry)), entry.stored_digest, f"section {entry.name} of {self.name}")
            frame.append(entry)
        self._check_padding(frame.end, self.header.index_offset)

    def _directory(self) -> memoryview:
        header = self.header
        data = self._view[header.index_offset : header.index_offset + header.index_length]
        self._compare(digest(data)[:16], header.index_digest, f"the index of {self.name}")
        return data

    def _typed(self, raw: Any, kind: type[T]) -> T:
        try:
            return msgspec.convert(raw, kind, strict=True)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ArchiveFormatError(f"the index of {self.name} is malformed ({error}): capture again") from error

    def _refuse_unknown(self, raw: Any, typed: Any, where: str) -> None:
        known = msgspec.to_builtins(typed, builtin_types=(bytes,))
        if (place := unknown_fields(raw, known, where)) is not None:
            raise ArchiveFormatError(
                f"the index of {self.name} has {place}, which format {self.header.major}.{self.header.minor} does not "
                "have: "
                "capture again"
            )

    def _check_places(self, entries: list[SectionEntry]) -> None:
        frame, names, total = Frame(), set[str](), 0
        for entry in entries:
            where = f"section {entry.name!r} of {self.name}"
            if entry.name in names:
                raise ArchiveFormatError(f"{where} is there twice: capture again")
            names.add(entry.name)
            # One rule for order, holes, overlaps and alignment: a section starts where the one before it allows.
            if entry.offset != frame.next_offset or entry.offset + entry.stored > self.header.index_offset:
                raise ArchiveFormatError(
                    f"{where} is said to lie at {entry.offset}, {entry.stored} bytes long, and has to start at "
                    f"{frame.next_offset} and end before the index at {self.header.index_offset}: fetch the archive "
                    "again"
                )
            if (impossible := CODECS[entry.codec].check(entry)) is not None:
                raise ArchiveFormatError(f"{where} {impossible}: capture again")
            total += entry.length
            if entry.length > self.limits.section_bytes or total > self.limits.decoded_bytes:
                raise ArchiveFormatError(
                    f"{where} would decode to {entry.length} bytes ({total} with those before it), more than the "
                    f"{self.limits.section_bytes} ({self.limits.decoded_bytes}) that a reader accepts: raise the "
                    "limits or "
                    "do not trust the file"
                )
            frame.append(entry)
        if frame.next_offset != self.header.index_offset:
            raise ArchiveFormatError(
                f"the sections of {self.name} end at {frame.end} and the index starts at {self.header.index_offset}, "
                "with a "
                "hole in between: fetch the archive again"
            )

    def _check_padding(self, start: int, end: int) -> None:
        between = bytes(self._view[start:end])
        if between.strip(b"\0"):
            place = start + next(i for i, byte in enumerate(between) if byte)
            raise ArchiveFormatError(
                f"{self.name} has byte {self._view[place]:#04x} at {place}, between two sections, where only zero may "
                "be: "
                "fetch it again"
            )

    @staticmethod
    def _compare(found: bytes, expected: bytes, what: str) -> None:
        if found != expected:
            raise ArchiveDigestError(
                f"{what} has digest {found.hex()[:16]}, and {expected.hex()[:16]} was written: fetch the archive again"
            )


def _close(mapping: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # somebody still holds a view: the mapping ends with it
        mapping.close()
