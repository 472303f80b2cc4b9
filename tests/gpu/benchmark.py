# SPDX-License-Identifier: Apache-2.0
"""The benchmark in steps that can be run one by one: what was measured stays, whatever ends it.

Each world has a file ``bench-tp2.json`` that grows with every step; a later run with the same arguments goes on from
it, and restores from the archive that an earlier one captured.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matrix
import reference
import templates
from launch import Deadline, Program, Report, RunFailed, TimeUp, capture, daemon, native, restore

from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.rankpatch.mesh import Mesh

# capture is also made by restore, pairs and switch where there is no archive yet.
STEPS = ("native", "floor", "capture", "restore", "pairs", "switch", "plan", "reference")

# For pairs of batch sizes, all graphs share as few executables as can be.
_SHARED = {"FOUNDRYD_EXECUTABLES": "1"}
_TIMED = {"FOUNDRYD_DRIVER_CLOCK": "1"}

Rows = list[dict[str, Any]]


class Bench:
    """One world's benchmark.

    ``switched`` are pairs of batch sizes that take each other's executables; without any they are chosen by templates.
    """

    def __init__(
        self,
        out: Path,
        variant: str,
        arguments: Sequence[str],
        deadline: Deadline,
        *,
        jobs: int = 1,
        controls: int = 1,
        switched: Sequence[templates.Pair] = (),
        label: str = "bench",
    ) -> None:
        self.name = f"{label}-{variant.replace('=', '').replace(',', '-')}"
        self._variant, self.world = variant, Mesh.parse(variant).world
        self._jobs, self._controls, self._switched = jobs, controls, switched
        self._arguments = ["--mesh", variant, *arguments]
        self._deadline = deadline
        self._archive = out / f"{self.name}.foundry"
        self._file = out / f"{self.name}.json"
        self._troubles: dict[str, str] = {}
        self._skipped: dict[str, str] = {}
        self.reports: dict[str, Any] = {"arguments": self._arguments}
        if self._file.exists():
            before = json.loads(self._file.read_text())
            if before.get("arguments") == self._arguments:
                self.reports = before

    def run(self, steps: Sequence[str]) -> Rows:
        """Runs these of ``STEPS``, in their order; rows of all that is known then."""
        # One run measures both of a pair; the second of a pair alone says what the first would, too.
        natively = [step for step in ("native", "floor") if step in steps]
        if natively:
            self._step(natively, lambda: self._natively(natively))
        if "capture" in steps:
            self._step(["capture"], self._capture)
        restored = [step for step in ("restore", "pairs") if step in steps]
        if not self._captured() and "capture" not in steps and (restored or "switch" in steps):
            self._step(["capture"], self._capture)
        if restored and self._captured():
            self._step(restored, lambda: self._restore(restored))
        if "switch" in steps and self._captured():
            self._step(["switch"], self._switch)
        if "plan" in steps:
            self._step(["plan"], self._plan)
        if "reference" in steps:
            self._step(["reference"], self._reference)
        return rows(self.name, self.reports, self._troubles, self._skipped)

    def _step(self, names: Sequence[str], step: Callable[[], None]) -> None:
        name = " and ".join(names)
        print(f"{self.name}: {name}", file=sys.stderr, flush=True)
        try:
            step()
        except TimeUp as error:
            self._troubles[name] = f"late: {error}"
        except RunFailed as error:
            self._troubles[name] = f"failed: {error}"
        except reference.Skipped as error:
            self._skipped[name] = str(error)
        self._file.write_text(json.dumps(self.reports))

    def _natively(self, steps: Sequence[str]) -> None:
        more = () if "floor" in steps else ("--floor-repeats", "0")
        with self._partial(steps) as path:
            program = Program("bench.py", ("native", *self._arguments, *more, "--json", path))
            reports = native(program, self.world, timeout=self._deadline.left(1800))
        self.reports |= dict.fromkeys(steps, reports)

    def _captured(self) -> bool:
        return "capture" in self.reports and self._archive.exists()

    def _capture(self) -> None:
        program = Program("bench.py", ("engine", *self._arguments))
        self.reports.pop("capture", None)
        report = capture(
            program,
            self._variant,
            self.world,
            self._archive,
            timeout=self._deadline.left(3600),
            jobs=self._jobs,
            controls=self._controls,
            echo=True,
        )
        with ArchiveReader.open(self._archive) as reader:
            self.reports["capture"] = report | {"stored_bytes": stored_bytes(reader)}

    def _restore(self, steps: Sequence[str]) -> None:
        more = () if "pairs" in steps else ("--no-compare",)
        with self._partial(steps) as path, daemon([self._archive]) as runtime:
            program = Program("bench.py", ("engine", *self._arguments, *more, "--json", path))
            reports = restore(
                self._archive,
                program,
                self._variant,
                self.world,
                runtime,
                timeout=self._deadline.left(1200),
                environment=_TIMED if "restore" in steps else None,
            )
        self.reports |= dict.fromkeys(steps, reports)

    def _switch(self) -> None:
        known = templates.of_archive(self._archive)
        chosen = templates.sort_out(known, self._switched) if self._switched else templates.choose(known)
        self.reports["templates"] = {"graphs": len(known)} | asdict(chosen)
        self.reports["switch"] = []
        options = {"--switch": chosen.same, "--switch-across": chosen.across}
        more = [word for name, pairs in options.items() if pairs for word in (name, templates.text(pairs))]
        if not more:
            return  # of a single graph
        arguments = ("engine", *self._arguments, "--no-compare", *more)
        with self._partial(["switch"]) as path, daemon([self._archive]) as runtime:
            program = Program("bench.py", (*arguments, "--json", path))
            self.reports["switch"] = restore(
                self._archive,
                program,
                self._variant,
                self.world,
                runtime,
                timeout=self._deadline.left(600),
                environment=_SHARED,
            )

    def _plan(self) -> None:
        (self.reports["plan"],) = native(Program("plan.py", ()), 1, timeout=self._deadline.left(120))

    def _reference(self) -> None:
        folder = self._archive.with_suffix(".reference")
        known = self.reports.setdefault("reference", {})
        reference.measure(known, self._arguments, self.world, folder, self._deadline)

    @contextmanager
    def _partial(self, steps: Sequence[str]) -> Iterator[str]:
        """Where ranks write as they go; if they do not end, that is the report, where every rank wrote one."""
        pattern = f"{self.name}-{steps[-1]}-{{rank}}.json"
        files = [self._file.with_name(pattern.format(rank=rank)) for rank in range(self.world)]
        for file in files:
            file.unlink(missing_ok=True)
        try:
            yield str(self._file.with_name(pattern))
        except RunFailed:
            if all(file.exists() for file in files):
                reports = [json.loads(file.read_text()) for file in files]
                self.reports |= dict.fromkeys(steps, reports)
            raise


def rows(name: str, reports: Report, troubles: dict[str, str], skipped: dict[str, str] | None = None) -> Rows:
    """What is known, in milliseconds of the slowest rank; what is not is None."""
    skipped = skipped or {}
    floors: Sequence[Report] = reports.get("floor", [])
    natives: Sequence[Report] = reports.get("native", floors)
    pairs: Sequence[Report] = reports.get("pairs", [])
    restored: Sequence[Report] = reports.get("restore", pairs)
    wrong = [f"{step} {trouble}" for step, trouble in troubles.items()]
    # A report of a run that was cut short may be from before the restore.
    for several in (restored, pairs):
        if several and all("ready_ms" in r for r in several):
            wrong += [w for w in matrix.not_restored(several) if w not in wrong]
    verdict = "ok"
    if wrong:
        verdict = "late" if troubles and all(t.startswith("late") for t in troubles.values()) else "failed"
    elif skipped and not any(reports.get(step) for step in STEPS):
        verdict = "skipped"
    summary = {
        "case": name,
        "verdict": verdict,
        "graphs": _progress(natives, "native"),
        "warm-up": _slowest(natives, lambda r: _steps(r, "warm_up_ms")),
        "capture": _slowest(natives, lambda r: _steps(r, "capture_ms")),
        "instantiate": _slowest(natives, lambda r: _steps(r, "instantiate_ms")),
        "native ready": _slowest(natives, lambda r: r.get("ready_ms")),
        "floor": _slowest(floors, lambda r: _floor(r, "floor")),
        "floor, kept": _slowest(floors, lambda r: _floor(r, "floor_kept")),
        "restore": _slowest(restored, lambda r: r.get("restore_ms")),
        "restored ready": _slowest(restored, lambda r: r.get("ready_ms")),
        "to first replay": _slowest(restored, lambda r: r.get("first_replay_ms")),
        "all executables": _slowest(restored, lambda r: r.get("all_ready_ms")),
        "archive MB": reports["capture"]["archive_bytes"] / 1e6 if "capture" in reports else None,
        "native GB": _memory(natives),
        "restored GB": _memory(restored),
        "detail": "; ".join(wrong)[:300],
    }
    left_out = [{"case": f"{name} {step}", "verdict": "skipped", "detail": why} for step, why in skipped.items()]
    measured = [*_floor_rows(name, floors), *_phase_rows(name, restored), *_replay_rows(name, pairs)]
    return [summary, *left_out, *measured, *_template_rows(name, reports), *reference.rows(name, reports)]


def _floor_rows(name: str, floors: Sequence[Report]) -> Rows:
    """What a graph costs on average where every graph is kept, of the slowest rank."""
    kept = [report["floor_kept"].values() for report in floors if report.get("floor_kept")]
    if not kept:
        return []
    slowest = max(kept, key=lambda costs: sum(cost["build_ms"] + cost["instantiate_ms"] for cost in costs))
    parts = {
        "build": "build_ms",
        "of it kernels added": "add_kernels_ms",
        "attributes copied": "copy_attributes_ms",
        "instantiate": "instantiate_ms",
    }
    means = {part: sum(cost[figure] for cost in slowest) / len(slowest) for part, figure in parts.items()}
    return [{"case": f"{name} floor, kept, a graph", **means}]


def _phase_rows(name: str, restored: Sequence[Report]) -> Rows:
    if not restored or not restored[0].get("phases"):
        return []
    phases = {phase: max(r["phases"].get(phase, 0.0) for r in restored) for phase in restored[0]["phases"]}
    found = [{"case": f"{name} phases", **phases}]
    # Of the rank whose own part is largest.
    if all(r.get("cpu") for r in restored):
        cpu = max((r["cpu"] for r in restored), key=lambda c: c["own_ms"])
        found += [{"case": f"{name} {part}", **cpu[part]} for part in ("driver", "own")]
    return found


def _template_rows(name: str, reports: Report) -> Rows:
    """How many templates there are, and which batch sizes were chosen to take each other's executables."""
    if (found := reports.get("templates")) is None:
        return []
    pairs = {"of one": found["same"], "of different ones": found["across"]}
    texts = {kind: ", ".join(f"{a} and {b}" for a, b in chosen) or "none" for kind, chosen in pairs.items()}
    return [{"case": f"{name} templates", "graphs": found["graphs"], "templates": found["templates"], **texts}]


