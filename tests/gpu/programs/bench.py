# SPDX-License-Identifier: Apache-2.0
"""One rank of the benchmark: what graphs cost natively, what the driver alone would cost, and what restoring costs.

``native`` captures each graph through ``torch.cuda.graph`` and then measures the driver's floor for the same graphs:
one after the other (``floor``), and all of them kept (``floor_kept``).
``engine`` captures or restores as the environment says; restored, it also captures some of the same graphs natively
in the same process and compares replays of both, taken in turn.  The last line of standard output is the report; with
``--json`` it is also written after every step, so that what ends early leaves what it measured.

Times of a restored engine all begin where it asks for its first graph, and end when ``restore`` returned
(``restore_ms``), every graph can be replayed (``ready_ms``), the graph of the largest batch was replayed
(``first_replay_ms``), and every graph has an executable of its own (``all_ready_ms``).  A native one has all of this at
its ``ready_ms``.  ``from_restore`` has times that begin with the call of ``session.restore()``: until the hottest
graph, the first one asked for, was replayed, until every graph can be, and until all have executables of their own.

With ``--switch`` replays of two batch sizes in turn are timed where graphs share an executable
(``FOUNDRYD_EXECUTABLES=1``), beside the driver's own update of native graphs of the same batch sizes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from cuda.bindings import driver
from engine import Engine, add_arguments, batch_sizes, cpu

from foundryd.errors import DriverCallFailed
from foundryd.session.driver import call, time_calls

Replay = Callable[[], None]


class Results(dict[str, Any]):
    """The report as it grows: written to a file, and a line of progress shown, after every step."""

    def __init__(self, rank: Engine, args: argparse.Namespace) -> None:
        super().__init__(asked=len(rank.batch_sizes))
        self._rank = rank
        # While capturing there is nothing to report, and a report of before must stay.
        path = None if rank.capturing else args.json
        self._path = None if path is None else Path(path.replace("{rank}", str(rank.rank)))

    def step(self, text: str, **more: Any) -> None:
        """Takes in what a step found, and the engine's own figures as they are now."""
        self.update(self._rank.figures())
        self.update(more)
        if self._path is not None:
            aside = self._path.with_suffix(".part")
            aside.write_text(json.dumps(self))
            aside.replace(self._path)
        print(f"progress: rank {self._rank.rank}: {text}", file=sys.stderr, flush=True)


@contextmanager
def timed(into: dict[str, float], name: str) -> Iterator[None]:
    """Milliseconds of a block, and of what it launched."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    yield
    torch.cuda.synchronize()
    into[name] = (time.perf_counter() - started) * 1e3


@dataclass
class Native:
    """A graph captured through ``torch.cuda.graph``; milliseconds of the steps."""

    graph: Any
    outputs: Any
    times: dict[str, float]


def capture_natively(fn: Callable[[], Any], pool: Any) -> Native:
    """A warm-up, a capture and an instantiation, each timed."""
    times: dict[str, float] = {}
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with timed(times, "warm_up_ms"):
        fn()
    with timed(times, "capture_ms"), torch.cuda.graph(graph, pool=pool):
        outputs = fn()
    with timed(times, "instantiate_ms"):
        graph.instantiate()
    return Native(graph, outputs, times)


def native(args: argparse.Namespace) -> dict[str, Any]:
    """Every graph natively, and the driver's floor for each."""
    import floor

    engine = Engine(args)
    results = Results(engine, args)
    results.step("the engine is there")
    pool = torch.cuda.graph_pool_handle()
    graphs: dict[int, Native] = {}
    times: dict[str, dict[str, float]] = {}
    spent = 0.0
    for batch in sorted(engine.batch_sizes, reverse=True):
        started: dict[str, float] = {}
        with timed(started, "ms"):
            graphs[batch] = capture_natively(partial(engine.step, batch), pool)
        spent += started["ms"]
        times[str(batch)] = graphs[batch].times
        if len(graphs) % 8 == 0:
            results.step(f"{len(graphs)} graphs captured natively", graphs=len(graphs), native=times)
    first: dict[str, float] = {}
    with timed(first, "first_replay_ms"):
        graphs[max(graphs)].graph.replay()
    results.step("all captured natively", graphs=len(graphs), native=times, ready_ms=spent, **first)
    readings = {batch: floor.read(int(g.graph.raw_cuda_graph())) for batch, g in graphs.items()}
    costs: dict[int, list[floor.Cost]] = {batch: [] for batch in readings}
    for repeat in range(args.floor_repeats):
        if repeat == 0:
            floor.cost(next(iter(readings.values())))  # the first of anything is slower
        for batch, reading in readings.items():
            costs[batch].append(floor.cost(reading))
        lowest = {
            str(batch): {
                "nodes": several[0].nodes,
                "edges": several[0].edges,
                "build_ms": statistics.median(c.build_ms for c in several),
                "instantiate_ms": statistics.median(c.instantiate_ms for c in several),
            }
            for batch, several in costs.items()
        }
        results.step(f"the driver's floor, {repeat + 1} of {args.floor_repeats}", floor=lowest, graphs=len(graphs))
    if args.floor_repeats:
        kept = {str(batch): asdict(cost) for batch, cost in floor.keep(readings).items()}
        results.step("the driver's floor, everything kept", floor_kept=kept)
    readings.clear()
    graphs.clear()
    engine.close()
    return results


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """All graphs from the environment's mode; restored, replays compared with native ones."""
    rank = Engine(args)
    results = Results(rank, args)
    results.step("the engine is there")
    times: dict[str, float] = {}
    since = Since(rank)
    with timed(times, "all_ready_ms"):
        with timed(times, "first_replay_ms"):
            with timed(times, "ready_ms"):
                rank.prepare(partial(since.replayed, max(rank.batch_sizes)))
            since.mark("all_served_ms")
            if not rank.capturing:
                rank.replay(max(rank.batch_sizes))
        times["restore_ms"] = rank.timings["first_graph"]
        # Replays are compared, and memory is looked at, when every graph has an executable of its own.
        rank.graphs.wait()
        since.mark("all_own_ms")
    spent = cpu(rank.graphs.session)
    time_calls(None)  # what follows times launches
    results.step("captured" if rank.capturing else "restored", from_restore=since.marks, cpu=spent, **times)
    if not rank.capturing and args.switch:
        switched: dict[str, Any] = {}
        for pair in zip(args.switch[::2], args.switch[1::2], strict=True):
            switched[f"{pair[0]} and {pair[1]}"] = asdict(switch(rank, pair, args))
            results.step(f"executables changed, batches {pair[0]} and {pair[1]}", switched=switched)
    elif not rank.capturing:
        compared: dict[str, Any] = {}
        memory = results["memory"]  # before native graphs come to it
        for batch in (batch for batch in args.compare if batch in rank.replayable):
            compared[str(batch)] = asdict(compare(rank, batch, args))
            both = rank.figures()["memory"]
            results.step(
                f"replays compared, batch {batch}",
                compared_with_native=compared,
                memory=memory,
                memory_with_native=both,
            )
    rank.close()
    return results


