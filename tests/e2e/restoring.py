# SPDX-License-Identifier: Apache-2.0
"""A rank that restores by the policy in ``POLICY`` and then does what ``SCENARIO`` names; the last line is JSON.

It is run as a program of its own, with the worker's flags; see test_restore_policy.py.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd.demo import config, numerics
from foundryd.demo.device import Device
from foundryd.demo.engine import Engine
from foundryd.demo.rendezvous import FakeStore, SocketStore
from foundryd.demo.worker import counters, parser
from foundryd.errors import FoundrydError
from foundryd.session import building, executables
from foundryd.session.executables import Executables
from foundryd.session.graphset import GraphSet
from foundryd.session.policy import RestorePolicy
from foundryd.settings import settings

Call = Callable[..., Any]


class Driver:
    """Stands between ``foundryd.session.building`` and the driver: counts executables, slows them down, fails them."""

    def __init__(self) -> None:
        self.call: Call = building.call
        self.living: set[int] = set()
        self.most = 0
        self.calls: list[str] = []
        self.slow = 0.0  # seconds that an instantiation takes
        self.failing: set[int] = set()  # of the instantiations from here on, by number from 0
        self.refuses = False  # to change an executable into another graph's
        self._lock = threading.Lock()
        building.call = self  # type: ignore[assignment]

    def __call__(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            self.calls.append(name)
            number = self.calls.count("cuGraphInstantiate") - 1
            if name == "cuGraphExecDestroy":
                self.living.discard(int(arguments[0]))
        if name == "cuGraphExecUpdate" and self.refuses:
            # A graph that no executable of another can become.
            arguments = (arguments[0], self.call("cuGraphCreate", 0))
        if name == "cuGraphInstantiate":
            if number in self.failing:
                # The driver refuses flags that do not exist.
                return self.call(name, arguments[0], 1 << 40)
            time.sleep(self.slow)
        made = self.call(name, *arguments)
        if name == "cuGraphInstantiate":
            with self._lock:
                self.living.add(int(made))
                self.most = max(self.most, len(self.living))
        return made

    def count(self, name: str) -> int:
        with self._lock:
            return self.calls.count(name)


class Rank:
    """The demo's engine, with the session's own restore in place of the loop over batch sizes."""

    def __init__(self) -> None:
        args = parser().parse_args()
        env = settings()
        self.config = config.from_args(args, world=env.world_size)
        self.store = FakeStore() if args.store is None else SocketStore(args.store, timeout=args.timeout)
        self.graphs = GraphSet.from_env(store=self.store)
        self.rank = env.rank
        self.device = Device(env.local_rank)
        self.engine = Engine(self.config, env.rank, self.device, self.graphs, self.store)
        self.driver = Driver()
        self.tokens: dict[str, Any] = {}

    @property
    def session(self) -> Any:
        return self.graphs.session

    def restore(self, policy: RestorePolicy | None = None, *, start: bool = True) -> None:
        self.session.restore(self.store, policy=policy or policy_of_environment(), start=start)
        self.use(self.session.graphs)

    def use(self, graphs: dict[Any, Any]) -> None:
        self.engine._graphs = {batch: (graph, graph.outputs) for (_, batch), graph in graphs.items()}

    def ready(self) -> list[int]:
        return [key[1] for key, graph in self.session.graphs.items() if graph.ready]

    def serve(self, *batches: int) -> None:
        """Decodes the requests of each batch size, in this order."""
        for batch in batches:
            self.tokens[str(batch)] = self.engine._decode(batch).tolist()

    def first_token(self, batch: int) -> list[int]:
        """What one replay samples, whatever ran before."""
        c = self.config
        prompt = numerics.prompts(c.seed, c.cell(self.rank), batch, c.prompt, c.vocab)
        graph, output = self.engine._graphs[batch]
        self.engine._feed(prompt[:, 0], 0)
        # What an earlier replay left must not pass for the answer of this one.
        self.driver.call("cuMemsetD8", output.address, 0xFF, output.nbytes)
        self.driver.call("cuCtxSynchronize")
        graph.replay(self.device.stream)
        return self.device.read(output.address, output.shape, output.dtype).ravel().tolist()


def policy_of_environment() -> RestorePolicy:
    given = json.loads(os.environ.get("POLICY", "{}"))
    return RestorePolicy(**given)


def until(what: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.001)


def builders() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "foundryd-graphs"]


def serves(rank: Rank) -> dict[str, Any]:
    """Every batch size in the order of ORDER."""
    rank.driver.refuses = "REFUSES" in os.environ
    rank.restore()
    ready = rank.ready()
    made = rank.driver.count("cuGraphInstantiate")
    rank.serve(*json.loads(os.environ["ORDER"]))
    rank.session.wait(20)
    return {
        "ready": ready,
        "made": made,
        "ready_later": rank.ready(),
        "graphs": sum(graph.built is not None and graph.built.has_graph for graph in rank.session.graphs.values()),
        "most": rank.driver.most,
        "background_ms": rank.session.background_ms,
        "phases": rank.session.phases,
        "driver_ms": rank.session.driver_ms,
        "background_driver_ms": rank.session.background_driver_ms,
        "updates": rank.driver.count("cuGraphExecUpdate"),
        "made_later": rank.driver.count("cuGraphInstantiate"),
        "counters": counters(),
    }


def at_random(rank: Rank) -> dict[str, Any]:
    """Random policies over one restored set of graphs, each with random replays."""
    from hypothesis import HealthCheck, given
    from hypothesis import settings as limits
    from hypothesis import strategies as st

    rank.restore(RestorePolicy(first="all"))
    batches = list(rank.config.batch_sizes)
    right = {batch: rank.first_token(batch) for batch in batches}
    assert len({str(tokens[:1]) + str(len(tokens)) for tokens in right.values()}) == len(batches)
    before = set(rank.driver.living)
    materializer = rank.session._materializer
    members = [graph.member for graph in rank.session.graphs.values()]
    seen = {"replays": 0, "examples": 0, "updates": 0}

    @st.composite
    def policies(draw: Any) -> RestorePolicy:
        cap = draw(st.none() | st.integers(1, len(batches)))
        keys = st.lists(st.sampled_from(batches), unique=True, max_size=cap or len(batches))
        first = draw(st.none() | keys)
        return RestorePolicy(
            None if first is None else [("decode", batch) for batch in first],
            [("decode", batch) for batch in draw(keys)],
            draw(st.booleans()),
            cap,
        )

    @limits(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(policies(), st.lists(st.sampled_from(batches), max_size=12))
    def right_whatever_is_asked_for(policy: RestorePolicy, wanted: list[int]) -> None:
        rank.driver.most = len(rank.driver.living)
        some = Executables(materializer._build, members, policy, who="rank 0", extra={})
        try:
            some.build_first()
            some.start()
            rank.use(some.graphs)
            for batch in wanted:
                assert rank.first_token(batch) == right[batch], (policy, batch)
                assert some.graphs["decode", batch].ready
            some.wait(20)
        finally:
            some.close()
        assert rank.driver.most - len(before) <= (policy.executables or len(batches))
        assert rank.driver.living == before, "executables stayed"
        seen["replays"] += len(wanted)
        seen["examples"] += 1

    right_whatever_is_asked_for()
    seen["updates"] = rank.driver.count("cuGraphExecUpdate")
    rank.use(rank.session.graphs)
    rank.serve(*batches)
    return seen


def from_threads(rank: Rank) -> dict[str, Any]:
    """Threads with streams of their own ask for graphs at random, more of them than may have an executable."""
    rank.restore()
    limit = policy_of_environment().executables
    failed: list[str] = []

    def ask(seed: int) -> None:
        try:
            driver.cuCtxSetCurrent(rank.device.context)
            _, stream = driver.cuStreamCreate(1)
            chosen = random.Random(seed)
            for _ in range(60):
                chosen.choice(list(rank.session.graphs.values())).replay(int(stream))
            driver.cuStreamSynchronize(stream)
        except Exception as error:
            failed.append(repr(error))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    rank.session.wait(20)
    rank.serve(*rank.config.batch_sizes)
    return {"failed": failed, "alive": sum(t.is_alive() for t in threads), "most": rank.driver.most, "limit": limit}


def failure(action: Callable[..., object], *arguments: Any) -> list[str]:
    """The kind and the words of the error that it raises."""
    try:
        action(*arguments)
    except FoundrydError as error:
        return [type(error).__name__, str(error)]
    return ["nothing", ""]


def fails_in_the_background(rank: Rank) -> dict[str, Any]:
    rank.restore(start=False)
    rank.driver.failing = {2}
    rank.session.start_background()
    waited = failure(rank.session.wait, 20)
    lost = next(key for key, graph in rank.session.graphs.items() if not graph.ready)
    # While the driver goes on failing, the replay says so.
    rank.driver.failing = set(range(1000))
    raised = failure(rank.session.graphs[lost].replay, rank.device.stream)
    others = [batch for batch in rank.config.batch_sizes if batch != lost[1]]
    rank.serve(*others)
    rank.driver.failing = set()
    rank.serve(lost[1])
    rank.session.wait(1)
    return {
        "lost": list(lost),
        "waited": waited,
        "raised": raised,
        "builders": builders(),
    }


def has_no_context_in_the_background(rank: Rank) -> dict[str, Any]:
    rank.restore(start=False)
    made = rank.session._materializer.executables
    context, made._context = made._context, driver.CUcontext(0x1234560)
    rank.session.start_background()
    waited = failure(rank.session.wait, 20)
    failures = [key[1] for key in made.failures]
    made._context = context
    ready = rank.ready()
    rank.serve(*rank.config.batch_sizes)
    rank.session.wait(1)
    return {"waited": waited, "failures": failures, "ready": ready}


def prepares(rank: Rank) -> dict[str, Any]:
    """The loop of an engine: the background begins with finish()."""
    finish, before = rank.graphs.finish, {}

    def look_first(**options: Any) -> None:
        before.update(builders=builders(), ready=rank.ready())
        finish(**options)

    rank.graphs.finish = look_first  # type: ignore[method-assign]
    rank.engine.prepare()
    rank.graphs.wait(20)
    after = {"ready": rank.ready(), "background_ms": rank.session.background_ms}
    rank.serve(*rank.config.batch_sizes)
    return {"before": before, "after": after}


def loads(rank: Rank) -> dict[str, Any]:
    """What of the archive's code the driver has: after the restore, after each replay, and whether one can fail."""
    needs = {}
    found: list[tuple[list[int], int]] = []

    def look() -> None:
        functions = np.flatnonzero(rank.session._materializer._bindings.functions).tolist()
        found.append((functions, rank.graphs._hook.report().engine["module_loads"] - before))

    before = rank.graphs._hook.report().engine["module_loads"]
    rank.restore(RestorePolicy(first=(), background=False))
    for key, graph in rank.session.graphs.items():
        needs[key[1]] = rank.session._materializer._members.needs(graph.member).functions.tolist()
    look()
    batches = list(rank.config.batch_sizes)
    # The first is asked for while the driver does not give its functions.
    hook = rank.session._materializer._bindings._hook

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(hook, name)

        def load_function(self, module: int, name: str, settings: Any) -> int:
            return int(hook.load_function(module, "nobody", settings))

    rank.session._materializer._bindings._hook = Failing()
    raised = None
    try:
        rank.session.graphs["decode", batches[0]].replay(rank.device.stream)
    except FoundrydError as error:
        raised = error
    rank.session._materializer._bindings._hook = hook
    for batch in batches:
        rank.serve(batch)
        look()
    return {"needs": [needs[b] for b in batches], "found": found, "raised": [type(raised).__name__, str(raised)]}


