# SPDX-License-Identifier: Apache-2.0
"""A restored rank that is disturbed as ``SCENARIO`` names; the last line is JSON.

It is run as a program of its own, beside restoring.py, with the worker's flags; see test_disturbed_restores.py.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from cuda.bindings import driver
from restoring import Driver, Rank, until

from foundryd.errors import DriverCallFailed, FoundrydError
from foundryd.session import executables
from foundryd.session.policy import RestorePolicy


class Hooked(Driver):
    """The driver of restoring.py that lets a scenario in before and after each call.

    A launch of an executable that is destroyed is noted and not made.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[str], None] = lambda _name: None
        self.after: Callable[[str], None] = lambda _name: None
        self.dead: list[int] = []

    def __call__(self, name: str, *arguments: Any) -> Any:
        self.before(name)
        if name == "cuGraphLaunch" and (arguments[0] is None or int(arguments[0]) not in self.living):
            self.dead.append(0 if arguments[0] is None else int(arguments[0]))
            return None
        made = super().__call__(name, *arguments)
        self.after(name)
        return made


armed: list[bool] = []  # whether the alarm raises


def sort(error: BaseException) -> list[str]:
    return [type(error).__name__, str(error)]


def attempt(what: Callable[[], Any]) -> list[str] | None:
    """The kind and message of what ``what`` raises."""
    try:
        what()
    except BaseException as error:
        return sort(error)
    return None


def free_memory() -> int:
    """Bytes of the device that nobody has."""
    code, free, _ = driver.cuMemGetInfo()
    assert code == driver.CUresult.CUDA_SUCCESS
    return int(free)


def closes_under_replays(rank: Rank) -> dict[str, Any]:
    """Threads replay ready graphs while another closes them, each launch taking its time."""
    rank.restore()
    rank.session.wait(20)
    graphs = list(rank.session.graphs.values())
    ended: list[list[str] | None] = []

    def replay(graph: Any) -> None:
        driver.cuCtxSetCurrent(rank.device.context)
        _, stream = driver.cuStreamCreate(1)

        def go_on() -> None:
            while True:
                graph.replay(int(stream))

        ended.append(attempt(go_on))

    def dawdle(name: str) -> None:
        if name == "cuGraphLaunch":
            time.sleep(0.02)

    rank.driver.before = dawdle
    threads = [threading.Thread(target=replay, args=(graph,), daemon=True) for graph in graphs]
    for thread in threads:
        thread.start()
    until(lambda: rank.driver.count("cuGraphLaunch") >= len(threads))
    closed = attempt(rank.graphs.close)
    for thread in threads:
        thread.join(10)
    alive = sum(thread.is_alive() for thread in threads)
    return {
        "ended": ended,
        "dead": rank.driver.dead,
        "closed": closed,
        "alive": alive,
        "living": len(rank.driver.living),
    }


def is_interrupted(rank: Rank) -> dict[str, Any]:
    """Interrupts come at any time of replays that take each other's executables."""
    rank.restore(start=False)
    graphs = list(rank.session.graphs.values())
    batches = list(rank.config.batch_sizes)
    right = {batch: rank.first_token(batch) for batch in batches}
    chosen = random.Random(7)
    wrong: list[int] = []
    other: list[list[str]] = []
    interrupts = 0
    while interrupts < 300:
        try:
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, chosen.uniform(0.0001, 0.003))
                while True:
                    chosen.choice(graphs).replay(rank.device.stream)
            finally:
                armed.clear()
        except KeyboardInterrupt:
            interrupts += 1
        except BaseException as error:
            other.append(sort(error))
        if interrupts % 16 == 0:
            batch = chosen.choice(batches)
            if rank.first_token(batch) != right[batch]:
                wrong.append(batch)
    wrong += [batch for batch in batches if rank.first_token(batch) != right[batch]]
    begun = time.monotonic()
    closed = attempt(rank.graphs.close)
    took = time.monotonic() - begun
    return {"interrupts": interrupts, "wrong": wrong, "other": other[:3], "closed": closed, "took": took}


class Interrupting:
    """A hook that counts the graphs that it made and that were not destroyed, and lets a scenario in after it."""

    def __init__(self, hook: Any, after: Callable[[str], None]) -> None:
        self._hook = hook
        self._after = after
        self.living: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._hook, name)

    def build_graph(self, *arguments: Any) -> int:
        graph = int(self._hook.build_graph(*arguments))
        self.living.add(graph)
        self._after("build_graph")
        return graph

    def destroy_graph(self, graph: int) -> None:
        self._hook.destroy_graph(graph)
        self.living.discard(graph)
        self._after("destroy_graph")


