# SPDX-License-Identifier: Apache-2.0
"""What one rank makes of an archive's members, without a driver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foundryd.archive.index import Variant
from foundryd.archive.reader import ArchiveReader
from foundryd.rankpatch.plan import Plan, compute_plan
from foundryd.session.building import Bindings
from foundryd.session.executables import Member
from foundryd.session.patching import MemberBlocks

SCALES = 0x7F0012345000  # where a process has the global that parameters point to


class Modules:
    """Stands for the hook where only addresses of globals are asked for."""

    def global_address(self, module: int, name: str) -> tuple[int, int]:
        return SCALES, 256


class Rank:
    """An archive, and what one rank makes of its members without a driver."""

    def __init__(self, path: Path, rank: int = 5) -> None:
        self.reader = ArchiveReader.open(path)
        self.variant: Variant = self.reader.index.variants[0]
        self.plan: Plan = compute_plan(self.reader, self.variant.name, rank)
        self.bindings = Bindings(Modules(), lambda place: 0, [], self.variant.symbols)  # type: ignore
        self.blocks = MemberBlocks(self.reader, self.variant, self.plan)

    def patched(self, place: int) -> Any:
        """The graph of a member for this rank."""
        entry = self.variant.members[place]
        return self.blocks.patched(Member(place, entry.key, entry.template, None), self.bindings)
