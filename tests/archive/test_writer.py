# SPDX-License-Identifier: Apache-2.0
"""A path has a whole archive or what it had before, whatever happens to the writer."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from foundryd.archive.index import Index
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.errors import ArchiveError, UsageError


@pytest.fixture(params=["unnamed", "hidden"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of writing aside: a file without a name, and a hidden one where there is no O_TMPFILE."""
    if request.param == "hidden":
        real = os.open

        def refuse(path: object, flags: int, *args: object, **kwargs: object) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *args, **kwargs)

        monkeypatch.setattr(os, "open", refuse)
    return request.param


def test_finishing_leaves_the_archive_and_nothing_else(tmp_path: Path, empty_index: Index, way: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        writer.add("x", b"x")
        assert not (tmp_path / "a.foundry").exists()
        assert len(os.listdir(tmp_path)) == (0 if way == "unnamed" else 1)
        writer.finish(empty_index)
    assert os.listdir(tmp_path) == ["a.foundry"]
    assert (tmp_path / "a.foundry").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert len(os.listdir("/proc/self/fd")) == before
    ArchiveReader.open(tmp_path / "a.foundry").verify()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def write_and_fail(path: Path) -> None:
    with ArchiveWriter(path) as writer:
        writer.add("x", bytes(100000))
        raise RuntimeError("the engine died")


def test_an_exception_leaves_nothing(tmp_path: Path, way: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match="engine"):
        write_and_fail(tmp_path / "a.foundry")
    assert os.listdir(tmp_path) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_forgotten_writer_leaves_nothing(tmp_path: Path, way: str) -> None:
    writer = ArchiveWriter(tmp_path / "a.foundry")
    writer.add("x", b"x")
    del writer
    assert os.listdir(tmp_path) == []


def test_the_old_archive_stays_until_the_new_one_is_whole(tmp_path: Path, empty_index: Index, way: str) -> None:
    path = tmp_path / "a.foundry"
    for text in (b"one", b"two"):
        with ArchiveWriter(path) as writer:
            writer.add("x", text)
            if text == b"two":
                assert ArchiveReader.open(path).section("x") == b"one"
                old = ArchiveReader.open(path)
            writer.finish(empty_index)
    assert ArchiveReader.open(path).section("x") == b"two"
    assert old.section("x") == b"one"  # a reader keeps the file it opened
    with pytest.raises(RuntimeError, match="engine"):
        write_and_fail(path)
    assert ArchiveReader.open(path).section("x") == b"two"
    assert os.listdir(tmp_path) == ["a.foundry"]


def test_a_killed_writer_leaves_nothing(tmp_path: Path) -> None:
    program = """
        import sys
        from foundryd.archive.writer import ArchiveWriter
        writer = ArchiveWriter(sys.argv[1])
        writer.add("x", bytes(1 << 20))
        print("written", flush=True)
        sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", textwrap.dedent(program), str(tmp_path / "a.foundry")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "written\n"
    child.send_signal(signal.SIGKILL)
    assert child.wait(30) == -signal.SIGKILL
    child.communicate()
    assert os.listdir(tmp_path) == []


def test_a_forked_child_does_not_take_its_parents_file(tmp_path: Path, empty_index: Index, way: str) -> None:
    writer = ArchiveWriter(tmp_path / "a.foundry")
    writer.add("x", b"x")
    child = os.fork()
    if child == 0:
        writer.abort()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.finish(empty_index)
    assert ArchiveReader.open(tmp_path / "a.foundry").section("x") == b"x"


def test_a_full_disk_is_an_archive_error_and_leaves_nothing(tmp_path: Path, empty_index: Index, way: str) -> None:
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20000, old[1]))
    try:
        with ArchiveWriter(tmp_path / "a.foundry") as writer:
            writer.add("x", b"x")
            with pytest.raises(ArchiveError, match="File too large"):
                writer.add("y", bytes(range(256)) * 400)
            with pytest.raises(UsageError, match="finished or aborted"):
                writer.finish(empty_index)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, ignored)
    assert os.listdir(tmp_path) == []


def test_places_that_cannot_be_written_are_refused(tmp_path: Path, empty_index: Index, way: str) -> None:
    with pytest.raises(ArchiveError, match="No such file"):
        ArchiveWriter(tmp_path / "none" / "a.foundry")
    (tmp_path / "folder").mkdir()
    with ArchiveWriter(tmp_path / "folder") as writer, pytest.raises(ArchiveError, match="Is a directory"):
        writer.finish(empty_index)
    assert os.listdir(tmp_path) == ["folder"]


def test_a_finished_writer_takes_nothing_more(tmp_path: Path, empty_index: Index) -> None:
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        writer.finish(empty_index)
        with pytest.raises(UsageError, match="finished or aborted"):
            writer.add("x", b"x")
    ArchiveReader.open(tmp_path / "a.foundry").verify()


def test_readers_never_see_half_an_archive(tmp_path: Path, empty_index: Index) -> None:
    path = tmp_path / "a.foundry"

    def write(number: int) -> None:
        with ArchiveWriter(path) as writer:
            for name in "abc":
                writer.add(name, bytes([number]) * 9000)
            writer.finish(empty_index)

    write(0)
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            with ArchiveReader.open(path) as reader:
                reader.verify()
                if len({bytes(reader.section(name)) for name in "abc"}) != 1:
                    wrong.append(reader)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, 40):
            write(number)
    finally:
        stop.set()
        for thread in threads:
            thread.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)
