# SPDX-License-Identifier: Apache-2.0
"""Sealed shared memory: written once, then read-only for everybody, for as long as somebody maps it."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable

from foundryd.errors import DaemonError, NotEnoughMemory

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG)


class Sealed:
    """A memfd under all four seals; owns its descriptor.

    Attributes
    ----------
    fd : the descriptor, close-on-exec.
    size : bytes.
    """

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    @classmethod
    def create(cls, name: str, size: int, fill: Callable[[int], object]) -> Sealed:
        """Memory of ``size`` bytes that ``fill(fd)`` writes, sealed afterwards.

        ``fill`` writes with calls, not through a mapping, so that a shortage of pages is an error and not a SIGBUS.
        No page is missing afterwards, so that no reader needs one.

        Raises
        ------
        NotEnoughMemory : the pages could not be had.
        DaemonError : ``fill`` changed the size, or kept a writable mapping.
        """
        if size <= 0:
            raise DaemonError(f"shared memory {name!r} would have {size} bytes: it needs at least one")
        try:
            fd = os.memfd_create(name[:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise NotEnoughMemory(
                f"no shared memory for {name} can be made ({error.strerror}): raise this process's limit of "
                "descriptors (ulimit -n) or free memory"
            ) from error
        try:
            try:
                os.ftruncate(fd, size)
                fill(fd)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise NotEnoughMemory(
                    f"{size} bytes of shared memory for {name} cannot be written ({error.strerror}): free memory or "
                    "raise the limit of this process"
                ) from error
            actual = os.fstat(fd).st_size
            if actual != size:
                raise DaemonError(f"the memory of {name} has {actual} bytes after it was filled, not {size}: report it")
            try:
                os.posix_fallocate(fd, 0, size)
            except OSError as error:
                raise NotEnoughMemory(
                    f"{size} bytes of shared memory for {name} cannot be had ({error.strerror}): free memory or raise "
                    "the limit of this process"
                ) from error
            try:
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            except OSError as error:  # EBUSY: a writable mapping lives
                raise DaemonError(f"the memory of {name} cannot be sealed ({error.strerror}): report it") from error
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size)

    @classmethod
    def from_bytes(cls, name: str, *pieces: bytes | memoryview) -> Sealed:
        """Sealed memory with these bytes, one piece behind the other."""
        views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]

        def fill(fd: int) -> None:
            offset = 0
            for view in views:
                _write_all(fd, view, offset)
                offset += len(view)

        return cls.create(name, sum(map(len, views)), fill)

    @classmethod
    def adopt(cls, fd: int, size: int, giver: str = "the daemon") -> Sealed:
        """Takes over a descriptor that ``giver`` passed; closes it when it is not sealed memory of ``size`` bytes."""
        try:
            try:
                seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            except OSError:  # not a memfd
                seals = 0
            status = os.fstat(fd)
            if seals & SEALS != SEALS or status.st_size != size:
                raise DaemonError(
                    f"{giver} passed memory of {status.st_size} bytes under seals {seals:#x}, not {size} bytes under "
                    f"{SEALS:#x}: it could change under this process, so it is refused; restart {giver}"
                )
            if status.st_blocks * 512 < size:  # a page that is missing is taken when it is read, or is a SIGBUS
                raise DaemonError(
                    f"{giver} passed memory of {size} bytes of which {status.st_blocks * 512} are there: no reader may "
                    f"have to find the others, so it is refused; restart {giver}"
                )
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, size)

    def duplicate(self) -> Sealed:
        """The same memory with a descriptor of its own."""
        return Sealed(fcntl.fcntl(self.fd, fcntl.F_DUPFD_CLOEXEC, 0), self.size)

    @property
    def inode(self) -> tuple[int, int]:
        """Device and inode: equal for two descriptors of one memory."""
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino

    def map(self) -> mmap.mmap:
        """A read-only mapping; it stays valid after ``close`` and after the death of whoever made the memory."""
        return mmap.mmap(self.fd, self.size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)

    def close(self) -> None:
        """Closes the descriptor; mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
