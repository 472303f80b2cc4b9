# SPDX-License-Identifier: Apache-2.0
"""The benchmark's report grows by steps, and what ends early leaves what it measured."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
KEPT = FOLDER.parent / "archive" / "kept" / "format-1.3.archive"  # stands in for what a capture writes


@pytest.fixture
def gpu_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("benchmark")


def native_report(rank=0, graphs=2, **more):
    """A rank's report after ``graphs`` of two graphs."""
    times = {"warm_up_ms": 10.0 + rank, "capture_ms": 20.0, "instantiate_ms": 5.0}
    measured = {str(batch): times for batch in range(1, graphs + 1)}
    return {"asked": 2, "rank": rank, "native": measured, "memory": {"device_used": 10**9 * (rank + 1)}} | more


def restored_report(**more):
    return {
        "asked": 2,
        "restored": True,
        "fallback": None,
        "restore_ms": 28.0,
        "ready_ms": 30.0,
        "first_replay_ms": 31.0,
        "all_ready_ms": 90.0,
        "phases": {"layout": 1.0, "graphs": 9.0},
        "memory": {"device_used": 10**9},
    } | more


FLOOR = {"1": {"nodes": 9, "edges": 8, "build_ms": 1.0, "instantiate_ms": 2.0}}
KEPT_FLOOR = {
    str(batch): FLOOR["1"] | {"build_ms": build, "add_kernels_ms": 0.75 * build, "copy_attributes_ms": 0.5}
    for batch, build in ((1, 4.0), (2, 8.0))
}
PAIR = {"ratio": [0.9, 1.0, 1.1], "spread": [0.95, 1.0, 1.05], "restored_ms": 5.0, "native_ms": 5.1}


def test_a_whole_report_has_every_figure_of_the_slowest_rank(gpu_benchmark):
    reports = {
        "native": [native_report(rank, ready_ms=70.0 + rank) for rank in range(2)],
        "floor": [native_report(rank, ready_ms=80.0, floor=FLOOR) for rank in range(2)],
        "capture": {"archive_bytes": 4_000_000},
        "restore": [restored_report(ready_ms=30.0 + rank) for rank in range(2)],
        "pairs": [restored_report(ready_ms=99.0, compared_with_native={"1": PAIR}) for _ in range(2)],
    }
    summary, phases, replay = gpu_benchmark.rows("bench", reports, {})
    assert summary["verdict"] == "ok"
    assert summary["graphs"] == "2"
    assert (summary["warm-up"], summary["native ready"], summary["floor"]) == (22.0, 71.0, 3.0)
    assert (summary["restored ready"], summary["archive MB"], summary["native GB"]) == (31.0, 4.0, 2.0)
    assert (summary["restore"], summary["to first replay"], summary["all executables"]) == (28.0, 31.0, 90.0)
    assert phases == {"case": "bench phases", "layout": 1.0, "graphs": 9.0}
    assert replay["restored / native"] == "1.0000 (0.9000 to 1.1000)"


def test_where_the_time_of_a_kept_floor_goes_is_told_of_the_slowest_rank(gpu_benchmark):
    quick = {batch: cost | {"instantiate_ms": 1.0} for batch, cost in KEPT_FLOOR.items()}
    floors = [native_report(floor=FLOOR, floor_kept=kept) for kept in (quick, KEPT_FLOOR, quick)]
    summary, kept = gpu_benchmark.rows("bench", {"floor": floors}, {})
    assert (summary["floor"], summary["floor, kept"]) == (3.0, 16.0)
    assert kept == {
        "case": "bench floor, kept, a graph",
        "build": 6.0,
        "of it kernels added": 4.5,
        "attributes copied": 0.5,
        "instantiate": 2.0,
    }
    # A step that ended before it has no such row.
    (summary,) = gpu_benchmark.rows("bench", {"floor": [native_report(floor=FLOOR)]}, {})
    assert summary["floor, kept"] is None


def test_of_a_report_that_is_not_whole_the_rest_is_unknown(gpu_benchmark):
    late = {"native": "late: rank 0 did not end in 5 s"}
    (summary,) = gpu_benchmark.rows("bench", {"native": [native_report(graphs=1)]}, late)
    assert (summary["verdict"], summary["graphs"], summary["warm-up"]) == ("late", "1 of 2", 10.0)
    assert summary["native ready"] is summary["floor"] is summary["restored ready"] is summary["archive MB"] is None
    (nothing,) = gpu_benchmark.rows("bench", {}, {"native": "failed: no such weights"})
    assert (nothing["verdict"], nothing["graphs"]) == ("failed", "-")
    assert "no such weights" in nothing["detail"]


