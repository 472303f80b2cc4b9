# SPDX-License-Identifier: Apache-2.0
"""The archive: one file with everything that restoring an engine's graphs needs."""

from foundryd.archive.index import Index
from foundryd.archive.inflate import inflate, inflated_size
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter

__all__ = ["ArchiveReader", "ArchiveWriter", "Index", "inflate", "inflated_size"]
