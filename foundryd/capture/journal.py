# SPDX-License-Identifier: Apache-2.0
"""What a control run is asked to try and has tried, kept outside of it: a kernel that was sent astray takes its process
with it.

A trial that was begun and never ended is known to be fatal when the control is launched again.  It counts as one that
changed what a replay computes, and the rest of the proofs goes on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from foundryd.rankpatch.noise import Strays


class Journal:
    """Trials by key (JSON); without a path, as in ``FORGETFUL``, nothing is remembered."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._state: Any = None
        self._share = _share(path)
        self.fatal = set(unended(path)) if path is not None else set()

    def graphs(self, count: int) -> range:
        """Those of ``count`` graphs that this control is to prove; others prove the rest."""
        place, controls = self._share
        return range(place, count, controls)

    def enter_state(self, state: Any) -> None:
        """Says in which of the engine's states the trials that follow are made."""
        self._state = state

    def here(self, *key: Any) -> tuple[Any, ...]:
        """The key of a trial whose end says nothing of other states."""
        return (self._state, *key)

    def attempt(self, key: tuple[Any, ...], trial: Callable[[], bool]) -> bool:
        """What ``trial`` finds; False, without running it, if it was fatal to an earlier launch."""
        if key in self:
            return False
        name = json.dumps(key)
        self._note("begin", name)
        found = trial()
        self._note("end", name)
        return found

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        """Whether the trial was fatal to an earlier launch."""
        return json.dumps(key) in self.fatal

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
        elif what == "end":
            open_trials.pop(name, None)
    return list(open_trials)


def write_share(path: Path, place: int, controls: int) -> None:
    """Begins the journal of one of several controls: the graphs of that place and every ``controls`` further."""
    path.write_text(f"graphs {place} {controls}\n")


def _share(path: Path | None) -> tuple[int, int]:
    """Place and number of controls of a journal that ``write_share`` began; all graphs are one's without it."""
    first = path.read_text().partition("\n")[0] if path is not None and path.exists() else ""
    what, *numbers = first.split(" ")
    return (int(numbers[0]), int(numbers[1])) if what == "graphs" else (0, 1)


FORGETFUL = Journal(None)


def read_strays(path: Path | None) -> Strays:
    """The strays of a file that ``write_strays`` wrote; none without one."""
    return [] if path is None else [(b, o, n) for b, o, n in json.loads(path.read_text())]


def write_strays(path: Path, strays: Strays) -> None:
    """Writes what ``read_strays`` reads."""
    path.write_text(json.dumps(list(strays)))
