# SPDX-License-Identifier: Apache-2.0
"""What the benchmark's program makes of clocks and replays, on a clock and a driver of the tests' own."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed; it is no dependency of foundryd nor of its tests"
)

FOLDER = Path(__file__).parent


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER / "programs"))
    return importlib.import_module("bench")


def test_a_rank_writes_its_report_after_every_step(program, tmp_path, capsys):
    class Rank:
        rank, capturing, batch_sizes = 1, False, (1, 2, 4)

        def figures(self):
            return {"rank": 1, "graphs": 0}

    class Arguments:
        json = str(tmp_path / "bench-{rank}.json")

    results = program.Results(Rank(), Arguments())
    results.step("the first", native={"4": {}}, graphs=1)
    assert json.loads((tmp_path / "bench-1.json").read_text()) == {
        "asked": 3,
        "rank": 1,
        "graphs": 1,
        "native": {"4": {}},
    }
    results.step("the second", ready_ms=5.0, graphs=3)
    assert json.loads((tmp_path / "bench-1.json").read_text())["native"] == {"4": {}}
    assert capsys.readouterr().err.splitlines() == ["progress: rank 1: the first", "progress: rank 1: the second"]
    Rank.capturing = True
    program.Results(Rank(), Arguments()).step("captured")
    assert json.loads((tmp_path / "bench-1.json").read_text())["ready_ms"] == 5.0


TAKES = {"cuGraphExecUpdate": 3e-3, "cuGraphLaunch": 1e-3}  # seconds, and twice as many right after an update


class Requests:
    """An engine's state of three requests; graphs are named by their batch sizes, and none of them is restored."""

    def __init__(self, clock):
        self.tokens = torch.zeros(3, dtype=torch.int64)
        self.replayed = []
        self._clock = clock

    def vary(self, seed):
        self.tokens.fill_(seed + 4)

    def step(self, batch):
        return batch

    def replay(self, batch):
        self._clock[0] += 1e-3 if self.replayed[-1:] == [batch] else 5e-3
        self.replayed.append(batch)


class Driver:
    """Executables whose kernels add the size of their cluster, the batch's, to what they read; a step moves the state.

    ``defect`` is what an update does that it should not.
    """

    def __init__(self, program, requests, clock, defect):
        self.calls = []
        self.outputs = {batch: torch.zeros(3, dtype=torch.int64) for batch in (1, 2)}
        self._program, self._requests, self._clock, self._defect = program, requests, clock, defect

    def capture(self, step, _pool):
        (batch,) = step.args
        graph = SimpleNamespace(raw_cuda_graph=lambda: batch)
        return SimpleNamespace(graph=graph, outputs={"tokens": self.outputs[batch]})

    def call(self, name, *arguments):
        after_update = self.calls[-1:] == ["cuGraphExecUpdate"]
        self.calls.append(name)
        if name == "cuGraphInstantiate":
            batch = int(arguments[0])
            return SimpleNamespace(runs=batch, cluster=batch, updated=False, idle=False)
        if name == "cuGraphExecUpdate":
            self._update(*arguments)
        elif name == "cuGraphLaunch":
            self._launch(arguments[0])
        self._clock[0] += TAKES.get(name, 0.0) * (2 if after_update else 1)
        return None

    def _update(self, executable, graph):
        if self._defect == "refuses":
            raise self._program.DriverCallFailed("cuGraphExecUpdate failed: see the driver's manual")
        executable.runs, executable.updated = int(graph), True
        executable.idle = self._defect == "writes nothing"
        if self._defect != "keeps clusters":
            executable.cluster = int(graph)

    def _launch(self, executable):
        if not executable.idle:
            self.outputs[executable.runs].copy_(self._requests.tokens + executable.cluster)
        self._requests.tokens += 1


@pytest.fixture
def measured(program, monkeypatch):
    """Changes executables of batches 1 and 2; what was found, by which calls."""

    def measure(defect="", one_template=True):
        clock = [0.0]
        requests = Requests(clock)
        driver = Driver(program, requests, clock, defect)

        def sample(launch, inner):
            launch()
            assert inner == 3
            return (1.25 if launch.args[1].updated else 1.0), 0.0

        monkeypatch.setattr(program, "call", driver.call)
        monkeypatch.setattr(program, "_sample", sample)
        monkeypatch.setattr(program, "capture_natively", driver.capture)
        monkeypatch.setattr(program.time, "perf_counter", lambda: clock[0])
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
        given = SimpleNamespace(warm_up_rounds=2, rounds=5, inner=3)
        found = program.switch(requests, (1, 2), given, one_template)
        assert (round(found.again), round(found.switching)) == (1000, 5000)
        assert found.one_template == one_template
        assert driver.calls.count("cuGraphInstantiate") == driver.calls.count("cuGraphExecDestroy")
        return found, driver

    return measure


