# SPDX-License-Identifier: Apache-2.0
"""The reference implementation, foundry-core (arXiv 2604.06664), with the same decoder's graphs, where it is installed.

Each of its processes is a fresh one (``programs/reference_rank.py``).  Graphs are loaded twice: once as they are, and
once with the driver's memory for executables grown while the engine makes its weights, as its integrations do; that
time is in none of its figures.
"""

from __future__ import annotations

import importlib.util
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch import Deadline, Program, Report, RunFailed, native

Rows = list[dict[str, Any]]

# Columns of the loads, and whether executables get their memory ahead.
LOADS = {"load": "0", "load ahead": "1"}
_LABELS = {"load": "", "load ahead": ", executables' memory ahead"}


class Skipped(Exception):
    """A step that cannot be measured here, and why; it has neither passed nor failed."""


def find_hook(world: int) -> Path:
    """The library that it preloads; raises ``Skipped`` where there is none, or more ranks than it is measured with."""
    if world > 1:
        raise Skipped(f"the reference implementation is measured with one rank, not {world}")
    # Importing it here would load its hook into this process.
    spec = importlib.util.find_spec("foundry")
    if spec is None:
        raise Skipped("there is no module foundry: install foundry-core, built for this PyTorch")
    hooks = [Path(folder) / "libcuda_hook.so" for folder in spec.submodule_search_locations or ()]
    for hook in hooks:
        if hook.exists():
            return hook
    raise Skipped(f"the module foundry of {spec.origin} has no libcuda_hook.so: it is not foundry-core")


def measure(report: Report, arguments: Sequence[str], world: int, folder: Path, deadline: Deadline) -> None:
    """Fills ``report``; what it has when a process fails was measured."""
    deadline.left()
    hook = find_hook(world)
    report.clear()

    def run(role: str, **environment: str) -> Report:
        program = Program("reference_rank.py", (role, *arguments, "--folder", str(folder)))
        try:
            (answer,) = native(program, 1, timeout=deadline.left(900), environment=environment)
        except RunFailed as error:
            folder.with_name(f"{folder.name}.log").write_text(f"{role}: {error}\n")
            raise
        return answer

    report["native"] = run("native")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    saved = run("save", LD_PRELOAD=str(hook), FOUNDRY_MODE="save")
    sizes = {file.name: file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    report["save"] = saved | {
        "capture_ms": (time.monotonic() - began) * 1e3,
        "archive_bytes": sum(sizes.values()),
        "graphs_bytes": sum(size for name, size in sizes.items() if name.startswith("graph_")),
    }
    for way, ahead in LOADS.items():
        report[way] = run("load", LD_PRELOAD=str(hook), FOUNDRY_MODE="load", FOUNDRY_EXEC_POOL_PREWARM=ahead)


def fastest(report: Report | None, figure: str) -> float | None:
    """The better of its loads."""
    found = [report[way][figure] for way in LOADS if way in report] if report else []
    return min(found, default=None)


def rows(name: str, reports: Report) -> Rows:
    """Both implementations in equal columns; times of a load since ``restore`` was called, or modules were loaded."""
    theirs: Report = reports.get("reference") or {}
    if not theirs:
        return []
    restored = max(reports.get("restore") or [{}], key=lambda r: r.get("from_restore", {}).get("all_served_ms", 0.0))
    since, captured = restored.get("from_restore", {}), reports.get("capture", {})
    stored = captured.get("stored_bytes")
    graphs = sum(size for kind, size in stored.items() if kind != "modules") if stored else None
    times = [since.get(mark) for mark in ("hottest_ms", "all_served_ms", "all_own_ms")]
    found = [_row(f"{name}: foundryd", captured, graphs, times, restored, None)]
    saved = theirs.get("save", {})
    for way in LOADS:
        loaded = theirs.get(way, {})
        served = loaded.get("all_served_ms")
        times = [loaded.get("hottest_ms"), served, None if loaded.get("shared") else served]
        label = f"{name}: foundry-core {saved.get('version', '')}{_LABELS[way]}"
        same = _same(theirs.get("native", {}), loaded)
        found.append(_row(label, saved, saved.get("graphs_bytes"), times, loaded, same))
    return found


def _row(
    case: str, saved: Report, graphs: float | None, times: Sequence[float | None], loaded: Report, same: str | None
) -> dict[str, Any]:
    hottest, served, own = times
    return {
        "case": case,
        "capture s": _by(saved.get("capture_ms"), 1e3),
        "archive MB": _by(saved.get("archive_bytes"), 1e6),
        "of it graphs": _by(graphs, 1e6),
        "hottest ms": hottest,
        "every graph ms": served,
        "own executables ms": own,
        "device GB": _by(loaded.get("memory", {}).get("device_used"), 1e9),
        "replays as natively": same,
    }


def _by(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def _same(natively: Report, loaded: Report) -> str | None:
    """How many graphs put out exactly what native ones did."""
    if "digests" not in natively or "digests" not in loaded:
        return None
    graphs = natively["digests"]
    return f"{sum(loaded['digests'].get(batch) == found for batch, found in graphs.items())} of {len(graphs)}"
