# SPDX-License-Identifier: Apache-2.0
"""What was written comes back, from equal input as equal bytes."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.archive.dtypes import noise_dtype
from foundryd.archive.format import ALIGNMENT, digest
from foundryd.archive.identity import MachineIdentity
from foundryd.archive.index import Index
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.errors import NotInArchiveError, UsageError

names = st.text(st.characters(categories=["L", "N", "P"]), min_size=1, max_size=40).filter(
    lambda text: len(text.encode()) <= 255
)
payloads = st.one_of(
    st.binary(max_size=300),
    st.integers(0, 20000).map(lambda size: bytes(size)),
    st.builds(lambda unit, times: unit * times, st.binary(min_size=1, max_size=9), st.integers(0, 3000)),
)
sections = st.dictionaries(names, st.tuples(payloads, st.sampled_from(["raw", "zstd"])), max_size=6)
values = st.one_of(st.text(max_size=20), st.integers(-(2**63), 2**64 - 1), st.lists(st.text(max_size=5), max_size=3))
notes = st.dictionaries(
    st.text(max_size=8),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), st.text()),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=4), inner, max_size=4)),
        max_leaves=10,
    ),
    max_size=4,
)


@given(sections, st.dictionaries(names, values, max_size=5), notes)
@settings(max_examples=80, deadline=None)
def test_sections_and_index_round_trip(
    tmp_path_factory: pytest.TempPathFactory, content: dict, facts: dict, figures: dict
) -> None:
    path = tmp_path_factory.mktemp("round") / "a.foundry"
    index = Index("archive", "2026-01-01T00:00:00Z", "test", MachineIdentity.of(facts).fields, [], figures)
    with ArchiveWriter(path) as writer:
        for name, (data, codec) in content.items():
            writer.add(name, data, codec)
        writer.finish(index)
    with ArchiveReader.open(path) as reader:
        reader.verify()
        assert reader.index == index
        assert list(reader.sections) == list(content)
        for name, (data, codec) in content.items():
            assert reader.section(name) == data
            entry = reader.entry(name)
            assert entry.offset % ALIGNMENT == 0
            assert entry.codec == (codec if data else "raw")
            assert entry.digest == digest(data)


@given(
    st.integers(0, 40),
    st.integers(0, 20),
    st.sampled_from(["random", "arithmetic", "equal"]),
    st.integers(0, 2**32 - 1),
)
@settings(max_examples=120, deadline=None)
def test_columns_round_trip(
    tmp_path_factory: pytest.TempPathFactory, empty_index: Index, rows: int, cols: int, form: str, seed: int
) -> None:
    random = np.random.default_rng(seed)
    first, step = random.integers(0, 2**32, (2, rows, 1), dtype=np.uint32)
    matrix = {
        "random": lambda: random.integers(0, 2**32, (rows, cols), dtype=np.uint32),
        "arithmetic": lambda: first + step * np.arange(cols, dtype=np.uint32),  # wraps
        "equal": lambda: np.broadcast_to(first, (rows, cols)),
    }[form]()
    path = tmp_path_factory.mktemp("columns") / "a.foundry"
    with ArchiveWriter(path) as writer:
        name = writer.put_matrix("columns", matrix)
        writer.finish(empty_index)
    with ArchiveReader.open(path) as reader:
        reader.verify()
        found = reader.array(name, "<u4").reshape(rows, cols)
        assert np.array_equal(found, matrix)
        assert not found.flags.writeable


def test_columns_make_arithmetic_members_nearly_free(tmp_path: Path, empty_index: Index) -> None:
    # 64 members whose words grow with the batch size by steps that repeat over the layers of a model.
    random = np.random.default_rng(1)
    rows, cols = 36 * 40, 64
    step = np.tile(random.choice([1, 4, 128, 4096, 12288, 36864], 40), 36).astype(np.uint32)
    first = random.integers(0, 2**32, rows, dtype=np.uint32)
    matrix = first[:, None] + step[:, None] * np.arange(cols, dtype=np.uint32)
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        one = writer.put_matrix("one", matrix[:, :1])
        all_members = writer.put_matrix("all", matrix)
        writer.finish(empty_index)
    with ArchiveReader.open(tmp_path / "a.foundry") as reader:
        assert reader.entry(all_members).stored < matrix.nbytes / 50
        assert reader.entry(all_members).stored < 1.1 * reader.entry(one).stored


@pytest.mark.parametrize("count", [0, 1, 2, 5000])
@pytest.mark.parametrize("fast", [False, True])
def test_rows_come_back_as_they_were_put_in(tmp_path: Path, empty_index: Index, count: int, fast: bool) -> None:
    random = np.random.default_rng(count)
    rows = np.zeros(count, noise_dtype)
    for field in noise_dtype.names:
        rows[field] = random.integers(0, 2**32, count, dtype=np.uint32)
    with ArchiveWriter(tmp_path / "a.foundry", fast=fast) as writer:
        name = writer.put_rows("noise", rows)
        writer.finish(empty_index)
    with ArchiveReader.open(tmp_path / "a.foundry") as reader:
        reader.verify()
        assert np.array_equal(reader.array(name, noise_dtype), rows)
        assert reader.header.min_reader == (3 if count else 0)


def test_rows_that_repeat_in_every_graph_cost_little_more_than_one_graphs(tmp_path: Path, empty_index: Index) -> None:
    random = np.random.default_rng(1)
    one = np.zeros(5000, noise_dtype)
    one["offset"] = np.cumsum(random.integers(8, 40, len(one)))
    one["width"] = random.integers(1, 5, len(one))
    rows = np.tile(one, 64)
    rows["block"] = np.repeat(np.arange(64), len(one))
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        first, every = writer.put_rows("noise", one), writer.put_rows("noise", rows)
        writer.finish(empty_index)
    with ArchiveReader.open(tmp_path / "a.foundry") as reader:
        assert reader.entry(every).stored < 1.2 * reader.entry(first).stored


def test_equal_input_gives_equal_bytes(tmp_path: Path, make_draft) -> None:
    one = make_draft().write(tmp_path / "one.foundry").read_bytes()
    other = make_draft().write(tmp_path / "other.foundry").read_bytes()
    assert one == other


def test_equal_bytes_under_one_name_are_stored_once(tmp_path: Path, empty_index: Index) -> None:
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        writer.add("x", b"same", "zstd")
        writer.add("x", bytearray(b"same"))
        with pytest.raises(UsageError, match="section x is already there"):
            writer.add("x", b"other")
        assert writer.put("kind", b"same") == writer.put("kind", b"same")
        assert writer.add_image(b"image") == digest(b"image").hex()
        writer.finish(empty_index)
    with ArchiveReader.open(tmp_path / "a.foundry") as reader:
        assert len(reader.sections) == 3


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "n" * 256, "é" * 128])
def test_impossible_names_are_refused(tmp_path: Path, name: str) -> None:
    with ArchiveWriter(tmp_path / "a.foundry") as writer, pytest.raises(UsageError, match="cannot name a section"):
        writer.add(name, b"")


def test_arrays_are_views_of_the_file_where_raw(tmp_path: Path, empty_index: Index) -> None:
    rows = np.array([(1, 2), (3, 4)], [("a", "<u4"), ("b", "<u8")])
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        writer.add("rows", rows)
        writer.add("none", rows[:0])
        writer.finish(empty_index)
    reader = ArchiveReader.open(tmp_path / "a.foundry")
    found, again = reader.array("rows", rows.dtype), reader.array("rows", rows.dtype)
    assert np.shares_memory(found, again)
    assert len(reader.array("none", rows.dtype)) == 0
    with pytest.raises(ValueError, match="read-only"):
        found["a"][0] = 9
    with pytest.raises(TypeError):
        reader.section("rows")[0] = 9
    with pytest.raises(NotInArchiveError, match="no section 'other'"):
        reader.section("other")
    reader.close()
    assert np.array_equal(found, rows)  # still mapped


def test_closing_gives_the_descriptor_back(sample: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with ArchiveReader.open(sample) as reader:
            reader.verify()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_share_a_reader(sample: Path) -> None:
    with ArchiveReader.open(sample) as reader:
        expected = {name: digest(reader.section(name)) for name in reader.sections}
    with ArchiveReader.open(sample) as reader:
        wrong: list[str] = []

        def read() -> None:
            for _ in range(20):
                wrong.extend(name for name, value in expected.items() if digest(reader.section(name)) != value)

        threads = [threading.Thread(target=read) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert not wrong
