# SPDX-License-Identifier: Apache-2.0
"""What a restore is to cost, beside what was measured: a row for each figure that has a target.

A figure that was not measured says so; nothing is taken for met.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import reference

Reports = dict[str, Any]
Rows = list[dict[str, Any]]

# Of worlds of one rank and of more.
_HOTTEST_MS = (150.0, 250.0)
_SERVED_MS = (400.0, 800.0)
_OF_FLOOR = (1.15, 1.3)
_OF_NATIVE = 12
_OF_UPDATE = 1.3
_OF_FRESH = 1.01  # a replay of an executable that was updated, by one of a fresh one
_OWN_SHARE = 0.05
_GRAPHS_MB = 25.0
_OF_IMAGES = 4
_PLAN_MS, _KEPT_MS = 5.0, 0.2
_MODULES = "modules"  # of archive.sizes.KINDS, what does not belong to graphs


def rows(name: str, world: int, reports: Reports) -> Rows:
    """The rows of one world; ``reports`` are those of ``benchmark.Bench``."""
    restored = reports.get("restore") or reports.get("pairs") or []
    several = int(world > 1)
    found = [
        _attach(name, restored),
        _at_most(name, "first replay of the hottest graph, ms", _HOTTEST_MS[several], _since(restored, "hottest_ms")),
        _at_most(name, "every graph can be replayed, ms", _SERVED_MS[several], _since(restored, "all_served_ms")),
        *_executables(name, several, restored, reports.get("floor", []), reports.get("native", [])),
        *_switches(name, reports.get("switch", []), reports.get("templates", {})),
        *_replays(name, reports.get("pairs", [])),
        _own_time(name, restored),
        *_sizes(name, reports.get("capture")),
    ]
    if world == 1:
        found += _reference(name, restored, reports.get("reference"))
    return found + _plans(name, reports.get("plan"))


def _row(name: str, figure: str, target: str, measured: str | None, met: bool | None) -> dict[str, Any]:
    verdict = "not measured" if measured is None else "-" if met is None else "met" if met else "MISSED"
    return {"world": name, "figure": figure, "target": target, "measured": measured or "-", "target met": verdict}


def _at_most(name: str, figure: str, target: float, measured: float | None) -> dict[str, Any]:
    text = None if measured is None else f"{measured:,.3g}" if measured < 1 else f"{measured:,.1f}"
    return _row(name, figure, f"<= {target:g}", text, None if measured is None else measured <= target)


def _slowest(reports: Sequence[Any], *names: str) -> float | None:
    """The largest of a figure over ranks, None unless all have it."""
    values = []
    for report in reports:
        value = report
        for name in names:
            value = value.get(name) if isinstance(value, dict) else None
        if value is None:
            return None
        values.append(float(value))
    return max(values) if values else None


def _since(reports: Sequence[Any], name: str) -> float | None:
    return _slowest(reports, "from_restore", name)


def _attach(name: str, restored: Sequence[Any]) -> dict[str, Any]:
    phases = [_slowest(restored, "phases", phase) for phase in ("attach", "identity")]
    if not any(phases):
        return _row(name, "attach and identity, ms", "a row of its own", None, None)
    return _row(name, "attach and identity, ms", "a row of its own", f"{sum(p or 0.0 for p in phases):,.1f}", None)


def _executables(
    name: str, several: int, restored: Sequence[Any], floors: Sequence[Any], natives: Sequence[Any]
) -> Rows:
    """Own executables of all graphs, by the graph, beside the driver's two floors and a native capture."""
    took, count = _since(restored, "all_own_ms"), _slowest(restored, "asked")
    each = None if took is None or not count else took / count
    native = _slowest(natives or floors, "ready_ms")
    whole = native / count if native and count else None
    more = " + issuing collectives again" if several else ""
    target = _OF_FLOOR[several]
    by_kept = "own executables, a graph, by a floor that keeps them"
    return [
        _ratio(name, "own executables, a graph, by the driver's floor", target, each, _floor(floors, "floor"), more),
        _ratio(name, by_kept, target, each, _floor(floors, "floor_kept"), more),
        _ratio(name, "own executables, a graph, by native", 1 / _OF_NATIVE, each, whole),
    ]


