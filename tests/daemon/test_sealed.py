# SPDX-License-Identifier: Apache-2.0
"""Nobody can change sealed memory, whoever has its descriptor."""

import ctypes
import errno
import fcntl
import mmap
import os

import pytest

from foundryd.daemon.sealed import Sealed
from foundryd.errors import DaemonError

LIBC = ctypes.CDLL(None, use_errno=True)
PUNCH_HOLE = 3  # FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE


def checked(result):
    if result:
        raise OSError(ctypes.get_errno(), "refused")


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def sealed():
    memory = Sealed.from_bytes("test", b"content" * 1000)
    yield memory
    memory.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.pwrite(fd, b"x", 7000),
        lambda fd: os.ftruncate(fd, 10),
        lambda fd: os.ftruncate(fd, 70000),
        lambda fd: os.posix_fallocate(fd, 0, 70000),
        lambda fd: mmap.mmap(fd, 7000, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda fd: os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_TRUNC),
        lambda fd: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), b"x", 0),
        lambda fd: checked(LIBC.fallocate(fd, PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(4096))),
        lambda fd: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
    ],
)
def test_it_cannot_be_written_resized_or_mapped_writable(sealed, change):
    with pytest.raises(OSError) as refused:
        change(sealed.fd)
    assert refused.value.errno in (errno.EPERM, errno.EACCES)
    assert os.pread(sealed.fd, 10000, 0) == b"content" * 1000


def test_a_rank_cannot_change_what_it_got(start, archive, join):
    start(archive)
    attachment = join(0)
    with pytest.raises(TypeError):
        attachment.archive[0] = 0
    # The mapping's own descriptor is the only one that the process has.
    fds = [int(f) for f in os.listdir("/proc/self/fd") if "memfd:foundryd:model" in _target(f)]
    assert fds
    for fd in fds:
        with pytest.raises(OSError) as refused:
            os.pwrite(fd, b"x", 0)
        assert refused.value.errno == errno.EPERM


def test_what_a_rank_mapped_stays_read_only_and_is_never_code(start, archive, join):
    start(archive)
    join(0)
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps if "memfd:foundryd:" in line]
    assert [fields[1] for fields in mapped] == ["r--s"] * 2
    for fields in mapped:
        begin, end = (int(part, 16) for part in fields[0].split("-"))
        with pytest.raises(OSError) as refused:
            checked(
                LIBC.mprotect(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.PROT_READ | mmap.PROT_WRITE)
            )
        assert refused.value.errno == errno.EACCES


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def test_memory_that_is_not_sealed_is_refused_and_closed():
    fd = os.memfd_create("open", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 10)
    before = descriptors()
    with pytest.raises(DaemonError, match=r"memory of 10 bytes under seals 0x0, not 10 bytes under 0xf"):
        Sealed.adopt(fd, 10)
    assert descriptors() == before - 1


def test_memory_of_another_size_is_refused(sealed):
    with pytest.raises(DaemonError, match=r"memory of 7000 bytes .* not 9999 bytes"):
        Sealed.adopt(os.dup(sealed.fd), 9999)


def test_a_file_is_refused(folder):
    (folder / "file").write_bytes(b"1234")
    with pytest.raises(DaemonError, match="under seals 0x0"):
        Sealed.adopt(os.open(folder / "file", os.O_RDONLY), 4)


def test_a_failed_fill_leaves_nothing():
    before = descriptors()
    with pytest.raises(ZeroDivisionError):
        Sealed.create("test", 10, lambda fd: 1 / 0)
    with pytest.raises(DaemonError, match=r"has 5 bytes after it was filled, not 10"):
        Sealed.create("test", 10, lambda fd: os.ftruncate(fd, 5))
    kept = []

    def keep_mapped(fd):
        kept.append(mmap.mmap(fd, 10))

    with pytest.raises(DaemonError, match="cannot be sealed"):
        Sealed.create("test", 10, keep_mapped)
    kept[0].close()
    assert descriptors() == before


def test_no_page_is_missing_after_sealing():
    memory = Sealed.create("test", 1 << 20, lambda fd: None)
    assert os.fstat(memory.fd).st_blocks * 512 >= 1 << 20
    memory.close()
