# SPDX-License-Identifier: Apache-2.0
"""``foundryd demo``: captured on one device, restored on every rank of a world, with the reference's tokens."""

from __future__ import annotations

import pytest

from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.capture.recording import unpack, unpack_ranked
from foundryd.rankpatch.mesh import Coordinate, Mesh
from foundryd.rankpatch.rules import RuleKind

KEYS = {
    "ok", "driver", "ranks", "capture_devices", "captured_ranks", "heldout_rank", "graphs", "templates", "comm_nodes",
    "patched_words", "rules", "archive_bytes", "capture_ms", "attach_ms", "restore_ms", "resident_copies",
    "tokens_match",
}  # fmt: skip


def run_demo(foundryd, keep, *options, timeout=150.0):
    done = foundryd("demo", "--driver", "soft", "--json", "--keep", keep, *options, timeout=timeout)
    assert done.code == 0, done.out + done.err
    figures = done.json
    assert figures.keys() >= KEYS
    assert figures["ok"] is True
    assert figures["tokens_match"] is True
    assert figures["driver"] == "soft"
    assert figures["capture_devices"] == 1
    # One sealed copy serves all ranks.
    assert figures["resident_copies"] == 1
    assert figures["archive_bytes"] == keep.stat().st_size
    return figures


def check_held_out(figures, archive):
    """The proof rank is one that the rules were not made from, as the archive itself says."""
    with ArchiveReader.open(archive) as reader:
        for variant in reader.index.variants:
            held_out, seen = variant.rank_class.held_out, variant.rank_class.captured
            if len(variant.rank_class.ranks) <= 4:
                assert held_out is None
                assert seen == variant.rank_class.ranks
            else:
                assert held_out in variant.rank_class.ranks
                assert held_out not in seen
                assert figures["heldout_rank"] == held_out


def parameter_rules(archive, function, name):
    """Rules of the words of one parameter of one kernel, in every graph."""
    with ArchiveReader.open(archive) as reader:
        (variant,) = reader.index.variants
        recording, rules = unpack(reader, variant), unpack_ranked(reader, variant).rules
    wanted = f"{name} byte 0 of node"
    return [
        rule
        for rule in rules
        if rule["block"] < len(recording.graphs)
        and (text := recording.describe(int(rule["block"]), int(rule["offset"]))).startswith(wanted)
        and f"({function})" in text
    ]


# Where the demo's kernels get the rank from: the last parameter of one, the last but one of the other.
VOCABULARY = ("slice_argmax", "parameter 4")
EXPERT = ("expert_down", "parameter 9")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("parallel", "vocabulary", "expert"),
    [
        ("dp=2,tp=4", (Coordinate.TP, 64), None),
        ("tp=2,ep=4", (Coordinate.TP, 128), (Coordinate.EP, 2)),
    ],
)
def test_rules_of_a_mesh_follow_the_right_coordinate(foundryd, tmp_path, parallel, vocabulary, expert):
    keep = tmp_path / "kept.foundry"
    figures = run_demo(foundryd, keep, "--parallel", parallel, "--batch-sizes", "1,3", "--layers", "1")
    assert figures["ranks"] == 8
    assert figures["graphs"] == 2
    assert set(figures["captured_ranks"]) <= set(range(8))
    check_held_out(figures, keep)
    for place, follows in ((VOCABULARY, vocabulary), (EXPERT, expert)):
        rules = parameter_rules(keep, *place)
        if follows is None:
            assert rules == []
            continue
        coordinate, stride = follows
        assert len(rules) == figures["graphs"], place
        for rule in rules:
            assert (rule["kind"], rule["coordinate"]) == (RuleKind.AFFINE, coordinate)
            assert (rule["base"], rule["stride"]) == (0, stride)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_small_worlds_are_captured_whole(foundryd, tmp_path, ranks):
    keep = tmp_path / "kept.foundry"
    dispatch = "allgather" if ranks == 4 else "all-to-all"
    figures = run_demo(
        foundryd, keep, "--ranks", ranks, "--dispatch", dispatch, "--batch-sizes", "1-3", "--layers", "1"
    )
    assert figures["ranks"] == ranks
    assert figures["captured_ranks"] == list(range(ranks))
    check_held_out(figures, keep)
    assert (figures["comm_nodes"] > 0) == (ranks > 1)
    # Nothing has to be extrapolated: what differs is in tables of every rank's value.
    rules = parameter_rules(keep, *EXPERT)
    assert len(rules) == (figures["graphs"] if ranks > 1 else 0)
    experts = 8 // ranks
    with ArchiveReader.open(keep) as reader:
        (variant,) = reader.index.variants
        tables = unpack_ranked(reader, variant).tables
    for rule in rules:
        assert rule["kind"] == RuleKind.TABLE
        assert tables[rule["table"] :][:ranks].tolist() == [experts * rank for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_many_batch_sizes_cost_little_and_the_kept_archive_is_sound(foundryd, tmp_path):
    keep = tmp_path / "kept.foundry"
    figures = run_demo(foundryd, keep, timeout=220)
    assert figures["ranks"] == 8
    assert figures["graphs"] == 64
    assert figures["comm_nodes"] > 0
    assert figures["patched_words"] > 0
    check_held_out(figures, keep)
    with ArchiveReader.open(keep) as reader:
        sizes = stored_bytes(reader)
    assert sizes["templates"] + sizes["members"] <= 1.5 * sizes["templates"], sizes

    verified = foundryd("verify", keep, "--json")
    assert verified.code == 0, verified.err
    assert verified.json["ok"] is True
    shown = foundryd("inspect", keep, "--json")
    assert shown.code == 0, shown.err
    (variant,) = shown.json["variants"]
    assert (variant["name"], variant["world"], variant["graphs"]) == (str(Mesh(ep=8)), 8, 64)
    assert variant["held_out"] == figures["heldout_rank"]
    assert shown.json["stored_bytes"] == sizes


def test_a_person_sees_progress_and_a_table_and_nothing_stays(foundryd, traces):
    done = foundryd("demo", "--driver", "soft", "--ranks", "2", "--batch-sizes", "1", "--layers", "1", env=traces.env)
    assert done.code == 0, done.err
    assert "capturing as rank 0 of 2" in done.err
    assert "restoring and decoding" in done.err
    assert "as the reference" in done.out
    assert done.out.rstrip().endswith("ok")
    assert traces.nothing_is_left()
