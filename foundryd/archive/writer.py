# SPDX-License-Identifier: Apache-2.0
"""Writing an archive: aside, synced, then renamed, so that a path either has a whole archive or what it had before."""

from __future__ import annotations

import errno
import os
import secrets
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from foundryd.archive.codecs import CODECS
from foundryd.archive.format import (
    INTERLEAVED_READER,
    MIN_READER,
    MINOR,
    WINDOWS_READER,
    Frame,
    SectionEntry,
    digest,
    image_section,
)
from foundryd.archive.index import Index
from foundryd.errors import ArchiveError, UsageError

if TYPE_CHECKING:
    from typing_extensions import Buffer

    Data = Buffer | npt.NDArray[Any]

_CHUNK = 64 << 20  # one write call takes at most 2 GiB


class ArchiveWriter:
    """Writes one archive to ``path``.

    Use it in a ``with`` block: leaving without ``finish`` discards everything.  Equal input gives equal bytes.

    Parameters
    ----------
    path : where the archive shall be; the folder must exist and be writable.
    fast : compress little, because the file is read once and then gone.

    Raises
    ------
    ArchiveError
        The folder or the file cannot be written.
    """

    def __init__(self, path: Path | str, *, fast: bool = False) -> None:
        self.path = Path(path)
        self._fast = fast
        self._frame = Frame()
        self._by_name: dict[str, SectionEntry] = {}
        self._finished = False
        try:
            self._file = _Aside(self.path)
        except OSError as error:
            raise self._failed(error) from error

    def __enter__(self) -> ArchiveWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def add(self, name: str, data: Data, codec: str = "raw", **params: int) -> str:
        """Adds a section and returns its name.

        Parameters
        ----------
        name : 1 to 255 bytes of UTF-8 without control characters, unique in the archive.
        data : its bytes; adding the same bytes under the same name again is allowed and stores nothing.
        codec : ``raw``, ``zstd`` or ``columns``; the last takes ``rows`` and ``cols``.

        Raises
        ------
        UsageError
            The name has other bytes already, the codec does not exist, or the writer is finished.
        ArchiveError
            The file cannot be written.
        """
        self._check_open()
        if not name or len(name.encode()) > 255 or not name.isprintable():
            raise UsageError(f"{name!r} cannot name a section: use 1 to 255 printable bytes")
        if codec not in CODECS:
            raise UsageError(f"section {name} asks for codec {codec!r}: use one of {', '.join(CODECS)}")
        view = _flat(data)
        content = digest(view)
        if (known := self._by_name.get(name)) is not None:
            if known.digest != content or known.length != view.nbytes:
                raise UsageError(
                    f"section {name} is already there with {known.length} bytes {known.digest.hex()[:16]}, now come "
                    f"{view.nbytes} bytes {content.hex()[:16]}: use another name"
                )
            return name
        if view.nbytes == 0:
            codec, params = "raw", {}
        stored, stored_params = CODECS[codec].encode(view, params, fast=self._fast)
        stored = _flat(stored)
        entry = SectionEntry(
            name=name,
            offset=self._frame.next_offset,
            stored=stored.nbytes,
            length=view.nbytes,
            codec=codec,  # type: ignore[arg-type]  # one of CODECS, as checked above
            stored_digest=content if codec == "raw" else digest(stored),
            digest=content,
            params=stored_params,
        )
        self._write(stored, entry.offset)
        self._frame.append(entry)
        self._by_name[name] = entry
        return name

    def put(self, kind: str, data: Data, codec: str = "zstd", **params: int) -> str:
        """Adds a section named after its content, ``kind/<digest>``: equal data is stored once.  Returns the name."""
        return self.add(f"{kind}/{digest(_flat(data)).hex()[:32]}", data, codec, **params)

    def put_matrix(self, kind: str, matrix: npt.NDArray[np.uint32]) -> str:
        """Adds a uint32 matrix [rows][cols], codec ``columns``, named after content and shape; returns the name."""
        rows, cols = matrix.shape
        words = np.ascontiguousarray(matrix, "<u4")
        name = f"{kind}/{digest(_flat(words)).hex()[:32]}-{rows}x{cols}"
        return self.add(name, words, "columns", rows=rows, cols=cols)

    def put_rows(self, kind: str, table: npt.NDArray[Any]) -> str:
        """Adds a table of structs of uint32, each field as differences from row to row; returns the name."""
        fields = table.dtype.itemsize // 4
        name = f"{kind}/{digest(_flat(table)).hex()[:32]}"
        return self.add(name, table, "columns", rows=fields, cols=len(table), interleaved=1)

    def add_image(self, image: Data) -> str:
        """Adds a module image as ``module/<digest>`` and returns its digest, the blake3 of its bytes in hex."""
        name = digest(_flat(image)).hex()
        self.add(image_section(name), image, "zstd")
        return name

    def finish(self, index: Index) -> None:
        """Writes the index and puts the archive in its place, replacing a file that was there.

        Raises
        ------
        ArchiveError
            The file cannot be written; what was at the path before is still there.
        """
        self._check_open()
        min_reader = WINDOWS_READER if any(v.windows is not None for v in index.variants) else MIN_READER
        if any("interleaved" in entry.params for entry in self._by_name.values()):
            min_reader = INTERLEAVED_READER
        header, directory = self._frame.close(index, minor=MINOR, min_reader=min_reader)
        self._write(memoryview(directory), header.index_offset)
        self._write(memoryview(header.pack()), 0)
        self._finished = True
        try:
            self._file.publish()
        except OSError as error:
            raise self._failed(error) from error
        finally:
            self._file.discard()

    def abort(self) -> None:
        """Discards what was written; after ``finish`` it does nothing."""
        self._finished = True
        self._file.discard()

    def _write(self, data: memoryview, offset: int) -> None:
        try:
            write_at(self._file.fd, data, offset)
        except OSError as error:
            self.abort()
            raise self._failed(error) from error

    def _check_open(self) -> None:
        if self._finished:
            raise UsageError(f"the archive {self.path} is already finished or aborted: make another writer")

    def _failed(self, error: OSError) -> ArchiveError:
        return ArchiveError(
            f"writing the archive {self.path} failed ({error.strerror}): give a writable folder with room"
        )


