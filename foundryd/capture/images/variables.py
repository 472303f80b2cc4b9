# SPDX-License-Identifier: Apache-2.0
"""A variable of a module, and names that make sense to ask the driver for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from foundryd.errors import UnreadableImage


@dataclass(frozen=True)
class Variable:
    """A variable in device or constant memory.

    ``holds_code``: its initialiser holds the address of code, which is another one in each load.
    """

    name: str
    holds_code: bool = False


def distinct(variables: Sequence[Variable]) -> list[Variable]:
    """The variables by name; raises ``UnreadableImage`` if two share one, for the driver finds only one of them."""
    for name, count in Counter(v.name for v in variables).items():
        if count > 1:
            raise UnreadableImage(f"{count} of its variables are named {name}")
    return sorted(variables, key=lambda v: v.name)
