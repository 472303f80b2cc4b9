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

from foundryd.errors import FoundrydError

log = logging.getLogger("foundryd.vllm")


@dataclass
class StartUp:
    """What is known of this worker's start so far.

    Attributes
    ----------
    engine : the engine and its version.
    rank : of the world.
    way : ``native``, ``captured`` or ``restored``.
    fallback : why a worker that should have restored captured natively.
    graphs : how many graphs the engine got from foundryd.
    kv_blocks : blocks of the KV cache.
    phases : milliseconds of the engine's phases, in order; one that ran more than once is added up.
    restore : milliseconds of the phases of the restore, which are part of ``phases["graphs"]``.
    """

    engine: str
    rank: int
    way: str = "native"
    fallback: FoundrydError | None = None
    graphs: int = 0
    kv_blocks: int = 0
    phases: dict[str, float] = field(default_factory=dict)
    restore: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times what happens inside."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.phases[name] = self.phases.get(name, 0.0) + (time.monotonic() - started) * 1000

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON holds it."""
        error = self.fallback
        return {
            "engine": self.engine,
            "rank": self.rank,
            "way": self.way,
            "fallback": None if error is None else {"reason": error.reason, "message": str(error)},
            "graphs": self.graphs,
            "kv_blocks": self.kv_blocks,
            "phases_ms": _rounded(self.phases),
            "restore_ms": _rounded(self.restore),
        }

    def publish(self, folder: Path | None) -> None:
        """Logs one line, and writes ``rank-N.json`` if there is a folder for it.

        A report that cannot be written is said to be so and disturbs nothing.
        """
        times = ", ".join(f"{name} {ms / 1000:.2f} s" for name, ms in self.phases.items())
        log.info("%s, rank %d, %s, %d graphs: %s", self.engine, self.rank, self.way, self.graphs, times)
        if folder is None:
            return
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"rank-{self.rank}.json").write_text(json.dumps(self.as_dict(), indent=2) + "\n")
        except OSError as error:
            log.warning("the start-up report cannot be written to %s (%s): name another folder", folder, error)


def _rounded(times: Mapping[str, float]) -> dict[str, float]:
    return {name: round(ms, 3) for name, ms in times.items()}
