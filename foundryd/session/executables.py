# SPDX-License-Identifier: Apache-2.0
"""Executables as a policy wants them: the first at once, the others in the background or when they are replayed.

One graph is in the making at a time, since the driver takes one instantiation after another whatever thread asks.  So a
replay waits for one graph at most that is not its own: who replays comes before the background, and the background
lets launches go on that began while it built.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foundryd.errors import DeadlineExceeded, FoundrydError, RestoreError, UsageError
from foundryd.session.building import BuiltGraph
from foundryd.session.driver import call, driver_ms, made_current, relaxed_capture
from foundryd.session.policy import RestorePolicy

log = logging.getLogger(__name__)

DEADLINE = 60.0  # seconds for what takes milliseconds: the graph in the making, or the end of the thread


@dataclass(frozen=True)
class Member:
    """A graph of the archive: its place among the variant's, its key, its template's number and what it returns."""

    place: int
    key: Any
    template: int
    outputs: Any


class RestoredGraph:
    """A graph from the archive, ready to launch: it gets an executable when it is first replayed, if not before.

    Attributes
    ----------
    key : what the engine called it.
    outputs : what the captured function returned.
    """

    def __init__(self, member: Member, executables: Executables, order: int) -> None:
        self.key = member.key
        self.outputs = member.outputs
        self.member = member
        self.order = order
        self.built: BuiltGraph | None = None
        self.ready = False  # it has an executable, and nobody is about to take it
        self.launching = 0
        self.last_used = 0
        self._executables = executables

    def replay(self, stream: int) -> None:
        """Launches the graph on ``stream`` (a driver handle); waits for nothing on the device.

        Raises ``RestoreError`` and its kinds if the graph has no executable yet and gets none.
        """
        self._executables.launch(self, stream)


class Executables:
    """Every graph of a variant, and who has an executable.

    Parameters
    ----------
    build : builds the graph of a member, without an executable.
    who : begins the messages about a graph: ``rank 3``.
    extra : fields of the log's lines.

    Attributes
    ----------
    graphs : by key.
    first : members that have an executable before anything is replayed.
    failures : what the background could not build, by key, until it was built after all.
    background_ms : milliseconds that the background took, None until it has ended.
    background_driver_ms : of these in the driver, if its calls are timed.
    """

    def __init__(
        self,
        build: Callable[[Member], BuiltGraph],
        members: Sequence[Member],
        policy: RestorePolicy,
        *,
        who: str,
        extra: dict[str, str],
    ) -> None:
        self._build = build
        self._policy = policy
        self._who = who
        self._extra = extra
        by_key = {member.key: member for member in members}
        first, rest = policy.arrange([member.key for member in members])
        self.graphs = {key: RestoredGraph(by_key[key], self, order) for order, key in enumerate([*first, *rest])}
        self._first = [self.graphs[key] for key in first]
        self.first = [graph.member for graph in self._first]
        self._rest = [self.graphs[key] for key in rest]
        self.failures: dict[Any, RestoreError] = {}
        self.background_ms: float | None = None
        self.background_driver_ms: float | None = None
        self._limit = len(members) if policy.executables is None else min(policy.executables, len(members))
        self._context = call("cuCtxGetCurrent")
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False
        self._stop = False  # the background is to end
        # Once every graph has an executable of its own that nobody can take, a replay is a launch and nothing else.
        self._settled = False
        # All below is under the lock.
        self._condition = threading.Condition(threading.Lock())
        self._making: RestoredGraph | None = None
        self._demands = 0  # replays that wait to make an executable
        self._ready = 0  # graphs with an executable
        self._turn = 0  # launches so far
        self._under_way: set[int] = set()  # turns of launches that have not returned

    def build_first(self) -> None:
        """Gives the first graphs their executables; raises what building one raises."""
        for graph in self._first:
            with self._condition:
                self._make(graph)

    def start(self) -> None:
        """Starts the background, if the policy has one and it has something to do."""
        if not self._policy.background or not self._rest or self._thread is not None or self._closed:
            return
        self._thread = threading.Thread(target=self._build_rest, name="foundryd-graphs", daemon=True)
        # A thread that came back from the driver into an interpreter that is ending would take the process down.
        atexit.register(self._at_exit)
        self._thread.start()

    def wait(self, deadline: float) -> None:
        """Waits ``deadline`` seconds at most until the background has ended.

        Raises ``DeadlineExceeded``, or the first of ``failures``.
        """
        if self._thread is not None:
            self._thread.join(deadline)
            if self._thread.is_alive():
                raise DeadlineExceeded(
                    f"{self._who} built {self._ready} of {len(self.graphs)} graphs in {deadline:.0f} s: wait longer"
                )
        for error in list(self.failures.values()):
            raise error

    def launch(self, graph: RestoredGraph, stream: int) -> None:
        """Launches a graph, which gets an executable now if it has none."""
        if self._settled:
            assert graph.built is not None
            graph.built.launch(stream)
            return
        with self._condition:
            self._check_open(graph)
            if not graph.ready:
                self._obtain(graph)
            built = graph.built
            assert built is not None
            graph.launching += 1
            self._turn += 1
            turn = graph.last_used = self._turn
            self._under_way.add(turn)
        try:
            built.launch(stream)
        finally:
            with self._condition:
                graph.launching -= 1
                self._under_way.discard(turn)
                self._condition.notify_all()

    def close(self) -> None:
        """Ends the background and destroys every executable and graph.

        Raises ``DeadlineExceeded``, and destroys nothing, if a graph is still in the making then; to be called again.
        """
        with self._condition:
            self._closed = True
            self._settled = False
        self._stop_background()
        with self._condition:
            idle = self._condition.wait_for(lambda: self._making is None and not self._under_way, DEADLINE)
            if not idle or (self._thread is not None and self._thread.is_alive()):
                raise DeadlineExceeded(
                    f"{self._who} still builds or launches a graph {DEADLINE:.0f} s after its graphs were to be "
                    "closed: look at what the driver does, and close again"
                )
            for graph in self.graphs.values():
                if graph.built is not None:
                    graph.ready = False
                    graph.built.close()
                    graph.built = None
            self._ready = 0

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _obtain(self, graph: RestoredGraph) -> None:
        """Gives a graph an executable for a replay: waits for who makes one, or makes it; the lock is held."""
        self._demands += 1
        try:
            in_time = self._condition.wait_for(
                lambda: self._closed or graph.ready or (self._making is None and self._has_room()), DEADLINE
            )
        finally:
            self._demands -= 1
            self._condition.notify_all()
        self._check_open(graph)
        if graph.ready:
            return
        if not in_time:
            made = "none" if self._making is None else repr(self._making.key)
            raise DeadlineExceeded(
                f"{self._who} could not begin to build graph {graph.key!r} within {DEADLINE:.0f} s, graph {made} being "
                "in the making: look at what the driver does"
            )
        try:
            self._make(graph)
        except Exception as error:
            raise self._failure(graph, "replay", error) from error

    def _make(self, graph: RestoredGraph) -> None:
        """Gives a graph an executable; the lock is held, but not while the driver works."""
        donor = None
        if self._ready >= self._limit:
            donor = self._donor(graph)
            donor.ready = False
            self._ready -= 1
        self._making = graph
        self._condition.release()
        try:
            with made_current(self._context), relaxed_capture():
                self._give_executable(graph, donor)
        finally:
            self._condition.acquire()
            self._making = None
            for one in (graph, donor):
                if one is not None and not one.ready and one.built is not None and one.built.executable:
                    one.ready = True
                    self._ready += 1
            self._settled = self._ready == len(self.graphs) and not self._closed
            self._condition.notify_all()
        self.failures.pop(graph.key, None)

    def _give_executable(self, graph: RestoredGraph, donor: RestoredGraph | None) -> None:
        if graph.built is None:
            graph.built = self._build(graph.member)
        if donor is not None:
            assert donor.built is not None
            # On an H200 an update takes a fifth of an instantiation; the driver may refuse it.
            if donor.member.template == graph.member.template and graph.built.take_over(donor.built):
                return
            donor.built.drop_executable()
        graph.built.instantiate()

    def _has_room(self) -> bool:
        return self._ready < self._limit or any(g.ready and not g.launching for g in self.graphs.values())

    def _donor(self, graph: RestoredGraph) -> RestoredGraph:
        """Whose executable is given up: nobody is launching it, its template is the same if possible, LRU."""
        idle = [g for g in self.graphs.values() if g.ready and not g.launching]
        return min(idle, key=lambda g: (g.member.template != graph.member.template, g.last_used, -g.order))

    def _check_open(self, graph: RestoredGraph) -> None:
        if self._closed:
            raise UsageError(f"graph {graph.key!r} was closed with its session: replay graphs before that")

    # --- the background ----------------------------------------------------------------------------------------------

    def _build_rest(self) -> None:
        started, spent = time.monotonic(), driver_ms()
        before = self._ready
        try:
            for graph in self._rest:
                try:
                    if not self._build_next(graph):
                        break
                except Exception as error:
                    failure = self._failure(graph, "background", error)
                    self.failures[graph.key] = failure
                    log.error("%s; it is tried again when it is replayed", failure, extra=self._extra)
        finally:
            self.background_driver_ms = driver_ms() - spent
            self.background_ms = (time.monotonic() - started) * 1000
            atexit.unregister(self._at_exit)
        built, ms = self._ready - before, self.background_ms
        log.info("%s built %d more graphs in %.0f ms", self._who, built, ms, extra=self._extra)

    def _build_next(self, graph: RestoredGraph) -> bool:
        """Builds one graph when no replay needs the driver more; False if there is nothing more to do."""
        with self._condition:
            turn = self._turn
            # Without a deadline of its own: a launch or a building that hangs is reported by who waits for it, and
            # closing ends this.
            while not self._stop and (
                self._making is not None or self._demands or any(t <= turn for t in self._under_way)
            ):
                self._condition.wait(1.0)
            if self._stop or self._ready >= self._limit:
                return False
            if not graph.ready:
                self._make(graph)
            return True

    def _failure(self, graph: RestoredGraph, phase: str, error: Exception) -> RestoreError:
        kind = type(error) if isinstance(error, RestoreError) else RestoreError
        text = str(error) if isinstance(error, FoundrydError) else f"{error!r}; report it"
        return kind(f"{self._who} could not build graph {graph.key!r} in phase {phase!r}: {text}")

    def _at_exit(self) -> None:
        """Ends the thread before the interpreter ends; a forked child has none, and maybe a lock that nobody frees."""
        if os.getpid() == self._process:
            self._stop_background()

    def _stop_background(self) -> None:
        with self._condition:
            self._stop = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(DEADLINE)
