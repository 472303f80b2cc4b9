# SPDX-License-Identifier: Apache-2.0
"""What is captured on one GPU and restored on as many as there are ranks, and what must hold of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launch import Deadline, Program, Report, RunFailed, TimeUp, capture, daemon, foundryd, native, restore

from foundryd.rankpatch.mesh import Mesh


@dataclass(frozen=True)
class Case:
    """A program and the world that it is captured for.

    Attributes
    ----------
    environment : variables of capture, restore and native run alike.
    sample, held_out : ranks to capture and to predict, where not the tool's own choice.
    """

    name: str
    variant: str
    program: Program
    environment: Mapping[str, str] = field(default_factory=dict)
    sample: str = ""
    held_out: str = ""

    @property
    def world(self) -> int:
        """Ranks, and so GPUs of a restore."""
        return Mesh.parse(self.variant).world

    def on(self, gpu: int) -> Case:
        """The same where only one GPU is seen."""
        return replace(self, environment={**self.environment, "CUDA_VISIBLE_DEVICES": str(gpu)})


def _decode(name: str, variant: str, *arguments: str, sample: str = "", held_out: str = "", **environment: str) -> Case:
    program = Program("decode.py", ("--mesh", variant, "--steps", "16", "--replays", "8", *arguments))
    return Case(name, variant, program, environment, sample, held_out)


SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
REST_OF_8 = "4,5,6"  # the tool's own sample has the others
FEW = {"FOUNDRYD_EXECUTABLES": "2"}  # fewer than batch sizes, so that executables are changed all the time
OF_64 = "0,1,2,31,63"
MOE = ("--model", "moe")
CROWD = 4  # ranks that may share a GPU: each is a process with a context, and NCCL connects them by sockets
CASES = (
    Case("features", "tp=1", Program("torch_features.py")),
    _decode("dense", "tp=1"),
    _decode("dense-compiled", "tp=1", "--compile"),
    _decode("dense-triton", "tp=1", "--norm", "triton"),
    _decode("dense-sampled", "tp=1", "--rng"),
    _decode("dense-expandable", "tp=1", **EXPANDABLE),
    _decode("dense-few-executables", "tp=1", **FEW),
    _decode("dense-on-demand", "tp=1", FOUNDRYD_RESTORE_BACKGROUND="0"),
    _decode("moe", "tp=1", *MOE),
    _decode("dense-tp2", "tp=2"),
    _decode("dense-tp2-gather", "tp=2", "--head", "gather"),
    _decode("dense-tp2-compiled", "tp=2", "--compile"),
    _decode("dense-tp2-compiled-runtime", "tp=2", "--compile", "--embedding", "runtime"),
    _decode("dense-tp2-sampled", "tp=2", "--rng", "--norm", "triton"),
    _decode("dense-tp2-few-executables", "tp=2", **FEW),
    _decode("dense-dp2", "dp=2"),
    _decode("moe-ep2-all-gather", "ep=2", *MOE),
    _decode("moe-ep2-all-to-all", "ep=2", *MOE, "--dispatch", "all-to-all"),
    _decode("moe-ep2-compiled", "ep=2", *MOE, "--dispatch", "all-to-all", "--compile"),
    _decode("dense-tp2-sockets", "tp=2", **SOCKETS),
    _decode("moe-ep2-sockets", "ep=2", *MOE, "--dispatch", "all-to-all", **SOCKETS),
    _decode("dense-tp2-expandable", "tp=2", **EXPANDABLE),
    _decode("dense-tp8", "tp=8", held_out=REST_OF_8),
    _decode("dense-tp8-compiled", "tp=8", "--compile", held_out=REST_OF_8),
    _decode("dense-tp8-compiled-runtime", "tp=8", "--compile", "--embedding", "runtime", held_out=REST_OF_8),
    _decode("dense-dp2-tp4", "dp=2,tp=4", held_out=REST_OF_8),
    _decode("moe-ep8", "ep=8", *MOE, "--dispatch", "all-to-all", held_out=REST_OF_8),
    _decode("moe-ep4-tp2", "ep=4,tp=2", *MOE, held_out=REST_OF_8),
    _decode("dense-tp64", "tp=64", "--size", "64-heads", "--layers", "2", sample=OF_64, held_out="37"),
    _decode(
        "moe-ep64",
        "ep=64",
        *MOE,
        "--experts",
        "64",
        "--dispatch",
        "all-to-all",
        "--layers",
        "2",
        sample=OF_64,
        held_out="37",
    ),
)


@dataclass
class Outcome:
    """What came of a case.

    Attributes
    ----------
    verdict : ``ok``, ``captured`` (there are too few GPUs to restore), ``unstable`` (two native runs differ),
        ``late`` (there was not the time) or ``failed``.
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


