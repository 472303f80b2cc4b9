# SPDX-License-Identifier: Apache-2.0
"""How often a process replays CUDA graphs, and of which kind; counted alike in a start's only process and in workers.

``native`` are replays of graphs that were captured in the process, ``restored`` of those from an archive; ``captured``
is how many vLLM captured since the process began.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ReplayCounts:
    """Counts this process's replays between ``begin`` and ``write``."""

    def __init__(self) -> None:
        self._found = {"native": 0, "restored": 0}
        self._real: list[tuple[Any, Any]] = []
        self._aside = False

    def begin(self) -> None:
        """Counts from now on."""
        import torch

        from foundryd.engines.torch.graph import TorchRestored

        owners: dict[str, Any] = {"native": torch.cuda.CUDAGraph, "restored": TorchRestored}
        for kind, owner in owners.items():
            self._real.append((owner, owner.replay))
            owner.replay = self._counted(kind, owner.replay)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Replays inside are not counted."""
        self._aside = True
        try:
            yield
        finally:
            self._aside = False

    def write(self, folder: Path, worker: str) -> None:
        """Counts no longer, and writes what it found for the worker of that name into the folder."""
        from vllm.compilation.counter import compilation_counter

        if not self._real:
            raise RuntimeError(f"{worker} was asked for its replays and never told to count them")
        while self._real:
            owner, replay = self._real.pop()
            owner.replay = replay
        folder.mkdir(parents=True, exist_ok=True)
        found = self._found | {"captured": int(compilation_counter.num_cudagraph_captured)}
        (folder / f"{worker}.json").write_text(json.dumps(found))

    def _counted(self, kind: str, real: Any) -> Any:
        def replay(graph: Any, *arguments: Any) -> Any:
            self._found[kind] += 0 if self._aside else 1
            return real(graph, *arguments)

        return replay
