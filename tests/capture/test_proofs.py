# SPDX-License-Identifier: Apache-2.0
"""Nothing is taken for dead or noise that a replay depends on."""

from __future__ import annotations

import numpy as np
import pytest

from foundryd._native import _hook
from foundryd.capture.canonical import Graph
from foundryd.capture.journal import Journal
from foundryd.capture.proofs import prove_dead, prove_noise
from foundryd.capture.snapshots import Memory
from foundryd.errors import UsageError
from foundryd.rankpatch.noise import noise_dtype
from foundryd.session.arena import ARENAS


class HostMemory:
    """Stands for pinned host memory: six allocations of the host arena."""

    def __init__(self) -> None:
        self.bytes = {0x1000 * (i + 1): np.arange(i, i + 64, dtype=np.uint8) for i in range(6)}

    def allocations(self):
        out = np.zeros(len(self.bytes), _hook.allocation_dtype)
        for i, (address, data) in enumerate(self.bytes.items()):
            out[i]["address"], out[i]["bytes"] = address, len(data)
            out[i]["arena"], out[i]["ordinal"], out[i]["live"] = ARENAS.index("host"), i, 1
        return out

    def download(self, address, size):
        return self.bytes[address][:size].copy()

    def upload(self, address, data):
        self.bytes[address][:] = data


def found_dead(memory, replays, candidates):
    memory.begin(replays)
    return prove_dead(memory, replays, candidates)


A, B, C, D, E, OUT = (0x1000 * (i + 1) for i in range(6))


def test_dead_is_what_is_written_before_it_is_read():
    device = HostMemory()
    memory = Memory(device)

    def scratch():  # A is overwritten, then read; B is read; C is untouched
        device.bytes[A][:] = 7
        device.bytes[OUT][:] = device.bytes[A] + device.bytes[B]

    assert found_dead(memory, [scratch], {A, B, C}) == {A, C}


def test_a_range_is_alive_if_any_graph_reads_it():
    device = HostMemory()
    memory = Memory(device)

    def first():
        device.bytes[A][:] = 1

    def second():
        device.bytes[OUT][:] = device.bytes[A]

    assert found_dead(memory, [first, second], {A}) == set()


def test_a_partly_overwritten_range_is_alive_where_the_rest_is_read():
    device = HostMemory()
    memory = Memory(device)

    def graph():
        device.bytes[A][:32] = 0
        device.bytes[OUT][:] = device.bytes[A]

    assert found_dead(memory, [graph], {A}) == set()


def test_ranges_that_are_harmless_only_alone_are_not_dead_together():
    device = HostMemory()
    memory = Memory(device)

    def graph():  # the output changes only if both moved
        moved = [not np.array_equal(device.bytes[x], np.arange(i, i + 64, dtype=np.uint8)) for i, x in ((0, A), (1, B))]
        device.bytes[OUT][:] = all(moved)

    assert len(found_dead(memory, [graph], {A, B})) < 2


def test_memory_is_afterwards_as_it_was():
    device = HostMemory()
    before = {a: d.copy() for a, d in device.bytes.items()}
    found_dead(Memory(device), [lambda: device.bytes[OUT].fill(3)], {A, B})
    assert all((device.bytes[a] == before[a]).all() for a in before)


def rows(*offsets):
    out = np.zeros(len(offsets), noise_dtype)
    out["offset"], out["width"] = offsets, 4
    return out


def member(words, nodes=1):
    nodes = np.zeros(nodes, _hook.node_dtype)
    params = np.array(words, np.uint32).view(np.uint8).copy()
    nodes["param_bytes"] = len(params) // len(nodes)
    nodes["param_offset"] = np.arange(len(nodes)) * nodes["param_bytes"]
    return Graph(("g",), nodes, np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype), params)


def prove(memory, *arguments):
    memory.begin([])
    return [(int(word["offset"]), int(word["width"])) for word in prove_noise(memory, *arguments)]