def _replay_rows(name: str, pairs: Sequence[Report]) -> Rows:
    found = []
    for batch, compared in (pairs[0].get("compared_with_native", {}) if pairs else {}).items():
        low, middle, high = compared["ratio"]
        least, same, most = compared["spread"]
        found.append(
            {
                "case": f"{name} replay, batch {batch}",
                "restored ms": compared["restored_ms"],
                "native ms": compared["native_ms"],
                "restored / native": f"{middle:.4f} ({low:.4f} to {high:.4f})",
                "native / native": f"{same:.4f} ({least:.4f} to {most:.4f})",
            }
        )
    return found


def _slowest(reports: Sequence[Report], value: Callable[[Report], float | None]) -> float | None:
    """The maximum over ranks, None unless all have one."""
    values = [v for v in map(value, reports) if v is not None]
    return max(values) if values and len(values) == len(reports) else None


def _steps(report: Report, step: str) -> float | None:
    return sum(times[step] for times in report["native"].values()) if "native" in report else None


def _floor(report: Report, which: str) -> float | None:
    if which not in report:
        return None
    return float(sum(cost["build_ms"] + cost["instantiate_ms"] for cost in report[which].values()))


def _progress(reports: Sequence[Report], name: str) -> str:
    """How many graphs were measured of how many."""
    if not reports:
        return "-"
    done, asked = min(len(r.get(name, {})) for r in reports), reports[0]["asked"]
    return str(asked) if done == asked else f"{done} of {asked}"


def _memory(reports: Sequence[Report]) -> float | None:
    return max(r["memory"]["device_used"] for r in reports) / 1e9 if reports else None