class _Aside:
    """A file without a name until it is published, or with a hidden one where the file system has no other way."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._partial = f".{path.name[:200]}.{secrets.token_hex(8)}.partial"
        self._folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fd, named = self._create(path.parent)
        except OSError:
            os.close(self._folder)
            raise
        self._named = [self._partial] if named else []
        # Runs at the latest when the process ends, so that even a forgotten writer leaves nothing.
        self._finalizer = weakref.finalize(self, _discard, os.getpid(), self.fd, self._folder, self._named)

    def _create(self, folder: Path) -> tuple[int, bool]:
        try:
            # A file without a name vanishes with the process, even with one that was killed.
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666), False
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
        return os.open(self._partial, flags, 0o666, dir_fd=self._folder), True

    def publish(self) -> None:
        os.fsync(self.fd)
        if not self._named:
            # follow_symlinks with a folder descriptor is linkat(AT_SYMLINK_FOLLOW); a link cannot replace a file,
            # hence the hidden name in between.
            os.link(f"/proc/self/fd/{self.fd}", self._partial, dst_dir_fd=self._folder, follow_symlinks=True)
            self._named.append(self._partial)
        os.rename(self._partial, self._name, src_dir_fd=self._folder, dst_dir_fd=self._folder)
        self._named.clear()
        os.fsync(self._folder)

    def discard(self) -> None:
        self._finalizer()


def _discard(owner: int, fd: int, folder: int, named: list[str]) -> None:
    if os.getpid() == owner:  # a forked child must not remove its parent's file
        for name in named:
            os.unlink(name, dir_fd=folder)
    os.close(fd)
    os.close(folder)


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Writes all of ``data`` at ``offset``; raises ``OSError``."""
    while data:
        written = os.pwrite(fd, data[:_CHUNK], offset)
        data, offset = data[written:], offset + written


def _flat(data: Data) -> memoryview:
    if isinstance(data, np.ndarray) and data.flags.c_contiguous and data.nbytes:
        data = data.reshape(-1).view(np.uint8)  # memoryview cannot cast structured elements
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    if not view.c_contiguous:
        raise UsageError("a section is made from bytes that are not contiguous: pass a contiguous copy")
    # A view without elements cannot be cast.
    return view.cast("B") if view.nbytes else memoryview(b"")
