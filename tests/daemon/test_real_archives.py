# SPDX-License-Identifier: Apache-2.0
"""The daemon with archives as capture writes them: verified, inflated, planned."""

from pathlib import Path

import numpy as np
import pytest

from foundryd.archive.dtypes import records
from foundryd.archive.index import Block, Content, Index, RankClass, Variant
from foundryd.archive.inflate import inflated_size
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.daemon import __main__ as daemon_program
from foundryd.daemon import limits
from foundryd.daemon.launch import start_daemon
from foundryd.daemon.resident import free
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.store import Store
from foundryd.errors import ArchiveDigestError, ArchiveError, ArchiveFormatError, NotEnoughMemory, NotInArchiveError
from foundryd.rankpatch.plan import Plan
from foundryd.session.client import attach_file

BASE, STRIDE = 0x600000000000, 1 << 38
GRAPH = 4
CONTENT = np.arange(1 << 18, dtype="<u4").tobytes()  # 1 MiB
MODEL_RANKS = 4


def write(path: Path, *, content: bytes = CONTENT, ranks: int = MODEL_RANKS) -> Path:
    """An archive with one piece of content whose second word is 100 + 7 * rank."""
    dtypes = records()
    address = BASE + GRAPH * STRIDE
    with ArchiveWriter(path) as writer:
        section = writer.put("content", content)
        empty = writer.put("empty", b"")
        variant = Variant(
            name=f"ep={ranks}",
            world=ranks,
            rank_class=RankClass(list(range(ranks)), list(range(ranks)), None, None),
            arena_base=BASE,
            arena_stride=STRIDE,
            allocations=writer.put(
                "allocations", np.array([(address, len(content), GRAPH, 0, 1, 0)], dtypes.allocation)
            ),
            functions=[],
            modules=[],
            symbols=[],
            templates=[],
            members=[],
            communicators=[],
            comm_ops=empty,
            contents=[Content(address, len(content), GRAPH, section, 0)],
            blocks=[Block("content", 0)],
            rules=writer.put("rules", np.array([(0, 4, 4, 0, 0, 0, 0, 100, 7)], dtypes.rule)),
            tables=empty,
            relocations=empty,
        )
        writer.finish(
            Index(kind="archive", created="2026-01-01T00:00:00Z", writer="test", identity={}, variants=[variant])
        )
    return path


@pytest.fixture
def real(folder):
    return write(folder / "model.foundry")


@pytest.fixture
def serve(runtime_dir):
    processes = []

    def begin(*archives):
        started = start_daemon(runtime_dir, [str(a) for a in archives], timeout=60)
        processes.append(started.process)
        return started

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def check(attachment, rank):
    """Archive and plan are usable as a rank uses them."""
    reader = ArchiveReader(attachment.archive, trusted=True)
    content = reader.index.variants[0].contents[0]
    assert reader.sections[content.section].codec == "raw"
    assert bytes(reader.section(content.section)) == CONTENT
    plan = Plan.from_buffer(attachment.plan)
    assert (plan.rank, plan.world, plan.variant) == (rank, MODEL_RANKS, "ep=4")
    block = np.frombuffer(CONTENT, np.uint8).copy()
    plan.apply(0, block)
    assert block.view("<u4")[1] == 100 + 7 * rank
    reader.close()


def test_every_rank_gets_the_inflated_archive_and_its_plan(serve, real, join):
    status = serve(real).status
    assert status.archives[0].bytes > len(CONTENT) > real.stat().st_size
    for rank in range(MODEL_RANKS):
        check(join(rank, variant="ep=4"), rank)
    with pytest.raises(NotInArchiveError, match="has the ranks 0-3 and rank 4 is asked for"):
        join(4, variant="ep=4")


def test_without_a_daemon_it_is_the_same(serve, real, join):
    with attach_file(real, rank=2) as alone:
        check(alone, 2)
        serve(real)
        served = join(2, variant="")
        assert bytes(served.archive) == bytes(alone.archive)
        assert (served.digest, bytes(served.plan)) == (alone.digest, bytes(alone.plan))


