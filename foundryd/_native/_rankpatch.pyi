# SPDX-License-Identifier: Apache-2.0
"""Bindings of ``rankpatch/``.  Arrays must be contiguous and of the stated type; nothing is converted."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

rule_dtype: np.dtype[np.void]
"""``fp_rule`` of ``rankpatch/include/rankpatch/rule.h``."""
write_dtype: np.dtype[np.void]
"""``fp_write``."""
relocation_dtype: np.dtype[np.void]
"""``fp_relocation``."""

class InvalidRules(ValueError):
    """A rule, write, table or coordinate says something impossible; the message names the first."""

def plan(
    rules: npt.NDArray[np.void], tables: npt.NDArray[np.uint64], coordinates: Sequence[int], world: int
) -> npt.NDArray[np.void]:
    """Works out the writes of the rank with these six coordinates (order of ``fp_coordinate``).

    Rules must ascend by (block, offset) without overlap, and the writes do too; noise gives none.  Raises
    ``InvalidRules``.
    """

def check_rules(rules: npt.NDArray[np.void], table_count: int, world: int) -> None:
    """Checks rules as ``plan`` does, for every rank; raises ``InvalidRules``."""

def check_writes(writes: npt.NDArray[np.void]) -> None:
    """Checks order, widths and values of writes; raises ``InvalidRules``."""

def expand(
    base: npt.NDArray[np.uint8], positions: npt.NDArray[np.uint32], columns: npt.NDArray[np.uint32], column: int
) -> npt.NDArray[np.uint8]:
    """Makes a member's block: a copy of ``base`` with the 4-byte words at ``positions`` [P] replaced by column
    ``column`` of ``columns`` [P][M].  Raises ``ValueError`` if a shape or a position does not fit.
    """

def apply(block: npt.NDArray[np.uint8], writes: npt.NDArray[np.void]) -> None:
    """Stores ``writes`` into ``block`` in place, little-endian; raises ``ValueError`` before the first store if one
    does not fit.  The caller picks the writes of this block.
    """

def differing(
    reference: npt.NDArray[np.uint8], others: Sequence[npt.NDArray[np.uint8]], width: int = 4
) -> npt.NDArray[np.uint32]:
    """Finds the ascending offsets of the words of ``width`` (1, 2, 4, 8) bytes in which any of ``others`` differs from
    ``reference``; all are equally long.  Raises ``ValueError``.
    """