class Since:
    """Milliseconds since ``session.restore()`` was called; none of a rank that has no session."""

    def __init__(self, rank: Engine) -> None:
        self.marks: dict[str, float] = {}
        self._rank, self._began = rank, 0.0
        session = rank.graphs.session
        if session is not None:
            restore = session.restore

            def begin(*arguments: Any, **more: Any) -> None:
                self._began = time.perf_counter()
                restore(*arguments, **more)
                self.mark("returned_ms")

            session.restore = begin  # type: ignore[method-assign]

    def mark(self, name: str) -> None:
        """Notes the time now."""
        if self._began:
            torch.cuda.synchronize()
            self.marks[name] = (time.perf_counter() - self._began) * 1e3

    def replayed(self, batch: int) -> None:
        """Replays the graph that is there, and notes when it has ended."""
        if self._began:
            self._rank.replay(batch)
            self.mark("hottest_ms")


@dataclass
class Switch:
    """Medians in microseconds on the host.

    ``again`` is a replay of the graph that has the executable, ``switching`` one of the other graph; ``update`` is
    ``cuGraphExecUpdate`` from one native graph to the other, ``launch`` the launch after it, and ``again_native`` one
    more, which changes nothing.  Why there is none of the latter three, ``refused`` says.

    ``slowed`` is what replays take on the device after all these updates, by those of a fresh executable of the same
    graph, in turns: 10th, 50th and 90th percentile.
    """

    again: float
    switching: float
    update: float | None
    launch: float | None
    again_native: float | None
    slowed: list[float] | None
    refused: str = ""