@pytest.mark.parametrize("step", ["restore", "pairs"])
def test_a_rank_that_fell_back_is_no_restore(gpu_benchmark, step):
    reports = {step: [restored_report(restored=False, fallback="LayoutDiverged: elsewhere")]}
    summary = gpu_benchmark.rows("bench", reports, {})[0]
    assert summary["verdict"] == "failed"
    assert "LayoutDiverged" in summary["detail"]


class World:
    """Stands in for GPUs: takes down what was run, and ends as told."""

    def __init__(self, gpu_benchmark, monkeypatch):
        self.ran = []
        self.cut = False
        self._benchmark = gpu_benchmark
        for name in ("native", "capture", "restore", "daemon"):
            monkeypatch.setattr(gpu_benchmark, name, getattr(self, name))

    def native(self, program, world, *, timeout, environment=None):
        if program.name == "plan.py":
            self.ran.append(("plan", program.arguments))
            return [{"ranks": 64, "computed_ms": 0.1, "kept_ms": 0.001}]
        self.ran.append(("native", program.arguments))
        path = program.arguments[program.arguments.index("--json") + 1]
        for rank in range(world):
            Path(path.replace("{rank}", str(rank))).write_text(json.dumps(native_report(rank, 1)))
        if self.cut:
            raise self._benchmark.TimeUp("rank 0 did not end")
        return [native_report(rank) for rank in range(world)]

    def capture(self, program, variant, world, archive, *, timeout, echo, jobs, controls):
        self.ran.append(("capture", program.arguments))
        shutil.copyfile(KEPT, archive)
        return {"archive_bytes": 1}

    def restore(self, archive, program, variant, world, runtime, *, timeout, environment=None):
        self.ran.append(("switch" if "--switch" in program.arguments else "restore", program.arguments))
        self.environment = environment or {}
        return [restored_report() for _ in range(world)]

    def daemon(self, archives):
        import contextlib

        return contextlib.nullcontext(Path("run"))

    def steps(self):
        ran, self.ran = [name for name, _ in self.ran], []
        return ran


@pytest.fixture
def world(gpu_benchmark, monkeypatch):
    return World(gpu_benchmark, monkeypatch)


def bench(gpu_benchmark, out, *arguments, seconds=60.0, **options):
    return gpu_benchmark.Bench(out, "tp=2", arguments, gpu_benchmark.Deadline(seconds), **options)


def test_all_steps_run_each_program_once(gpu_benchmark, world, tmp_path):
    summary = bench(gpu_benchmark, tmp_path).run(gpu_benchmark.STEPS)[0]
    assert world.steps() == ["native", "capture", "restore", "switch", "plan"]
    assert (summary["verdict"], summary["graphs"]) == ("ok", "2")


@pytest.mark.parametrize(
    ("step", "program", "without", "option"),
    [
        ("native", "native", True, "--floor-repeats"),
        ("floor", "native", False, "--floor-repeats"),
        ("restore", "restore", True, "--no-compare"),
        ("pairs", "restore", False, "--no-compare"),
    ],
)
def test_a_step_measures_no_more_than_itself(gpu_benchmark, world, tmp_path, step, program, without, option):
    bench(gpu_benchmark, tmp_path).run([step])
    (arguments,) = [given for name, given in world.ran if name == program]
    assert (option in arguments) == without


def test_the_driver_is_timed_apart_where_a_restore_is_measured_only(gpu_benchmark, world, tmp_path):
    timed = []
    for step in ("restore", "pairs", "switch"):
        bench(gpu_benchmark, tmp_path).run([step])
        timed.append(world.environment.get("FOUNDRYD_DRIVER_CLOCK"))
    assert timed == ["1", None, None]


def test_time_in_the_driver_and_outside_it_stands_beside_the_phases(gpu_benchmark):
    def spent(own):
        return {"driver_ms": 8.0, "own_ms": own, "driver": {"graphs": 8.0}, "own": {"graphs": own}}

    reports = {"restore": [restored_report(cpu=spent(1.0)), restored_report(cpu=spent(2.0))]}
    rows = {row["case"]: row for row in gpu_benchmark.rows("bench", reports, {})}
    assert rows["bench driver"] == {"case": "bench driver", "graphs": 8.0}
    assert rows["bench own"] == {"case": "bench own", "graphs": 2.0}
    reports["restore"][1]["cpu"] = None
    assert "bench own" not in {row["case"] for row in gpu_benchmark.rows("bench", reports, {})}


