# SPDX-License-Identifier: Apache-2.0
"""An archive in sealed memory under a name."""

from __future__ import annotations

import mmap
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foundryd.archive.index import Index
from foundryd.daemon.messages import ArchiveState, VariantState, printable
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.tools import Reader


@dataclass(frozen=True)
class Resident:
    """An archive in memory under a name; two names of one content share ``memory`` and ``reader``."""

    name: str
    path: Path
    digest: str
    memory: Sealed
    reader: Reader
    mapping: mmap.mmap
    source: Literal["file", "rank"] = "file"

    @property
    def index(self) -> Index:
        """What the archive says about itself."""
        return self.reader.index

    @property
    def state(self) -> ArchiveState:
        """For status and events."""
        variants: dict[str, VariantState] = {}
        for v in self.index.variants:
            so_far = variants.get(v.name, VariantState(v.name, v.world, 0, 0))
            ranks = so_far.ranks + len(v.rank_class.ranks)
            variants[v.name] = VariantState(v.name, v.world, ranks, max(so_far.graphs, len(v.members)))
        return ArchiveState(
            name=self.name,
            state="resident",
            path=printable(self.path),
            digest=self.digest,
            bytes=self.memory.size,
            source=self.source,
            variants=list(variants.values()),
        )


def free(resident: Resident) -> None:
    """Closes the reader and the memory of a content that no name stands for; ranks that map it keep it."""
    resident.reader.close()
    resident.memory.close()
    with suppress(BufferError):  # somebody in this process still reads it: the last reader frees it
        resident.mapping.close()
