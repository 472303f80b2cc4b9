# SPDX-License-Identifier: Apache-2.0
"""Each thing that an archive may say wrongly about itself is found and named."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from foundryd.archive.format import image_section
from foundryd.archive.index import (
    Block,
    Communicator,
    Global,
    Index,
    Member,
    Symbol,
    Variant,
)
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import verify, violations
from foundryd.archive.writer import ArchiveWriter
from foundryd.errors import ArchiveFormatError, FoundrydError

replace = msgspec.structs.replace
BASE, STRIDE, NONE = 0x600000000000, 1 << 38, 0xFFFFFFFF
RESERVATIONS = 70  # where those of the first arena begin, in strides


def found_in(path: Path, deep: bool = True) -> list[str]:
    with ArchiveReader.open(path) as reader:
        reader.verify()
        return violations(reader, deep=deep)


def test_the_sample_has_no_violation(sample: Path) -> None:
    assert found_in(sample) == []
    with ArchiveReader.open(sample) as reader:
        verify(reader)


def test_memory_that_an_engine_mapped_lies_among_the_reservations_of_its_arena(draft: Any, tmp_path: Path) -> None:
    first, size = BASE + (RESERVATIONS + 8) * STRIDE, 8 * STRIDE
    for address in (first, first + size - 4096):
        draft.allocations["address"][2] = address
        assert found_in(draft.write(tmp_path / "a.foundry")) == []


# --- arrays: (what to change in the draft, part of the sentence) ------------------------------------------------------


def put(name: str, row: int, field: str, value: Any) -> Callable[[Any], None]:
    """Sets one field of one row of a table of the draft."""

    def change(draft: Any) -> None:
        getattr(draft, name)[field][row] = value

    return change


def node(row: int, field: str, value: Any) -> Callable[[Any], None]:
    """Sets one field of one node of every member."""

    def change(draft: Any) -> None:
        for graph in draft.graphs:
            graph.nodes[field][row] = value

    return change


def edge(row: int, field: str, value: Any) -> Callable[[Any], None]:
    def change(draft: Any) -> None:
        for graph in draft.graphs:
            graph.edges[field][row] = value

    return change


def overlap(draft: Any) -> None:
    draft.allocations["live"][2] = 1
    draft.allocations["bytes"][0] += 1


def shift_noise(draft: Any) -> None:
    draft.noise["offset"][0] -= 4


def noise_of(field: str, value: int) -> Callable[[Any], None]:
    return put("template_noise", 0, field, value)


def repeat_noise(draft: Any) -> None:
    draft.template_noise = np.repeat(draft.template_noise, 2)


def rule_in_noise(draft: Any) -> None:
    draft.noise, draft.rules = draft.noise[:0], draft.rules[:1]
    draft.template_noise["members"] = 4
    draft.template_noise["offset"] -= 1


def shift_rules(draft: Any) -> None:
    draft.rules["offset"][0] += 6


ARRAYS: dict[str, tuple[Callable[[Any], None], str]] = {
    "arena": (put("allocations", 0, "arena", 6), "allocation 0 is in an arena that does not exist, there are 6"),
    "below its arena": (put("allocations", 0, "address", BASE), "allocation 0 does not lie in its arena"),
    "beyond its arena": (put("allocations", 0, "bytes", STRIDE + 1), "allocation 0 does not lie in its arena"),
    "reserved by another arena": (
        put("allocations", 0, "address", BASE + RESERVATIONS * STRIDE),
        "allocation 0 does not lie in its arena",
    ),
    "behind the reservations": (
        put("allocations", 0, "address", BASE + (RESERVATIONS + 2 * 8) * STRIDE - 2048),
        "allocation 0 does not lie in its arena",
    ),
    "wild bytes": (put("allocations", 1, "bytes", 2**64 - 1), "allocation 1 does not lie in its arena"),
    "no bytes": (put("allocations", 1, "bytes", 0), "allocation 1 has no bytes"),
    "live flag": (put("allocations", 1, "live", 2), "allocation 1 has a flag"),
    "ordinal": (put("allocations", 2, "ordinal", 5), "arena 1: allocation 1 is out of the arena's sequence"),
    "overlap": (overlap, "allocation 0 overlaps allocation 2"),
    "op kind": (put("comm_ops", 0, "kind", 10), "operation 0 has a kind that does not exist"),
    "op communicator": (put("comm_ops", 1, "communicator", 2), "operation 1 has a communicator that is not one of 2"),
    "op peer": (put("comm_ops", 1, "peer", 2), "operation 1 has a peer or root outside its communicator"),
    "op group": (put("comm_ops", 1, "group", 1 << 20), "operation 1 has a group that is not below"),
    "two communicators": (put("comm_ops", 1, "group", 0), "group 0 has operations of two communicators"),
    "rule block": (put("rules", 2, "block", 5), "rule 2 has a block that is not one of 5"),
    "rule offset": (put("rules", 2, "offset", 1 << 20), "rule 2 reaches beyond the end of its block"),
    "wild rule offset": (put("rules", 2, "offset", 2**32 - 4), "rule 2 reaches beyond the end of its block"),
    "rule width": (put("rules", 2, "width", 3), "rule 2 has a width that is not 1, 2, 4 or 8"),
    "rule kind": (put("rules", 2, "kind", 4), "rule 2 has a kind that does not exist"),
    "rule coordinate": (put("rules", 0, "coordinate", 6), "rule 0 follows a coordinate that does not exist"),
    "rule reserved": (put("rules", 0, "reserved", 1), "rule 0 has reserved bits set"),
    "table entry": (lambda d: d.tables.__setitem__(8, 1 << 32), "rule 1 has a table entry beyond its width"),
    "rule table": (put("rules", 1, "table", 2), "rule 1 has a table of 8 ranks beyond the 9 entries"),
    "rule order": (put("rules", 0, "block", 2), "rule 0 is not wholly before the next one"),
    "rule on a fixed field": (
        put("rules", 0, "offset", 40),
        "rule 0 is in a part of a node that belongs to the template",
    ),
    "relocation block": (put("relocations", 0, "block", 9), "relocation 0 has a block that is not one of 5"),
    "relocation offset": (put("relocations", 0, "offset", 10**6), "relocation 0 reaches beyond the end of its block"),
    "relocation symbol": (put("relocations", 0, "symbol", 1), "relocation 0 has a symbol that is not one of 1"),
    "relocation on a node": (put("relocations", 0, "offset", 32), "relocation 0 is in a part of a node"),
    "node type": (node(0, "type", 6), "node 0 has a type that does not exist"),
    "node function": (node(1, "function", 2), "node 1 has a function that is not one of 2"),
    "function of a memset": (node(2, "function", 0), "node 2 has a function and is no kernel"),
    "empty grid": (node(0, "grid", (0, 1, 1)), "node 0 launches an empty grid or block"),
    "param kind": (node(2, "param_kind", 1), "node 2 has parameters of a kind that its type does not take"),
    "params of an empty node": (node(6, "param_bytes", 4), "node 6 has parameters of a kind"),
    "param bytes": (node(0, "param_bytes", 12), "node 0 has 12 bytes of parameters, and its function takes another"),
    "param range": (node(2, "param_offset", 40), "node 2 has parameters beyond the block of 64 bytes"),
    "wild param range": (node(2, "param_offset", 2**32 - 16), "node 2 has parameters beyond the block"),
    "shared params": (node(1, "param_offset", 8), "node 0 shares parameter bytes with node 1"),
    "attributes": (node(0, "attribute_first", 1), "node 0 has attributes beyond the 1 there are"),
    "wild attributes": (node(0, "attribute_count", 2**32 - 1), "node 0 has attributes beyond the 1 there are"),
    "comm group": (node(3, "comm_group", 7), "node 3 is a placeholder of a group that no operation has"),
    "group of a kernel": (node(0, "comm_group", 0), "node 0 has a communication group and is no placeholder"),
    "child": (node(5, "child", 1), "node 5 has a child that is not one of 1"),
    "child of a kernel": (node(0, "child", 0), "node 0 has a child and is no child node"),
    "unused child": (node(5, "type", 3), "has 1 children and 0 child nodes for them"),
    "edge end": (edge(0, "to", 7), "edge 0 has an end that is not one of 7 nodes"),
    "wild edge": (edge(0, "from", NONE), "edge 0 has an end that is not one of 7 nodes"),
    "cycle": (edge(4, "to", 1), "its edges form a cycle"),
    "loop": (edge(0, "to", 0), "its edges form a cycle"),
    "edge reserved": (edge(0, "reserved", 1), "edge 0 has reserved bytes set"),
    "noise block": (put("noise", 1, "block", 5), "run of noise 1 has a block that is not one of 5"),
    "noise offset": (put("noise", 1, "offset", 1 << 20), "run of noise 1 reaches beyond the end of its block"),
    "noise width": (put("noise", 0, "width", 0), "run of noise 0 has no bytes"),
    "noise order": (put("noise", 0, "block", 2), "run of noise 0 is not wholly before the next one"),
    "noise in a template": (put("noise", 0, "offset", 40), "run of noise 0 is in a part of a node that belongs to the"),
    "noise and rule": (shift_noise, "a rule and a run of noise are both at offset"),
    "noise and relocation": (put("noise", 0, "width", 5), "a relocation and a run of noise are both at offset"),
    "noise of no template": (
        noise_of("template", 1),
        "run of noise of a template 0 has a template that",
    ),
    "template noise width": (noise_of("width", 0), "run of noise of a template 0 has no bytes"),
    "template noise end": (noise_of("width", 2**32 - 1), "run of noise of a template 0 reaches beyond"),
    "template noise of nobody": (
        noise_of("members", 0),
        "run of noise of a template 0 is of no member",
    ),
    "template noise of many": (noise_of("members", 5), "template 0 is of no member, or of more than"),
    "template noise order": (repeat_noise, "run of noise of a template 0 is not wholly before the next one"),
    "template noise in a node": (
        noise_of("offset", 40),
        "run of noise of a template 0 is in a part of",
    ),
    "template noise and others": (noise_of("members", 3), "is noise in 3 of 4 members, and 2 have a"),
    "template noise and rule": (rule_in_noise, "is noise in 4 of 4 members, and 1 have a rule"),
    "rule and relocation": (shift_rules, "a rule and a relocation are both at offset"),
}


@pytest.mark.parametrize(("change", "sentence"), ARRAYS.values(), ids=ARRAYS.keys())
def test_wrong_tables_are_named(draft: Any, tmp_path: Path, change: Callable[[Any], None], sentence: str) -> None:
    change(draft)
    sentences = found_in(draft.write(tmp_path / "a.foundry"))
    assert any(sentence in text for text in sentences), sentences
    assert all(text.startswith("variant ep=8 (ranks 0 to 7): ") for text in sentences)
    with ArchiveReader.open(tmp_path / "a.foundry") as reader, pytest.raises(ArchiveFormatError, match="contradicts"):
        verify(reader)


# --- members: only a deep look finds these ----------------------------------------------------------------------------


def other_member(field: str, row: int, value: Any) -> Callable[[Any], None]:
    """Sets a field of a node of the third member only."""

    def change(draft: Any) -> None:
        draft.graphs[2].nodes[field][row] = value

    return change


MEMBERS: dict[str, tuple[Callable[[Any], None], str]] = {
    "function": (other_member("function", 0, 2), "gives column 2 the impossible function 2"),
    "grid": (other_member("grid", 0, (0, 1, 1)), "gives column 2 the impossible grid 0"),
    "group": (other_member("comm_group", 3, 5), "gives column 2 the impossible comm_group 5"),
    "group of a kernel": (other_member("comm_group", 0, 0), "gives column 2 the impossible comm_group 0"),
    "function of a memset": (other_member("function", 2, 0), "gives column 2 the impossible function 0"),
}


@pytest.mark.parametrize(("change", "sentence"), MEMBERS.values(), ids=MEMBERS.keys())
def test_wrong_members_are_named(draft: Any, tmp_path: Path, change: Callable[[Any], None], sentence: str) -> None:
    change(draft)
    path = draft.write(tmp_path / "a.foundry")
    assert any(sentence in text for text in found_in(path)), found_in(path)
    assert found_in(path, deep=False) == []


def test_members_differ_only_where_they_may(draft: Any, tmp_path: Path) -> None:
    draft.graphs[1].nodes["param_offset"][0] = 4
    assert any(
        "position" in text and "belongs to the template" in text for text in found_in(draft.write(tmp_path / "a"))
    )


# --- the index --------------------------------------------------------------------------------------------------------


def variant(**change: Any) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, **change)


def template(**change: Any) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, templates=[replace(v.templates[0], **change)])


def rank_class(**change: Any) -> Callable[[Variant], Variant]:
    return lambda v: replace(v, rank_class=replace(v.rank_class, **change))


def item(name: str, place: int, value: Any) -> Callable[[Variant], Variant]:
    """Replaces one element of a list of the variant, or fields of it where ``value`` is a dict."""

    def change(v: Variant) -> Variant:
        rows = list(getattr(v, name))
        rows[place] = replace(rows[place], **value) if isinstance(value, dict) else value
        return replace(v, **{name: rows})

    return change


def deeply(depth: int) -> Callable[[Variant], Variant]:
    def change(v: Variant) -> Variant:
        child = v.templates[0].children[0]
        for _ in range(depth):
            child = replace(child, children=[child])
        return replace(v, templates=[replace(v.templates[0], children=[child])])

    return change


INDEX: dict[str, tuple[Callable[[Variant], Variant], str]] = {
    "world": (variant(world=4), "has a world of 4 ranks, and its mesh has 8"),
    "no world": (variant(world=0), "has a world of 0 ranks"),
    "wild world": (variant(world=2**64 - 1), "has a world of 18446744073709551615 ranks"),
    "mesh": (variant(name="qq=8"), "has a name that is no mesh"),
    "wild mesh": (variant(name="ep=" + "9" * 5000), "has a name that is no mesh"),
    "ranks": (rank_class(ranks=[0, 1, 2, 4, 7, 8, 3]), "has a rank that is not in its world of 8"),
    "no ranks": (rank_class(ranks=[]), "has no ranks"),
    "rank twice": (rank_class(ranks=[0, 1, 2, 3, 4, 7, 7]), "names a rank twice"),
    "captured": (rank_class(captured=[0, 9]), "was captured as no rank, or as one that it does not have"),
    "control": (rank_class(control=3), "has the control 3, never captured"),
    "held out": (rank_class(held_out=1), "has the held-out rank 1, which it does not have or which inference saw"),
    "arenas": (variant(arena_base=2**63, arena_stride=2**62), "do not fit an address space"),
    "negative arena": (variant(arena_base=-1), "do not fit an address space"),
    "no stride": (variant(arena_stride=0), "do not fit an address space"),
    "allocations": (variant(allocations="none"), "allocations are said to be in section 'none'"),
    "other struct": (lambda v: replace(v, allocations=v.templates[0].attributes), "not a multiple of the 32 bytes"),
    "content range": (item("contents", 0, {"address": BASE}), "in no live allocation of it"),
    "content of freed memory": (
        item("contents", 0, {"address": BASE + STRIDE + 4096, "arena": 1}),
        "in no live allocation of it",
    ),
    "content arena": (item("contents", 0, {"arena": 1}), "in no live allocation of it"),
    "content size": (item("contents", 0, {"bytes": 8}), "has 8 bytes and its section 320"),
    "wild content": (item("contents", 0, {"address": 2**64 - 1}), "which is no range"),
    "negative content": (item("contents", 0, {"address": -1}), "which is no range"),
    "content section": (item("contents", 0, {"section": "x"}), "its bytes are said to be in section 'x'"),
    "content block": (item("contents", 0, {"block": 9}), "content 0: says block 9, and there are 5 blocks"),
    "content block kind": (item("contents", 0, {"block": 1}), "says block 1, which is member 1"),
    "content twice": (lambda v: replace(v, contents=v.contents * 2), "inside the content before it"),
    "function module": (item("functions", 0, {"module": 2}), "function 0: is in module 2, and there are 2 modules"),
    "negative module": (item("functions", 0, {"module": -1}), "function 0: is in module -1"),
    "function name": (item("functions", 0, {"name": ""}), "function 0: has the impossible name ''"),
    "function params": (item("functions", 0, {"param_bytes": 40000}), "takes 40000 bytes of parameters"),
    "wild params": (item("functions", 0, {"param_bytes": 2**64 - 1}), "bytes of parameters, and a kernel takes"),
    "function fields": (
        item("functions", 0, {"fields": [(0, 8), (4, 8)]}),
        "function 0: has a parameter of 8 bytes at 4",
    ),
    "field range": (item("functions", 0, {"fields": [(8, 16)]}), "function 0: has a parameter of 16 bytes at 8"),
    "setting": (item("functions", 0, {"settings": [(1, 2**40)]}), "has a setting that is no 32-bit number"),
    "api": (item("modules", 0, {"api": 2}), "module 0: says load API 2"),
    "no image": (item("modules", 0, {"digests": []}), "module 0: has no image"),
    "digest": (item("modules", 0, {"digests": ["xyz"]}), "which is not 64 hexadecimal digits"),
    "image": (item("modules", 0, {"digests": ["0" * 64]}), "its images are said to be in section"),
    "by rank": (item("modules", 1, {"by_rank": None}), "does not say which rank loads which"),
    "by rank length": (item("modules", 1, {"by_rank": [0] * 7}), "gives images to 7 ranks, and the world has 8"),
    "by rank place": (item("modules", 1, {"by_rank": [2] * 8}), "gives some rank an image that is not one of its 2"),
    "captured image": (item("modules", 1, {"by_rank": [-1] * 8}), "has no image for a rank that was captured"),
    "global block": (item("modules", 0, {"globals": [Global("state", 9)]}), "global state: says block 9"),
    "global block kind": (item("modules", 0, {"globals": [Global("state", 1)]}), "which is member 1"),
    "symbol": (item("symbols", 0, Symbol(5, "x")), "symbol 0: is in module 5"),
    "nodes": (template(nodes="none"), "its nodes are said to be in section 'none'"),
    "columns": (template(columns="none"), "its columns are said to be in section 'none'"),
    "positions": (lambda v: template(positions=v.comm_ops)(v), "position"),
    "columns size": (template(members=[0, 1, 2]), "bytes of columns, and"),
    "member place": (template(members=[0, 1, 2, 9]), "template 0: has member 9, and there are 4 members"),
    "member twice": (template(members=[0, 1, 2, 2]), "has member 2, which template 0 has too"),
    "no members": (template(members=[]), "template 0: has no members"),
    "child members": (
        lambda v: template(children=[replace(v.templates[0].children[0], members=[0])])(v),
        "template 0: child 0: has members of its own",
    ),
    "children in children": (deeply(8), "has children more than 8 deep"),
    "member template": (item("members", 1, {"template": 1}), "member 1: says template 1, and it is template 0"),
    "member key": (item("members", 1, Member(["decode", 1], 0)), "member 1: has the key ['decode', 1], as member 0"),
    "member key type": (item("members", 1, Member({"a": 1}, 0)), "cannot name a graph"),
    "flags": (item("members", 1, {"instantiate_flags": -1}), "member 1: has the impossible flags -1"),
    "communicator size": (item("communicators", 0, Communicator(9, ["ep"])), "communicator 0: has 9 ranks"),
    "wild communicator": (item("communicators", 0, Communicator(2**64 - 1, ["ep"])), "communicator 0: has 184"),
    "communicator of other axes": (item("communicators", 0, Communicator(8, ["tp"])), "and the axes ['tp'] have 1"),
    "communicator axes": (item("communicators", 0, Communicator(8, ["xx"])), "communicator 0: spans the axes ['xx']"),
    "communicator list": (item("communicators", 1, Communicator(2, None, [0, 0])), "which are not the 2 that it lists"),
    "communicator rank": (item("communicators", 1, Communicator(2, None, [0, 8])), "which are not the 2 that it lists"),
    "communicators of one place": (
        item("communicators", 1, Communicator(2, None, [0, 4], 1)),
        "places [1, 1] in the order",
    ),
    "communicator before the first": (
        item("communicators", 1, Communicator(2, None, [0, 4], -1)),
        "places [1, -1] in the order",
    ),
    "unknown members": (item("communicators", 1, Communicator(2, None)), "communicator 1: is used, and its ranks"),
    "no communicators": (variant(communicators=[]), "operation 0 has a communicator that is not one of 0"),
    "block index": (item("blocks", 0, Block("member", 4)), "block 0: is member 4, and there are 4"),
    "block twice": (item("blocks", 0, Block("member", 1)), "block 1: is member 1, as a block before it is"),
    "block section": (item("blocks", 0, Block("member", 0, "x")), "made from its template, and names a section"),
    "global section": (item("blocks", 3, Block("global", 0)), "block 3: its bytes are said to be in section ''"),
    "ops section": (item("blocks", 4, Block("comm_ops", 0, "x")), "block 4: names section 'x'"),
    "rules": (variant(rules=""), "its rules are said to be in section ''"),
    "tables": (variant(tables="none"), "its tables are said to be in section 'none'"),
}


@pytest.mark.parametrize(("change", "sentence"), INDEX.values(), ids=INDEX.keys())
def test_wrong_indexes_are_named(
    draft: Any, tmp_path: Path, change: Callable[[Variant], Variant], sentence: str
) -> None:
    draft.edit = change
    sentences = found_in(draft.write(tmp_path / "a.foundry"))
    assert any(sentence in text for text in sentences), sentences


def rewrite(path: Path, name: str, change: Callable[[bytes], bytes]) -> Path:
    """Another archive with the same index, in which one section has other bytes."""
    other = path.with_name("other.foundry")
    with ArchiveReader.open(path) as reader, ArchiveWriter(other) as writer:
        for section in reader.sections:
            data = bytes(reader.section(section))
            writer.add(section, change(data) if section == name else data, "zstd")
        writer.finish(reader.index)
    return other


def test_an_image_is_the_one_it_is_named_for(draft: Any, tmp_path: Path) -> None:
    path = draft.write(tmp_path / "a.foundry")
    with ArchiveReader.open(path) as reader:
        name = image_section(reader.index.variants[0].modules[0].digests[0])
    (sentence,) = found_in(rewrite(path, name, lambda data: data[:-1] + b"!"))
    assert sentence.startswith(f"section {name} holds an image with another digest")


def test_the_first_member_is_the_template(draft: Any, tmp_path: Path) -> None:
    path = draft.write(tmp_path / "a.foundry")
    with ArchiveReader.open(path) as reader:
        columns = reader.index.variants[0].templates[0].columns
    (sentence,) = found_in(rewrite(path, columns, lambda data: b"\1" + data[1:]))
    assert "template 0: position 0 does not leave the template's word to its first member" in sentence


def test_rank_classes_of_a_variant_are_apart_and_recordings_have_one_rank(draft: Any, tmp_path: Path) -> None:
    draft.edit_index = lambda index: replace(index, variants=index.variants * 2)
    sentences = found_in(draft.write(tmp_path / "a.foundry"))
    assert any("has rank [0], which another rank class of it has too" in text for text in sentences)
    draft.edit_index = lambda index: index
    draft.kind = "recording"
    sentences = found_in(draft.write(tmp_path / "a.foundry"))
    assert any("is a recording of more than one rank" in text for text in sentences)
    assert any("is a recording and has rules" in text for text in sentences)


def test_an_odd_number_of_parameter_bytes_is_named(draft: Any, tmp_path: Path) -> None:
    path = draft.write(tmp_path / "a.foundry")
    with ArchiveReader.open(path) as reader:
        params = reader.index.variants[0].templates[0].params
    sentences = found_in(rewrite(path, params, lambda data: data + b"x"))
    assert any("not a multiple of 4" in text for text in sentences)


def strange(rng: random.Random, value: Any) -> Any:
    """Something else of the same kind, usually impossible."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return rng.choice([-1, 0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1, value + 1, -value])
    if isinstance(value, str):
        return rng.choice(["", "none", value[:-1], "x" * 300, "\0", "ep=3"])
    return value


