# SPDX-License-Identifier: Apache-2.0
"""The variables of a whole image, for a device."""

from __future__ import annotations

from dataclasses import dataclass

from foundryd.capture.images import elf, ptx
from foundryd.capture.images.container import ELF, Capability, Entry, capability, chosen, entries
from foundryd.capture.images.variables import Variable
from foundryd.errors import UnreadableImage


@dataclass(frozen=True)
class Listing:
    """One piece of an image that the driver may take, and every variable of it."""

    entry: Entry
    variables: list[Variable]

    @property
    def names(self) -> set[str]:
        """Names of the variables."""
        return {v.name for v in self.variables}


@dataclass(frozen=True)
class Summary:
    """What there is to say of an image; ``globals`` is None if they cannot be listed, and ``unreadable`` says why."""

    targets: list[str]
    compression: list[str]  # "none", "lz4", "zstd"
    globals: int | None
    unreadable: str = ""


def listings(image: bytes, device: Capability) -> list[Listing]:
    """The variables of each piece that the driver may take on a device; raises ``UnreadableImage``."""
    return [
        Listing(entry, elf.variables(entry.code()) if entry.kind == ELF else ptx.variables(entry.code()))
        for entry in chosen(entries(image), device)
    ]


def summary(image: bytes, device: str) -> Summary:
    """A summary of an image for a compute capability as ``9.0``, whether it can be read or not."""
    targets: list[str] = []
    compression: list[str] = []
    try:
        found = entries(image)
        targets = sorted({e.target for e in found})
        compression = sorted({e.compression or "none" for e in found})
        count = max(len(listing.variables) for listing in listings(image, capability(device)))
    except UnreadableImage as error:
        return Summary(targets, compression, None, str(error))
    return Summary(targets, compression, count)
