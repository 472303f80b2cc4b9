# SPDX-License-Identifier: Apache-2.0
"""Archives of every format that there was open; what wants a newer reader is refused by name, wherever it is met.

The files in ``kept`` were written by builds of those formats and never change.  A new minor version adds one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from foundryd.archive import format as frame
from foundryd.archive.dtypes import records
from foundryd.archive.inflate import inflate
from foundryd.archive.members import member_block
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import verify
from foundryd.daemon.launch import start_daemon
from foundryd.errors import ArchiveVersionError
from foundryd.rankpatch.plan import Plan
from foundryd.session.client import attach, attach_file

KEPT = Path(__file__).with_name("kept")
# What names their content: a reader that understood a byte differently would say another one.
DIGESTS = {
    "1.0": "3dfa46cff58049265ab43682467762db9dc1cf7f03c930c08c182ccca2111e7e",
    "1.1": "e9cfe3f13b2d839719a4177c23b58a862df417ff04ab45170d3254120b3b86d6",
    "1.2": "48c58558a90fa48eb595fbcced084729f45cf8e984e0d2a09a8a7294667e3b50",
    # Noise of templates, tables stored field by field, and communicators in the order of their declarations.
    "1.3": "ce65165cd055158705b0d51f0896b06f2e53c88fb9b06dbc29d7425cb7e041f6",
}
HERE = f"{frame.MAJOR}.{frame.MINOR}"


def kept(version: str) -> Path:
    return KEPT / f"format-{version}.archive"


def rewritten(target: Path, edit: Callable[[dict], object] = lambda index: None, **header: int) -> Path:
    """The kept archive of this format with another header, sound in itself; ``edit`` changes the index."""
    data = kept(HERE).read_bytes()
    old = frame.Header.unpack(memoryview(data), "kept")
    directory = msgspec.msgpack.decode(data[old.index_offset :])
    edit(directory["index"])
    raw = msgspec.msgpack.encode(directory)
    new = frame.Header(
        old.index_offset + len(raw),
        old.index_offset,
        len(raw),
        frame.digest(raw)[:16],
        **{"minor": frame.MINOR} | header,
    )
    body = bytearray(data[: old.index_offset] + raw)
    body[: frame.HEADER.size] = new.pack()
    target.write_bytes(body)
    return target


def test_every_minor_version_is_kept() -> None:
    assert DIGESTS.keys() == {f"{frame.MAJOR}.{minor}" for minor in range(frame.MINOR + 1)}


@pytest.mark.parametrize("version", DIGESTS)
def test_a_kept_archive_opens_and_means_what_it_meant(version: str, tmp_path: Path) -> None:
    with ArchiveReader.open(kept(version)) as reader:
        assert f"{reader.header.major}.{reader.header.minor}" == version
        verify(reader)
        assert reader.content_digest == DIGESTS[version]
        (variant,) = reader.index.variants
        assert (variant.windows is None) == (version == "1.0")
        assert bool(variant.noise) == (version not in ("1.0", "1.1"))
        assert bool(variant.template_noise) == (version == "1.3")
        places = [None, None] if version in ("1.0", "1.1", "1.2") else [1, 0]
        assert [communicator.declared for communicator in variant.communicators] == places
        # The batch size of a member is the grid of its first node, a kernel.
        node = records().node
        grids = [member_block(reader, variant, place)[: node.itemsize].view(node)["grid"][0] for place in range(4)]
        assert [grid.tolist() for grid in grids] == [[size, 1, 1] for size in (1, 2, 4, 8)]
        with (tmp_path / "inflated").open("w+b") as target:
            inflate(reader, target)
    with ArchiveReader.open(tmp_path / "inflated") as inflated:
        assert inflated.content_digest == DIGESTS[version]
        assert f"{inflated.header.major}.{inflated.header.minor}" == version


@pytest.mark.parametrize("version", DIGESTS)
def test_a_rank_is_served_from_a_kept_archive(version: str) -> None:
    with attach_file(kept(version), rank=4) as attachment:
        assert attachment.digest == DIGESTS[version]
        plan = Plan.from_buffer(attachment.plan)
    assert (plan.rank, plan.world, plan.variant) == (4, 8, "ep=8")
    with ArchiveReader.open(kept(version)) as reader:
        (variant,) = reader.index.variants
        block = member_block(reader, variant, 0)
        params = len(reader.section(variant.templates[0].nodes))
    assert block[params + 8 : params + 12].view("<u4")[0] == 1
    plan.apply(0, block)
    assert block[params + 8 : params + 12].view("<u4")[0] == 3 * 4  # the rule of that word: three times the rank


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    minor = frame.MINOR + 1
    return rewritten(tmp_path / "newer.foundry", minor=minor, min_reader=minor)


NEEDS = rf"newer\.foundry has format 1\.{frame.MINOR + 1} and needs a reader of 1\.{frame.MINOR + 1}, this is {HERE}"


def test_what_needs_a_newer_reader_is_refused_by_name(newer: Path) -> None:
    for use in (ArchiveReader.open, attach_file):
        with pytest.raises(ArchiveVersionError, match=NEEDS):
            use(newer)


@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_commands_say_so_in_one_sentence(newer: Path, command: str) -> None:
    line = [sys.executable, "-P", "-m", "foundryd.cli", command, newer]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert re.search(NEEDS, " ".join(done.stderr.split()).replace("newer. foundry", "newer.foundry")), done.stderr
    assert "Traceback" not in done.stderr


def test_a_daemon_refuses_it_at_its_start_and_serves_the_kept_one(newer: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as folder:
        run = Path(folder) / "run"
        with pytest.raises(ArchiveVersionError, match=NEEDS):
            start_daemon(run, [str(newer)], timeout=60)
        started = start_daemon(run, [str(kept("1.0"))], timeout=60)
        try:
            with attach(runtime_dir=run, rank=4, timeout=20) as attachment:
                assert attachment.digest == DIGESTS["1.0"]
        finally:
            started.process.kill()
            started.process.wait()


def test_a_newer_archive_that_this_reader_may_read_opens_with_fields_that_it_does_not_know(tmp_path: Path) -> None:
    def add(index: dict) -> None:
        index["more"] = {"a": 1}
        index["variants"][0]["more"] = [1]

    minor = frame.MINOR + 1
    path = rewritten(tmp_path / "newer.foundry", add, minor=minor, min_reader=frame.MINOR)
    with attach_file(path, rank=4) as attachment:
        assert Plan.from_buffer(attachment.plan).rank == 4


def test_another_major_version_is_refused_before_anything_else_of_it_is_believed(tmp_path: Path) -> None:
    path = rewritten(tmp_path / "newer.foundry", major=frame.MAJOR + 1, minor=0)
    path.write_bytes(path.read_bytes()[:64])
    with pytest.raises(ArchiveVersionError, match=r"newer.foundry says format 2\.0 and this foundryd reads format 1"):
        ArchiveReader.open(path)
