# SPDX-License-Identifier: Apache-2.0
"""How costs grow with graphs and with nodes: small benchmarks of some batch sizes and layers, and slopes between them.

Each point is captured once and has a file ``sweep-8x2-tp1.json`` that a later run goes on from, like the benchmark's.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmark import Bench
from launch import Deadline, Report

# A figure of each kind is enough: what a native engine pays, the driver alone, and a restore.
STEPS = ("native", "floor", "restore")

Rows = list[dict[str, Any]]


@dataclass(frozen=True, order=True)
class Point:
    """Graphs of the batch sizes 1 to ``graphs``, of a model with so many layers."""

    layers: int
    graphs: int

    def __str__(self) -> str:
        return f"{self.graphs}x{self.layers}"

    @classmethod
    def parse(cls, text: str) -> Point:
        """Reads ``8x2``: eight graphs of two layers."""
        graphs, cross, layers = text.partition("x")
        if not (cross and graphs.isdecimal() and layers.isdecimal() and int(graphs) and int(layers)):
            raise argparse.ArgumentTypeError(f"{text!r} is no point: give graphs and layers, as in 8x2")
        return cls(int(layers), int(graphs))


POINTS = tuple(Point(layers, graphs) for layers in (2, 8, 36) for graphs in (1, 8, 64))


def run(
    out: Path,
    variant: str,
    points: Sequence[Point],
    arguments: Sequence[str],
    deadline: Deadline,
    done: Callable[[dict[str, Any]], None],
    **options: Any,
) -> Rows:
    """Measures the points, the cheapest first, each row handed to ``done`` as it is known; returns the slopes.

    ``arguments`` are the program's besides layers and batch sizes, ``options`` those of ``Bench``.
    """
    known: dict[Point, dict[str, Any]] = {}
    name = f"sweep {variant}"
    for point in sorted(points, key=lambda p: (p.graphs * p.layers, p)):
        given = ["--layers", str(point.layers), "--batch-sizes", f"1-{point.graphs}", "--floor-repeats", "1"]
        bench = Bench(out, variant, [*given, *arguments], deadline, label=f"sweep-{point}", **options)
        summary = bench.run(STEPS)[0]
        known[point] = figures(summary, bench.reports)
        verdict = {"verdict": summary["verdict"]}
        done({"case": f"{name}, {point}"} | verdict | known[point] | {"detail": summary["detail"]})
    return slopes(name, known)


def figures(summary: dict[str, Any], reports: Report) -> dict[str, Any]:
    """What a point costs, in milliseconds of the slowest rank; None where it is not known."""
    floors, restored = reports.get("floor") or [], reports.get("restore") or []
    costs = floors[0].get("floor", {}).values() if floors else ()
    stored = reports.get("capture", {}).get("stored_bytes", {})
    return {
        "nodes": sum(cost["nodes"] for cost in costs) or None,
        "native": summary["native ready"],
        "floor": summary["floor"],
        "returned": _slowest(restored, "from_restore", "returned_ms"),
        "all executables": _slowest(restored, "from_restore", "all_own_ms"),
        "own": _slowest(restored, "cpu", "own_ms"),
        "archive kB": sum(size for kind, size in stored.items() if kind != "modules") / 1e3 or None,
    }


def slopes(name: str, known: dict[Point, dict[str, Any]]) -> Rows:
    """What one more graph costs with as many layers, and 1,000 more nodes in as many graphs, between neighbours."""
    found: Rows = []
    for layers in sorted({point.layers for point in known}):
        line = sorted(point for point in known if point.layers == layers)
        for less, more in pairwise(line):
            case = f"{name}, {layers} layers, a graph from {less.graphs} to {more.graphs}"
            found.append({"case": case} | _slope(known[less], known[more], more.graphs - less.graphs))
    for graphs in sorted({point.graphs for point in known}):
        line = sorted(point for point in known if point.graphs == graphs)
        for less, more in pairwise(line):
            case = f"{name}, {graphs} graphs, 1,000 nodes from {less.layers} to {more.layers} layers"
            nodes = [known[point]["nodes"] for point in (less, more)]
            by = None if None in nodes else (nodes[1] - nodes[0]) / 1000
            found.append({"case": case} | _slope(known[less], known[more], by))
    return found


def _slope(less: dict[str, Any], more: dict[str, Any], by: float | None) -> dict[str, float | None]:
    return {
        name: None if not by or value is None or more[name] is None else (more[name] - value) / by
        for name, value in less.items()
        if name != "nodes"
    }


def _slowest(reports: Sequence[Report], part: str, name: str) -> float | None:
    values = [(report.get(part) or {}).get(name) for report in reports]
    known = [value for value in values if value is not None]
    return max(known) if known and len(known) == len(values) else None
