# SPDX-License-Identifier: Apache-2.0
"""How an engine puts itself into other states, for the proofs of a capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Vary:
    """The functions of ``GraphSet.finish``; an engine may have either, both or none.

    Attributes
    ----------
    engine : puts all of the engine into the state of a seed.
    graph : adds what one graph, of a key, needs in the state of a seed.
    """

    engine: Callable[[int], None] | None = None
    graph: Callable[[Any, int], None] | None = None

    def __bool__(self) -> bool:
        """Whether there is another state."""
        return self.engine is not None or self.graph is not None
