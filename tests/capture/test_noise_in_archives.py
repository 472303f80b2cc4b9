# SPDX-License-Identifier: Apache-2.0
"""Garbage costs an archive next to nothing, and everything else stays exact."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd._native import _rankpatch
from foundryd.archive.dtypes import noise_dtype, template_noise_dtype
from foundryd.archive.members import member_block
from foundryd.archive.noise import by_template, noise_bytes
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import verify
from foundryd.archive.writer import ArchiveWriter
from foundryd.capture.merge import merge, split_noise, write_archive
from foundryd.capture.recording import (
    Proofs,
    Recording,
    load,
    make_index,
    pack,
    save,
    unpack,
    unpack_ranked,
)
from foundryd.errors import CaptureError
from foundryd.rankpatch.infer import RankView
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.noise import noise_candidates, span_bytes
from foundryd.rankpatch.rules import RuleKind

sys.path.insert(0, str(Path(__file__).parent))
import scripted_engine

GRAPHS, LEFT = 64, slice(16, 17 + scripted_engine.UNREAD)


def captured(seed: int) -> Recording:
    """A rank alone with graphs of one template, each with its own number and its own garbage."""
    generator = np.random.default_rng(seed)
    made = scripted_engine.recording(0, Mesh.parse("tp=1"))
    (graph,) = made.graphs
    for number in range(GRAPHS):
        params = graph.params.copy()
        params[8] = number
        params[LEFT] = generator.integers(0, 256, LEFT.stop - LEFT.start, np.uint8)
        made.graphs.append(replace(graph, key=("g", number), params=params))
    made.graphs = made.graphs[1:]
    return made


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("noise") / "a.foundry"
    rank, control = captured(1), captured(2)
    fields = rank.fields()[:GRAPHS]
    views = [RankView(0, r.blocks()[:GRAPHS]) for r in (control, rank)]
    control.proofs = Proofs(noise=noise_candidates(*views, fields))
    write_archive(path, [merge([rank], control, [0])])
    return path


def test_a_member_s_garbage_is_that_of_its_template_and_all_else_its_own(archive: Path) -> None:
    rank = captured(1)
    with ArchiveReader.open(archive) as reader:
        verify(reader)
        (variant,) = reader.index.variants
        assert reader.array(variant.rules, _rankpatch.rule_dtype).size == 0
        start = rank.graphs[0].param_start()
        for place, graph in enumerate(rank.graphs):
            block = member_block(reader, variant, place)
            expected = graph.block
            # Where the control happened to have the same byte it is no noise, and stays.
            same = captured(2).graphs[place].params[LEFT] == graph.params[LEFT]
            expected[start:][LEFT] = np.where(same, graph.params[LEFT], rank.graphs[0].params[LEFT])
            assert np.array_equal(block, expected), place


def test_garbage_takes_hardly_any_room(archive: Path) -> None:
    with ArchiveReader.open(archive) as reader:
        (variant,) = reader.index.variants
        assert not variant.noise
        stored = reader.entry(variant.templates[0].columns).stored + reader.entry(variant.template_noise).stored
    # A byte in 256 is not known for garbage, since the control has it in common with the rank by chance.
    assert stored < GRAPHS * (LEFT.stop - LEFT.start) / 8


def test_an_archive_says_in_how_many_members_a_byte_is_noise(archive: Path) -> None:
    ours, theirs = captured(1), captured(2)
    differ = [a.block != b.block for a, b in zip(ours.graphs, theirs.graphs, strict=True)]
    with ArchiveReader.open(archive) as reader:
        (variant,) = reader.index.variants
        noise = reader.array(variant.template_noise, template_noise_dtype)
    counts = np.zeros(len(differ[0]), int)
    for template, offset, width, members in noise.tolist():
        assert template == 0
        counts[offset : offset + width] += members
    assert np.array_equal(counts, np.sum(differ, axis=0))
    assert noise_bytes(noise) == np.sum(differ)


def test_a_copy_of_a_variant_has_the_same_members_and_the_same_noise(archive: Path, tmp_path: Path) -> None:
    with ArchiveReader.open(archive) as reader, ArchiveWriter(tmp_path / "copy.foundry") as writer:
        (variant,) = reader.index.variants
        copied = pack(writer, unpack(reader, variant), unpack_ranked(reader, variant))
        writer.finish(make_index("archive", reader.index.identity, [copied], {}))
        assert copied.templates == variant.templates
        assert copied.template_noise == variant.template_noise
        assert not copied.noise
    with ArchiveReader.open(tmp_path / "copy.foundry") as reader:
        verify(reader)
    with ArchiveReader.open(archive) as reader, ArchiveWriter(tmp_path / "other.foundry") as writer:
        ranked = unpack_ranked(reader, variant)
        ranked.template_noise = (ranked.template_noise[0], [list(range(GRAPHS))[::-1]])
        with pytest.raises(CaptureError, match="its noise fits no more"):
            pack(writer, unpack(reader, variant), ranked)
        writer.abort()


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 30), st.integers(1, 6)), max_size=40),
    st.permutations(range(6)),
    st.integers(0, 6),
)
def test_noise_of_members_is_counted_by_the_byte(drawn: list[tuple[int, int, int]], order: list[int], cut: int) -> None:
    spans = {(block, 8 * at): width for block, at, width in drawn}  # of one block none over another
    noise = np.array([(*at, spans[at]) for at in sorted(spans)], noise_dtype)
    templates = [order[:cut], order[cut:]]
    expected = np.zeros((2, 300), int)
    for block, offset, width in noise.tolist():
        expected[int(block in order[cut:]), offset : offset + width] += 1
    runs = by_template(noise, templates)
    counts = np.zeros_like(expected)
    for template, offset, width, members in runs.tolist():
        assert members > 0
        counts[template, offset : offset + width] += members
    assert np.array_equal(counts, expected)
    where = list(zip(runs["template"].tolist(), runs["offset"].tolist(), strict=True))
    assert where == sorted(set(where))
    assert noise_bytes(runs) == noise_bytes(noise)


def test_what_a_control_proved_comes_back_whole_however_much_it_is(tmp_path: Path) -> None:
    made = captured(1)
    noise = noise_candidates(*[RankView(0, captured(s).blocks()[:GRAPHS]) for s in (1, 2)], made.fields()[:GRAPHS])
    made.proofs = Proofs([5, 1 << 40], noise, noise[::2].copy(), True)
    save(made, tmp_path / "r")
    back = load(tmp_path / "r")
    assert back.proofs is not None
    assert (back.proofs.dead, back.proofs.varied) == ([5, 1 << 40], True)
    assert np.array_equal(back.proofs.noise, noise)
    assert np.array_equal(back.proofs.strays, noise[::2])
    assert "proofs" not in back.notes


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40), st.booleans()), unique_by=lambda r: r[:2], max_size=60)
)
def test_runs_have_exactly_the_bytes_of_the_rules(drawn: list[tuple[int, int, bool]]) -> None:
    rules = np.zeros(len(drawn), _rankpatch.rule_dtype)
    for row, (block, at, noisy) in zip(rules, sorted(drawn), strict=True):
        row["block"], row["offset"], row["width"] = block, 4 * at, 4
        row["kind"] = RuleKind.NOISE if noisy else RuleKind.AFFINE
    needed, runs = split_noise(rules)
    assert (needed["kind"] == RuleKind.AFFINE).all()
    assert len(needed) == sum(not noisy for *_, noisy in drawn)
    noise = rules[rules["kind"] == RuleKind.NOISE]
    for block in range(3):
        mine, theirs = runs[runs["block"] == block], noise[noise["block"] == block]
        assert np.array_equal(span_bytes(mine["offset"], mine["width"]), span_bytes(theirs["offset"], theirs["width"]))
        assert (mine["offset"][1:] > mine["offset"][:-1] + mine["width"][:-1]).all()
