# SPDX-License-Identifier: Apache-2.0
"""An archive demands the pinned memory that its recordings use, and none that only garbage mentions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd._native import _hook
from foundryd.archive.dtypes import noise_dtype
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import violations
from foundryd.capture.demands import demanded_host
from foundryd.capture.merge import Merge, merge, write_archive
from foundryd.capture.recording import ContentRecord, Proofs, Recording
from foundryd.capture.shares import joined
from foundryd.capture.structure import alike, class_keys
from foundryd.errors import CaptureError, HeldOutMismatch
from foundryd.rankpatch.mesh import Mesh
from foundryd.session.arena import ARENAS

sys.path.insert(0, str(Path(__file__).parent))
import scripted_engine
from scripted_engine import GARBAGE, host_rows, put

HOST = ARENAS.index("host")
REAL = 48  # another offset in the second parameter; of what is there nothing is known to be noise
SAMPLED = [0, 1, 2, 3, 7]  # of eight ranks
ROWS = host_rows(8)


def address(place: int | None) -> int:
    return 0 if place is None else int(ROWS["address"][place])


def captured(
    rank: int = 0,
    *,
    rows: int,
    real: int | None = None,
    garbage: int | None = None,
    filled: Sequence[int] = (),
    mesh: str = "tp=1",
) -> Recording:
    """A capture with ``rows`` host allocations, of which parameters mention two; those ``filled`` hold the rank."""
    made = scripted_engine.recording(rank, Mesh.parse(mesh))
    made.allocations = ROWS[:rows].copy()
    put(made.graphs[0].params, REAL, address(real))
    put(made.graphs[0].params, GARBAGE, address(garbage))
    for place in filled:
        made.contents.append(ContentRecord(address(place), HOST, place, np.full(4096, 1 + rank, np.uint8)))
    return made


def proving(control: Recording) -> Recording:
    """A control that proved what is at ``GARBAGE`` to be noise."""
    start = control.graphs[0].param_start() + GARBAGE
    return replace(control, proofs=Proofs(noise=np.array([(0, start, 4), (0, start + 4, 4)], noise_dtype)))


def kept(merged: Merge) -> int:
    """How many host allocations all recordings of a merge have, beside content in no other."""
    for one in merged.recordings:
        assert np.array_equal(one.allocations, merged.reference.allocations)
        assert all(c.ordinal < len(one.allocations) for c in one.contents if c.arena == HOST)
    return len(merged.reference.allocations)


@pytest.mark.parametrize(("ours", "theirs"), [(2, 3), (3, 2), (1, 4)])
def test_what_only_noise_mentions_on_one_capture_is_in_no_archive(ours, theirs, tmp_path):
    rank, control = (
        captured(rows=count, real=0, garbage=count - 1, filled=range(1, count)) for count in (ours, theirs)
    )
    merged = merge([rank], proving(control), [0])
    assert kept(merged) == 1
    write_archive(tmp_path / "a.foundry", [merged])
    with ArchiveReader.open(tmp_path / "a.foundry") as reader:
        assert violations(reader, deep=True) == []
        (variant,) = reader.index.variants
        assert reader.array(variant.allocations, _hook.allocation_dtype).tolist() == ROWS[:1].tolist()
        assert variant.contents == []


def test_without_a_proof_everything_that_is_mentioned_stays():
    rank = captured(rows=3, real=0, garbage=2)
    assert kept(merge([rank], replace(rank, proofs=Proofs()), [0])) == 3


def test_what_one_rank_alone_uses_is_kept_for_all():
    ranks = [captured(r, rows=3 if r == 2 else 1, real=2 if r == 2 else 0, mesh="tp=4") for r in range(4)]
    control = captured(1, rows=2, real=0, garbage=1, mesh="tp=4")
    assert kept(merge(ranks, proving(control), range(4))) == 3


places = st.none() | st.integers(0, 7)


@settings(deadline=None)
@given(st.lists(st.tuples(places, places), min_size=4, max_size=4), places)
def test_the_last_that_any_capture_uses_is_the_last_of_all(mentions, stale):
    def made(rank, real, garbage):
        rows = 1 + max(-1 if place is None else place for place in (real, garbage))
        return captured(rank, rows=rows, real=real, garbage=garbage, mesh="tp=4")

    ranks = [made(rank, *mentioned) for rank, mentioned in enumerate(mentions)]
    merged = merge(ranks, proving(made(1, mentions[1][0], stale)), range(4))
    assert kept(merged) == 1 + max(-1 if real is None else real for real, _ in mentions)


def test_what_used_memory_mentions_is_used_even_if_the_using_capture_holds_something_else_there():
    def holding(count, mentioned):
        made = captured(rows=count, real=0, garbage=count - 1)
        data = np.zeros(4096, np.uint8)
        put(data, 8, address(mentioned))
        made.contents.append(ContentRecord(address(0), HOST, 0, data))
        return made

    for ours, theirs in ((3, 2), (2, 3)):
        recordings = [holding(count, 1 if count == 3 else 0) for count in (ours, theirs)]
        noise = proving(recordings[0]).proofs.noise
        assert len(demanded_host(recordings, noise)) == 2


def test_what_the_engine_compares_is_kept():
    rank, control = captured(rows=3, garbage=2), captured(rows=2, garbage=1)
    rank.notes["named_on_host"] = [address(1) + 8]
    assert kept(merge([rank], proving(control), [0])) == 2


def test_the_source_of_a_copy_is_read_though_nothing_depends_on_it():
    copy = captured(rows=2, garbage=1)
    assert len(demanded_host([copy], proving(copy).proofs.noise)) == 0
    copy.graphs[0].nodes["type"] += 1
    assert len(demanded_host([copy], proving(copy).proofs.noise)) == 2


def test_an_address_beside_noise_counts_wherever_it_begins():
    for offset in (GARBAGE - 8, GARBAGE + 8, GARBAGE + 11):
        made = captured(rows=3, garbage=2)
        put(made.graphs[0].params, offset, address(1))
        assert len(demanded_host([made], proving(made).proofs.noise)) == 2
    put(made.graphs[0].params, GARBAGE + 7, address(2))  # its first byte is noise
    assert len(demanded_host([made], proving(made).proofs.noise)) == 0


def test_controls_that_share_graphs_keep_what_either_recorded():
    short, long = captured(rows=1, real=0), captured(rows=3, real=0, garbage=2)
    for controls in ((short, long), (long, short)):
        together = joined([proving(control) for control in controls], [short])
        assert together.proofs is not None
        assert len(together.allocations) == 3


# --- which recordings go together -------------------------------------------------------------------------------------


def listed(rank: int, sizes: Sequence[int]) -> Recording:
    made = captured(rank, rows=len(sizes), mesh="tp=8")
    made.allocations["bytes"] = sizes
    return made


def begins(one: Sequence[int], other: Sequence[int]) -> bool:
    return list(other[: len(one)]) == list(one)


def test_lists_that_differ_in_their_common_part_are_of_different_classes_and_refused_together():
    first, second = listed(0, [1, 2]), listed(1, [1, 3, 4])
    assert not alike(first, [second])
    assert len(set(class_keys({0: first, 1: second}).values())) == 2
    expected = (
        r"allocation 1 of arena host is 3 bytes at 0x\w+ on rank 1 and 2 bytes at 0x\w+ on rank 0: make the engine"
    )
    with pytest.raises(CaptureError, match=expected):
        merge([first, second], listed(0, [1]), range(2))
    # Each begins with what the reference has.
    with pytest.raises(CaptureError, match=r"3 bytes at .* on the control of rank 0"):
        merge([listed(0, [1]), listed(1, [1, 2])], listed(0, [1, 3, 4]), range(2))


def test_a_list_that_begins_two_different_ones_is_of_neither_class():
    keys = class_keys({r: listed(r, sizes) for r, sizes in enumerate([[1], [1, 2], [1, 3], [1, 3, 4], []])})
    assert keys[0] == keys[4]
    assert keys[2] == keys[3]
    assert len(set(keys.values())) == 3


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), max_size=3), min_size=1, max_size=6))
def test_ranks_of_a_class_have_lists_that_begin_the_longest_of_it(lists):
    keys = class_keys({rank: listed(rank, sizes) for rank, sizes in enumerate(lists)})
    for rank, sizes in enumerate(lists):
        together = [lists[other] for other in keys if keys[other] == keys[rank]]
        assert begins(sizes, max(together, key=len))
        others = [other for other in lists if begins(sizes, other) or begins(other, sizes)]
        if all(begins(other, max(others, key=len)) for other in others):
            assert keys[rank] == keys[lists.index(max(others, key=len))]


def test_other_parts_tell_classes_apart_whatever_is_pinned():
    first, second = listed(0, [1]), listed(1, [1, 2])
    second.engine = {"a": 1}
    assert not alike(first, [second])
    assert len(set(class_keys({0: first, 1: second}).values())) == 2


@pytest.mark.parametrize("of_control", [False, True])
def test_another_allocation_of_any_other_arena_is_refused_and_named(of_control):
    rank, control = captured(rows=1, real=0), captured(rows=1, real=0)
    more = np.zeros(3, _hook.allocation_dtype)
    more["arena"], more["ordinal"], more["bytes"], more["live"] = ARENAS.index("kv"), range(3), 512, [1, 1, 0]
    more["address"] = scripted_engine.BASE + 2 * scripted_engine.STRIDE
    for one, count in ((rank, 2 if of_control else 3), (control, 3 if of_control else 2)):
        one.allocations = np.concatenate([more[:count], one.allocations])
    assert not alike(rank, [control])
    longer, shorter = ("the control of rank 0", "rank 0") if of_control else ("rank 0", "the control of rank 0")
    expected = (
        rf"^{longer} made allocation 2 of arena kv \(512 bytes at 0x\w+, given back\) and {shorter} only 2 allocations "
        "there: make the engine allocate alike on every rank$"
    )
    with pytest.raises(CaptureError, match=expected):
        merge([rank], proving(control), [0])


# --- ranks that inference did not see ---------------------------------------------------------------------------------


def merged_samples(real: int) -> Merge:
    """Samples that have two host allocations and use the first, whatever address their parameters have."""
    ranks = [captured(r, rows=2, real=real, garbage=1 if r % 2 else 0, mesh="ep=8") for r in SAMPLED]
    return merge(ranks, proving(captured(1, rows=1, real=real, garbage=0, mesh="ep=8")), range(8))


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_a_held_out_rank_may_have_more_and_less_that_noise_mentions(rows):
    merged = merged_samples(0)
    assert kept(merged) == 1
    merged.add_images(captured(4, rows=rows, real=0, garbage=rows - 1, filled=range(1, rows), mesh="ep=8"))
    assert kept(merged) == 1


def test_a_held_out_rank_that_uses_more_is_refused():
    merged = merged_samples(5)
    assert kept(merged) == 0
    assert merged.check(captured(4, rows=5, real=5, garbage=4, mesh="ep=8")).rank == 4
    expected = r"rank 4 refers to allocation 5 of arena host \(4096 bytes at 0x\w+\), and .*: sample rank 4 as well"
    with pytest.raises(HeldOutMismatch, match=expected):
        merged.check(captured(4, rows=6, real=5, garbage=0, mesh="ep=8"))