@pytest.mark.parametrize("used", [(), (1,), (0, 2)])
def test_noise_is_what_no_output_depends_on(used):
    device = HostMemory()
    graph = member([5, 6, 7, 8])
    start = graph.param_start()

    def replay_with(params):
        words = params.view(np.uint32)
        device.bytes[OUT].view(np.uint32)[:] = sum(int(words[i]) * 31**i for i in used) % 2**32

    words = rows(start, start + 4, start + 8)
    other = graph.params ^ 1
    proven = prove(Memory(device), graph, words, [other], replay_with, np.random.default_rng(0))
    assert proven == [(start + 4 * i, 4) for i in range(3) if i not in used]


def test_functions_and_launch_dimensions_are_never_noise():
    graph = member([1])
    words = rows(4, 8)  # inside the node
    assert prove(Memory(HostMemory()), graph, words, [graph.params], lambda _: None, np.random.default_rng(0)) == []


def test_a_word_that_matters_is_never_overwritten_with_nonsense():
    """As an index it would take the whole process down."""
    device = HostMemory()
    graph = member([5, 6, 7, 8])
    start = graph.param_start()
    other = graph.params.copy()
    other.view(np.uint32)[[0, 2, 3]] ^= 0x04040404

    def replay_with(params):
        live = int(params.view(np.uint32)[0])
        assert live in (5, 5 ^ 0x04040404)
        device.bytes[OUT].view(np.uint32)[:] = live

    words = rows(start, start + 8, start + 12)
    generator = np.random.default_rng(0)
    assert prove(Memory(device), graph, words, [other], replay_with, generator) == [(start + 8, 4), (start + 12, 4)]
    with pytest.raises(UsageError, match="equal in all captures"):
        prove(Memory(device), graph, rows(start + 4), [other], replay_with, generator)


@pytest.mark.parametrize("steady", [True, False])
def test_of_a_graph_that_does_not_do_the_same_twice_nothing_is_tried(steady):
    device = HostMemory()
    graph = member([5, 6, 7, 8])
    words = rows(graph.param_start(), graph.param_start() + 8)
    ran, unsteady = [], set()

    def replay_with(params):
        ran.append(bytes(params))
        device.bytes[OUT][0] = 0 if steady else len(ran)

    arguments = (graph, words, [graph.params ^ 1], replay_with, np.random.default_rng(0))
    proven = prove(Memory(device), *arguments, Journal(None), None, unsteady)
    if steady:
        assert (len(proven), unsteady) == (2, set())
        assert len(set(ran)) > 1
    else:
        assert (proven, unsteady) == ([], {("g",)})
        assert set(ran) == {bytes(graph.params)}


class Astray(Exception):
    """Stands for the end of the process."""


def test_what_was_fatal_to_one_word_is_not_tried_with_others_of_its_kind(tmp_path):
    """Each launch ends at its first fatal trial, and the next goes on: one for all words together, one for the kind."""
    device = HostMemory()
    graph = member([5, 6, 7, 8, 9, 10], nodes=3)  # of one function, with two words each
    start = graph.param_start()
    other = graph.params ^ 2
    deadly = [0, 2, 4]
    runs = []

    def replay_with(params):
        runs.append(params.view(np.uint32)[deadly].tolist())
        if (params.view(np.uint32)[deadly] > 255).any():
            raise Astray
        device.bytes[OUT].view(np.uint32)[:] = 3

    def launch():
        words = rows(*range(start, start + 24, 4))
        generator = np.random.default_rng(0)
        return prove(Memory(device), graph, words, [other], replay_with, generator, Journal(tmp_path / "journal"))

    for _ in range(2):
        with pytest.raises(Astray):
            launch()
    assert launch() == [(start + 4 * i, 4) for i in (1, 3, 5)]
    fatal = [values for values in runs if max(values) > 255]
    assert len(fatal) == 2
