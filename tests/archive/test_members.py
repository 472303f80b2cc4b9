# SPDX-License-Identifier: Apache-2.0
"""Members come out of a template as they went in, and cost next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.archive.dtypes import Records
from foundryd.archive.index import Index
from foundryd.archive.members import (
    GraphParts,
    TemplateReader,
    add_template,
    block_bytes,
    find_member,
    find_variant,
    graph_block,
    member_block,
    pack_template,
    split_block,
)
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import KINDS, stored_bytes
from foundryd.archive.writer import ArchiveWriter
from foundryd.errors import ArchiveFormatError, NotInArchiveError, UsageError

replace = msgspec.structs.replace


@given(st.integers(1, 8), st.integers(0, 30), st.integers(0, 2**32 - 1), st.floats(0, 1))
@settings(max_examples=100, deadline=None)
def test_packed_blocks_unpack_to_themselves(count: int, words: int, seed: int, share: float) -> None:
    random = np.random.default_rng(seed)
    blocks = np.repeat(random.integers(0, 256, (1, 4 * words), np.uint8), count, axis=0)
    blocks[random.random(blocks.shape) < share / 8] ^= 1
    packed = pack_template(list(blocks))
    assert packed.columns.shape == (len(packed.positions), count)
    assert np.all(np.diff(packed.positions.astype(np.int64)) > 0)
    for column, block in enumerate(blocks):
        found = packed.base.copy()
        found.view("<u4")[packed.positions // 4] += packed.columns[:, column]
        assert np.array_equal(found, block)
    # Nothing that all members share is stored for each of them.
    assert not packed.columns[:, 0].any()
    assert packed.columns.any(axis=1).all()


def test_blocks_that_are_no_template_are_refused() -> None:
    with pytest.raises(UsageError, match="at least one block"):
        pack_template([])
    with pytest.raises(UsageError, match="equally long and a multiple of 4"):
        pack_template([np.zeros(8, np.uint8), np.zeros(12, np.uint8)])
    with pytest.raises(UsageError, match="equally long and a multiple of 4"):
        pack_template([np.zeros(7, np.uint8)])


def same(one: GraphParts, other: GraphParts) -> bool:
    return len(one.children) == len(other.children) and all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for a, b in zip(one.walk(), other.walk(), strict=True)
        for name in ("nodes", "edges", "attributes", "params")
    )


def test_members_are_the_graphs_that_were_written(draft: Any, tmp_path: Path) -> None:
    with ArchiveReader.open(draft.write(tmp_path / "a.foundry")) as reader:
        variant = reader.index.variants[0]
        template = TemplateReader(reader, variant.templates[0])
        for column, graph in enumerate(draft.graphs):
            assert same(template.graph(column), graph)
            block = member_block(reader, variant, column)
            assert np.array_equal(block, graph_block(graph))
            assert np.array_equal(block, block_bytes(reader, variant, 0)) == (column == 0)
        # What is handed out may be written and belongs to nobody else.
        mine = template.graph(1)
        mine.params[:] = 0
        mine.nodes["function"] = 9
        mine.children[0].params[:] = 0
        assert same(template.graph(1), draft.graphs[1])


def test_members_are_found_in_any_order_of_columns(draft: Any, tmp_path: Path) -> None:
    order = [2, 0, 3, 1]
    path = draft.write(tmp_path / "a.foundry")
    with ArchiveReader.open(path) as reader, ArchiveWriter(tmp_path / "b.foundry") as writer:
        variant = reader.index.variants[0]
        for name in reader.sections:
            writer.add(name, reader.section(name))
        template = add_template(writer, [draft.graphs[member] for member in order], order)
        writer.finish(replace(reader.index, variants=[replace(variant, templates=[template])]))
    with ArchiveReader.open(tmp_path / "b.foundry") as reader:
        variant = reader.index.variants[0]
        for member, graph in enumerate(draft.graphs):
            assert np.array_equal(member_block(reader, variant, member), graph_block(graph))


def test_blocks_of_every_kind_have_their_bytes(draft: Any, tmp_path: Path) -> None:
    with ArchiveReader.open(draft.write(tmp_path / "a.foundry")) as reader:
        variant = reader.index.variants[0]
        assert np.array_equal(block_bytes(reader, variant, 1), graph_block(draft.graphs[1]))
        assert block_bytes(reader, variant, 2).tobytes() == draft.content
        assert block_bytes(reader, variant, 3).tobytes() == draft.variable
        assert block_bytes(reader, variant, 4).tobytes() == draft.comm_ops.tobytes()
        block_bytes(reader, variant, 4)[:] = 0  # a copy
        assert block_bytes(reader, variant, 4).tobytes() == draft.comm_ops.tobytes()
        with pytest.raises(NotInArchiveError, match="has 5 blocks, not number 5"):
            block_bytes(reader, variant, 5)


def test_a_block_is_split_as_it_was_joined(draft: Any) -> None:
    graph, other = draft.graphs[0], draft.graphs[1]
    assert same(split_block(graph_block(other), graph), other)
    with pytest.raises(UsageError, match="pass a block of that template"):
        split_block(np.append(graph_block(graph), np.zeros(4, np.uint8)), graph)


@pytest.mark.parametrize("part", ["edges", "attributes", "params", "nodes", "children", "child edges"])
def test_graphs_of_other_shapes_are_not_one_template(draft: Any, tmp_path: Path, part: str) -> None:
    graph = draft.graphs[1]
    parts = {name: getattr(graph, name) for name in ("nodes", "edges", "attributes", "params", "children")}
    if part == "edges":
        parts["edges"] = parts["edges"].copy()
        parts["edges"]["type"][0] ^= 1
    elif part == "attributes":
        parts["attributes"] = parts["attributes"].copy()
        parts["attributes"]["value"][0, 63] ^= 1
    elif part == "children":
        parts["children"] = ()
    elif part == "child edges":
        child = graph.children[0]
        parts["children"] = (GraphParts(child.nodes, graph.edges, child.attributes, child.params),)
    else:
        parts[part] = parts[part][:-4] if part == "params" else parts[part][:-1]
    with (
        ArchiveWriter(tmp_path / "a.foundry") as writer,
        pytest.raises(UsageError, match="member 5 differs from member 4"),
    ):
        add_template(writer, [draft.graphs[0], GraphParts(**parts)], [4, 5])


def test_templates_that_do_not_fit_are_refused(draft: Any, tmp_path: Path) -> None:
    with ArchiveReader.open(draft.write(tmp_path / "a.foundry")) as reader:
        variant = reader.index.variants[0]
        good = variant.templates[0]
        with pytest.raises(ArchiveFormatError, match="not those of"):
            TemplateReader(reader, replace(good, members=[0, 1]))
        with pytest.raises(ArchiveFormatError, match="points outside the words of a block"):
            TemplateReader(reader, replace(good, positions=good.columns, columns=good.columns, members=[0]))
        with pytest.raises(NotInArchiveError, match="has 4 graphs, not number 4"):
            member_block(reader, variant, 4)
        with pytest.raises(ArchiveFormatError, match="says template 0, which does not have it"):
            member_block(reader, replace(variant, templates=[replace(good, members=[])]), 0)


def test_variants_and_members_are_found_by_name_rank_and_key(sample: Path) -> None:
    with ArchiveReader.open(sample) as reader:
        index = reader.index
        variant = find_variant(index, "ep=8", 5)
        assert find_variant(index, "", 5) is variant
        assert [find_member(variant, ("decode", size)) for size in (1, 2, 4, 8)] == [0, 1, 2, 3]
        assert find_member(variant, ["decode", 4]) == 2
        for key in (("decode", 3), "decode", ("decode", True), ("decode", 1.0), ("decode",), None):
            with pytest.raises(NotInArchiveError, match="has no graph"):
                find_member(variant, key)
        with pytest.raises(NotInArchiveError, match="no variant 'ep=4', it has ep=8"):
            find_variant(index, "ep=4", 0)
        with pytest.raises(NotInArchiveError, match="a world of 8 and nothing for rank 8"):
            find_variant(index, "ep=8", 8)


def decode_graph(dtypes: Records, layers: int, batch_size: int, seed: int = 3) -> GraphParts:
    """A decode graph as engines capture it: words are addresses, counts and strides, some follow the batch size."""
    random = np.random.default_rng(seed)
    kinds = 15
    nodes = np.zeros(layers * kinds, dtypes.node)
    per_layer = random.integers(4, 40, kinds)  # words of each kernel's parameters
    scale = [random.choice([0, 0, 0, 1, 128, 4096, 12288], int(count)) for count in per_layer]
    first = [random.integers(0, 2**20, int(count), np.uint32) for count in per_layer]
    address = random.integers(0, 2**32, (layers, kinds), np.uint32)
    params = []
    for place in range(len(nodes)):
        layer, kind = divmod(place, kinds)
        words = (first[kind] + scale[kind] * batch_size).astype(np.uint32)
        words[:2] = (address[layer, kind], 0x6000)  # a pointer of its own
        params.append(words)
    sizes = np.array([words.nbytes for words in params])
    nodes["type"] = 0
    nodes["function"] = np.arange(len(nodes)) % kinds
    nodes["grid"][:] = np.stack([np.arange(len(nodes)) % kinds + batch_size, *np.ones((2, len(nodes)), int)], axis=1)
    nodes["block"][:] = (128, 1, 1)
    nodes["param_kind"] = 1
    nodes["param_bytes"] = sizes
    nodes["param_offset"] = np.cumsum(sizes) - sizes
    nodes["comm_group"] = nodes["child"] = 0xFFFFFFFF
    edges = np.zeros(len(nodes) - 1, dtypes.edge)
    edges["from"], edges["to"] = np.arange(len(nodes) - 1), np.arange(1, len(nodes))
    return GraphParts(nodes, edges, np.zeros(3, dtypes.attribute), np.concatenate(params).view(np.uint8))


@pytest.mark.parametrize(
    "sizes",
    [range(1, 65), [1, 2, 4, *range(8, 64 * 8 - 16, 8)]],
    ids=["1 to 64", "as engines choose them"],
)
def test_64_members_cost_at_most_half_a_template(
    tmp_path: Path, dtypes: Records, empty_index: Index, sizes: Any, make_draft: Callable[[], Any]
) -> None:
    graphs = [decode_graph(dtypes, 36, size) for size in list(sizes)[:64]]
    draft = make_draft()
    draft.graphs = graphs[:4]  # a variant to hang the template on
    with ArchiveWriter(tmp_path / "a.foundry") as writer:
        template = add_template(writer, graphs, list(range(64)))
        variant = replace(draft._variant(writer), templates=[template])
        writer.finish(replace(empty_index, variants=[variant]))
    with ArchiveReader.open(tmp_path / "a.foundry") as reader:
        stored = stored_bytes(reader)
        assert len(graphs) == 64
        assert stored["templates"] + stored["members"] <= 1.5 * stored["templates"]
        plain = sum(graph_block(graph).nbytes for graph in graphs)
        assert stored["templates"] + stored["members"] < plain / 50
        found = TemplateReader(reader, template)
        for column in (0, 17, 63):
            assert same(found.graph(column), graphs[column])


def test_sizes_add_up_to_the_file(sample: Path) -> None:
    with ArchiveReader.open(sample) as reader:
        sizes = stored_bytes(reader)
        assert tuple(sizes) == KINDS
        assert sum(sizes.values()) == sample.stat().st_size
        assert sizes["other"] == 0
        assert all(sizes[kind] > 0 for kind in KINDS if kind != "other")