def switch(rank: Engine, pair: tuple[int, int], args: argparse.Namespace) -> Switch:
    """Times replays of two graphs in turn, and what the driver alone takes to change an executable."""

    def host_us(action: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        action()
        return (time.perf_counter() - began) * 1e6

    replays = [partial(rank.replay, batch) for batch in pair]
    natively = ("update", "launch", "again_native")
    times: dict[str, list[float]] = {name: [] for name in ("again", "switching", *natively)}
    rounds = args.warm_up_rounds + args.rounds
    for _ in range(rounds):
        for replay in replays:
            times["switching"].append(host_us(replay))
            times["again"].append(host_us(replay))
    refused, slowed = "", None
    pool = torch.cuda.graph_pool_handle()
    natives = [capture_natively(partial(rank.step, batch), pool) for batch in pair]
    graphs = [driver.CUgraph(int(native.graph.raw_cuda_graph())) for native in natives]
    executable = call("cuGraphInstantiate", graphs[0], 0)
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    try:
        for _ in range(rounds):
            for graph in reversed(graphs):
                times["update"].append(host_us(partial(call, "cuGraphExecUpdate", executable, graph)))
                for name in ("launch", "again_native"):
                    times[name].append(host_us(partial(call, "cuGraphLaunch", executable, stream)))
        slowed = _slowed(executable, graphs[0], stream, args)
    except DriverCallFailed as error:
        refused = str(error)
        times |= {name: [] for name in natively}
    finally:
        torch.cuda.synchronize()
        call("cuGraphExecDestroy", executable)
    middle = {name: statistics.median(v[2 * args.warm_up_rounds :]) if v else None for name, v in times.items()}
    return Switch(**middle, slowed=slowed, refused=refused)


def _slowed(changed: Any, graph: Any, stream: Any, args: argparse.Namespace) -> list[float]:
    """Replays of ``changed``, which has that graph now, by those of an executable that never had another."""
    fresh = call("cuGraphInstantiate", graph, 0)
    try:
        taken = [
            [_sample(partial(call, "cuGraphLaunch", executable, stream), args.inner)[0] for executable in order]
            for _ in range(args.warm_up_rounds + args.rounds)
            for order in ((changed, fresh), (fresh, changed))
        ]
    finally:
        torch.cuda.synchronize()
        call("cuGraphExecDestroy", fresh)
    rounds = [ms if place % 2 == 0 else ms[::-1] for place, ms in enumerate(taken)][2 * args.warm_up_rounds :]
    return _percentiles(_ratios([ms[0] for ms in rounds], [ms[1] for ms in rounds]))


@dataclass
class Comparison:
    """Replays of one graph three ways, taken in turn: milliseconds by CUDA events, and ratios of neighbours.

    ``ratio`` is the restored graph to a native one, ``spread`` one native one to another: 10th, 50th and 90th
    percentile of each.  ``launch_us`` is what a launch takes on the host.
    """

    restored_ms: float
    native_ms: float
    other_native_ms: float
    ratio: list[float]
    spread: list[float]
    launch_us: dict[str, float]
    samples: dict[str, list[float]]


def compare(rank: Engine, batch: int, args: argparse.Namespace) -> Comparison:
    """Compares replays; every rank does so in one order, since a graph may hold collectives."""
    pool = torch.cuda.graph_pool_handle()
    natives = [capture_natively(partial(rank.step, batch), pool) for _ in range(2)]
    ways: dict[str, Replay] = {
        "restored": rank.replayable[batch][0].replay,
        "native": natives[0].graph.replay,
        "other_native": natives[1].graph.replay,
    }
    samples: dict[str, list[float]] = {way: [] for way in ways}
    launches: dict[str, list[float]] = {way: [] for way in ways}
    # Every order as often as every other, so that no way always follows the same one.
    orders = itertools.islice(itertools.cycle(itertools.permutations(ways)), args.warm_up_rounds + args.rounds)
    for i, order in enumerate(orders):
        for way in order:
            device_ms, host_us = _sample(ways[way], args.inner)
            if i >= args.warm_up_rounds:
                samples[way].append(device_ms)
                launches[way].append(host_us)
    medians = {way: statistics.median(values) for way, values in samples.items()}
    return Comparison(
        medians["restored"],
        medians["native"],
        medians["other_native"],
        _percentiles(_ratios(samples["restored"], samples["native"])),
        _percentiles(_ratios(samples["other_native"], samples["native"])),
        {way: statistics.median(values) for way, values in launches.items()},
        samples,
    )


def _sample(replay: Replay, inner: int) -> tuple[float, float]:
    """Milliseconds on the device and microseconds on the host for one of ``inner`` replays in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    began = time.perf_counter()
    for _ in range(inner):
        replay()
    host = time.perf_counter() - began
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / inner, host / inner * 1e6


def _ratios(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(left, right, strict=True)]


def _percentiles(values: Sequence[float]) -> list[float]:
    deciles = statistics.quantiles(values, n=10)
    return [deciles[0], statistics.median(values), deciles[-1]]


def arguments(description: str | None, *roles: str) -> argparse.ArgumentParser:
    """The command line of the benchmark's programs: all take what one of them is given."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("role", choices=roles)
    add_arguments(parser)
    # A short cache: proofs of a capture save and compare all of it many times.
    parser.set_defaults(size="qwen3-8b", layers=36, batch_sizes=batch_sizes("1-64"), max_seq=128)
    parser.add_argument("--floor-repeats", type=int, default=3, help="0 for no floor")
    parser.add_argument(
        "--compare", type=batch_sizes, default=(1, 8, 32, 64), help="batch sizes whose replays to compare"
    )
    parser.add_argument("--no-compare", dest="compare", action="store_const", const=(), help="compare none")
    parser.add_argument(
        "--switch", type=batch_sizes, default=(), help="batch sizes, two by two, whose graphs share an executable"
    )
    parser.add_argument("--rounds", type=int, default=60, help="samples of each way")
    parser.add_argument("--warm-up-rounds", type=int, default=6)
    parser.add_argument("--inner", type=int, default=5, help="replays of one sample")
    parser.add_argument("--json", help="where to write the report after every step; {rank} becomes the rank")
    return parser


def main() -> None:
    args = arguments(__doc__, "native", "engine").parse_args()
    print(json.dumps(native(args) if args.role == "native" else engine(args)), flush=True)


if __name__ == "__main__":
    main()
