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
(``FOUNDRYD_EXECUTABLES=1``), beside the driver's own update of native graphs of the same batch sizes, which have to be
of one template: a driver may report an update to a kernel of other attributes as done and keep those of before.  Of
batch sizes of different templates, given with ``--switch-across``, only replays are timed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from cuda.bindings import driver
from decode import raw
from engine import Engine, add_arguments, batch_sizes, cpu, pairs

from foundryd.errors import DriverCallFailed
from foundryd.session.driver import call, time_calls

Replay = Callable[[], None]

# An instantiation may replay faster or slower than another of the same graph for as long as it lives.
NATIVES = 3
_STATE = 1  # of the requests, where outputs are compared


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
    if not rank.capturing and (args.switch or args.switch_across):
        switched: dict[str, Any] = {}
        for one_template, chosen in ((True, args.switch), (False, args.switch_across)):
            for first, second in chosen:
                batches = f"{first} and {second}"
                switched[batches] = asdict(switch(rank, (first, second), args, one_template))
                results.step(f"executables changed, batches {batches}", switched=switched)
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

    ``again`` is a replay of the graph that has the executable, ``switching`` one of the other graph.  The rest is of
    native graphs, and only where both are of one template: ``update`` is ``cuGraphExecUpdate`` from one to the other,
    ``launch`` the launch after it, and ``again_native`` one more, which changes nothing.  Why there is none of it,
    ``refused`` says.

    ``equal`` tells whether the executable put out, byte by byte, what a fresh one of the same graph does from the same
    state, updated to either graph.  ``slowed`` is what its replays take on the device after all these updates, by those
    of a fresh one, in turns: 10th, 50th and 90th percentile.
    """

    again: float
    switching: float
    one_template: bool
    update: float | None = None
    launch: float | None = None
    again_native: float | None = None
    equal: bool | None = None
    slowed: list[float] | None = None
    refused: str = ""


def switch(rank: Engine, pair: tuple[int, int], args: argparse.Namespace, one_template: bool) -> Switch:
    """Times replays of two graphs in turn, and what the driver alone takes to change an executable."""
    replays = [partial(rank.replay, batch) for batch in pair]
    times: dict[str, list[float]] = {name: [] for name in ("again", "switching")}
    for _ in range(args.warm_up_rounds + args.rounds):
        for replay in replays:
            times["switching"].append(_host_us(replay))
            times["again"].append(_host_us(replay))
    medians = _medians(times, args)
    found = Switch(medians["again"], medians["switching"], one_template)
    return replace(found, **_updated(rank, pair, args)) if one_template else found


def _updated(rank: Engine, pair: tuple[int, int], args: argparse.Namespace) -> dict[str, Any]:
    """What the driver's own update of native graphs takes, and what becomes of the executable."""
    times: dict[str, list[float]] = {name: [] for name in ("update", "launch", "again_native")}
    pool = torch.cuda.graph_pool_handle()
    natives = [capture_natively(partial(rank.step, batch), pool) for batch in pair]
    graphs = [driver.CUgraph(int(native.graph.raw_cuda_graph())) for native in natives]
    stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
    with _instantiated(graphs[0]) as executable:
        update, launch = partial(call, "cuGraphExecUpdate", executable), partial(call, "cuGraphLaunch")
        equal = True
        try:
            for _ in range(args.warm_up_rounds + args.rounds):
                for graph in reversed(graphs):
                    times["update"].append(_host_us(partial(update, graph)))
                    for name in ("launch", "again_native"):
                        times[name].append(_host_us(partial(launch, executable, stream)))
            # An update that leaves behind what the executable was made with shows in the other graph only.
            for graph, native in reversed([*zip(graphs, natives, strict=True)]):
                update(graph)
                with _instantiated(graph) as fresh:
                    first, second = (
                        _outcome(rank, native.outputs, partial(launch, one, stream)) for one in (fresh, executable)
                    )
                equal = equal and first == second
            with _instantiated(graphs[0]) as fresh:
                slowed = _slowed(partial(launch, executable, stream), partial(launch, fresh, stream), args)
        except DriverCallFailed as error:
            return {"refused": str(error)}
    return _medians(times, args) | {"equal": equal, "slowed": slowed}