def _floor(reports: Sequence[Any], which: str) -> float | None:
    """Milliseconds a graph, of the slowest rank; a step that was cut has what came before its floor."""
    measured = [report[which].values() for report in reports if report.get(which)]
    return max((sum(c["build_ms"] + c["instantiate_ms"] for c in f) / len(f) for f in measured), default=None)


def _ratio(
    name: str, figure: str, target: float, ours: float | None, base: float | None, more: str = "", unit: str = "ms"
) -> dict[str, Any]:
    wanted = f"<= {target:.3g}{more}"
    if ours is None or not base:
        return _row(name, figure, wanted, None, None)
    return _row(name, figure, wanted, f"{ours / base:.3f} ({ours:,.2f} / {base:,.2f} {unit})", ours <= target * base)


def _reference(name: str, restored: Sequence[Any], theirs: Any) -> Rows:
    """Beside the better load of the reference implementation, after which each graph has its own executable."""
    figures = {
        "first replay of the hottest graph": ("hottest_ms", "hottest_ms"),
        "every graph can be replayed": ("all_served_ms", "all_served_ms"),
        "own executables": ("all_own_ms", "all_served_ms"),
    }
    return [
        _ratio(name, f"{figure}, by the reference", 1.0, _since(restored, mark), reference.fastest(theirs, other))
        for figure, (mark, other) in figures.items()
    ]


def _switches(name: str, reports: Sequence[Any], templates: Any) -> Rows:
    """What a replay of another graph adds to a launch, beside what the driver's own update of native graphs takes.

    The launch after an update takes longer than the next one, and ours is one, so there is a row with that, too.
    Executables are updated within a template only; what a replay adds across templates has a row without a target.
    """
    bases: dict[str, Callable[[Any], float | None]] = {
        "by the driver's update": lambda s: s["update"],
        "by the driver's update and the launch after it": _updated_and_launched,
    }
    whole = bool(reports) and all(report.get("switched") for report in reports)
    pairs = {
        pair: [report["switched"][pair] for report in reports]
        for pair in (reports[0]["switched"] if whole else ())
        if all(pair in report["switched"] for report in reports)
    }
    # A report from before pairs were chosen by templates does not say.
    same = {pair: ranks for pair, ranks in pairs.items() if all(rank.get("one_template") is True for rank in ranks)}
    across = {pair: ranks for pair, ranks in pairs.items() if all(rank.get("one_template") is False for rank in ranks)}
    found = [
        _switch(name, f"another graph's executable, batches {pair}, {by}", ranks, base)
        for pair, ranks in same.items()
        for by, base in bases.items()
    ]
    found += [_slowed(name, f", batches {pair}", ranks) for pair, ranks in same.items()]
    found += [_across(name, f", batches {pair}", ranks) for pair, ranks in across.items()]
    count = templates.get("templates")
    if not same:
        why = "no two graphs have one template" if count is not None and count == templates["graphs"] else "-"
        figures = [f"another graph's executable, {by}" for by in bases]
        unknown = [*(_row(name, figure, f"<= {_OF_UPDATE:g}", None, None) for figure in figures), _slowed(name, "", [])]
        found = [*(row | {"measured": why} for row in unknown), *found]
    if not across:
        why = "all graphs have one template" if count == 1 else "-"
        found.append(_across(name, "", []) | {"measured": why})
    return found


def _across(name: str, batches: str, ranks: Sequence[Any]) -> dict[str, Any]:
    """What it takes to destroy an executable and to make the other graph's, of the slowest rank."""
    figure = f"another template's executable{batches}, ms"
    slowest = max((rank["switching"] - rank["again"] for rank in ranks), default=None)
    return _row(name, figure, "a row of its own", None if slowest is None else f"{slowest / 1e3:,.2f}", None)


def _slowed(name: str, batches: str, ranks: Sequence[Any]) -> dict[str, Any]:
    """What replays of an updated executable take, which is to decide whether executables are updated at all."""
    found = [rank["slowed"] for rank in ranks if rank.get("slowed") and rank.get("equal") is not None]
    figure, target = f"replay of an updated executable{batches}, by a fresh one", f"<= {_OF_FRESH:g}"
    if any(rank.get("equal") is False for rank in ranks):
        return _row(name, figure, target, "wrong", False)
    if not found or len(found) < len(ranks):
        return _row(name, figure, target, None, None)
    least, middle, most = max(found, key=lambda percentiles: percentiles[1])
    return _row(name, figure, target, f"{middle:.4f} ({least:.4f} to {most:.4f})", middle <= _OF_FRESH)


