# SPDX-License-Identifier: Apache-2.0
"""A worker of vLLM 0.22.1 that counts its replays when it is asked to: ``--worker-cls counted_worker.Worker``.

Whoever started vLLM cannot see what happens in a worker's own process.  Its methods are called by name, in all workers
at once, with ``LLM.collective_rpc`` or through a server's ``/collective_rpc``; as that has the answers of one replica
only, counts come in files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from replay_counts import ReplayCounts
from vllm.v1.worker import gpu_worker

from foundryd.engines.vllm.v0_22_ranks import Place


class Worker(gpu_worker.Worker):
    """vLLM's own worker, with counts."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._replay_counts = ReplayCounts()

    def begin_replay_counts(self) -> None:
        """Counts from now on."""
        self._replay_counts.begin()

    def write_replay_counts(self, folder: str) -> None:
        """Writes what was counted, in a file that is called as the worker's start-up report is."""
        place = Place.of(self)
        before = f"replica-{place.replica}-" if place.replica else ""
        self._replay_counts.write(Path(folder), f"{before}rank-{place.rank}")

    def execute_dummy_batch(self) -> None:
        """As every worker, uncounted: how often a replica without requests keeps others company depends on time."""
        with self._replay_counts.aside():
            super().execute_dummy_batch()
