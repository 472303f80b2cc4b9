# SPDX-License-Identifier: Apache-2.0
"""What ranks had open of their peers' memory is inferred, archived, and asked of every restored rank."""

from __future__ import annotations

import numpy as np
import pytest

from foundryd._native import _hook, _rankpatch
from foundryd.archive.members import block_bytes
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import violations
from foundryd.archive.windows import window_base, with_own
from foundryd.capture.merge import merge, write_archive
from foundryd.capture.recording import Recording, load, save
from foundryd.errors import CaptureError, WindowMissing
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.plan import compute_plan
from foundryd.session.materialize import check_windows

BASE, STRIDE = 0x600000000000, 256 << 30
MESH = Mesh.parse("dp=4,tp=4")


class Layout:
    arena_base, arena_stride = BASE, STRIDE


def opened(rank, *, own=False, size=4096):
    """What an engine opens that maps two buffers of each peer in its tensor-parallel group."""
    peers = [p for p in MESH.group(rank, ("tp",)) if own or p != rank]
    rows = [
        (window_base(Layout(), p) + offset, n, BASE + offset, p, 0)
        for p in peers
        for offset, n in ((0, size), (1 << 21, 8))
    ]
    return np.array(rows, _hook.window_dtype)


def recording(rank, windows=None, **parts):
    windows = opened(rank) if windows is None else windows
    return Recording(
        variant=str(MESH), world=MESH.world, rank=rank, identity={}, arena_base=BASE, arena_stride=STRIDE,
        allocations=np.zeros(0, _hook.allocation_dtype), graphs=[], functions=[], modules=[], symbols=[],
        relocations=np.zeros(0, _rankpatch.relocation_dtype), communicators=[],
        comm_ops=np.zeros(0, _hook.comm_op_dtype), contents=[], windows=with_own(windows, Layout(), rank),
        own_window=bool((windows["rank"] == rank).any()), **parts,
    )  # fmt: skip


@pytest.mark.parametrize("own", [False, True])
def test_every_rank_is_asked_for_what_it_would_have_captured(own, tmp_path):
    captured = [0, 1, 2, 7, 15]
    merged = merge([recording(r, opened(r, own=own)) for r in captured], recording(1, opened(1, own=own)), range(16))
    merged.check(recording(9, opened(9, own=own)))
    path = tmp_path / "a.foundry"
    write_archive(path, [merged])
    with ArchiveReader.open(path) as reader:
        assert violations(reader, deep=True) == []
        variant = reader.index.variants[0]
        assert variant.windows is not None
        assert variant.windows.own is own
        for rank in range(16):
            block = block_bytes(reader, variant, variant.windows.block)
            compute_plan(reader, str(MESH), rank).apply(variant.windows.block, block)
            assert block.tobytes() == with_own(opened(rank, own=own), Layout(), rank).tobytes(), rank


def test_a_recording_keeps_its_windows(tmp_path):
    before = recording(6)
    save(before, tmp_path / "a.foundry")
    after = load(tmp_path / "a.foundry")
    assert after.windows.tobytes() == before.windows.tobytes()
    assert not after.own_window
    empty = recording(6, opened(6)[:0])
    save(empty, tmp_path / "b.foundry")
    assert len(load(tmp_path / "b.foundry").windows) == 0
    with ArchiveReader.open(tmp_path / "b.foundry") as reader:
        assert reader.index.variants[0].windows is None


def test_ranks_that_open_differently_are_not_one_class():
    with pytest.raises(CaptureError, match="windows"):
        merge([recording(0), recording(1, opened(1)[:2])], recording(0), range(2))
    with pytest.raises(CaptureError, match="windows"):
        merge([recording(0), recording(1, opened(1, own=True))], recording(0), range(2))


def test_a_window_is_named_in_errors():
    one = recording(0)
    assert one.describe(1, _hook.window_dtype.itemsize + 8) == "field bytes of window 1"
    assert [len(b) for b in one.blocks()] == [0, one.windows.nbytes]
    assert one.fields()[1][:4].tolist() == [[0, 8], [8, 8], [16, 8], [24, 4]]


class Open:
    """A hook in whose process these windows are open."""

    def __init__(self, table):
        self.table = table

    def windows(self):
        return self.table


def test_a_rank_that_opened_everything_passes():
    wanted = with_own(opened(5), Layout(), 5)
    check_windows(Open(opened(5)), wanted, 5, own=False)
    check_windows(Open(np.concatenate([opened(5), opened(12)])), wanted, 5, own=False)
    check_windows(Open(opened(5, own=True)), wanted, 5, own=True)


@pytest.mark.parametrize(
    ("table", "own", "says"),
    [
        (opened(5)[1:], False, r"rank 4 at 0x[0-9a-f]+ \(4096 bytes\), .* is not open on rank 5"),
        (opened(5, size=8192), False, r"rank 4 .* is open with 8192 bytes on rank 5"),
        (opened(5), True, r"rank 5 .* is not open on rank 5"),
        (opened(5)[:0], False, r"is not open"),
    ],
    ids=["one missing", "another size", "own missing", "none"],
)
def test_a_rank_that_did_not_is_refused_with_the_first(table, own, says):
    with pytest.raises(WindowMissing, match=says):
        check_windows(Open(table), with_own(opened(5), Layout(), 5), 5, own=own)