def _updated_and_launched(switch: Any) -> float | None:
    """What an update costs natively in all; None of a report from before a launch without one was measured."""
    again = switch.get("again_native")
    return None if again is None else switch["update"] + switch["launch"] - again


def _switch(name: str, figure: str, ranks: Sequence[Any], base: Callable[[Any], float | None]) -> dict[str, Any]:
    """The row of the rank that is slowest beside its base."""
    refused = [rank["refused"] for rank in ranks if rank["update"] is None]
    if refused:
        return _row(name, figure, f"<= {_OF_UPDATE:g}", None, None) | {"measured": refused[0][:80]}
    if any(rank.get("equal") is False for rank in ranks):
        wrong = "the updated executable is wrong"
        return _row(name, figure, f"<= {_OF_UPDATE:g}", None, None) | {"measured": wrong}
    bases = [base(rank) for rank in ranks]
    if not all(bases):
        return _row(name, figure, f"<= {_OF_UPDATE:g}", None, None)
    # A replay that changes nothing is a launch, which both have.
    costs = [(rank["switching"] - rank["again"], least) for rank, least in zip(ranks, bases, strict=True) if least]
    ours, least = max(costs, key=lambda cost: cost[0] / cost[1])
    return _ratio(name, figure, _OF_UPDATE, ours, least, unit="us")


def _replays(name: str, reports: Sequence[Any]) -> Rows:
    found = []
    for batch in reports[0].get("compared_with_native", {}) if reports else {}:
        compared = [r["compared_with_native"][batch] for r in reports]
        worst = max(compared, key=lambda c: c["ratio"][1])
        least, _, most = worst["spread"]
        measured = f"{worst['ratio'][1]:.4f} ({least:.4f} to {most:.4f})"
        # Faster than native is not a miss.
        met = worst["ratio"][1] <= most
        found.append(_row(name, f"replay, batch {batch}, by native", "within native by native", measured, met))
    return found or [_row(name, "replay, by native", "within native by native", None, None)]


def _own_time(name: str, restored: Sequence[Any]) -> dict[str, Any]:
    """CPU time outside the driver beside the driver's."""
    figure, target = "own CPU time beside the driver's", f"<= {_OWN_SHARE:.0%}"
    shares = [r["cpu"] for r in restored if r.get("cpu")]
    if not shares or len(shares) < len(restored):
        return _row(name, figure, target, None, None)
    worst = max(shares, key=lambda c: c["own_ms"] / c["driver_ms"])
    share = worst["own_ms"] / worst["driver_ms"]
    text = f"{share:.1%} ({worst['own_ms']:,.0f} / {worst['driver_ms']:,.0f} ms)"
    return _row(name, figure, target, text, share <= _OWN_SHARE)


def _sizes(name: str, captured: Any) -> Rows:
    stored = (captured or {}).get("stored_bytes")
    if not stored:
        return [
            _row(name, "archive without modules, MB", f"<= {_GRAPHS_MB:g}", None, None),
            _row(name, "modules by the unpruned images", f"<= 1/{_OF_IMAGES}", None, None),
        ]
    graphs = sum(size for kind, size in stored.items() if kind != _MODULES) / 1e6
    return [
        _at_most(name, "archive without modules, MB", _GRAPHS_MB, graphs),
        _ratio(
            name,
            "modules by the unpruned images",
            1 / _OF_IMAGES,
            stored[_MODULES] / 1e6,
            captured["image_bytes"] / 1e6,
            unit="MB",
        ),
    ]


def _plans(name: str, plan: Any) -> Rows:
    plan = plan or {}
    return [
        _at_most(name, "plan for one rank of 64, ms", _PLAN_MS, plan.get("computed_ms")),
        _at_most(name, "the same, kept, ms", _KEPT_MS, plan.get("kept_ms")),
    ]