def test_a_launch_is_measured_after_an_update_and_without_one(measured):
    found, driver = measured()
    assert tuple(map(round, (found.update, found.launch, found.again_native))) == (3000, 2000, 1000)
    assert found.slowed == [1.25] * 3
    assert (found.equal, found.refused) == (True, "")
    assert driver.calls[-1] == "cuGraphExecDestroy"


def test_an_update_that_the_driver_refuses_leaves_nothing_measured_of_it(measured):
    found, _ = measured("refuses")
    assert (found.update, found.launch, found.again_native, found.equal, found.slowed) == (None,) * 5
    assert found.refused.startswith("cuGraphExecUpdate failed")


@pytest.mark.parametrize("defect", ["keeps clusters", "writes nothing"])
def test_an_updated_executable_that_puts_out_something_else_is_noticed(measured, defect):
    found, _ = measured(defect)
    assert found.equal is False
    assert round(found.update) == 3000


def test_graphs_of_different_templates_are_never_updated(measured):
    found, driver = measured("refuses", one_template=False)
    assert driver.calls == []
    assert (found.update, found.launch, found.again_native, found.equal, found.slowed) == (None,) * 5
    assert found.refused == ""


@pytest.fixture
def compared(program, monkeypatch):
    """Compares replays of these milliseconds, of which each round takes ``slower`` times as many as the one before.

    What was found, and the orders in which ways were taken.
    """

    def compare(restored, natives, rounds=24, slower=1.0):
        left, taken = iter(natives), []

        def way(ms):
            return SimpleNamespace(graph=SimpleNamespace(replay=ms), replay=ms)

        def sample(ms, _inner):
            taken.append(ms)
            return ms * slower ** ((len(taken) - 1) // 4), 2.0

        monkeypatch.setattr(program, "capture_natively", lambda _step, _pool: way(next(left)))
        monkeypatch.setattr(program, "_sample", sample)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        rank = SimpleNamespace(replayable={8: (way(restored), {})}, step=lambda batch: {})
        found = program.compare(rank, 8, SimpleNamespace(warm_up_rounds=6, rounds=rounds, inner=5))
        assert next(left, None) is None
        return found, [tuple(taken[i : i + 4]) for i in range(0, len(taken), 4)][6:]

    return compare


@pytest.mark.parametrize(("rounds", "measured"), [(1, 24), (24, 24), (25, 48), (48, 48)])
def test_every_order_of_the_ways_is_taken_as_often_as_every_other(compared, rounds, measured):
    found, orders = compared(4.0, (1.0, 2.0, 3.0), rounds)
    assert Counter(orders) == dict.fromkeys(permutations((1.0, 2.0, 3.0, 4.0)), measured / 24)
    assert {len(samples) for samples in found.samples.values()} == {measured}
    assert len(found.samples) == len(found.launch_us) == 4


def test_no_native_graph_is_special(compared):
    found = [compared(10.1, natives)[0] for natives in permutations((10.0, 9.6, 10.2))]
    for one in found:
        assert (one.restored_ms, one.native_ms) == (10.1, 10.0)
        assert one.ratio == pytest.approx([1.01] * 3)
        assert one.spread == pytest.approx([9.6 / 10.2, 1.0, 10.2 / 9.6], abs=2e-3)
        assert one.spread[0] * one.spread[2] == pytest.approx(1.0)


def test_a_graph_is_compared_with_the_median_of_its_own_round(compared):
    """When the device slows down from round to round, that is no difference between graphs."""
    found, _ = compared(10.1, (10.0, 9.6, 10.2), slower=1.1)
    assert found.samples["restored"][-1] > 5 * found.samples["restored"][0]
    assert found.ratio == pytest.approx([1.01] * 3)


def test_pairs_keep_their_order_and_the_vocabulary_is_the_size_s_own_unless_given(program):
    engine = importlib.import_module("engine")
    parser = program.arguments(None, "engine")
    given = parser.parse_args(["engine", "--switch", "8:7,1:2", "--vocabulary", "32768"])
    assert (given.switch, given.switch_across, given.rounds % 24) == (((8, 7), (1, 2)), (), 0)
    assert engine.config_of(given).vocab == 32768
    assert engine.config_of(parser.parse_args(["engine"])).vocab == 151936
    for wrong in ("1,2", "3:3", "0:1", "1:2:3"):
        with pytest.raises(SystemExit):
            parser.parse_args(["engine", "--switch", wrong])
