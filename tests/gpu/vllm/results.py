# SPDX-License-Identifier: Apache-2.0
"""What was found so far: kept in one JSON file, so that a run that is cut loses nothing, and shown as tables."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
OK, FAILED, LATE = "ok", "failed", "late"


class Results:
    """Rows by step, in memory and in ``results.json``; a step that runs again replaces its row."""

    def __init__(self, out: Path) -> None:
        self._file = out / "results.json"
        self._lock = threading.Lock()
        self.rows: dict[str, Row] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def add(self, name: str, row: Row) -> None:
        """Takes in what a step found."""
        with self._lock:
            self.rows[name] = row
            self._file.write_text(json.dumps(self.rows, indent=1) + "\n")

    def of(self, name: str) -> Row:
        """What a step found, empty if it did not run."""
        return self.rows.get(name, {})


def line(name: str, row: Mapping[str, Any]) -> str:
    """One line of a step."""
    shared = "crowded: " if row.get("crowded") else ""
    return f"{name:18} {row['verdict']:7} {row['seconds']:6.1f} s  {shared}{row.get('detail', '')}".rstrip()


def differences(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> list[str]:
    """Which answers differ and where first; a missing one is one that differs."""
    found = []
    for i in range(max(len(ours), len(theirs))):
        if i >= len(ours) or i >= len(theirs):
            found.append(f"answer {i} is missing")
        elif list(ours[i]) != list(theirs[i]):
            pairs = zip(ours[i], theirs[i], strict=False)
            place = next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(ours[i]), len(theirs[i])))
            found.append(f"answer {i} from token {place}")
    return found


def tables(rows: Mapping[str, Row]) -> str:
    """Phases natively and restored, time of a token, and the verdict of each step."""
    parts = []
    for name, row in rows.items():
        setup, _, step = name.partition(".")
        native = rows.get(f"{setup}.native", {})
        if step == "restore" and row.get("phases_ms") and native.get("phases_ms"):
            parts.append(_phases(setup, native, row))
    paces = [(name, row["pace"]) for name, row in rows.items() if row.get("pace")]
    for name, pace in paces:
        parts.append(_paces(name, pace))
    parts.append("\n".join(line(name, row) for name, row in rows.items()))
    return "\n\n".join(parts)


def _phases(setup: str, native: Row, restored: Row) -> str:
    lines = [f"{setup:38}{'native ms':>10}{'restored ms':>14}"]
    if native.get("crowded") or restored.get("crowded"):
        lines = [f"{setup}, crowded: ranks shared a GPU, so these times say nothing", *lines]
    ours, theirs = restored["phases_ms"], native["phases_ms"]
    for phase in {**theirs, **ours}:
        lines.append(f"{phase:38}{theirs.get(phase, 0.0):10.1f}{ours.get(phase, 0.0):14.1f}")
    for title, kind in (("part", "parts_ms"), ("collector", "collector_ms")):
        ours, theirs = restored.get(kind, {}), native.get(kind, {})
        for name in {**theirs, **ours}:
            lines.append(f"  {f'{title}: {name}':36}{theirs.get(name, 0.0):10.1f}{ours.get(name, 0.0):14.1f}")
    for phase, ms in restored.get("restore_ms", {}).items():
        lines.append(f"  {f'restore: {phase}':36}{ms:24.1f}")
    for figure in ("import_s", "init_s", "ready_s"):
        lines.append(f"{figure[:-2] + ' (s)':38}{native[figure]:10.2f}{restored[figure]:14.2f}")
    lines.append(f"answers equal: {restored['equal']} of {restored['answers']}")
    return "\n".join(lines)


def _paces(name: str, pace: Mapping[str, Any]) -> str:
    heads = f"{'native':>9}{'again':>9}{'restored':>10}{'again/native':>14}{'restored/native':>17}"
    lines = [f"{name + ', ms a token':24}{heads}"]
    for batch, found in pace.items():
        lines.append(
            f"  batch {batch:16}{found['native']:9.3f}{found['again']:9.3f}{found['restored']:10.3f}"
            f"{found['again_ratio']:14.4f}{found['restored_ratio']:17.4f}"
        )
    return "\n".join(lines)
