# SPDX-License-Identifier: Apache-2.0
"""What is captured on one GPU and restored on as many as there are ranks, and what must hold of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from launch import Program, Report, RunFailed, capture, daemon, foundryd, native, restore

from foundryd.rankpatch.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """A program and the world that it is captured for."""

    name: str
    variant: str
    program: Program

    @property
    def world(self) -> int:
        """Ranks, and so GPUs of a restore."""
        return Mesh.parse(self.variant).world


def _decode(name: str, variant: str, *arguments: str) -> Case:
    program = Program("decode.py", ("--mesh", variant, "--steps", "16", "--replays", "8", *arguments))
    return Case(name, variant, program)


MOE = ("--model", "moe")
CASES = (
    Case("features", "tp=1", Program("torch_features.py")),
    _decode("dense", "tp=1"),
    _decode("dense-compiled", "tp=1", "--compile"),
    _decode("dense-triton", "tp=1", "--norm", "triton"),
    _decode("dense-sampled", "tp=1", "--rng"),
    _decode("moe", "tp=1", *MOE),
    _decode("dense-tp2", "tp=2"),
    _decode("dense-tp2-gather", "tp=2", "--head", "gather"),
    _decode("dense-tp2-compiled", "tp=2", "--compile"),
    _decode("dense-tp2-compiled-runtime", "tp=2", "--compile", "--embedding", "runtime"),
    _decode("dense-tp2-sampled", "tp=2", "--rng", "--norm", "triton"),
    _decode("dense-dp2", "dp=2"),
    _decode("moe-ep2-all-gather", "ep=2", *MOE),
    _decode("moe-ep2-all-to-all", "ep=2", *MOE, "--dispatch", "all-to-all"),
    _decode("moe-ep2-compiled", "ep=2", *MOE, "--dispatch", "all-to-all", "--compile"),
    _decode("dense-tp8", "tp=8"),
    _decode("dense-tp8-compiled", "tp=8", "--compile"),
    _decode("dense-dp2-tp4", "dp=2,tp=4"),
    _decode("moe-ep8", "ep=8", *MOE, "--dispatch", "all-to-all"),
    _decode("moe-ep4-tp2", "ep=4,tp=2", *MOE),
)


@dataclass
class Outcome:
    """What came of a case.

    Attributes
    ----------
    verdict : ``ok``, ``captured`` (there are too few GPUs to restore), ``unstable`` (two native runs differ) or
        ``failed``.
    detail : why, where it is not ok.
    """

    name: str
    variant: str
    world: int
    verdict: str = "failed"
    detail: str = ""
    capture: Report = field(default_factory=dict)
    native: list[Report] = field(default_factory=list)
    restored: list[Report] = field(default_factory=list)


def run_case(case: Case, gpus: int, folder: Path) -> Outcome:
    """Captures, verifies, restores, and compares every digest with a native run's."""
    outcome = Outcome(case.name, case.variant, case.world)
    archive = folder / f"{case.name}.foundry"
    try:
        outcome.capture = capture(case.program, case.variant, case.world, archive)
        foundryd("verify", str(archive))
        if case.world > gpus:
            outcome.verdict = "captured"
            outcome.detail = f"{gpus} GPUs here"
        else:
            _restore_and_compare(case, archive, outcome)
    except RunFailed as error:
        outcome.detail = str(error)
    (folder / f"{case.name}.json").write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def _restore_and_compare(case: Case, archive: Path, outcome: Outcome) -> None:
    with daemon([archive]) as runtime:
        outcome.restored = restore(archive, case.program, case.variant, case.world, runtime)
    outcome.native = native(case.program, case.world)
    wrong = [*not_restored(outcome.restored), *differences(outcome.restored, outcome.native)]
    if wrong and not not_restored(outcome.restored):
        # A program that does not repeat itself proves nothing either way.
        again = differences(native(case.program, case.world), outcome.native)
        if again:
            outcome.verdict = "unstable"
            wrong = [f"two native runs differ: {line}" for line in again]
    outcome.detail = "; ".join(wrong)
    if not wrong:
        outcome.verdict = "ok"


def not_restored(reports: Sequence[Report]) -> list[str]:
    """Ranks that did not restore, and what else went wrong in them."""
    wrong = []
    for rank, report in enumerate(reports):
        if not report["restored"] or report["fallback"]:
            wrong.append(f"rank {rank} captured natively: {report['fallback']}")
        if report.get("errors"):
            wrong.append(f"rank {rank}: {report['errors']}")
        if report.get("eager_collectives_wrong"):
            wrong.append(f"rank {rank}: {report['eager_collectives_wrong']} eager collectives had wrong sums")
    return wrong


def differences(left: Sequence[Report], right: Sequence[Report]) -> list[str]:
    """Where digests of two runs differ, the first replay of each graph."""
    wrong = []
    for rank, (a, b) in enumerate(zip(left, right, strict=True)):
        mine, others = a["digests"], b["digests"]
        if set(mine) != set(others):
            wrong.append(f"rank {rank} has graphs {sorted(mine)} and {sorted(others)}")
        for graph in sorted(set(mine) & set(others)):
            pairs = list(zip(mine[graph], others[graph], strict=False))
            first = next((i for i, (x, y) in enumerate(pairs) if x != y), None)
            if first is not None or len(mine[graph]) != len(others[graph]) or not pairs:
                wrong.append(f"rank {rank}, graph {graph}: replay {first} of {len(pairs)}")
    return wrong


def row(outcome: Outcome) -> dict[str, Any]:
    """The line of the table."""

    def worst(reports: Sequence[Report], name: str) -> float | None:
        times = [report["timings"][name] for report in reports if name in report.get("timings", {})]
        return max(times, default=None)

    return {
        "case": outcome.name,
        "ranks": outcome.world,
        "verdict": outcome.verdict,
        "captured as": outcome.capture.get("captured_ranks", ""),
        "archive MB": outcome.capture.get("archive_bytes", 0) / 1e6,
        "capture s": outcome.capture.get("capture_ms", 0.0) / 1e3,
        "native graphs ms": worst(outcome.native, "graphs"),
        "restored graphs ms": worst(outcome.restored, "graphs"),
        "detail": outcome.detail[:160],
    }