def test_a_later_run_goes_on_from_an_earlier_one_with_the_same_arguments(gpu_benchmark, world, tmp_path):
    bench(gpu_benchmark, tmp_path, "--layers", "2").run(["native", "capture"])
    assert world.steps() == ["native", "capture"]
    summary = bench(gpu_benchmark, tmp_path, "--layers", "2").run(["restore"])[0]
    assert world.steps() == ["restore"]
    assert (summary["graphs"], summary["restored ready"]) == ("2", 30.0)
    summary = bench(gpu_benchmark, tmp_path, "--layers", "3").run(["restore"])[0]
    assert world.steps() == ["capture", "restore"], "the archive of another model was used"
    assert summary["graphs"] == "-"


def test_a_step_that_is_run_alone_leaves_what_another_measured(gpu_benchmark, world, tmp_path):
    bench(gpu_benchmark, tmp_path).run(["floor", "pairs"])
    bench(gpu_benchmark, tmp_path).run(["native", "restore", "switch", "plan"])
    kept = json.loads((tmp_path / "bench-tp2.json").read_text())
    assert set(kept) == {"arguments", "templates", *gpu_benchmark.STEPS} - {"reference"}


def test_a_run_that_is_cut_short_leaves_what_each_rank_wrote(gpu_benchmark, world, tmp_path):
    world.cut = True
    summary = bench(gpu_benchmark, tmp_path).run(["native"])[0]
    assert (summary["verdict"], summary["graphs"], summary["warm-up"]) == ("late", "1 of 2", 11.0)
    assert json.loads((tmp_path / "bench-tp2.json").read_text())["native"][1]["rank"] == 1


def test_without_time_nothing_is_started(gpu_benchmark, world, tmp_path):
    summary = bench(gpu_benchmark, tmp_path, seconds=0).run(gpu_benchmark.STEPS)[0]
    assert world.steps() == []
    assert summary["verdict"] == "late"


def test_pairs_that_take_each_other_s_executables_are_chosen_from_the_archive(gpu_benchmark, world, tmp_path):
    rows = bench(gpu_benchmark, tmp_path).run(["switch"])
    (arguments,) = [given for name, given in world.ran if name == "switch"]
    assert arguments[arguments.index("--switch") + 1] == "1:2,4:8"
    assert "--switch-across" not in arguments, "all graphs of this archive have one template"
    assert world.environment == {"FOUNDRYD_EXECUTABLES": "1"}
    (row,) = [row for row in rows if row["case"] == "bench-tp2 templates"]
    assert (row["graphs"], row["templates"]) == (4, 1)
    assert (row["of one"], row["of different ones"]) == ("1 and 2, 4 and 8", "none")
    # As well of a report that was read from its file.
    assert bench(gpu_benchmark, tmp_path).run([])[1:] == [row]


def test_pairs_that_are_given_are_sorted_by_templates(gpu_benchmark, world, monkeypatch, tmp_path):
    known = {1: (0,), 2: (1,), 4: (1,), 8: (0,)}
    monkeypatch.setattr(gpu_benchmark.templates, "of_archive", lambda path: known)
    bench(gpu_benchmark, tmp_path, switched=((2, 1), (8, 1), (4, 2))).run(["switch"])
    (arguments,) = [given for name, given in world.ran if name == "switch"]
    assert arguments[arguments.index("--switch") + 1] == "8:1,4:2"
    assert arguments[arguments.index("--switch-across") + 1] == "2:1"
    summary = bench(gpu_benchmark, tmp_path, switched=((1, 3),)).run(["switch"])[0]
    assert summary["verdict"] == "failed"
    assert "[3] have no graph" in summary["detail"]


def test_a_single_graph_takes_no_other_s_executable(gpu_benchmark, world, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_benchmark.templates, "of_archive", lambda path: {7: (0,)})
    one = bench(gpu_benchmark, tmp_path)
    assert one.run(["switch"])[0]["verdict"] == "ok"
    assert world.steps() == ["capture"]
    assert (one.reports["switch"], one.reports["templates"]["graphs"]) == ([], 1)
