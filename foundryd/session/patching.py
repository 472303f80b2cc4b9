# SPDX-License-Identifier: Apache-2.0
"""The bytes of members as one rank has them."""

from __future__ import annotations

import numpy as np

from foundryd._native import _hook, _rankpatch
from foundryd.archive import index as ix
from foundryd.archive.members import GraphParts, TemplateReader, split_block
from foundryd.archive.reader import ArchiveReader
from foundryd.rankpatch.plan import Plan
from foundryd.session.building import Bindings, Needs, distinct
from foundryd.session.executables import Member

_KERNEL = int(_hook.NodeType.KERNEL)


class MemberBlocks:
    """Makes members of a variant for a rank, one after another in the same memory.

    Everything that can be looked up once is: a member then costs one copy of its template and a store for each word
    that differs, all of it in native code, without an allocation.  A template costs what reading its sections does,
    since many have only a few members.  Not for several threads at once.
    """

    def __init__(self, reader: ArchiveReader, variant: ix.Variant, plan: Plan) -> None:
        self._reader = reader
        self._variant = variant
        self._plan = plan
        self._relocations = reader.array(variant.relocations, _rankpatch.relocation_dtype)
        blocks = np.ascontiguousarray(self._relocations["block"])
        self._bounds: list[int] = np.searchsorted(blocks, np.arange(len(variant.blocks) + 1)).tolist()
        self._templates: dict[int, TemplateReader] = {}
        self._memory = np.empty(0, np.uint8)
        self._split: dict[int, tuple[np.ndarray, GraphParts]] = {}  # the memory as a template has it, by its number
        self._filled_with: int | None = None  # the member in it, by place, while nothing else was done to it

    def give_back(self) -> None:
        """Lets go of the memory that members are made in; the next one gets it anew."""
        self._memory, self._split, self._filled_with = np.empty(0, np.uint8), {}, None
        for template in self._templates.values():
            template.give_back()

    def relocations_of(self, block: int) -> np.ndarray:
        """The relocations of one block, a view."""
        return self._relocations[self._bounds[block] : self._bounds[block + 1]]

    def needs(self, member: Member) -> Needs:
        """What a member uses."""
        _, graph = self._filled(member)
        symbols = self.relocations_of(member.place)["symbol"]
        return Needs(self._functions(graph), distinct(symbols, len(self._variant.symbols), "symbol"))

    def patched(self, member: Member, bindings: Bindings) -> GraphParts:
        """The graph of a member for this rank, with this process's addresses; views that the next member overwrites.

        Raises ``ArchiveFormatError`` if the archive or the plan contradict themselves, and what loading its functions
        raises.
        """
        memory, graph = self._filled(member)
        if not bindings.has_functions:
            bindings.need(Needs(self._functions(graph)))
        self._filled_with = None
        bindings.relocate(memory, self.relocations_of(member.place))
        return graph

    def _filled(self, member: Member) -> tuple[np.ndarray, GraphParts]:
        """The memory with the member as this rank has it, and the graph whose views it is."""
        template = self._template(member.template)
        if member.template not in self._split:
            if self._memory.nbytes < template.nbytes:
                self._memory, self._split = np.empty(template.nbytes, np.uint8), {}
            memory = self._memory[: template.nbytes]
            self._split[member.template] = memory, split_block(memory, template.first)
        memory, graph = self._split[member.template]
        if self._filled_with != member.place:
            self._filled_with = None
            template.fill(template.column_of(member.place), memory)
            self._plan.apply(member.place, memory)
            self._filled_with = member.place
        return memory, graph

    def _template(self, number: int) -> TemplateReader:
        """A template, read when it is first asked for."""
        if number not in self._templates:
            self._templates[number] = TemplateReader(self._reader, self._variant.templates[number])
        return self._templates[number]

    def _functions(self, graph: GraphParts) -> np.ndarray:
        """Numbers of the functions of a graph's kernels, each once."""
        parts = [g.nodes["function"][g.nodes["type"] == _KERNEL] for g in graph.walk()]
        used = np.concatenate(parts) if len(parts) > 1 else parts[0]
        return distinct(used, len(self._variant.functions), "function")
