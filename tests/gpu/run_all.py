# SPDX-License-Identifier: Apache-2.0
"""Everything that needs real GPUs, one after another: tests, captures and restores, benchmark, the hook's cost.

``python -P tests/gpu/run_all.py --out DIR``.  Raw results are JSON files in DIR; the table is printed last.  The status
is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import matrix
from launch import PROGRAMS, Program, Report, RunFailed, capture, daemon, devices, native, restore

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[2]


def run_tests(out: Path) -> Rows:
    """``pytest tests/gpu``."""
    xml = out / "pytest.xml"
    command = [sys.executable, "-P", "-m", "pytest", "tests/gpu", "-q", f"--junitxml={xml}"]
    done = subprocess.run(command, cwd=ROOT, timeout=3600, check=False)
    suite = ElementTree.parse(xml).getroot().find("testsuite")
    counts = {} if suite is None else {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    return [{"case": "pytest tests/gpu", "verdict": "ok" if done.returncode == 0 else "failed", **counts}]


def run_matrix(out: Path, names: Sequence[str], gpus: int) -> Rows:
    """Every case, or those named."""
    rows = []
    for case in matrix.CASES:
        if not names or case.name in names:
            print(f"{case.name}: {case.variant}", file=sys.stderr, flush=True)
            rows.append(matrix.row(matrix.run_case(case, gpus, out)))
    return rows


def run_bench(out: Path, variant: str, world: int, arguments: Sequence[str]) -> Rows:
    """Native, floor and restore of one world."""
    common = ("--mesh", variant, *arguments)
    name = f"bench-{variant.replace('=', '')}"
    archive = out / f"{name}.foundry"
    engine = Program("bench.py", ("engine", *common))
    reports: dict[str, Any] = {"native": native(Program("bench.py", ("native", *common)), world, timeout=1800)}
    reports["capture"] = capture(engine, variant, world, archive, timeout=3600)
    with daemon([archive]) as runtime:
        reports["restored"] = restore(archive, engine, variant, world, runtime, timeout=1200)
    (out / f"{name}.json").write_text(json.dumps(reports))
    return bench_rows(name, reports["native"], reports["restored"], reports["capture"])


def bench_rows(name: str, natives: Sequence[Report], restored: Sequence[Report], captured: Report) -> Rows:
    """Times are milliseconds, of the slowest rank."""

    def steps(report: Report, step: str) -> float:
        return float(sum(times[step] for times in report["native"].values()))

    def floor(report: Report) -> float:
        return float(sum(cost["build_ms"] + cost["instantiate_ms"] for cost in report["floor"].values()))

    wrong = matrix.not_restored(restored)
    rows: Rows = [
        {
            "case": name,
            "verdict": "failed" if wrong else "ok",
            "graphs": natives[0]["graphs"],
            "warm-up": max(steps(r, "warm_up_ms") for r in natives),
            "capture": max(steps(r, "capture_ms") for r in natives),
            "instantiate": max(steps(r, "instantiate_ms") for r in natives),
            "native ready": max(r["ready_ms"] for r in natives),
            "floor": max(floor(r) for r in natives),
            "restored ready": max(r["ready_ms"] for r in restored),
            "to first replay": max(r["first_replay_ms"] for r in restored),
            "archive MB": captured["archive_bytes"] / 1e6,
            "detail": "; ".join(wrong)[:160],
        }
    ]
    rows.append(
        {
            "case": f"{name} phases",
            **{phase: max(r["phases"].get(phase, 0.0) for r in restored) for phase in restored[0]["phases"]},
        }
    )
    for batch, compared in restored[0]["compared_with_native"].items():
        low, middle, high = compared["ratio"]
        least, same, most = compared["spread"]
        rows.append(
            {
                "case": f"{name} replay, batch {batch}",
                "restored ms": compared["restored_ms"],
                "native ms": compared["native_ms"],
                "restored / native": f"{middle:.4f} ({low:.4f} to {high:.4f})",
                "native / native": f"{same:.4f} ({least:.4f} to {most:.4f})",
            }
        )
    return rows


def run_hook_cost(out: Path, binary: Path | None) -> Rows:
    """Nanoseconds a driver call, without and with the hook."""
    path = out / "hook-cost.json"
    given = [] if binary is None else ["--binary", str(binary)]
    command = [sys.executable, "-P", str(PROGRAMS / "hook_cost" / "run.py"), "--json", str(path), *given]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode != 0:
        raise RunFailed(f"hook_cost ended with {done.returncode}: {done.stderr.strip()[-2000:]}")
    costs = json.loads(path.read_text())["costs"]
    return [
        {"case": f"hook: {call}", **{f"{way} ns": figures["median_ns"] for way, figures in ways.items()}}
        for call, ways in costs.items()
    ]


def table(rows: Rows) -> str:
    """Runs of rows with equal columns share a heading."""

    def text(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:,.2f}" if isinstance(value, float) else str(value)

    lines: list[str] = []
    while rows:
        columns = list(rows[0])
        count = next((i for i, row in enumerate(rows) if list(row) != columns), len(rows))
        cells = [columns, *([text(row[c]) for c in columns] for row in rows[:count])]
        widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
        lines += ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in cells]
        lines.append("")
        rows = rows[count:]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for archives and raw results")
    parser.add_argument("--part", action="append", choices=("tests", "matrix", "bench", "hook"), help="all by default")
    parser.add_argument("--case", action="append", default=[], help="only this case of the matrix; repeat for more")
    parser.add_argument("--hook-cost-binary", type=Path, help="the program, where there is no compiler")
    parser.add_argument(
        "--bench-arguments", nargs=argparse.REMAINDER, default=[], help="all that follows, for bench.py"
    )
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    gpus = devices()
    parts = {
        "tests": lambda: run_tests(out),
        "matrix": lambda: run_matrix(out, args.case, gpus),
        "bench": lambda: [
            row for n in (1, 2) if n <= gpus for row in run_bench(out, f"tp={n}", n, args.bench_arguments)
        ],
        "hook": lambda: run_hook_cost(out, args.hook_cost_binary),
    }
    rows: Rows = []
    for name, part in parts.items():
        if args.part is None or name in args.part:
            try:
                rows += part()
            except (RunFailed, subprocess.TimeoutExpired) as error:
                rows.append({"case": name, "verdict": "failed", "detail": str(error)[-2000:]})
    (out / "rows.json").write_text(json.dumps({"gpus": gpus, "rows": rows}, indent=1))
    print(table(rows))
    return 1 if any(row.get("verdict") in ("failed", "unstable") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
