# SPDX-License-Identifier: Apache-2.0
"""What the index of an archive says, as typed structs.

The index is one msgpack map; arrays of plain structs (``hook/include/foundryd/records.h``, ``rankpatch/rule.h``) lie
in sections beside it and are referred to by section name.  A name of a section is never empty: where there is nothing
to store, the section is empty.  A *recording* is an archive whose only variant has one rank and no rules.
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

    ``nodes`` (fdy_node) and ``params`` are those of the template's first member.  Its *block* is the bytes of
    ``nodes``, then those of ``params``, then the blocks of ``children`` in order; each of these lengths is a multiple
    of 4.  ``positions`` (uint32, ascending) are the offsets of the 4-byte words of the block in which members differ;
    ``columns`` is uint32 [len(positions)][len(members)]: what a member adds, modulo 2**32, to the word of the block;
    its first column is zero.
    Children have no members, positions (``""``) or columns (``""``) of their own: their words are part of the
    parent's block.  ``foundryd.archive.members`` reads and writes all of this.
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
    """A communicator in creation order.

    ``axes`` are the mesh axes it spans; else ``members`` lists its world ranks in the communicator's order.
    ``declared`` is its place in the order in which the engine declared communicators, None if it did not.
    """

    size: int
    axes: list[str] | None
    members: list[int] | None = None
    declared: int | None = None


class Content(msgspec.Struct, frozen=True):
    """Bytes that restore uploads to a range of one live allocation; they are block ``block``."""

    address: int
    bytes: int
    arena: int
    section: str
    block: int


class Block(msgspec.Struct, frozen=True):
    """What a block number of a rule means; ``foundryd.archive.members.block_bytes`` gives its reference bytes."""

    kind: Literal["member", "comm_ops", "content", "global", "windows"]
    index: int  # member, 0, content, 0, or place in the flat list of all modules' globals
    section: str = ""  # with the bytes: a global always, a member never, others may repeat theirs


class Windows(msgspec.Struct, frozen=True):
    """Peers' memory that was open through IPC handles when the capture ended, as bytes of block ``block``.

    A rank's own memory is listed with its peers', so that ranks have lists of one shape; ``own`` says whether a rank
    had it open, too.
    """

    section: str  # fdy_window of the reference rank, by address
    block: int
    own: bool


class RankClass(msgspec.Struct, frozen=True):
    """Ranks that share templates."""

    ranks: list[int]
    captured: list[int]  # the ranks that inference saw, the reference rank first
    control: int | None  # one of them, captured twice
    held_out: int | None  # one of `ranks` that inference did not see


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
    engine: dict[str, Any] = {}  # what the engine's adapter compares when it restores, the same on every rank
    windows: Windows | None = None  # None if no peer's memory was open
    noise: str = ""  # noise_dtype, ordered by (block, offset): bytes on which nothing depends; "" if there are none
    template_noise: str = ""  # template_noise_dtype, ordered by (template, offset): the same, of members


class Index(msgspec.Struct, frozen=True):
    """The root of the index."""

    kind: Literal["recording", "archive"]
    created: str  # ISO 8601, UTC
    writer: str  # "foundryd 0.1.0"
    identity: dict[str, IdentityField]
    variants: list[Variant]
    notes: dict[str, Any] = {}  # figures of the capture, never needed to restore