def mutate(rng: random.Random, value: Any) -> Any:
    """``value`` with one leaf, or the length of one list, changed."""
    if isinstance(value, dict) and value:
        key = rng.choice(sorted(value))
        return value | {key: mutate(rng, value[key])}
    if isinstance(value, list) and value:
        place = rng.randrange(len(value))
        if rng.random() < 0.2:
            return rng.choice([value[:place], value * 2, []])
        return [*value[:place], mutate(rng, value[place]), *value[place + 1 :]]
    return strange(rng, value)


def test_no_index_makes_verification_fail_otherwise(sample: Path, tmp_path: Path) -> None:
    rng = random.Random(5)
    with ArchiveReader.open(sample) as reader:
        raw = reader.raw_index()
        outcomes = {"refused": 0, "violations": 0, "sane": 0}
        for _ in range(400):
            changed = raw
            for _ in range(rng.randint(1, 3)):
                changed = changed | {"variants": mutate(rng, changed["variants"])}
            try:
                index = msgspec.convert(changed, Index)
            except msgspec.ValidationError:
                outcomes["refused"] += 1
                continue
            reader.index = index
            try:
                outcomes["violations" if violations(reader) else "sane"] += 1
            except FoundrydError:
                pytest.fail("violations are returned, not raised")
    assert outcomes["violations"] > 200


def test_no_table_makes_verification_fail_otherwise(make_draft: Callable[[], Any], tmp_path: Path) -> None:
    rng = random.Random(6)
    found = 0
    for _ in range(150):
        draft = make_draft()
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(["allocations", "comm_ops", "rules", "relocations", "nodes", "edges"])
            tables = (
                [getattr(graph, name) for graph in draft.graphs]
                if name in ("nodes", "edges")
                else [getattr(draft, name)]
            )
            field = rng.choice(tables[0].dtype.names)
            row = rng.randrange(len(tables[0]))
            base = tables[0][field].dtype
            bits = rng.choice([0, 1, 7, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
            value = np.frombuffer(bits.to_bytes(8, "little")[: base.itemsize], base)[0]
            for table in tables:
                table[field][row] = value
        found += bool(found_in(draft.write(tmp_path / "a.foundry")))
    assert found > 60
