# SPDX-License-Identifier: Apache-2.0
"""Everything that needs real GPUs: tests, captures and restores, benchmark, the hook's cost.

``python -P tests/gpu/run_all.py --out DIR``.  Raw results are JSON files in DIR; ``rows.json`` grows with every result,
and the table is printed last, also when time was up or the program was told to end.  Where time is short, choose:

    run_all.py --out DIR --part matrix --case dense --case moe --jobs 2 --part-limit 140
    run_all.py --out DIR --part bench --bench-variant tp=1 --bench-step native --batch-sizes 1-16 --part-limit 140
    run_all.py --out DIR --part bench --bench-variant tp=1 --bench-step restore --batch-sizes 1-16 --part-limit 140

    run_all.py --out DIR --part sweep --bench-variant tp=1 --point 1x2 --point 8x2 --point 8x8 --part-limit 300

    run_all.py --out DIR --part bench --bench-variant tp=1 --bench-step restore --bench-step reference

The sweep, of batch sizes and layers, runs only when it is named.  The benchmark ends with a row for each figure that
has a target (``targets.py``), and a plot where matplotlib is there.  Its step ``reference`` measures foundry-core where
that is installed and is skipped elsewhere.
The status is 1 if anything failed or was late.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import benchmark
import matrix
import plot
import sweep
import targets
import templates
from launch import PROGRAMS, STOP, Deadline, RunFailed, TimeUp, clean_environment, devices, run

Rows = list[dict[str, Any]]
ROOT = Path(__file__).parents[2]
# What was skipped has a row that says so.
GOOD = ("ok", "captured", "skipped")
PARTS = ("tests", "matrix", "bench", "sweep", "hook")
DEFAULT_PARTS = tuple(part for part in PARTS if part != "sweep")
# What runs the matrix's cases, too.
MATRIX_TESTS = "tests/gpu/test_torch_on_gpus.py::test_{}"
MATRIX_TEST_NAMES = (
    "what_one_gpu_captured_is_restored_on_as_many_as_there_are_ranks",
    "one_gpu_captures_worlds_that_do_not_fit",
)


class Results:
    """Rows so far, in memory and in ``rows.json``."""

    def __init__(self, out: Path, gpus: int) -> None:
        self.rows: Rows = []
        self._file, self._gpus = out / "rows.json", gpus
        self._lock = threading.Lock()

    def add(self, *rows: dict[str, Any]) -> None:
        """Takes in rows; one with a verdict is shown at once."""
        with self._lock:
            self.rows += rows
            self._file.write_text(json.dumps({"gpus": self._gpus, "rows": self.rows}, indent=1))
        for row in rows:
            if "verdict" in row:
                print(f"{row['case']}: {row['verdict']} {row.get('detail', '')}".rstrip(), file=sys.stderr, flush=True)

    @property
    def bad(self) -> bool:
        """Whether anything failed or was late."""
        return any(row.get("verdict", "ok") not in GOOD for row in self.rows)


def run_tests(results: Results, out: Path, args: argparse.Namespace, limit: float) -> None:
    """``pytest tests/gpu``."""
    xml = out / "pytest.xml"
    xml.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "pytest", "tests/gpu", "-q", f"--junitxml={xml}"]
    command += ["-k", args.select] if args.select else []
    if args.part is None or "matrix" in args.part:
        command += [f"--deselect={MATRIX_TESTS.format(name)}" for name in MATRIX_TEST_NAMES]
    # pytest's lines are shown as they come.
    command = ["bash", "-c", 'exec "$@" >&2', "bash", *command]
    row: dict[str, Any] = {"case": "pytest tests/gpu", "verdict": "ok"}
    try:
        # Interrupted, it still writes what it knows.
        run("pytest", command, os.environ, timeout=limit, log=out / "pytest.log", echo=True, cwd=ROOT, patience=30)
    except TimeUp:
        row["verdict"] = "late"
    except RunFailed:
        row["verdict"] = "failed"
    row |= dict.fromkeys(("tests", "failures", "errors", "skipped"))
    suite = ElementTree.parse(xml).getroot().find("testsuite") if xml.exists() else None
    if suite is not None:
        row |= {k: int(suite.get(k, 0)) for k in ("tests", "failures", "errors", "skipped")}
    results.add(row)


def run_matrix(results: Results, out: Path, args: argparse.Namespace, gpus: int, limit: float) -> None:
    """Every case, or those named; with ``--jobs``, those that need one GPU run side by side, spread over the GPUs.

    With ``--share-gpus`` those that need several are among them.
    """
    deadline = Deadline(limit)
    unknown = set(args.case) - {case.name for case in matrix.CASES}
    if unknown:
        raise RunFailed(f"there are no cases {sorted(unknown)}: choose among {[case.name for case in matrix.CASES]}")
    chosen = [case for case in matrix.CASES if not args.case or case.name in args.case]

    def one(case: matrix.Case) -> None:
        try:
            left = deadline.left(args.case_limit)
        except TimeUp:
            results.add(matrix.row(matrix.late(case, limit)))
            return
        print(f"{case.name}: {case.variant}", file=sys.stderr, flush=True)
        found = matrix.run_case(case, gpus, out, limit=left, jobs=args.capture_jobs, crowded=args.crowded)
        results.add(matrix.row(found))

    together = [
        case for case in chosen if args.jobs > 1 and gpus and (args.share_gpus or not needs_several(case, gpus))
    ]
    side_by_side(together, args.jobs, gpus, one)
    for case in chosen:
        if case not in together:
            one(case)


def needs_several(case: matrix.Case, gpus: int) -> bool:
    """Whether a case is restored on more than one of the GPUs that there are."""
    return 1 < case.world <= gpus


def side_by_side(cases: Sequence[matrix.Case], jobs: int, gpus: int, one: Callable[[matrix.Case], None]) -> None:
    """Runs ``one`` for each case in ``jobs`` threads.

    A case that needs one GPU sees one that as few others see as can be.
    """
    if not cases:
        return
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for job in range(jobs):
        free.put(job % gpus)

    def on_a_gpu(case: matrix.Case) -> None:
        gpu = free.get()
        try:
            one(case if needs_several(case, gpus) else case.on(gpu))
        finally:
            free.put(gpu)

    with ThreadPoolExecutor(jobs) as pool:
        for done in [pool.submit(on_a_gpu, case) for case in cases]:
            done.result()


def run_benchmark(results: Results, out: Path, args: argparse.Namespace, gpus: int, limit: float) -> None:
    """The chosen steps for the chosen worlds."""
    deadline = Deadline(limit)
    variants = args.bench_variant or [f"tp={n}" for n in (1, 2) if n <= gpus]
    sizes = ["--batch-sizes", args.batch_sizes] if args.batch_sizes else []
    steps = args.bench_step or benchmark.STEPS
    beside = []
    for variant in variants:
        bench = benchmark.Bench(
            out,
            variant,
            [*sizes, *args.bench_arguments],
            deadline,
            jobs=args.capture_jobs,
            controls=args.controls,
            switched=args.switched,
        )
        results.add(*bench.run(steps))
        beside += targets.rows(bench.name, bench.world, bench.reports)
        print(plot.draw(bench.name, bench.reports, out / f"{bench.name}.svg"), file=sys.stderr)
    results.add(*beside)


def run_sweep(results: Results, out: Path, args: argparse.Namespace, limit: float) -> None:
    """The chosen points of the first chosen world."""
    variant = (args.bench_variant or ["tp=1"])[0]
    options = {"jobs": args.capture_jobs, "controls": args.controls}
    points = args.point or sweep.POINTS
    results.add(*sweep.run(out, variant, points, args.bench_arguments, Deadline(limit), results.add, **options))


def run_hook_cost(results: Results, out: Path, args: argparse.Namespace, limit: float) -> None:
    """Nanoseconds a driver call, without and with the hook."""
    include = args.hook_include or ROOT / "hook" / "include"
    if args.hook_cost_binary is None and not (include / "foundryd" / "hook.h").exists():
        raise RunFailed(
            f"{include} has no foundryd/hook.h, and the program that measures is built with it: give --hook-include "
            "with the folder hook/include of the sources, or --hook-cost-binary with the program"
        )
    path = out / "hook-cost.json"
    given = [] if args.hook_cost_binary is None else ["--binary", str(args.hook_cost_binary)]
    given += ["--include", str(include)]
    command = [sys.executable, "-P", str(PROGRAMS / "hook_cost" / "run.py"), "--json", str(path), *given]
    run("hook_cost", command, clean_environment(), timeout=min(limit, 1200), log=out / "hook-cost.log")
    costs = json.loads(path.read_text())["costs"]
    results.add(
        *(
            {"case": f"hook: {call}", **{f"{way} ns": figures["median_ns"] for way, figures in ways.items()}}
            for call, ways in costs.items()
        )
    )


def table(rows: Rows) -> str:
    """Runs of rows with equal columns share a heading."""

    def text(value: Any) -> str:
        if value is None:
            return "-"
        return f"{value:,.2f}" if isinstance(value, float) else " ".join(str(value).split())

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


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for archives and raw results")
    parser.add_argument("--part", action="append", choices=PARTS, help="all but sweep by default")
    parser.add_argument("--part-limit", type=float, default=7200.0, help="seconds of each part")
    parser.add_argument("--select", help="only tests that pytest's -k would choose")
    parser.add_argument("--case", action="append", default=[], help="only this case of the matrix; repeat for more")
    parser.add_argument("--case-limit", type=float, default=3600.0, help="seconds of each case of the matrix")
    parser.add_argument(
        "--jobs", type=int, default=1, help="cases of one GPU side by side; their times say little then"
    )
    parser.add_argument("--crowded", action="store_true", help="where GPUs are too few, up to four ranks share one")
    parser.add_argument("--share-gpus", action="store_true", help="cases of several GPUs side by side, too")
    parser.add_argument("--capture-jobs", type=int, default=1, help="launches of each case's capture side by side")
    parser.add_argument("--controls", type=int, default=1, help="controls of a capture that share its proofs")
    parser.add_argument(
        "--switched",
        type=templates.listed,
        default=(),
        help="batch sizes, two by two, that take each other's executables; chosen by templates by default",
    )
    parser.add_argument("--bench-step", action="append", choices=benchmark.STEPS, help="all by default")
    parser.add_argument("--bench-variant", action="append", help="tp=1 and, on two GPUs, tp=2 by default")
    parser.add_argument("--batch-sizes", help="of the benchmark, as in 1-64")
    points = " ".join(map(str, sweep.POINTS))
    parser.add_argument("--point", action="append", type=sweep.Point.parse, help=f"of the sweep; by default {points}")
    parser.add_argument("--hook-cost-binary", type=Path, help="the program, where there is no compiler")
    parser.add_argument("--hook-include", type=Path, help="folder of foundryd/hook.h, where it is not beside the tests")
    parser.add_argument(
        "--bench-arguments", nargs=argparse.REMAINDER, default=[], help="all that follows, for bench.py"
    )
    return parser


def main() -> int:
    args = arguments().parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: STOP.set())
    gpus = devices()
    results = Results(out, gpus)
    limit = args.part_limit
    parts: dict[str, Callable[[], None]] = {
        "tests": lambda: run_tests(results, out, args, limit),
        "matrix": lambda: run_matrix(results, out, args, gpus, limit),
        "bench": lambda: run_benchmark(results, out, args, gpus, limit),
        "sweep": lambda: run_sweep(results, out, args, limit),
        "hook": lambda: run_hook_cost(results, out, args, limit),
    }
    try:
        for name, part in parts.items():
            if name in (args.part or DEFAULT_PARTS):
                try:
                    part()
                except RunFailed as error:
                    verdict = "late" if isinstance(error, TimeUp) else "failed"
                    results.add({"case": name, "verdict": verdict, "detail": str(error)[-2000:]})
    finally:
        print(table(results.rows), flush=True)
    return 1 if results.bad else 0


if __name__ == "__main__":
    sys.exit(main())