def test_the_digest_is_that_of_the_content_not_of_the_file(serve, real, folder, join):
    with attach_file(real) as alone:
        inflated = folder / "inflated.foundry"
        inflated.write_bytes(alone.archive)
    status = serve(real, inflated).status
    assert len({a.digest for a in status.archives}) == 1
    check(join(1, variant="ep=4", archive="inflated"), 1)


@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_damaged_archive_is_refused_and_what_is_served_goes_on(serve, real, folder, join, control, place):
    serve(real)
    damaged = bytearray(write(folder / "damaged.foundry", content=CONTENT[::-1]).read_bytes())
    damaged[int(len(damaged) * place)] ^= 0x10
    (folder / "damaged.foundry").write_bytes(damaged)
    with pytest.raises((ArchiveDigestError, ArchiveFormatError)):
        control().load(folder / "damaged.foundry")
    check(join(0, variant="ep=4"), 0)


def test_a_truncated_archive_ends_the_start(serve, real):
    real.write_bytes(real.read_bytes()[:-100])
    with pytest.raises(ArchiveError):
        serve(real)


def offered(real, change=lambda data: None):
    """What ``Store.examine`` says of the inflated archive after ``change``, and whether it is then there to use."""
    store = Store()
    with attach_file(real, rank=0) as alone:
        data = bytearray(alone.archive)
        digest = alone.digest
    change(data)
    try:
        store.examine(Sealed.from_bytes("x", data), digest, [real])
    finally:
        there = store.offers.close(digest)
        if there is not None:
            free(there)
    return there


def test_inflated_memory_is_taken_for_the_archive(real):
    assert offered(real) is not None


def test_memory_with_any_byte_changed_is_refused(real):
    with attach_file(real, rank=0) as alone:
        size = len(alone.archive)
        header = ArchiveReader(alone.archive, trusted=True)
        ends = [e.offset + e.stored for e in header.sections.values()]
        index = header.header.index_offset
        header.close()
    gap = next(end for end in ends if end % 4096)  # padding behind a section
    for place in (0, 9, 20, 63, 64, 70, gap, size // 3, size // 2, index, index + 40, size - 1):

        def change(data, place=place):
            data[place] ^= 1

        with pytest.raises(ArchiveError):
            offered(real, change)


def test_memory_of_another_archive_of_the_same_size_is_refused(real, folder):
    with attach_file(write(folder / "other.foundry", content=CONTENT[::-1]), rank=0) as other:
        data = bytes(other.archive)
    store = Store()
    with attach_file(real, rank=0) as alone:
        assert len(data) == len(alone.archive)
        with pytest.raises(ArchiveDigestError, match="a copy of another archive"):
            store.examine(Sealed.from_bytes("x", data), alone.digest, [real])
    assert store.offers.close(alone.digest) is None


def test_a_restarted_daemon_serves_what_a_rank_holds(serve, real, join, control, eventually):
    first = serve(real)
    attachment = join(1, variant="ep=4")
    first.process.kill()
    first.process.wait()
    serve(real)
    eventually(lambda: attachment.lease.returned == 1, "the lease is back")
    assert [a.source for a in control().archives()] == ["rank"]
    assert not attachment.lease.own_memory
    check(join(2, variant="ep=4"), 2)


@pytest.mark.parametrize("short", [False, True])
def test_loading_takes_no_more_memory_than_is_asked_for(runtime_dir, folder, control, group, short):
    """In a control group with just enough room an archive is loaded, and with less it is refused, not tried."""
    started = start_daemon(runtime_dir, [], program=group.program(daemon_program.__file__), timeout=60)
    try:
        path = write(folder / "large.foundry", content=np.arange(25 << 20, dtype="<u4").tobytes())  # 100 MiB
        control().load(write(folder / "small.foundry"))  # what loading imports is there
        with ArchiveReader.open(path) as reader:
            needed = inflated_size(reader) + reader.decoding_bytes + limits.SLACK
            assert needed > 200 << 20
        group.limit(group.used + needed + (-1 if short else 1) * (4 << 20))
        if short:
            with pytest.raises(NotEnoughMemory, match=r"inflating the archive .*large.foundry needs"):
                control().load(path)
        else:
            control().load(path)
        assert len(control().archives()) == (1 if short else 2)
        assert group.kills == 0
    finally:
        started.process.kill()
        started.process.wait()
