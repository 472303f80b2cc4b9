# SPDX-License-Identifier: Apache-2.0
"""Which launches a capture makes of an engine whose launches differ, and that what it writes is still exact."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from foundryd._native import _hook
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import violations
from foundryd.capture import runs
from foundryd.capture.orchestrate import capture
from foundryd.capture.runs import CaptureSpec
from foundryd.errors import CaptureError, UnexplainedContent, UnexplainedWord
from foundryd.rankpatch.plan import compute_plan

SCRIPT = Path(__file__).with_name("scripted_engine.py")
SAMPLED = [0, 1, 2, 3, 7]  # of eight ranks


@pytest.fixture
def captured(tmp_path):
    """Captures a script as eight ranks: the result, the ranks launched, and what was said."""

    def run(script, **options):
        (tmp_path / "launches").touch()
        said = []
        spec = CaptureSpec("ep=8", [sys.executable, "-P", str(SCRIPT), script, str(tmp_path)], deadline=60, **options)
        try:
            return capture(tmp_path / "a.foundry", spec, progress=said.append), launched(), said
        finally:
            said.append("end")

    def launched():
        return [int(line) for line in (tmp_path / "launches").read_text().split()]

    run.launched = launched
    run.archive = tmp_path / "a.foundry"
    return run


def confirmed(result):
    return [report.rank for report in result.confirmed]


def test_as_many_ranks_confirm_the_rules_as_are_asked_for(captured):
    result, launched, _ = captured("few_values", held_out=[6, 4])
    assert confirmed(result) == [6, 4]
    assert launched[-2:] == [6, 4]
    # Every byte of each was compared, but for the noise: the number that follows the rank was patched.
    assert {(r.patched_words, r.noise_bytes) for r in result.confirmed} == {(1, 1)}
    with pytest.raises(CaptureError, match=r"ranks \[3\] are to be sampled and held out"):
        captured("few_values", requested=[0, 1, 2, 3, 7], held_out=[3])


def test_garbage_that_two_captures_share_is_seen_by_capturing_again(captured):
    result, launched, _ = captured("few_values")
    assert result.rules == {"affine ep": 1, "noise": 1}
    # Samples and control; each sample again; the control with all of them; the held-out rank.
    assert launched == [*SAMPLED, 1, *SAMPLED, 1, *confirmed(result)]
    with ArchiveReader.open(captured.archive) as reader:
        assert violations(reader, deep=True) == []


def test_what_the_rank_decides_is_refused_after_capturing_again(captured):
    with pytest.raises(UnexplainedWord, match="follows no coordinate"):
        captured("squares")
    assert captured.launched() == [*SAMPLED, 1, *SAMPLED, 1]
    assert not captured.archive.exists()


def test_garbage_that_each_rank_repeats_is_proven_by_the_control(captured):
    result, launched, said = captured("settled")
    assert result.rules == {"affine ep": 1, "noise": 1}
    assert launched == [*SAMPLED, 1, *confirmed(result)]
    assert [line for line in said if line.startswith("1 bytes follow no rule")]
    with ArchiveReader.open(captured.archive) as reader:
        assert violations(reader, deep=True) == []


def test_however_much_is_left_on_the_stack_few_launches_tell(captured):
    """Each capture shows other garbage: what an earlier one showed is not forgotten."""
    result, launched, _ = captured("stack", held_out=[4, 5, 6])
    assert result.rules["affine ep"] == 1
    assert launched[: len(SAMPLED) + 1] == [*SAMPLED, 1]
    assert confirmed(result) == [4, 5, 6]
    assert len(launched) <= len(SAMPLED) + 1 + 3 + 2
    with ArchiveReader.open(captured.archive) as reader:
        assert violations(reader, deep=True) == []


def test_garbage_that_only_the_held_out_rank_has_is_proven_and_the_same_rank_confirms(captured):
    result, launched, said = captured("late")
    assert result.rules == {"affine ep": 1, "noise": 1}
    assert confirmed(result) == [4]
    assert launched == [*SAMPLED, 1, 4, 1]
    assert [line for line in said if "may be garbage" in line]


def test_garbage_beside_noise_that_only_the_held_out_rank_has_needs_no_other_state_of_the_engine(captured):
    """Of a stale address one byte differs in all captures but the one that confirms."""
    result, launched, _ = captured("beside")
    assert result.rules == {"affine ep": 1, "noise": 2}
    assert launched == [*SAMPLED, 1, 4, 1]
    assert confirmed(result) == [4]


def test_scratch_that_only_held_out_ranks_filled_is_proven_and_the_same_ranks_confirm(captured):
    """However many ranks show however much of it, one more control proves all, and none joins the samples."""
    result, launched, said = captured("scratch", held_out=[4, 5, 6])
    assert launched == [*SAMPLED, 1, 4, 5, 6, 1]
    assert confirmed(result) == [4, 5, 6]
    assert result.rules == {"affine ep": 1}
    assert [line for line in said if line.startswith("0 words and 2 allocations are not as predicted on ranks [4, 5,")]
    with ArchiveReader.open(captured.archive) as reader:
        assert violations(reader, deep=True) == []
        assert reader.index.variants[0].contents == []


def test_scratch_and_garbage_of_one_held_out_rank_are_proven_together(captured):
    result, launched, _ = captured("scratch_and_garbage")
    assert launched == [*SAMPLED, 1, 4, 1]
    assert confirmed(result) == [4]
    assert result.rules == {"affine ep": 1, "noise": 1}


def test_scratch_of_one_held_out_rank_is_proven_while_another_joins_the_samples(captured):
    result, launched, said = captured("scratch_and_surprise", held_out=[4, 5, 6])
    assert [line[:6] for line in said if "joins the samples" in line] == ["rank 5"]
    assert launched == [*SAMPLED, 1, 4, 5, 6, 1, 0, 1, 2, 3, 5, 7, 1]
    assert confirmed(result) == [4, 6]


def test_memory_that_outputs_depend_on_is_refused_however_late_it_is_seen(captured):
    """It is offered to one control; when that does not prove it, the rank that filled it joins the samples."""
    with pytest.raises(UnexplainedContent, match=r"rank 4 has 0x14.*did not prove it dead"):
        captured("read")
    assert captured.launched() == [*SAMPLED, 1, 4, 1, 1]
    assert not captured.archive.exists()


def test_memory_of_a_sampled_rank_that_outputs_depend_on_is_refused_by_the_first_control(captured):
    with pytest.raises(UnexplainedContent, match=r"rank 2 has 0x12.*did not prove it dead"):
        captured("read_when_sampled")
    assert captured.launched() == [*SAMPLED, 1]
    assert not captured.archive.exists()


def test_what_the_rank_decides_and_outputs_depend_on_is_refused(captured):
    with pytest.raises(UnexplainedWord, match="follows no coordinate"):
        captured("wanted")
    assert captured.launched() == [*SAMPLED, 1, *SAMPLED, 1]
    assert not captured.archive.exists()


def test_launches_that_follow_code_of_each_rank_are_known_of_all_ranks(captured):
    """A compiler that tunes what it makes for one rank may choose other launch dimensions: no rule can tell which."""
    result, launched, said = captured("tuned")
    assert result.captured == list(range(8))
    assert launched == [*SAMPLED, 1, *SAMPLED, 1, 4, 5, 6, 4, 5, 6, 1]
    assert [line for line in said if line.startswith("all 8 ranks are sampled, for their code differs: ")]
    with ArchiveReader.open(captured.archive) as reader:
        assert violations(reader, deep=True) == []
        (variant,) = reader.index.variants
        assert len(set(variant.modules[0].by_rank)) == 8
        (template,) = variant.templates
        parts = [reader.array(section, np.uint8) for section in (template.nodes, template.params)]
        grids = []
        for rank in range(8):
            block = np.concatenate(parts)
            compute_plan(reader, variant.name, rank).apply(0, block)
            grids.append(int(block[: len(parts[0])].view(_hook.node_dtype)["grid"][0, 0]))
    assert grids == [(32, 64, 16)[rank**2 % 3] for rank in range(8)]


def test_a_rank_that_surprises_joins_the_samples_and_another_is_held_out(captured):
    result, launched, said = captured("surprise")
    assert result.rules == {"affine ep": 1, "noise": 1}
    assert [line for line in said if "rank 4 is not as predicted" in line]
    assert confirmed(result) == [5]
    more = [*SAMPLED[:4], 4, SAMPLED[4]]
    assert launched == [*SAMPLED, 1, 4, 1, *more, 1, 5]


def test_ranks_are_captured_again_where_their_first_launch_was_cold(captured):
    result, launched, said = captured("cold")
    assert launched == [*SAMPLED, 1, *SAMPLED, 1, *confirmed(result), *confirmed(result)]
    assert not any("rank classes" in line for line in said)
    with ArchiveReader.open(captured.archive) as reader:
        (variant,) = reader.index.variants
        assert reader.section(variant.allocations).nbytes == 0


def test_staging_buffers_that_only_garbage_mentions_split_no_class_and_are_not_archived(captured):
    result, launched, said = captured("staging")
    assert launched == [*SAMPLED, 1, *confirmed(result)]
    assert not any("rank classes" in line for line in said)
    with ArchiveReader.open(captured.archive) as reader:
        assert violations(reader, deep=True) == []
        assert reader.section(reader.index.variants[0].allocations).nbytes == 0


def test_no_control_is_made_of_launches_that_say_they_were_cold(captured):
    result, launched, _ = captured("told")
    assert launched == [*SAMPLED, *SAMPLED, 1, *confirmed(result), *confirmed(result)]


@pytest.mark.parametrize("script", ["told", "chilly"])
def test_a_control_that_began_with_cold_launches_begins_again_beside_warm_ones(captured, monkeypatch, script):
    order = []

    def noted(name, what):
        real = getattr(runs.Runs, name)
        monkeypatch.setattr(runs.Runs, name, lambda self, *given: order.append(what(*given)) or real(self, *given))

    noted("start_control", lambda rank, others: f"control of {rank} beside {list(others)}")
    noted("_capture_all", lambda launches: [launch.what for launch in launches])
    noted("_start_controls", lambda rank, *_: f"controls of {rank} start")
    captured(script, jobs=6)
    ranks = [f"rank {rank}" for rank in SAMPLED]
    control = [f"control of 1 beside {SAMPLED}", "controls of 1 start"]
    made = [step for step in order if step]
    assert made[:6] == [*control, ranks, *control, [f"{rank}, with warm caches" for rank in ranks]]
    assert made.count(control[1]) == 2


def test_a_control_that_started_with_cold_caches_is_launched_again_where_ranks_are_built_otherwise(captured):
    """It started beside the ranks, which are captured again since one was cold like it, and is of no use then."""
    result, launched, _ = captured("chilly", jobs=6)
    others = [rank for rank in SAMPLED if rank != 1]
    assert sorted(rank for rank in launched if rank != 1) == sorted([*others, *others, *confirmed(result) * 2])
    # A control that was of no use may have been ended before it said that it ran.
    assert launched.count(1) in (3, 4)
    with ArchiveReader.open(captured.archive) as reader:
        (variant,) = reader.index.variants
        assert reader.section(variant.allocations).nbytes == 0


def test_ranks_are_captured_again_where_a_cold_launch_had_memory_elsewhere(captured):
    """Their allocations are alike, so that only what graphs hold tells."""
    result, launched, said = captured("moved")
    assert launched == [*SAMPLED, 1, *SAMPLED, 1, *confirmed(result), *confirmed(result)]
    assert [line for line in said if line.startswith("two captures of one rank differ, and one may have had cold")]


def test_two_captures_that_differ_are_refused_when_both_were_warm(captured):
    with pytest.raises(UnexplainedWord, match=r"byte 8 of node 0 .* is noise that was not proven harmless"):
        captured("adrift")
    assert captured.launched() == [*SAMPLED, 1, *SAMPLED, 1]


def test_launches_may_run_side_by_side(captured):
    result, launched, _ = captured("few_values", jobs=4)
    assert result.rules == {"affine ep": 1, "noise": 1}
    assert sorted(launched) == sorted([*SAMPLED, 1, *SAMPLED, 1, *confirmed(result)])


def test_one_that_fails_beside_others_ends_them_all(captured, tmp_path):
    with pytest.raises(CaptureError, match="capturing rank 2 ended with exit code 3"):
        captured("failing", jobs=5)
    for pid in (tmp_path / "pids").read_text().split():
        assert not Path(f"/proc/{pid}").exists()


def test_a_launch_without_a_recording_is_not_taken_for_the_one_before(captured):
    with pytest.raises(CaptureError, match="rank 1 ended without a recording"):
        captured("forgetful")


def test_whoever_captures_is_told_of_tensors_that_no_arena_holds(captured):
    _, _, said = captured("outside")
    (warning,) = [line for line in said if line.startswith("warning")]
    assert "2 tensors (1,024 bytes, the first at 0x600000000200)" in warning
    _, _, said = captured("few_values")
    assert not [line for line in said if line.startswith("warning")]


def test_whoever_captures_is_told_why_no_image_was_cut(captured):
    for script, expected in (
        (
            "outside",
            ["no image was cut to the kernels that are used, that of module 0 since its kernels are not known"],
        ),
        ("few_values", []),
    ):
        _, _, said = captured(script)
        assert [line for line in said if "cut" in line] == expected


def test_the_control_goes_on_without_trials_that_were_fatal(captured):
    result, launched, said = captured("fatal")
    assert launched == [*SAMPLED, 1, 1, 1, *confirmed(result)]
    assert [line.rpartition(": ")[2] for line in said if "fatal" in line] == ['["one"]', '["two"]']
    assert result.rules == {"affine ep": 1, "noise": 1}
