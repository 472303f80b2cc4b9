# SPDX-License-Identifier: Apache-2.0
"""Executables as a policy wants them: the first at once, the others in the background or when they are replayed.

One graph is in the making at a time, since the driver takes one instantiation after another whatever thread asks.  So a
replay waits for one graph at most that is not its own: who replays comes before the background, and the background
lets launches go on that began while it built.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foundryd.errors import ArchiveFormatError, DeadlineExceeded, FoundrydError, RestoreError, UsageError
from foundryd.forks import tell_of_forks
from foundryd.interrupts import ANY, uninterrupted
from foundryd.session.building import BuiltGraph
from foundryd.session.driver import call, driver_ms, made_current, relaxed_capture
from foundryd.session.policy import RestorePolicy

log = logging.getLogger(__name__)

DEADLINE = 60.0  # seconds for what takes milliseconds: the graph in the making, or the end of the thread

_SIGNALS = 100  # exceptions of signals' handlers that may come while it is noted what was made


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
        self.last_used = 0
        self._executables = executables

    def replay(self, stream: int) -> None:
        """Launches the graph on ``stream`` (a driver handle); waits for nothing on the device.

        Raises ``RestoreError`` and its kinds if the graph has no executable yet and gets none.
        """
        self._executables.launch(self, stream)


@dataclass(eq=False)
class _Making:
    """Who gets an executable, for which launch if for any, and whose it was if it is another's."""

    graph: RestoredGraph
    turn: int | None = None
    donor: RestoredGraph | None = None
    begun: bool = False