def fails_first(rank: Rank) -> dict[str, Any]:
    """The graph that is to be ready first cannot be instantiated, so the engine captures natively."""
    rank.driver.failing = {0}
    rank.engine.prepare()
    rank.driver.failing = set()
    rank.serve(*rank.config.batch_sizes)
    fallback = rank.graphs.fallback
    return {"fallback": [type(fallback).__name__, str(fallback)], "builders": builders()}


def closes_early(rank: Rank) -> dict[str, Any]:
    """Closes while the background works."""
    rank.restore(start=False)
    descriptors = len(os.listdir("/proc/self/fd"))
    rank.driver.slow = 0.05
    rank.session.start_background()
    until(lambda: len(rank.ready()) >= 2)
    graphs, working = dict(rank.session.graphs), len(builders())
    rank.graphs.close()
    built = rank.driver.count("cuGraphInstantiate")
    refused = []
    for graph in graphs.values():
        with suppress(FoundrydError):
            graph.replay(rank.device.stream)
            refused.append("replayed after close")
    return {
        "working": working,
        "built": built,
        "graphs": len(graphs),
        "living": len(rank.driver.living),
        "builders": builders(),
        "descriptors": [descriptors, len(os.listdir("/proc/self/fd"))],
        "refused": refused,
    }


def ends_without_closing(rank: Rank) -> dict[str, Any]:
    # Called after whatever is registered from here on.
    atexit.register(lambda: print(f"at the end: {builders()}", file=sys.stderr, flush=True))
    rank.driver.slow = 0.05
    rank.restore()
    until(lambda: len(rank.ready()) >= 2)
    return {"builders": builders()}


