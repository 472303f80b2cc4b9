# SPDX-License-Identifier: Apache-2.0
"""What a restore adds to the driver's own work, on the software driver, and what a daemon takes to serve a rank."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from foundryd.daemon.launch import start_daemon
from foundryd.session.client import attach

CHILD = Path(__file__).parent / "child"
GRAPHS = 64

pytestmark = pytest.mark.benchmark(min_rounds=3, max_time=0.5, warmup=False)

Environment = Callable[[bool], dict[str, str]]
Run = Callable[..., dict[str, Any]]


def medians(rows: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in rows.items()}


def test_build_graphs_beside_the_drivers_floor(
    benchmark: Any, archive_of: Callable[..., Path], driver_environment: Environment, run: Run, tmp_path: Path
) -> None:
    """The benchmark's own time is that of a whole process; what matters is in ``extra_info``, CPU ms a graph."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "floor.so"
    line = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(CHILD / "floor.c"), "-ldl"]
    subprocess.run(line, check=True, timeout=60)
    path = archive_of(graphs=GRAPHS)
    ours = benchmark.pedantic(
        run, ("build_graphs.py", driver_environment(True), path, 5, GRAPHS), rounds=2, warmup_rounds=0
    )
    timed = run("build_graphs.py", driver_environment(True), path, 5, GRAPHS, "clock")
    floor = run("floor.py", driver_environment(False), path, library, GRAPHS)
    assert len(ours["rows"]["member"]) == len(floor["rows"]["build"]) == GRAPHS
    mine, apart, least = medians(ours["rows"]), medians(timed["rows"]), medians(floor["rows"])
    assert apart["calls"] > 612
    benchmark.extra_info.update(
        {f"phase_{name}_ms": value for name, value in ours["phases"].items()},
        block_ms=mine["block"],
        build_ms=mine["build"],
        instantiate_ms=mine["instantiate"],
        floor_build_ms=least["build"],
        floor_instantiate_ms=least["instantiate"],
        own_ms=mine["member"] - least["build"],
        outside_the_driver_ms=apart["own"],
        driver_calls=apart["calls"],
    )


@pytest.fixture(params=[1, 4, 20])
def large(served_archive_of: Callable[..., Path], request: pytest.FixtureRequest) -> Path:
    """An archive of graphs as large as those of PyTorch without a compiler, on so many templates, as it is served."""
    return served_archive_of(graphs=GRAPHS, nodes=2600, templates=request.param, noise=7500, programmatic=300)


def test_own_time_of_large_graphs(benchmark: Any, large: Path, driver_environment: Environment, run: Run) -> None:
    """What matters is in ``extra_info``: CPU ms a graph outside the driver, of all graphs, since the first of a
    template costs more."""
    line = ("build_graphs.py", driver_environment(True), large, 5, GRAPHS, "clock")
    timed = benchmark.pedantic(run, line, rounds=2, warmup_rounds=0)
    rows = timed["rows"]
    assert len(rows["own"]) == GRAPHS
    benchmark.extra_info.update(
        {f"phase_{name}_ms": value for name, value in timed["phases"].items()},
        block_ms=statistics.fmean(rows["block"]),
        own_ms=statistics.fmean(rows["own"]),
        own_median_ms=statistics.median(rows["own"]),
        driver_calls=statistics.fmean(rows["calls"]),
    )


def test_own_time_of_the_background(benchmark: Any, large: Path, driver_environment: Environment, run: Run) -> None:
    """In the thread that builds them; ``extra_info`` has wall ms a graph inside and outside the
    driver."""
    line = ("background.py", driver_environment(True), large, 5, "clock")
    timed = benchmark.pedantic(run, line, rounds=2, warmup_rounds=0)
    assert timed["driver_ms"] > 0
    benchmark.extra_info.update(own_ms=timed["own_ms"], driver_ms=timed["driver_ms"])


@pytest.fixture
def runtime_dir(archive_of: Callable[..., Path]) -> Iterator[Path]:
    """The runtime directory of a daemon that serves the archive of 512 graphs."""
    with tempfile.TemporaryDirectory(prefix="fdy-", dir="/tmp") as folder:
        daemon = start_daemon(Path(folder) / "run", [f"model={archive_of()}"], timeout=60)
        try:
            yield Path(folder) / "run"
        finally:
            daemon.process.kill()
            daemon.process.wait()


def test_attach_one_rank_whose_plan_is_kept(benchmark: Any, runtime_dir: Path) -> None:
    def attached() -> int:
        with attach(runtime_dir=runtime_dir, archive="model", rank=5, timeout=20.0, keep=False) as attachment:
            return len(attachment.plan)

    planned = attached()
    assert benchmark(attached) == planned > 512 * 13 * 24


def test_attach_a_rank_whose_plan_is_new(benchmark: Any, runtime_dir: Path) -> None:
    ranks = iter(range(64))

    def attached() -> None:
        attach(runtime_dir=runtime_dir, archive="model", rank=next(ranks), timeout=20.0, keep=False).close()

    benchmark.pedantic(attached, rounds=20, warmup_rounds=1)
