# SPDX-License-Identifier: Apache-2.0
"""Collecting violations, each a sentence that starts with the object it is about."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from foundryd.archive.dtypes import Records
from foundryd.archive.reader import ArchiveReader
from foundryd.errors import ArchiveDigestError, ArchiveFormatError

MOST = 200  # a hostile archive could violate something a million times


@dataclass(frozen=True)
class Findings:
    """Where in the archive we are, and what was found so far.

    Attributes
    ----------
    reader, dtypes : what is being checked, and how its structs look.
    deep : whether to decode large sections and look at every member.
    where : the object, ``variant ep=8: template 3`` for example.
    sentences : shared by all places of one check.
    """

    reader: ArchiveReader
    dtypes: Records
    deep: bool
    where: str = ""
    sentences: list[str] = field(default_factory=list)

    def inside(self, where: str) -> Findings:
        """The same findings, at an object further down."""
        place = f"{self.where}: {where}" if self.where else where
        return Findings(self.reader, self.dtypes, self.deep, place, self.sentences)

    def add(self, sentence: str) -> None:
        """Notes a violation."""
        if len(self.sentences) < MOST:
            self.sentences.append(f"{self.where}: {sentence}" if self.where else sentence)

    def need(self, holds: bool, sentence: str) -> bool:
        """Notes a violation unless ``holds``, which is returned."""
        if not holds:
            self.add(sentence)
        return holds

    def none(self, wrong: npt.NDArray[np.bool_], what: str, sentence: str) -> bool:
        """Notes the first place where ``wrong`` is set, ``what`` being the kind of element; returns whether none is."""
        places = np.flatnonzero(wrong)
        if not places.size:
            return True
        more = f" (and {places.size - 1} more)" if places.size > 1 else ""
        self.add(f"{what} {places[0]} {sentence}{more}")
        return False

    def array(self, section: str, dtype: npt.DTypeLike, what: str) -> npt.NDArray[Any] | None:
        """The section as an array, or None with a violation noted."""
        entry = self.reader.sections.get(section)
        if entry is None:
            self.add(f"its {what} are said to be in section {section!r}, which the archive does not have")
            return None
        item = np.dtype(dtype).itemsize
        if entry.length % item:
            self.add(f"section {section} has {entry.length} bytes, not a multiple of the {item} bytes of its {what}")
            return None
        try:
            return self.reader.array(section, dtype)
        except (ArchiveFormatError, ArchiveDigestError) as error:
            self.add(str(error))
            return None

    def length(self, section: str, what: str) -> int | None:
        """The section's decoded length, or None with a violation noted."""
        entry = self.reader.sections.get(section)
        if entry is None:
            self.add(f"its {what} are said to be in section {section!r}, which the archive does not have")
        return None if entry is None else entry.length


def in_range(value: int, count: int) -> bool:
    """Whether ``value`` is a place in a list of ``count``."""
    return 0 <= value < count
