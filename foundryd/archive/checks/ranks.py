# SPDX-License-Identifier: Apache-2.0
"""Communication, blocks, and what is patched in them for a rank."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from foundryd.archive.checks.findings import Findings, in_range
from foundryd.archive.checks.graphs import Shape
from foundryd.archive.dtypes import noise_dtype, template_noise_dtype
from foundryd.archive.index import Block, Variant
from foundryd.archive.noise import count_bytes
from foundryd.errors import UsageError
from foundryd.rankpatch.mesh import AXES, Coordinate, Mesh

_GROUPS = 1 << 20  # a placeholder's number is a place in an array at restore
_RELOCATED = 8  # bytes of an address


def check_class(found: Findings, variant: Variant) -> None:
    """World, mesh and rank class of a variant."""
    world = variant.world
    if not found.need(1 <= world <= 1 << 20, f"has a world of {world} ranks"):
        return
    mesh = _mesh(variant)
    if mesh is None:
        found.add(f"has a name that is no mesh, {variant.name[:80]!r}")
    else:
        found.need(mesh.world == world, f"has a world of {world} ranks, and its mesh has {mesh.world}")
    ranks = variant.rank_class
    found.need(bool(ranks.ranks), "has no ranks")
    found.need(len(set(ranks.ranks)) == len(ranks.ranks), "names a rank twice")
    found.need(all(in_range(rank, world) for rank in ranks.ranks), f"has a rank that is not in its world of {world}")
    mine = set(ranks.ranks)
    found.need(
        bool(ranks.captured) and set(ranks.captured) <= mine, "was captured as no rank, or as one that it does not have"
    )
    found.need(
        ranks.control is None or ranks.control in ranks.captured, f"has the control {ranks.control}, never captured"
    )
    found.need(
        ranks.held_out is None or ranks.held_out in mine - set(ranks.captured),
        f"has the held-out rank {ranks.held_out}, which it does not have or which inference saw",
    )


def _mesh(variant: Variant) -> Mesh | None:
    """The mesh that the variant is named for, None if that is none."""
    try:
        return Mesh.parse(variant.name)
    except (UsageError, ValueError):
        return None


def check_communication(found: Findings, variant: Variant) -> npt.NDArray[np.uint32]:
    """Communicators and operations; returns the placeholders that the operations stand behind."""
    mesh = _mesh(variant)
    for number, communicator in enumerate(variant.communicators):
        here = found.inside(f"communicator {number}")
        here.need(
            1 <= communicator.size <= variant.world, f"has {communicator.size} ranks, and the world has {variant.world}"
        )
        if communicator.axes is not None:
            spans = here.need(
                set(communicator.axes) <= set(AXES) and len(set(communicator.axes)) == len(communicator.axes),
                f"spans the axes {communicator.axes}, which are not each one of {', '.join(AXES)}",
            )
            if spans and mesh is not None:
                size = len(mesh.group(0, tuple(communicator.axes)))
                here.need(
                    communicator.size == size,
                    f"has {communicator.size} ranks, and the axes {communicator.axes} have {size}",
                )
        if communicator.members is not None:
            members = communicator.members
            here.need(
                len(set(members)) == len(members) == communicator.size
                and all(in_range(m, variant.world) for m in members),
                f"has {communicator.size} ranks, which are not the {len(members)} that it lists",
            )
    declared = [c.declared for c in variant.communicators if c.declared is not None]
    found.need(
        len(set(declared)) == len(declared) and all(0 <= place < 2**32 - 1 for place in declared),
        f"communicators have the places {declared} in the order of declarations, which are not each another one",
    )
    ops = found.array(variant.comm_ops, found.dtypes.comm_op, "communication operations")
    if ops is None:
        return np.empty(0, np.uint32)
    _check_ops(found, variant, ops)
    return np.unique(ops["group"]).astype(np.uint32)


def _check_ops(found: Findings, variant: Variant, ops: npt.NDArray[Any]) -> None:
    found.none(ops["kind"] >= len(found.dtypes.comm_op_kind), "operation", "has a kind that does not exist")
    found.none(ops["group"] >= _GROUPS, "operation", f"has a group that is not below {_GROUPS}")
    count = len(variant.communicators)
    if not found.none(ops["communicator"] >= count, "operation", f"has a communicator that is not one of {count}"):
        return
    sizes = np.array([min(max(c.size, 0), 2**32) for c in variant.communicators], np.int64)
    peers = ops["peer"]
    outside = (peers != found.dtypes.none) & (peers.astype(np.int64) >= sizes[ops["communicator"]])
    found.none(outside, "operation", "has a peer or root outside its communicator")
    for slot in np.unique(ops["communicator"]):
        known = variant.communicators[slot]
        found.inside(f"communicator {slot}").need(
            (known.axes is None) != (known.members is None),
            "is used, and its ranks are given by not exactly one of axes and list",
        )
    pairs = np.unique(np.stack([ops["group"], ops["communicator"]], axis=1), axis=0)
    for group in pairs[1:, 0][pairs[1:, 0] == pairs[:-1, 0]][:1]:
        found.add(f"group {group} has operations of two communicators")


def check_patches(found: Findings, variant: Variant, templates: list[Shape | None]) -> None:
    """Blocks, rules, tables, relocations and noise; ``templates`` are the shapes of its templates."""
    lengths = _check_blocks(found, variant, templates)
    tables = found.array(variant.tables, "<u8", "tables")
    rules = found.array(variant.rules, found.dtypes.rule, "rules")
    relocations = found.array(variant.relocations, found.dtypes.relocation, "relocations")
    ranges = []
    if rules is not None:
        sane = found.none(~np.isin(rules["width"], (1, 2, 4, 8)), "rule", "has a width that is not 1, 2, 4 or 8")
        found.none(rules["kind"] >= len(found.dtypes.rule_kind), "rule", "has a kind that does not exist")
        found.none(rules["coordinate"] >= len(Coordinate), "rule", "follows a coordinate that does not exist")
        found.none(rules["reserved"] != 0, "rule", "has reserved bits set")
        if tables is not None:
            beyond = (rules["kind"] == found.dtypes.rule_kind["TABLE"]) & (
                rules["table"].astype(np.int64) > max(len(tables) - variant.world, -1)
            )
            whole = found.none(
                beyond, "rule", f"has a table of {variant.world} ranks beyond the {len(tables)} entries there are"
            )
            if sane and whole and 0 < variant.world <= len(tables):
                found.none(_too_wide(rules, tables, variant.world, found), "rule", "has a table entry beyond its width")
        widths = rules["width"].astype(np.int64)
        if sane and _check_spans(found, "rule", rules, widths, lengths):
            _check_fixed(found, "rule", rules, widths, variant, templates)
            ranges.append(("rule", rules, widths))
    if relocations is not None:
        count = len(variant.symbols)
        found.none(relocations["symbol"] >= count, "relocation", f"has a symbol that is not one of {count}")
        found.none(relocations["reserved"] != 0, "relocation", "has reserved bits set")
        widths = np.full(len(relocations), _RELOCATED, np.int64)
        if _check_spans(found, "relocation", relocations, widths, lengths):
            _check_fixed(found, "relocation", relocations, widths, variant, templates)
            ranges.append(("relocation", relocations, widths))
    noise = found.array(variant.noise, noise_dtype, "noise") if variant.noise else None
    if noise is not None and found.none(noise["width"] == 0, "run of noise", "has no bytes"):
        widths = noise["width"].astype(np.int64)
        if _check_spans(found, "run of noise", noise, widths, lengths):
            _check_fixed(found, "run of noise", noise, widths, variant, templates)
            ranges.append(("run of noise", noise, widths))
    for one, other in combinations(ranges, 2):
        _check_apart(found, one, other)
    if variant.template_noise:
        _check_template_noise(found, variant, templates, ranges)


def _check_template_noise(
    found: Findings,
    variant: Variant,
    templates: list[Shape | None],
    ranges: list[tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]]],
) -> None:
    """Runs of noise of templates; ``ranges`` are all else that is said of bytes of blocks, and was found right."""
    what = "run of noise of a template"
    noise = found.array(variant.template_noise, template_noise_dtype, "noise of templates")
    count = len(templates)
    if noise is None or not found.none(noise["template"] >= count, what, f"has a template that is not one of {count}"):
        return
    sizes = np.array([len(template.members) for template in variant.templates] + [0])
    lengths = np.array([-1 if shape is None else shape.length for shape in templates] + [0])
    number, start = noise["template"].astype(np.int64), noise["offset"].astype(np.int64)
    width, members = noise["width"].astype(np.int64), noise["members"].astype(np.int64)
    end = start + width
    behind = (number[1:] > number[:-1]) | ((number[1:] == number[:-1]) & (start[1:] >= end[:-1]))
    sane = [
        found.none(width == 0, what, "has no bytes"),
        found.none(end > lengths[number], what, "reaches beyond the end of its template's blocks"),
        found.none((members == 0) | (members > sizes[number]), what, "is of no member, or of more than there are"),
        found.none(~behind, what, "is not wholly before the next one in order of template and offset"),
    ]
    if not all(sane):
        return
    template_of = np.full(len(variant.blocks) + 1, -1)
    for place, block in enumerate(variant.blocks):
        if block.kind == "member" and in_range(block.index, len(variant.members)):
            template = variant.members[block.index].template
            template_of[place] = template if in_range(template, count) else -1
    for place, shape in enumerate(templates):
        mine = number == place
        if shape is None or not mine.any():
            continue
        for row in np.flatnonzero(mine)[shape.fixed(start[mine], width[mine])][:1]:
            found.add(f"{what} {row} is in a part of a node that belongs to the template")
        taken = np.zeros(shape.length, np.int64)
        for _, table, widths in ranges:
            here = template_of[table["block"]] == place
            taken += count_bytes(table["offset"][here], widths[here], shape.length)
        have = count_bytes(start[mine], width[mine], shape.length, members[mine])
        for at in np.flatnonzero((have > 0) & (have + taken > sizes[place]))[:1]:
            found.add(
                f"byte {at} of template {place} is noise in {have[at]} of {sizes[place]} members, and {taken[at]} have "
                "a rule, a relocation or noise of their own there"
            )


def _too_wide(
    rules: npt.NDArray[Any], tables: npt.NDArray[np.uint64], world: int, found: Findings
) -> npt.NDArray[np.bool_]:
    """Which rules have an entry in their table that does not fit the word; tables and widths are right otherwise."""
    wrong = np.zeros(len(rules), np.bool_)
    table = rules["kind"] == found.dtypes.rule_kind["TABLE"]
    for width in (1, 2, 4):
        before = np.concatenate([np.zeros(1, np.int64), np.cumsum(tables >> np.uint64(8 * width) != 0)])
        mine = np.flatnonzero(table & (rules["width"] == width))
        first = rules["table"][mine].astype(np.int64)
        wrong[mine] = before[first + world] != before[first]
    return wrong


def _check_blocks(found: Findings, variant: Variant, templates: list[Shape | None]) -> npt.NDArray[np.int64]:
    """Bytes of each block; where they cannot be told a violation is noted and the length is -1."""
    seen: set[tuple[str, int]] = set()
    lengths = np.full(len(variant.blocks), -1, np.int64)
    globals_ = sum(len(module.globals) for module in variant.modules)
    for number, block in enumerate(variant.blocks):
        here = found.inside(f"block {number}")
        here.need((block.kind, block.index) not in seen, f"is {block.kind} {block.index}, as a block before it is")
        seen.add((block.kind, block.index))
        count = {
            "member": len(variant.members),
            "comm_ops": 1,
            "content": len(variant.contents),
            "global": globals_,
            "windows": int(variant.windows is not None),
        }[block.kind]
        if here.need(in_range(block.index, count), f"is {block.kind} {block.index}, and there are {count}"):
            length = _block_length(here, variant, block, templates)
            lengths[number] = -1 if length is None else length
    return lengths


def _block_length(here: Findings, variant: Variant, block: Block, templates: list[Shape | None]) -> int | None:
    if block.kind == "member":
        here.need(not block.section, "is a member, which is made from its template, and names a section")
        template = variant.members[block.index].template
        shape = templates[template] if in_range(template, len(templates)) else None
        return None if shape is None else shape.length
    own = {"comm_ops": lambda: variant.comm_ops, "content": lambda: variant.contents[block.index].section}
    if block.kind == "global":
        return here.length(block.section, "bytes")
    if variant.windows is not None:
        windows = variant.windows.section
        own["windows"] = lambda: windows
    section = own[block.kind]()
    here.need(block.section in ("", section), f"names section {block.section!r}, and its bytes are in {section!r}")
    return here.length(section, "bytes")


def _check_spans(
    found: Findings, what: str, table: npt.NDArray[Any], widths: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> bool:
    """Whether each word lies in its block, behind the word before it."""
    count = len(lengths)
    if not found.none(table["block"] >= count, what, f"has a block that is not one of {count}"):
        return False
    block, start = table["block"].astype(np.int64), table["offset"].astype(np.int64)
    end = start + widths
    good = found.none(end > lengths[block], what, "reaches beyond the end of its block")
    behind = (block[1:] > block[:-1]) | ((block[1:] == block[:-1]) & (start[1:] >= end[:-1]))
    return good & found.none(~behind, what, "is not wholly before the next one in order of block and offset")


def _check_fixed(
    found: Findings,
    what: str,
    table: npt.NDArray[Any],
    widths: npt.NDArray[np.int64],
    variant: Variant,
    templates: list[Shape | None],
) -> None:
    """A rank changes parameters, and of a node only what members may change too."""
    first = np.searchsorted(table["block"], np.arange(len(variant.blocks) + 1))
    for number, block in enumerate(variant.blocks):
        mine = slice(first[number], first[number + 1])
        if block.kind != "member" or mine.start == mine.stop:
            continue
        # Spans were found right, so the member, its template and the shape exist.
        shape = templates[variant.members[block.index].template]
        assert shape is not None
        fixed = np.flatnonzero(shape.fixed(table["offset"][mine].astype(np.int64), widths[mine]))
        if fixed.size:
            found.add(f"{what} {mine.start + fixed[0]} is in a part of a node that belongs to the template")


def _check_apart(
    found: Findings,
    one: tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]],
    other: tuple[str, npt.NDArray[Any], npt.NDArray[np.int64]],
) -> None:
    """A word cannot follow a rule and a symbol, nor either of them and be noise."""
    parts = (one, other)
    block = np.concatenate([table["block"].astype(np.int64) for _, table, _ in parts])
    start = np.concatenate([table["offset"].astype(np.int64) for _, table, _ in parts])
    end = start + np.concatenate([widths for _, _, widths in parts])
    order = np.lexsort((start, block))
    block, start, end = block[order], start[order], end[order]
    for place in np.flatnonzero((block[1:] == block[:-1]) & (start[1:] < end[:-1]))[:1]:
        found.add(f"a {one[0]} and a {other[0]} are both at offset {start[place + 1]} of block {block[place + 1]}")