def _host_us(action: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1e6


def _medians(times: dict[str, list[float]], args: argparse.Namespace) -> dict[str, float]:
    """Of all rounds but those that warm up, each of which has both graphs."""
    return {name: statistics.median(values[2 * args.warm_up_rounds :]) for name, values in times.items()}


@contextmanager
def _instantiated(graph: Any) -> Iterator[Any]:
    """An executable of a graph, destroyed when all it launched has ended."""
    executable = call("cuGraphInstantiate", graph, 0)
    try:
        yield executable
    finally:
        torch.cuda.synchronize()
        call("cuGraphExecDestroy", executable)


def _outcome(rank: Engine, outputs: dict[str, Any], replay: Replay) -> dict[str, bytes]:
    """What a replay leaves, from the same state of the requests each time, and with nothing in its outputs before."""
    rank.vary(_STATE)
    for output in outputs.values():
        output.zero_()
    replay()
    torch.cuda.synchronize()
    return {name: raw(tensor) for name, tensor in (outputs | {"next": rank.tokens}).items()}


def _slowed(changed: Replay, fresh: Replay, args: argparse.Namespace) -> list[float]:
    """Replays of an executable that was changed, by those of one of the same graph that never had another."""
    taken = [
        [_sample(replay, args.inner)[0] for replay in order]
        for _ in range(args.warm_up_rounds + args.rounds)
        for order in ((changed, fresh), (fresh, changed))
    ]
    rounds = [ms if place % 2 == 0 else ms[::-1] for place, ms in enumerate(taken)][2 * args.warm_up_rounds :]
    return _percentiles(_ratios([ms[0] for ms in rounds], [ms[1] for ms in rounds]))


@dataclass
class Comparison:
    """Replays of one graph, restored and captured natively several times, in turn: milliseconds by CUDA events.

    ``ratio`` is the restored graph by the median of the native ones of the same round: 10th, 50th and 90th percentile.
    ``spread`` is one native graph by another, over all pairs of them either way, since none is special: the lowest 10th
    percentile of a pair, the median of all pairs, and the highest 90th percentile.  ``native_ms`` is the median of the
    rounds' medians.  ``launch_us`` is what a launch takes on the host.
    """

    restored_ms: float
    native_ms: float
    ratio: list[float]
    spread: list[float]
    launch_us: dict[str, float]
    samples: dict[str, list[float]]


def compare(rank: Engine, batch: int, args: argparse.Namespace) -> Comparison:
    """Compares replays; every rank does so in one order, since a graph may hold collectives."""
    pool = torch.cuda.graph_pool_handle()
    natives = [capture_natively(partial(rank.step, batch), pool) for _ in range(NATIVES)]
    ways: dict[str, Replay] = {f"native {i}": native.graph.replay for i, native in enumerate(natives, 1)}
    ways = {"restored": rank.replayable[batch][0].replay} | ways
    samples: dict[str, list[float]] = {way: [] for way in ways}
    launches: dict[str, list[float]] = {way: [] for way in ways}
    # Every order as often as every other, so that no way follows another one more often.
    orders = [*itertools.permutations(ways)]
    rounds = math.ceil(args.rounds / len(orders)) * len(orders)
    for i, order in enumerate(itertools.islice(itertools.cycle(orders), args.warm_up_rounds + rounds)):
        for way in order:
            device_ms, host_us = _sample(ways[way], args.inner)
            if i >= args.warm_up_rounds:
                samples[way].append(device_ms)
                launches[way].append(host_us)
    restored, *others = samples.values()
    middle = [statistics.median(several) for several in zip(*others, strict=True)]
    return Comparison(
        statistics.median(restored),
        statistics.median(middle),
        _percentiles(_ratios(restored, middle)),
        _spread(others),
        {way: statistics.median(values) for way, values in launches.items()},
        samples,
    )


def _spread(several: Sequence[Sequence[float]]) -> list[float]:
    """How far one is from another, whichever they are: 10th percentile, median and 90th."""
    ratios = [_ratios(one, other) for one, other in itertools.permutations(several, 2)]
    low, _, high = zip(*map(_percentiles, ratios), strict=True)
    return [min(low), statistics.median(itertools.chain.from_iterable(ratios)), max(high)]


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
    parser.add_argument("--switch", type=pairs, default=(), help="of batch sizes of one template, as in 3:4,7:8")
    parser.add_argument("--switch-across", type=pairs, default=(), help="of batch sizes of different templates")
    parser.add_argument(
        "--rounds",
        type=int,
        default=48,
        help="samples of each way; replays are compared in a multiple of 24 rounds, one for each order of four ways",
    )
    parser.add_argument("--warm-up-rounds", type=int, default=6)
    parser.add_argument("--inner", type=int, default=5, help="replays of one sample")
    parser.add_argument("--json", help="where to write the report after every step; {rank} becomes the rank")
    return parser


def main() -> None:
    args = arguments(__doc__, "native", "engine").parse_args()
    print(json.dumps(native(args) if args.role == "native" else engine(args)), flush=True)


if __name__ == "__main__":
    main()
