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
    """Makes members of a variant for a rank, each in the memory that its template has ready.

    Everything that can be looked up once is: a member then costs one copy of its template and a store for each word
    that differs, all of it in native code, without an allocation.  Not for several threads at once.
    """

    def __init__(self, reader: ArchiveReader, variant: ix.Variant, plan: Plan) -> None:
        self._reader = reader
        self._variant = variant
        self._plan = plan
        self._relocations = reader.array(variant.relocations, _rankpatch.relocation_dtype)
        blocks = np.ascontiguousarray(self._relocations["block"])
        self._bounds: list[int] = np.searchsorted(blocks, np.arange(len(variant.blocks) + 1)).tolist()
        self._ready: dict[int, tuple[TemplateReader, np.ndarray, GraphParts]] = {}

    def relocations_of(self, block: int) -> np.ndarray:
        """The relocations of one block, a view."""
        return self._relocations[self._bounds[block] : self._bounds[block + 1]]

    def needs(self, member: Member) -> Needs:
        """What a member uses."""
        _, graph = self._filled(member)
        return Needs(_functions(graph), distinct(self.relocations_of(member.place)["symbol"]))

    def topology(self, member: Member) -> bytes:
        """Equal for members whose executables the driver may update to one another, if it takes their attributes."""
        return self._template(member.template)[0].topology

    def patched(self, member: Member, bindings: Bindings) -> GraphParts:
        """The graph of a member for this rank, with this process's addresses; views that the next member overwrites.

        Raises ``ArchiveFormatError`` if the archive or the plan contradict themselves, and what loading its functions
        raises.
        """
        memory, graph = self._filled(member)
        if not bindings.functions.all():
            bindings.need(Needs(_functions(graph)))
        bindings.relocate(memory, self.relocations_of(member.place))
        return graph

    def _filled(self, member: Member) -> tuple[np.ndarray, GraphParts]:
        """The memory of the member's template with the member as this rank has it, and the graph whose views it is."""
        template, memory, graph = self._template(member.template)
        template.fill(template.column_of(member.place), memory)
        self._plan.apply(member.place, memory)
        return memory, graph

    def _template(self, number: int) -> tuple[TemplateReader, np.ndarray, GraphParts]:
        """A template, its memory, and the graph whose views that is; made when it is first asked for."""
        if number not in self._ready:
            template = TemplateReader(self._reader, self._variant.templates[number])
            memory = np.empty_like(template.base)
            self._ready[number] = template, memory, split_block(memory, template.first)
        return self._ready[number]


def _functions(graph: GraphParts) -> np.ndarray:
    """Numbers of the functions of a graph's kernels, each once."""
    return distinct(np.concatenate([g.nodes["function"][g.nodes["type"] == _KERNEL] for g in graph.walk()]))
