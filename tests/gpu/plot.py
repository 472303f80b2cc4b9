# SPDX-License-Identifier: Apache-2.0
"""A picture of one world's benchmark: native, floor, restored, reference, by graph and until the engine may serve."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import reference

Reports = dict[str, Any]


def draw(name: str, reports: Reports, path: Path) -> str:
    """Draws what ``benchmark.Bench`` measured into ``path``; says in one line what became of it."""
    natives = reports.get("native") or reports.get("floor") or []
    restored = reports.get("restore") or reports.get("pairs") or []
    if not natives and not restored:
        return f"{name}: nothing to draw yet"
    try:
        import matplotlib
    except ImportError:
        return f"{name}: no plot, since matplotlib is not installed"
    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, (by_graph, ready) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    if natives:
        batches = sorted(map(int, natives[0].get("native", {})))
        for step in ("warm_up_ms", "capture_ms", "instantiate_ms"):
            times = [natives[0]["native"][str(batch)][step] for batch in batches]
            by_graph.plot(batches, times, label=f"native: {step[:-3].replace('_', '-')}")
    floors = reports.get("floor") or []
    if floors and "floor" in floors[0]:
        batches = sorted(map(int, floors[0]["floor"]))
        for step in ("build_ms", "instantiate_ms"):
            times = [floors[0]["floor"][str(batch)][step] for batch in batches]
            by_graph.plot(batches, times, label=f"floor: {step[:-3]}", linestyle="--")
    by_graph.set(xlabel="batch size", ylabel="ms", yscale="log", title="each graph")
    by_graph.legend(fontsize="small")
    bars = {
        "native, all": max((r["ready_ms"] for r in natives if "ready_ms" in r), default=None),
        "floor, all": max((_floor(r) for r in floors if "floor" in r), default=None),
    }
    for label, mark in (("own executables", "all_own_ms"), ("all served", "all_served_ms"), ("hottest", "hottest_ms")):
        bars[label] = max(
            (r["from_restore"][mark] for r in restored if mark in r.get("from_restore", {})), default=None
        )
    bars["reference, all"] = reference.fastest(reports.get("reference"), "all_served_ms")
    bars["reference, hottest"] = reference.fastest(reports.get("reference"), "hottest_ms")
    known = {label: value for label, value in bars.items() if value is not None}
    drawn = ready.barh(list(known), list(known.values()))
    ready.bar_label(drawn, fmt="{:,.0f} ms", padding=3)
    ready.set(xscale="log", xlabel="ms", title="until ready, slowest rank")
    ready.margins(x=0.3)
    figure.suptitle(name)
    figure.savefig(path)
    pyplot.close(figure)
    return f"{name}: drawn in {path}"


def _floor(report: Any) -> float:
    return float(sum(cost["build_ms"] + cost["instantiate_ms"] for cost in report["floor"].values()))