def asks_while_it_builds(rank: Rank) -> dict[str, Any]:
    """Replays a graph that is ready, and the last of the background's order, while others are built."""
    rank.driver.slow = 0.3
    rank.restore()
    last = max(rank.session.graphs.values(), key=lambda graph: graph.order)
    hot = min(rank.session.graphs.values(), key=lambda graph: graph.order)
    until(lambda: len(rank.ready()) >= 2)
    begun, not_ready = {}, {}
    for name, graph in (("ready", hot), ("last", last)):
        before = rank.driver.count("cuGraphInstantiate")
        graph.replay(rank.device.stream)
        begun[name] = rank.driver.count("cuGraphInstantiate") - before
        not_ready[name] = len(rank.session.graphs) - len(rank.ready())
    rank.driver.slow = 0.0
    rank.serve(*rank.config.batch_sizes)
    return {"begun": begun, "not_ready": not_ready}


def captures_while_it_builds(rank: Rank) -> dict[str, Any]:
    """The engine's thread captures a stream in global mode, and the background builds two graphs meanwhile."""
    call = rank.driver.call
    rank.driver.slow = 0.05
    rank.restore()
    address = rank.device.allocate((16,))
    stream = call("cuStreamCreate", 1)
    before = len(rank.ready())
    call("cuStreamBeginCapture", stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL)
    call("cuMemsetD32Async", address, 7, 16, stream)
    until(lambda: len(rank.ready()) >= before + 2)
    during = len(rank.ready()) - before
    # Not ready yet, and asked for by the thread that captures, for another stream.
    last = max(rank.session.graphs.values(), key=lambda graph: graph.order)
    was_ready = last.ready
    last.replay(rank.device.stream)
    graph = call("cuStreamEndCapture", stream)
    executable = call("cuGraphInstantiate", graph, 0)
    call("cuGraphLaunch", executable, stream)
    call("cuStreamSynchronize", stream)
    values = rank.device.read(address, (16,), "<i4")
    rank.driver.slow = 0.0
    rank.session.wait(20)
    rank.serve(*rank.config.batch_sizes)
    return {"during": during, "was_ready": was_ready, "values": np.unique(values).tolist()}


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        serves, prepares, at_random, from_threads, fails_in_the_background, fails_first, closes_early,
        ends_without_closing, asks_while_it_builds, captures_while_it_builds, loads,
        has_no_context_in_the_background,
    )
}  # fmt: skip


def main() -> None:
    name = os.environ["SCENARIO"]
    executables.DEADLINE = 20.0
    rank = Rank()
    result = SCENARIOS[name](rank)
    result |= {"rank": rank.rank, "tokens": rank.tokens, "restored": rank.graphs.restored}
    print(json.dumps(result), flush=True)
    if name == "ends_without_closing":
        sys.exit(0)
    rank.engine.close()
    rank.store.close()


if __name__ == "__main__":
    main()