class Executables:
    """Every graph of a variant, and who has an executable.

    Parameters
    ----------
    build : builds the graph of a member, without an executable.
    done : called when every graph was built, so that what building needed can go; by whoever built the last one.
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
        done: Callable[[], None] = lambda: None,
        who: str,
        extra: dict[str, str],
    ) -> None:
        self._build = build
        self._done = done
        self._policy = policy
        self._who = who
        self._extra = extra
        by_key: dict[Any, Member] = {}
        for member in members:
            if by_key.setdefault(member.key, member) is not member:
                raise ArchiveFormatError(
                    f"the archive has two graphs with the key {member.key!r}, numbers {by_key[member.key].place} and "
                    f"{member.place}: capture again, with a key of its own for each"
                )
        first, rest = policy.arrange([member.key for member in members])
        self.graphs = {key: RestoredGraph(by_key[key], self, order) for order, key in enumerate([*first, *rest])}
        self._first = [self.graphs[key] for key in first]
        self.first = [graph.member for graph in self._first]
        self._rest = [self.graphs[key] for key in rest]
        self._unbuilt = set(self.graphs.values())
        self.failures: dict[Any, RestoreError] = {}
        self.background_ms: float | None = None
        self.background_driver_ms: float | None = None
        self._limit = len(members) if policy.executables is None else min(policy.executables, len(members))
        self._context = call("cuCtxGetCurrent")
        self._thread: threading.Thread | None = None
        self._process = os.getpid()
        self._closed = False
        # Graphs whose launches have not returned, by turn.  They leave without the lock, so that nothing can come
        # between, and enter without it once all is settled: who looks has to copy, and who waits has to look again.
        self._under_way: dict[int, RestoredGraph] = {}
        self._turns = itertools.count(1)
        self._stop = False  # the background is to end
        # Once every graph has an executable of its own that nobody can take, a replay is a launch and nothing else.
        self._settled = False
        # All below is under the lock, which is taken as such: a signal's exception may come between a condition's
        # taking it and the block.
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._making: _Making | None = None
        self._demands = 0  # replays that wait to make an executable
        self._ready: set[RestoredGraph] = set()
        tell_of_forks(self)

    def build_first(self) -> None:
        """Gives the first graphs their executables; raises what building one raises."""
        for graph in self._first:
            self._make(_Making(graph), lambda: True)

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
                built = f"{len(self._ready)} of {len(self.graphs)} graphs"
                raise DeadlineExceeded(f"{self._who} built {built} in {deadline:.0f} s: wait longer")
        for error in list(self.failures.values()):
            raise error

    def launch(self, graph: RestoredGraph, stream: int) -> None:
        """Launches a graph, which gets an executable now if it has none."""
        turn, built = next(self._turns), None
        try:
            if self._settled:
                # Closing looks at these two the other way round, so one of both sees the other.
                self._under_way[turn] = graph
                built = graph.built if self._settled else None
            if built is None:
                built = self._ready_to_launch(graph, turn)
            built.launch(stream)
        finally:
            self._under_way.pop(turn, None)
            if not self._settled:
                with self._lock:
                    self._condition.notify_all()

    def close(self) -> None:
        """Ends the background and destroys every executable and graph.

        Raises ``DeadlineExceeded``, and destroys nothing, if a graph is still in the making then; to be called again.
        Raises what destroying one raises, after all others were.
        """
        with self._lock:
            self._closed = True
            self._settled = False
        self._stop_background()
        failed: Exception | None = None
        with self._lock:
            end = time.monotonic() + DEADLINE
            while (busy := self._making is not None or bool(self._under_way)) and time.monotonic() < end:
                self._condition.wait(0.01)
            if busy or (self._thread is not None and self._thread.is_alive()):
                raise DeadlineExceeded(
                    f"{self._who} still builds or launches a graph {DEADLINE:.0f} s after its graphs were to be "
                    "closed: look at what the driver does, and close again"
                )
            for graph in self.graphs.values():
                try:
                    with uninterrupted(ANY):
                        built, graph.built = graph.built, None
                        self._mark(graph, False)
                        if built is not None:
                            built.close()
                except FoundrydError as error:
                    failed = failed or error
        if failed is not None:
            raise failed

    def forked(self) -> None:
        """In a child nothing of the driver's is there, nor the background, which may have had the lock."""
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._closed, self._settled, self._thread, self._making = True, False, None, None
        self._under_way.clear()
        for graph in self.graphs.values():
            graph.built = None
            self._mark(graph, False)

    def _ready_to_launch(self, graph: RestoredGraph, turn: int) -> BuiltGraph:
        """The graph with an executable that nobody takes while this launch is under way."""
        making = _Making(graph, turn)
        try:
            self._make(making, lambda: self._may_make(graph, turn))
        except Exception as error:
            if not making.begun:
                raise
            raise self._failure(graph, "replay", error) from error
        assert graph.built is not None
        return graph.built

    def _make(self, making: _Making, wanted: Callable[[], bool]) -> bool:
        """Gives a graph an executable, if ``wanted`` says so under the lock, where it may wait; takes the lock.

        The thread of the background has the context and relaxed captures all the time, and runs no handlers.  What
        happened is noted however this ends: a signal's exception may come anywhere.
        """
        graph, tries, interrupt = making.graph, 0, None
        try:
            with self._lock:
                if not wanted():
                    return False
                self._making, making.begun = making, True
                if len(self._ready) >= self._limit:
                    making.donor = self._donor(graph)
                    self._mark(making.donor, False)
            if threading.current_thread() is self._thread:
                self._give_executable(graph, making.donor)
            else:
                # An exception of a handler amid this would lose a graph or an executable that nobody has taken yet.
                with uninterrupted(ANY), made_current(self._context), relaxed_capture():
                    self._give_executable(graph, making.donor)
        finally:
            # No call may stand between here and the block that catches.
            while self._making is making and tries < _SIGNALS:
                tries += 1
                try:
                    self._note(making)
                except BaseException as error:
                    interrupt = error
        if interrupt is not None:
            raise interrupt
        self.failures.pop(graph.key, None)
        return True

    def _note(self, making: _Making) -> None:
        """Notes who has an executable now, and that nobody is in the making; may be called again."""
        with self._lock:
            for one in (making.graph, making.donor):
                if one is not None:
                    self._mark(one, one.built is not None and one.built.executable)
            if making.graph.ready and making.turn is not None:
                self._enter(making.graph, making.turn)
            self._settled = len(self._ready) == len(self.graphs) and not self._closed
            if making.graph.built is not None:
                self._unbuilt.discard(making.graph)
                if not self._unbuilt:
                    self._done()
            self._condition.notify_all()
            self._making = None

    def _give_executable(self, graph: RestoredGraph, donor: RestoredGraph | None) -> None:
        if graph.built is None:
            graph.built = self._build(graph.member)
        if donor is not None:
            assert donor.built is not None
            # An update takes a fifth of an instantiation, and the driver may refuse it.  Not across templates: that
            # leaves a kernel's attributes as they are, cluster shapes among them, and reports success.
            if donor.member.template == graph.member.template and graph.built.take_over(donor.built):
                return
            donor.built.drop_executable()
        graph.built.instantiate()
        if self._limit == len(self.graphs):
            # Nobody will take the executable, and the next graph is built in the memory of this one: what a driver
            # allocates anew for a graph of 2,600 nodes costs thousands of page faults.
            graph.built.drop_graph()

    # --- under the lock ----------------------------------------------------------------------------------------------

    def _may_make(self, graph: RestoredGraph, turn: int) -> bool:
        """Waits until a graph is ready, which then is about to be launched (False), or may be made for a replay."""
        self._check_open(graph)
        self._demands += 1
        try:
            in_time = graph.ready or self._condition.wait_for(
                lambda: self._closed or graph.ready or (self._making is None and self._has_room()), DEADLINE
            )
        finally:
            self._demands -= 1
            self._condition.notify_all()
        self._check_open(graph)
        if graph.ready:
            self._enter(graph, turn)
            return False
        if not in_time:
            made = "none" if self._making is None else repr(self._making.graph.key)
            raise DeadlineExceeded(
                f"{self._who} could not begin to build graph {graph.key!r} within {DEADLINE:.0f} s, graph {made} being "
                "in the making: look at what the driver does"
            )
        return True

    def _enter(self, graph: RestoredGraph, turn: int) -> None:
        graph.last_used = next(self._turns)
        self._under_way[turn] = graph

    def _mark(self, graph: RestoredGraph, ready: bool) -> None:
        graph.ready = ready
        (self._ready.add if ready else self._ready.discard)(graph)

    def _has_room(self) -> bool:
        return len(self._ready) < self._limit or bool(self._idle())

    def _idle(self) -> list[RestoredGraph]:
        """Graphs with an executable that nobody is launching."""
        launching = {graph.order for graph in list(self._under_way.values())}
        return [graph for graph in self._ready if graph.order not in launching]

    def _donor(self, graph: RestoredGraph) -> RestoredGraph:
        """Whose executable is given up: nobody is launching it, one of the graph's template if there is, LRU."""
        template = graph.member.template
        return min(self._idle(), key=lambda g: (g.member.template != template, g.last_used, -g.order))

    def _check_open(self, graph: RestoredGraph) -> None:
        if os.getpid() != self._process:
            raise UsageError(
                f"graph {graph.key!r} belongs to process {self._process}, from which this one was forked: replay it "
                "there, or start a process of its own instead of forking"
            )
        if self._closed:
            raise UsageError(f"graph {graph.key!r} was closed with its session: replay graphs before that")

    # --- the background ----------------------------------------------------------------------------------------------

    def _build_rest(self) -> None:
        started, spent = time.monotonic(), driver_ms()
        before = len(self._ready)
        try:
            # For each graph anew, with what Python needs for it, this would take longer than patching the graph.
            with made_current(self._context), relaxed_capture():
                for graph in self._rest:
                    try:
                        if not self._build_next(graph):
                            break
                    except Exception as error:
                        self._fail(graph, error)
        except FoundrydError as error:
            log.error("%s has no context to build in: %s", self._who, error, extra=self._extra)
            for graph in self._rest:
                if graph.built is None:
                    self._fail(graph, error)
        finally:
            self.background_driver_ms = driver_ms() - spent
            self.background_ms = (time.monotonic() - started) * 1000
            atexit.unregister(self._at_exit)
        built, ms = len(self._ready) - before, self.background_ms
        log.info("%s built %d more graphs in %.0f ms", self._who, built, ms, extra=self._extra)

    def _fail(self, graph: RestoredGraph, error: Exception) -> None:
        failure = self._failure(graph, "background", error)
        self.failures[graph.key] = failure
        log.error("%s; it is tried again when it is replayed", failure, extra=self._extra)

    def _build_next(self, graph: RestoredGraph) -> bool:
        """Builds one graph when no replay needs the driver more; False if there is nothing more to do."""
        more = True

        def wanted() -> bool:
            nonlocal more
            before = next(self._turns)
            # Without a deadline of its own: a launch or a building that hangs is reported by who waits for it, and
            # closing ends this.
            while not self._stop and (
                self._making is not None or self._demands or any(turn < before for turn in list(self._under_way))
            ):
                self._condition.wait(1.0)
            more = not self._stop and len(self._ready) < self._limit
            return more and not graph.ready

        self._make(_Making(graph), wanted)
        return more

    def _failure(self, graph: RestoredGraph, phase: str, error: Exception) -> RestoreError:
        kind = type(error) if isinstance(error, RestoreError) else RestoreError
        text = str(error) if isinstance(error, FoundrydError) else f"{error!r}; report it"
        return kind(f"{self._who} could not build graph {graph.key!r} in phase {phase!r}: {text}")

    def _at_exit(self) -> None:
        """Ends the thread before the interpreter ends; a forked child has none."""
        if os.getpid() == self._process:
            self._stop_background()

    def _stop_background(self) -> None:
        with self._lock:
            self._stop = True
            self._condition.notify_all()
        if self._thread is not None:
            self._thread.join(DEADLINE)