def is_interrupted_behind_calls(rank: Rank) -> dict[str, Any]:
    """A handler raises when a call has made or ended something, before whoever called it can note that."""
    rank.restore(RestorePolicy(first="all"))
    batches = list(rank.config.batch_sizes)
    right = {batch: rank.first_token(batch) for batch in batches}
    materializer, members = rank.session._materializer, [graph.member for graph in rank.session.graphs.values()]
    signals = (signal.SIGALRM, signal.SIGINT, signal.SIGUSR1)
    awaited: list[str] = []
    raised: dict[str, int] = {}
    wrong: list[int] = []
    other: list[list[str]] = []

    def after(name: str) -> None:
        if name in awaited:
            awaited.clear()
            raised[name] = raised.get(name, 0) + 1
            armed.append(True)
            signal.raise_signal(signals[raised[name] % len(signals)])

    def interrupted(name: str, what: Callable[[], Any]) -> None:
        """``what``, with an interrupt behind that call if it comes to it."""
        awaited[:], before = [name], sum(raised.values())
        error = attempt(what)
        awaited.clear()
        if (error or [None])[0] != ("KeyboardInterrupt" if sum(raised.values()) > before else None):
            other.append([name, str(error)])

    for number in signals:
        signal.signal(number, signal.getsignal(signal.SIGALRM))
    rank.driver.after = after
    hook = materializer._hook = Interrupting(materializer._hook, after)
    before = set(rank.driver.living)
    left = []
    for name in ("build_graph", "cuGraphInstantiate", "cuGraphExecUpdate", "cuGraphExecDestroy", "destroy_graph"):
        for rank.driver.refuses in (False, True):
            policy = RestorePolicy((), (), False, 2)
            some = executables.Executables(materializer._build, members, policy, who="rank 0", extra={})
            rank.use(some.graphs)
            for batch in (*batches, *batches):
                interrupted(name, lambda batch=batch: rank.first_token(batch))
                wrong += [batch] * (rank.first_token(batch) != right[batch])
            interrupted(name, some.close)
            some.close()
            left.append([name, len(hook.living), len(rank.driver.living - before)])
    rank.use(rank.session.graphs)
    return {"raised": raised, "wrong": wrong, "other": other[:3], "left": [one for one in left if any(one[1:])]}


def a_change_does_not_end(rank: Rank) -> dict[str, Any]:
    """The call that changes an executable into another graph's does not come back well: it fails, or a signal came."""
    rank.restore()
    batches = list(rank.config.batch_sizes)
    right = {batch: rank.first_token(batch) for batch in batches}
    found: dict[str, Any] = {}
    for error in (DriverCallFailed("cuGraphExecUpdate failed with CUDA_ERROR_OUT_OF_MEMORY: see"), KeyboardInterrupt()):

        def fail(name: str, error: BaseException = error) -> None:
            if name == "cuGraphExecUpdate":
                rank.driver.after = lambda _name: None
                raise error

        last, wanted = batches[-1], batches[0]  # the smaller graph leaves out rows of the larger one
        rank.first_token(last)
        rank.driver.after = fail
        raised = attempt(lambda wanted=wanted: rank.first_token(wanted))
        wrong = [batch for batch in (last, wanted, *batches) if rank.first_token(batch) != right[batch]]
        found[type(error).__name__] = {"raised": raised, "wrong": wrong}
    return {"found": found, "living": len(rank.driver.living), "updates": rank.driver.count("cuGraphExecUpdate")}


def fails_at_random(rank: Rank) -> dict[str, Any]:
    """Calls that build, change and destroy executables fail at random, now and then after they did their work."""
    rank.restore(RestorePolicy(first="all"))
    batches = list(rank.config.batch_sizes)
    right = {batch: rank.first_token(batch) for batch in batches}
    materializer, members = rank.session._materializer, [graph.member for graph in rank.session.graphs.values()]
    before = set(rank.driver.living)
    chosen, calm = random.Random(11), True
    failing = ("cuGraphInstantiate", "cuGraphExecUpdate")
    found: dict[str, Any] = {"failed": 0, "right": 0, "wrong": [], "untyped": [], "over": 0, "left": 0}

    def fail(name: str) -> None:
        if not calm and name in failing and chosen.random() < 0.2:
            raise DriverCallFailed(f"{name} failed with CUDA_ERROR_OUT_OF_MEMORY: see the driver's manual")

    rank.driver.before = fail
    rank.driver.after = lambda name: fail(name) if name == "cuGraphExecUpdate" else None
    for _ in range(40):
        cap = chosen.choice([None, 1, 2, 3])
        policy = RestorePolicy((), (), chosen.random() < 0.5, cap)
        rank.driver.most = len(rank.driver.living)
        some = executables.Executables(materializer._build, members, policy, who="rank 0", extra={})
        rank.use(some.graphs)
        calm = False
        some.start()
        for batch in chosen.choices(batches, k=12):
            rank.driver.refuses = chosen.random() < 0.2
            try:
                tokens = rank.first_token(batch)
            except DriverCallFailed as error:
                found["failed"] += 1
                if not str(error).startswith(f"rank 0 could not build graph ('decode', {batch}) in phase 'replay': "):
                    found["untyped"].append(sort(error))
            except Exception as error:
                found["untyped"].append(sort(error))
            else:
                found["right"] += tokens == right[batch]
                found["wrong"] += [batch] * (tokens != right[batch])
        calm, rank.driver.refuses = True, False
        with suppress(DriverCallFailed):
            some.wait(20)
        found["wrong"] += [batch for batch in batches if rank.first_token(batch) != right[batch]]
        found["untyped"] += [sort(error) for error in some.failures.values() if cap is None]
        found["over"] += rank.driver.most - len(before) > (cap or len(batches))
        some.close()
        found["left"] += rank.driver.living != before
    rank.use(rank.session.graphs)
    return found