def run_case(
    case: Case, gpus: int, folder: Path, *, limit: float = 3600.0, jobs: int = 1, crowded: bool = False
) -> Outcome:
    """Captures, verifies, restores, and compares every digest with a native run's.

    ``limit`` is in seconds, for all of it; ``jobs`` launches of the capture run side by side.  ``crowded``: where there
    are too few GPUs, as many as ``CROWD`` ranks share one.
    """
    outcome = Outcome(case.name, case.variant, case.world)
    archive = folder / f"{case.name}.foundry"
    deadline = Deadline(limit)
    try:
        outcome.capture = capture(
            case.program,
            case.variant,
            case.world,
            archive,
            timeout=deadline.left(1800),
            environment=case.environment,
            sample=case.sample,
            held_out=case.held_out,
            jobs=jobs,
        )
        foundryd("verify", str(archive), timeout=deadline.left(300))
        unproven = not_proven(outcome.capture, case.world)
        if unproven:
            outcome.detail = unproven
        elif case.world > gpus * (CROWD if crowded else 1):
            outcome.verdict = "captured"
            outcome.detail = f"{gpus} GPUs here"
        else:
            _restore_and_compare(case, archive, outcome, deadline)
    except TimeUp as error:
        outcome.verdict = "late"
        outcome.detail = str(error)
    except RunFailed as error:
        outcome.detail = str(error)
    (folder / f"{case.name}.json").write_text(json.dumps(asdict(outcome), indent=1))
    return outcome


def _restore_and_compare(case: Case, archive: Path, outcome: Outcome, deadline: Deadline) -> None:
    def run_natively() -> list[Report]:
        return native(case.program, case.world, timeout=deadline.left(900), environment=case.environment)

    with daemon([archive]) as runtime:
        outcome.restored = restore(
            archive,
            case.program,
            case.variant,
            case.world,
            runtime,
            timeout=deadline.left(600),
            environment=case.environment,
        )
    outcome.native = run_natively()
    wrong = [*not_restored(outcome.restored), *differences(outcome.restored, outcome.native)]
    if wrong and not not_restored(outcome.restored):
        # A program that does not repeat itself proves nothing either way.
        again = differences(run_natively(), outcome.native)
        if again:
            outcome.verdict = "unstable"
            wrong = [f"two native runs differ: {line}" for line in again]
    outcome.detail = "; ".join(wrong)
    if not wrong:
        outcome.verdict = "ok"


def not_proven(captured: Report, world: int) -> str:
    """Why a capture's rules are not known to hold for ranks that it did not see; empty where they are."""
    if captured["heldout_ranks"] or len(captured["captured_ranks"]) == world:
        return ""
    return f"captured as ranks {captured['captured_ranks']} of {world}, and no rank was held out to check the rules"


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
        "held out": outcome.capture.get("heldout_ranks", ""),
        "rules": rules_text(outcome.capture),
        "archive MB": outcome.capture.get("archive_bytes", 0) / 1e6,
        "capture s": outcome.capture.get("capture_ms", 0.0) / 1e3,
        "native graphs ms": worst(outcome.native, "graphs"),
        "restored graphs ms": worst(outcome.restored, "graphs"),
        "detail": outcome.detail[:160],
    }


def rules_text(captured: Report) -> str:
    """Words by the kind of rule that gives them."""
    return ", ".join(f"{kind} {count}" for kind, count in sorted(captured.get("rules", {}).items()))


def late(case: Case, seconds: float) -> Outcome:
    """What came of a case that there was no time for."""
    return Outcome(case.name, case.variant, case.world, "late", f"the {seconds:g} s of this part were over")
