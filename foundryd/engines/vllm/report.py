# SPDX-License-Identifier: Apache-2.0
"""How a worker started: which way its graphs came, and how long each phase took."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundryd.engines.vllm.collector import Watch
from foundryd.errors import FoundrydError

log = logging.getLogger("foundryd.vllm")


@dataclass
class StartUp:
    """What is known of this worker's start so far.

    Attributes
    ----------
    engine : the engine and its version.
    rank : of the world.
    replica : of several worlds that share nothing.
    way : ``native``, ``captured`` or ``restored``.
    fallback : why a worker that should have restored captured natively.
    graphs : how many graphs the engine got from foundryd.
    kv_blocks : blocks of the KV cache.
    phases : milliseconds of the engine's phases, in order; one that ran more than once is added up.
    restore : milliseconds of the phases of the restore, which are part of ``phases["graphs"]``.
    parts : milliseconds of what a phase is made of, as ``phase.part``; parts may lie in one another.
    collections : milliseconds that Python's garbage collector took in each phase.
    """

    engine: str
    rank: int
    way: str = "native"
    fallback: FoundrydError | None = None
    graphs: int = 0
    kv_blocks: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    restore: dict[str, float] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    collections: dict[str, float] = field(default_factory=dict)
    replica: int = 0
    _now: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._watch = Watch(self._collected)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what happens inside."""
        self._now.append(name)
        try:
            with _timed(self.phases, name):
                yield
        finally:
            self._now.pop()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Times what happens inside as a part of the phase that it is in; outside of phases, nothing."""
        if not self._now:
            yield
            return
        with _timed(self.parts, f"{self._now[-1]}.{name}"):
            yield

    def _collected(self, ms: float) -> None:
        if self._now:
            phase = self._now[-1]
            self.collections[phase] = self.collections.get(phase, 0.0) + ms

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        error = self.fallback
        return {
            "engine": self.engine,
            "rank": self.rank,
            "replica": self.replica,
            "way": self.way,
            "fallback": None if error is None else {"reason": error.reason, "message": str(error)},
            "graphs": self.graphs,
            "kv_blocks": self.kv_blocks,
            "phases_ms": _rounded(self.phases),
            "restore_ms": _rounded(self.restore),
            "parts_ms": _rounded(self.parts),
            "collector_ms": _rounded(self.collections),
        }

    def publish(self, folder: Path | None) -> None:
        """Logs one line, and writes ``rank-N.json`` if there is a folder for it.

        A later replica's is ``replica-M-rank-N.json``.  A report that cannot be written is said to be so and disturbs
        nothing.
        """
        self._watch.close()
        times = ", ".join(f"{name} {ms / 1000:.2f} s" for name, ms in self.phases.items())
        log.info("%s, rank %d, %s, %d graphs: %s", self.engine, self.rank, self.way, self.graphs, times)
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            name = f"replica-{self.replica}-rank-{self.rank}" if self.replica else f"rank-{self.rank}"
            (folder / f"{name}.json").write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        except OSError as error:
            log.warning("the start-up report cannot be written to %s (%s): name another folder", folder, error)


@contextmanager
def _timed(times: dict[str, float], name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        times[name] = times.get(name, 0.0) + (time.monotonic() - started) * 1000


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms, 3) for name, ms in times.items()}
