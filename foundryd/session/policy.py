# SPDX-License-Identifier: Apache-2.0
"""Which graphs are ready when a restore returns, which follow in the background, and how many stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from foundryd.errors import NotInArchiveError, UsageError
from foundryd.session.arrays import freeze_key
from foundryd.settings import Settings


@dataclass(frozen=True)
class RestorePolicy:
    """When each graph of an archive gets an executable.  Whatever it says, every key can be replayed at any time.

    There is no limit in bytes: what the driver says of free memory is the whole device's, so that neither other
    processes nor the engine's own allocations can be told from an executable.

    Attributes
    ----------
    first : keys that are ready when the restore returns; None: the first that was captured; ``"all"``: every key.
    then : keys that the background builds before the others; these follow in the order of the capture.
    background : whether a thread builds what is not ready; without it a graph is built when it is first replayed.
    executables : how many graphs may have an executable at a time; None: all.  A graph that needs one when there are so
        many takes that of another, the one of its template whose last replay is longest ago, and changes it; where the
        driver refuses the change, or the template has none, an executable is destroyed for it.
    """

    first: Sequence[Any] | Literal["all"] | None = None
    then: Sequence[Any] = ()
    background: bool = True
    executables: int | None = None

    def __post_init__(self) -> None:
        for name, keys in (("first", self.first), ("then", self.then)):
            if isinstance(keys, str | bytes) and (name, keys) != ("first", "all"):
                raise UsageError(f"{name} is {keys!r}, not a sequence of keys: put the key into a tuple")
        if self.executables is not None and self.executables < 1:
            raise UsageError(f"executables is {self.executables}: allow at least one, or None for all")
        if self.executables is not None and self.first not in (None, "all") and len(self.first) > self.executables:
            raise UsageError(
                f"{len(self.first)} graphs are to be ready first and {self.executables} may have an executable: raise "
                "executables, or name fewer"
            )

    @classmethod
    def from_settings(cls, config: Settings) -> RestorePolicy:
        """What the environment says."""
        return cls(config.restore_first, (), config.restore_background, config.executables or None)

    def arrange(self, keys: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Of the archive's keys, as captured: those that come first, and the others, each in the order to build them.

        Raises ``NotInArchiveError`` for a key that the archive does not have, and ``UsageError`` if the first are more
        than may have an executable.
        """
        if self.first == "all":
            first = list(keys)
        elif self.first is None:
            first = list(keys[:1])
        else:
            first = _known(self.first, keys)
        if self.executables is not None and len(first) > self.executables:
            raise UsageError(
                f"all {len(first)} graphs are to be ready first and {self.executables} may have an executable: raise "
                "executables, or name those that come first"
            )
        rest = dict.fromkeys([*_known(self.then, keys), *keys])
        early = set(first)
        return first, [key for key in rest if key not in early]


def _known(wanted: Sequence[Any], keys: Sequence[Any]) -> list[Any]:
    """``wanted`` as the archive's keys, each once."""
    frozen, known = dict.fromkeys(freeze_key(key) for key in wanted), set(keys)
    for key in frozen:
        if key not in known:
            raise NotInArchiveError(
                f"the restore policy names {key!r}, which is not among the archive's {len(keys)} graphs: name keys "
                "that were captured"
            )
    return list(frozen)
