# SPDX-License-Identifier: Apache-2.0
"""An inflated archive is the same archive, in memory that others map and nobody can change."""

from __future__ import annotations

import fcntl
import mmap
import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foundryd.archive.codecs import CODECS
from foundryd.archive.format import SectionEntry
from foundryd.archive.inflate import inflate, inflated_size
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import violations
from foundryd.errors import ArchiveDigestError, ArchiveError, ArchiveFormatError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


@pytest.fixture
def sealed(sample: Path) -> Any:
    fd = os.memfd_create("archive", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with ArchiveReader.open(sample) as reader:
        assert inflate(reader, fd) == inflated_size(reader) == os.fstat(fd).st_size
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    yield fd
    os.close(fd)


def test_inflation_keeps_everything_but_the_codecs(sample: Path, sealed: int) -> None:
    with ArchiveReader.open(sample) as packed, ArchiveReader.from_fd(sealed) as raw:
        raw.verify()
        assert violations(raw) == []
        assert raw.index == packed.index
        assert raw.content_digest == packed.content_digest
        assert {section.codec for section in packed.sections.values()} == {"raw", "zstd", "columns"}
        assert {section.codec for section in raw.sections.values()} == {"raw"}
        assert list(raw.sections) == list(packed.sections)
        for name in packed.sections:
            assert raw.section(name) == packed.section(name)
            assert raw.entry(name).digest == packed.entry(name).digest


def test_inflating_again_changes_nothing(sealed: int, tmp_path: Path) -> None:
    with ArchiveReader.from_fd(sealed) as raw, open(tmp_path / "again", "w+b") as file:
        file.write(b"something else that was here" * 20000)
        file.flush()
        size = inflate(raw, file)
        assert os.fstat(file.fileno()).st_size == size == os.fstat(sealed).st_size
        assert os.pread(file.fileno(), size, 0) == os.pread(sealed, size, 0)


def test_sealed_memory_is_read_in_place(sealed: int) -> None:
    mapping = mmap.mmap(sealed, os.fstat(sealed).st_size, prot=mmap.PROT_READ)
    reader = ArchiveReader(mapping, trusted=True)
    whole = np.frombuffer(mapping, np.uint8)
    for name, section in reader.sections.items():
        if section.length:
            assert np.shares_memory(whole, reader.array(name, np.uint8))
    with pytest.raises(PermissionError):
        os.pwrite(sealed, b"x", 0)


def test_another_process_maps_the_same_memory(sealed: int) -> None:
    program = """
        import sys
        from foundryd.archive.format import digest
        from foundryd.archive.reader import ArchiveReader
        reader = ArchiveReader.from_fd(int(sys.argv[1]), trusted=True)
        print(*sorted(digest(reader.section(name)).hex() for name in reader.sections), reader.content_digest)
    """
    children = [
        subprocess.Popen(
            [sys.executable, "-P", "-c", textwrap.dedent(program), str(sealed)],
            pass_fds=[sealed],
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    with ArchiveReader.from_fd(sealed) as reader:
        expected = [*sorted(s.digest.hex() for s in reader.sections.values()), reader.content_digest]
    for child in children:
        out, _ = child.communicate(timeout=60)
        assert child.returncode == 0
        assert out.split() == expected


def test_a_damaged_section_stops_inflation_before_the_header(sample: Path) -> None:
    data = bytearray(sample.read_bytes())
    last = list(ArchiveReader(bytes(data)).sections.values())[-1]
    data[last.offset] ^= 1
    fd = os.memfd_create("archive")
    try:
        with pytest.raises(ArchiveDigestError, match=last.name):
            inflate(ArchiveReader(bytes(data)), fd)
        with pytest.raises(ArchiveFormatError):
            ArchiveReader.from_fd(fd)
    finally:
        os.close(fd)


def test_what_cannot_be_written_is_an_archive_error(sample: Path) -> None:
    with (
        ArchiveReader.open(sample) as reader,
        open(sample, "rb") as file,
        pytest.raises(ArchiveError, match="inflating"),
    ):
        inflate(reader, file)
    ArchiveReader.open(sample).verify()


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("codec", ["raw", "zstd", "columns"])
def test_decoding_takes_no_more_memory_than_it_says(codec: str, interleaved: int) -> None:
    rows, cols = 40, 50_000
    data = (np.arange(rows * cols, dtype="<u4") * 2654435761).data.cast("B")
    shape = {"rows": rows, "cols": cols} | ({"interleaved": 1} if interleaved else {})
    stored, params = CODECS[codec].encode(data, shape if codec == "columns" else {}, fast=False)
    entry = SectionEntry("x", 0, len(memoryview(stored)), data.nbytes, codec, bytes(32), bytes(32), params)
    view = memoryview(stored)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        decoded = CODECS[codec].decode(view, entry)
        taken = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    assert decoded == data
    most = CODECS[codec].workspace(entry)
    assert most * 0.6 <= taken <= most + 65536
