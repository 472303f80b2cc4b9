# SPDX-License-Identifier: Apache-2.0
"""The sweep measures each point once, the cheapest first, and tells how costs grow from one to the next."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def sweep(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("sweep")


def rank(graphs, layers, *, slow=1.0, **more):
    """What one restored rank reports of a point: 5 ms, 2 ms a graph and 1 ms for 100 nodes."""
    ms = slow * (5 + 2 * graphs + graphs * layers)
    return {"from_restore": {"returned_ms": 7.0, "all_own_ms": ms}, "cpu": {"own_ms": ms / 50}} | more


def reports(graphs, layers, **more):
    costs = {str(n): {"nodes": 100 * layers, "build_ms": 1.0, "instantiate_ms": 1.0} for n in range(graphs)}
    stored = {"modules": 5_000_000, "members": 1000 * graphs}
    ranks = [rank(graphs, layers), rank(graphs, layers, slow=0.5)]
    return {"floor": [{"floor": costs}], "restore": ranks, "capture": {"stored_bytes": stored}} | more


class Bench:
    """Stands in for the benchmark: takes down what was run."""

    ran: list[tuple[str, tuple[str, ...]]]

    def __init__(self, out, variant, arguments, deadline, *, label, **options):
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        self._layers, self._graphs = int(given["--layers"]), int(given["--batch-sizes"].split("-")[1])
        self.ran.append((label, tuple(arguments)))
        self.reports = {} if label == "sweep-8x8" else reports(self._graphs, self._layers)

    def run(self, steps):
        if not self.reports:
            return [{"verdict": "late", "detail": "no time", "native ready": None, "floor": None}]
        native = 100.0 * self._graphs * self._layers
        return [{"verdict": "ok", "detail": "", "native ready": native, "floor": 2.0 * self._graphs}]


@pytest.fixture
def ran(sweep, monkeypatch):
    monkeypatch.setattr(Bench, "ran", [], raising=False)
    monkeypatch.setattr(sweep, "Bench", Bench)
    return Bench.ran


def measured(sweep, *points):
    rows = []
    given = [sweep.Point.parse(point) for point in points]
    slopes = sweep.run(Path(), "tp=1", given, ("--max-seq", "32"), None, rows.append)
    return rows, {row["case"]: row for row in slopes}


def test_each_point_is_measured_once_the_cheapest_first(sweep, ran):
    rows, _ = measured(sweep, "8x8", "8x2", "1x2", "1x8")
    assert [label for label, _ in ran] == ["sweep-1x2", "sweep-1x8", "sweep-8x2", "sweep-8x8"]
    assert ran[2][1] == ("--layers", "2", "--batch-sizes", "1-8", "--floor-repeats", "1", "--max-seq", "32")
    assert [row["verdict"] for row in rows] == ["ok", "ok", "ok", "late"]
    assert rows[2]["nodes"] == 1600
    assert rows[2]["all executables"] == 5 + 2 * 8 + 16  # of the slower rank
    assert rows[2]["archive kB"] == 8  # without modules
    assert rows[3]["all executables"] is None
    assert [tuple(row) for row in rows] == [tuple(rows[0])] * 4  # one heading for all


def test_slopes_are_what_one_more_graph_and_a_thousand_more_nodes_cost(sweep, ran):
    _, slopes = measured(sweep, "1x2", "8x2", "64x2", "1x8")
    assert list(slopes) == [
        "sweep tp=1, 2 layers, a graph from 1 to 8",
        "sweep tp=1, 2 layers, a graph from 8 to 64",
        "sweep tp=1, 1 graphs, 1,000 nodes from 2 to 8 layers",
    ]
    by_graph, further, by_nodes = slopes.values()
    for row in (by_graph, further):
        assert row["all executables"] == pytest.approx(4)
        assert row["own"] == pytest.approx(4 / 50)
        assert row["native"] == pytest.approx(200)
        assert row["archive kB"] == pytest.approx(1)
    assert by_nodes["all executables"] == pytest.approx(10)
    assert by_nodes["returned"] == 0


def test_no_slope_is_told_from_a_point_that_was_not_measured(sweep, ran):
    _, slopes = measured(sweep, "8x2", "8x8")
    (row,) = slopes.values()
    assert {value for name, value in row.items() if name != "case"} == {None}


@pytest.mark.parametrize("text", ["8", "x2", "0x2", "8x0", "8xlayers", "-1x2"])
def test_what_is_no_point_is_refused(sweep, text):
    with pytest.raises(argparse.ArgumentTypeError, match="is no point"):
        sweep.Point.parse(text)


def test_the_sweep_runs_only_when_it_is_named(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    run_all = importlib.import_module("run_all")
    assert set(run_all.PARTS) - set(run_all.DEFAULT_PARTS) == {"sweep"}
    given = run_all.arguments().parse_args(["--out", "x", "--part", "sweep", "--point", "8x2"])
    assert [str(point) for point in given.point] == ["8x2"]