def forks(rank: Rank) -> dict[str, Any]:
    """Children of a process whose background builds, or has the lock, use what their parent restored."""
    rank.driver.slow = 0.3
    rank.restore()
    until(lambda: len(rank.ready()) >= 2)
    graphs = sorted(rank.session.graphs.values(), key=lambda graph: not graph.ready)
    codes, said = [], ""
    for locked in (False, True):
        if locked:
            rank.session._executables._condition.acquire()
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(8)  # a child that hangs dies of it
            begun = time.monotonic()
            result = [
                attempt(lambda graph=graph: graph.replay(rank.device.stream)) for graph in (graphs[0], graphs[-1])
            ]
            result += [attempt(rank.graphs.wait), attempt(rank.graphs.close)]
            os.write(write, json.dumps([result, time.monotonic() - begun]).encode())
            os._exit(0)
        os.close(write)
        codes.append(os.waitpid(child, 0)[1])
        with os.fdopen(read) as pipe:
            said = pipe.read()
        if locked:
            rank.session._executables._condition.release()
    rank.driver.slow = 0.0
    rank.session.wait(20)
    rank.serve(*rank.config.batch_sizes)
    return {"codes": codes, "said": json.loads(said or "null")}


def cannot_destroy(rank: Rank) -> dict[str, Any]:
    """The driver refuses to destroy an executable."""
    rank.restore(RestorePolicy(first="all"))
    graphs = len(rank.session.graphs)
    session = rank.session

    def refuse(name: str) -> None:
        if name == "cuGraphExecDestroy" and rank.driver.count(name) == 0:
            rank.driver.calls.append(name)
            raise DriverCallFailed("cuGraphExecDestroy failed with CUDA_ERROR_UNKNOWN: see the driver's manual")

    rank.driver.before = refuse
    closed = attempt(rank.graphs.close)
    mapped = len(session._attachment._mappings)
    return {"closed": closed, "destroyed": graphs - len(rank.driver.living), "graphs": graphs, "mapped": mapped}


def restore_is_interrupted(rank: Rank) -> dict[str, Any]:
    """Interrupts come at any time of a restore, which is then tried again, until one is left alone."""
    hook, session = rank.graphs._hook, rank.session
    before = free_memory()
    policy = RestorePolicy(first="all")
    raised: list[list[str] | None] = []
    held: list[int] = []
    chosen, longest = random.Random(3), 0.05
    while len(raised) < 40:

        def restore(seconds: float = chosen.uniform(0.0002, longest)) -> None:
            try:
                armed.append(True)
                signal.setitimer(signal.ITIMER_REAL, seconds)
                session.restore(policy=policy, start=False)
            finally:
                armed.clear()

        begun = time.monotonic()
        raised.append(attempt(restore))
        if raised[-1] is None:
            longest = (longest + time.monotonic() - begun) / 2
        if session.restored:
            session._teardown()
            hook.release_held()
        held.append(before - free_memory())
    rank.restore(policy)
    rank.serve(*rank.config.batch_sizes)
    return {"raised": [error for error in raised if error], "held": held}


def connect_fails(rank: Rank) -> dict[str, Any]:
    """One rank's own function that exchanges handles fails, with an error that is not foundryd's or by an interrupt."""
    kind = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}[os.environ["KIND"]]

    def connect() -> None:
        if rank.rank == 1:
            raise kind("no peers today")

    before = free_memory()
    begun = time.monotonic()
    raised = attempt(lambda: rank.session.restore(rank.store, connect=connect))
    took = time.monotonic() - begun
    return {
        "raised": raised,
        "took": took,
        "held": before - free_memory(),
        "living": len(rank.driver.living),
    }


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        closes_under_replays, is_interrupted, is_interrupted_behind_calls, a_change_does_not_end, fails_at_random,
        forks, cannot_destroy, restore_is_interrupted, connect_fails,
    )
}  # fmt: skip


def main() -> None:
    executables.DEADLINE = 6.0

    def interrupt(_number: int, _frame: Any) -> None:
        if armed:
            armed.clear()
            raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    rank = Rank()
    rank.driver = Hooked()
    result = SCENARIOS[os.environ["SCENARIO"]](rank)
    result |= {"rank": rank.rank, "tokens": rank.tokens}
    print(json.dumps(result), flush=True)
    attempt(rank.engine.close)
    rank.store.close()


if __name__ == "__main__":
    try:
        main()
    except FoundrydError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        raise
