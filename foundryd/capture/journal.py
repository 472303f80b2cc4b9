# SPDX-License-Identifier: Apache-2.0
"""What a control run has tried, kept outside of it: a kernel that was sent astray takes its whole process with it.

A trial that was begun and never ended is known to be fatal when the control is launched again.  It counts as one that
changed what a replay computes, and the rest of the proofs goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


class Journal:
    """Trials by key (JSON); without a path, as in ``FORGETFUL``, nothing is remembered."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._state: tuple[Any, ...] = ()
        self.fatal = set(unended(path)) if path is not None else set()

    def enter_state(self, state: Any) -> None:
        """Says in which of the engine's states the trials that follow are made."""
        self._state = (state,)

    def attempt(self, key: tuple[Any, ...], trial: Callable[[], bool]) -> bool:
        """What ``trial`` finds; False, without running it, if it was fatal to an earlier launch."""
        if key in self:
            return False
        name = self._name(key)
        self._note("begin", name)
        found = trial()
        self._note("end", name)
        return found

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        """Whether the trial was fatal to an earlier launch."""
        return self._name(key) in self.fatal

    def _name(self, key: tuple[Any, ...]) -> str:
        return json.dumps([*self._state, *key])

    def _note(self, what: str, name: str) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{what} {name}\n")


def unended(path: Path) -> list[str]:
    """The trials of a journal that were begun and did not end, each once, in order; none if there is no journal."""
    open_trials: dict[str, bool] = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        what, _, name = line.partition(" ")
        if what == "begin":
            open_trials[name] = True
        else:
            open_trials.pop(name, None)
    return list(open_trials)


FORGETFUL = Journal(None)
