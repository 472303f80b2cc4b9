# SPDX-License-Identifier: Apache-2.0
"""What the index of an archive says, as typed structs.

The index is one msgpack map; arrays of plain structs (``hook/include/foundryd/records.h``, ``rankpatch/rule.h``) lie
in sections beside it and are referred to by section name.  A *recording* is an archive whose only variant has one
rank and no rules.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class IdentityField(msgspec.Struct, frozen=True):
    """A fact that must agree between the machine of capture and that of restore.

    ``exact``: equal.  ``compatible``: see ``foundryd.archive.identity`` for the field's own rule.
    """

    value: str | int | list[str]
    match: Literal["exact", "compatible"] = "exact"


class Function(msgspec.Struct, frozen=True):
    """A kernel function that some node uses; nodes refer to it by place in the variant's list."""

    module: int  # place in the variant's modules
    name: str
    param_bytes: int
    fields: list[tuple[int, int]]  # (offset, bytes) of each parameter in the packed block
    settings: list[tuple[int, int]]  # (CUfunction_attribute, value) as last set


class Global(msgspec.Struct, frozen=True):
    """A writable global whose bytes differ from its initialiser; the bytes are block ``block``."""

    name: str
    block: int


class Module(msgspec.Struct, frozen=True):
    """A module instance that some function lives in.

    ``digests`` names image sections (``module/<digest>``).  With one digest every rank loads it.  Else ``by_rank``
    gives each world rank its place in ``digests`` (-1: that rank was not captured and cannot be served).
    """

    api: int  # fdy_module_api
    digests: list[str]
    by_rank: list[int] | None = None
    globals: list[Global] = []


class Symbol(msgspec.Struct, frozen=True):
    """A module global whose address some parameter word holds."""

    module: int
    name: str


class Template(msgspec.Struct, frozen=True):
    """What members share.

    ``nodes`` (fdy_node) and ``params`` are those of the template's first member and form its *block*: the bytes of
    ``nodes`` followed by those of ``params``.  ``positions`` (uint32) are the offsets of the 4-byte words of the
    block in which members differ; ``columns`` is uint32 [len(positions)][len(members)], the words' values.
    Children are templates of their own, with no members.
    """

    nodes: str
    edges: str
    attributes: str
    params: str
    positions: str
    columns: str
    members: list[int]  # places in the variant's members, in column order
    children: list[Template] = []


class Member(msgspec.Struct, frozen=True):
    """One captured graph."""

    key: Any  # what the engine called it: msgpack scalars and lists
    template: int
    outputs: Any = None  # what the engine's function returned, see foundryd.session.outputs
    instantiate_flags: int = 0


class Communicator(msgspec.Struct, frozen=True):
    """A communicator in creation order.  ``axes`` are the mesh axes it spans; else ``members`` lists its ranks."""

    size: int
    axes: list[str] | None
    members: list[int] | None = None


class Content(msgspec.Struct, frozen=True):
    """Bytes that restore uploads to a held range; they are block ``block``."""

    address: int
    bytes: int
    arena: int
    section: str
    block: int


class Block(msgspec.Struct, frozen=True):
    """What a block number of a rule means."""

    kind: Literal["member", "comm_ops", "content", "global"]
    index: int  # member, 0, content, or place in the flat list of all modules' globals
    section: str = ""  # bytes of the block where they are not made from a template


class RankClass(msgspec.Struct, frozen=True):
    """Ranks that share templates."""

    ranks: list[int]
    captured: list[int]
    control: int | None
    held_out: int | None


class Variant(msgspec.Struct, frozen=True):
    """Everything that belongs to one parallel configuration and one rank class of it."""

    name: str  # canonical mesh text
    world: int
    rank_class: RankClass
    arena_base: int
    arena_stride: int
    allocations: str  # fdy_allocation: whole sequences of every arena, addresses rank-independent
    functions: list[Function]
    modules: list[Module]
    symbols: list[Symbol]
    templates: list[Template]
    members: list[Member]
    communicators: list[Communicator]
    comm_ops: str  # fdy_comm_op of the reference rank, `group` = comm_group of the nodes
    contents: list[Content]
    blocks: list[Block]
    rules: str  # fp_rule, ordered by (block, offset)
    tables: str  # uint64, for rules of kind table
    relocations: str  # fp_relocation, ordered by (block, offset)


class Index(msgspec.Struct, frozen=True):
    """The root of the index."""

    kind: Literal["recording", "archive"]
    created: str  # ISO 8601, UTC
    writer: str  # "foundryd 0.1.0"
    identity: dict[str, IdentityField]
    variants: list[Variant]
    notes: dict[str, Any] = {}  # figures of the capture, never needed to restore
