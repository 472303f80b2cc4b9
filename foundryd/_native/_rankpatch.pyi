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

UNKNOWN: int
"""A coordinate that is not known."""

class InvalidRules(ValueError):
    """A rule, write, table or coordinate says something impossible; the message names the first."""

class UnknownCoordinate(InvalidRules):
    """A rule follows a coordinate that is ``UNKNOWN``."""

def plan(
    rules: npt.NDArray[np.void], tables: npt.NDArray[np.uint64], coordinates: Sequence[int], world: int
) -> npt.NDArray[np.void]:
    """Works out the writes of the rank with these six coordinates (order of ``fp_coordinate``).

    Rules must ascend by (block, offset) without overlap, and the writes do too; noise gives none.  A coordinate other
    than the rank may be ``UNKNOWN`` if no rule follows it.  Raises ``InvalidRules`` and ``UnknownCoordinate``.
    """

def check_rules(rules: npt.NDArray[np.void], table_count: int, world: int) -> None:
    """Checks rules as ``plan`` does, for every rank; raises ``InvalidRules``."""

def check_writes(writes: npt.NDArray[np.void]) -> None:
    """Checks order, widths and values of writes; raises ``InvalidRules``."""

def expand(
    block: npt.NDArray[np.uint8],
    base: npt.NDArray[np.uint8],
    positions: npt.NDArray[np.uint32],
    columns: npt.NDArray[np.uint32],
    column: int,
) -> None:
    """Makes a member in ``block``, whatever was in it: ``base``, and to its 4-byte words at ``positions`` [P] column
    ``column`` of ``columns`` [P][M] is added modulo 2**32.  Raises ``ValueError`` before the first store if a length
    or a position does not fit.
    """

def turn(block: npt.NDArray[np.uint32], columns: npt.NDArray[np.uint32], first: int) -> None:
    """Makes the columns of ``columns`` [P][M] from ``first`` on the rows of ``block`` [N][P].  Raises ``ValueError``
    before the first store if there are fewer than N or a length does not fit.
    """

def apply(block: npt.NDArray[np.uint8], writes: npt.NDArray[np.void]) -> None:
    """Stores ``writes`` into ``block`` in place, little-endian; raises ``ValueError`` before the first store if one
    does not fit.  The caller picks the writes of this block.
    """

def relocate(block: npt.NDArray[np.uint8], relocations: npt.NDArray[np.void], symbols: npt.NDArray[np.uint64]) -> None:
    """Stores the address of each relocation's symbol plus its addend into ``block`` in place, 8 bytes little-endian;
    raises ``ValueError`` before the first store if one does not fit.  The caller picks the relocations of this block.
    """

def differing(
    reference: npt.NDArray[np.uint8], others: Sequence[npt.NDArray[np.uint8]], width: int = 4
) -> npt.NDArray[np.uint32]:
    """Finds the ascending offsets of the words of ``width`` (1, 2, 4, 8) bytes in which any of ``others`` differs from
    ``reference``; all are equally long.  Raises ``ValueError``.
    """
