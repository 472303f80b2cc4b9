# SPDX-License-Identifier: Apache-2.0
"""What a restored graph does before each replay: its generators' values go to their cells, and they move on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.torch.rng import Cell, Cells, Prologue, Registered, prologues  # noqa: E402
from foundryd.errors import CaptureError  # noqa: E402

CPU = torch.device("cpu")
words = st.integers(0, 2**64 - 1)


class Generator:
    """A Philox generator as far as a prologue sees it."""

    def __init__(self, seed, offset):
        self.seed, self.offset = seed, offset

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def set_offset(self, offset):
        self.offset = offset


class Memory:
    """Eight-byte words at known addresses."""

    def __init__(self, count):
        self._tensor = torch.zeros(count, dtype=torch.int64)

    def at(self, place):
        return self._tensor.data_ptr() + 8 * place

    def __getitem__(self, place):
        return int(self._tensor[place]) % 2**64


@settings(deadline=None)
@given(words)
def test_a_cell_holds_any_unsigned_word(value):
    memory = Memory(3)
    cell = Cell(memory.at(1), CPU)
    cell.fill(value)
    assert cell.read() == memory[1] == value
    assert memory[0] == memory[2] == 0


@settings(deadline=None)
@given(words, st.integers(0, 2**40), st.integers(1, 4096).map(lambda n: 4 * n), st.integers(1, 5))
def test_each_replay_sees_the_generator_as_it_is_and_moves_it_on(seed, offset, consumed, replays):
    memory, generator = Memory(2), Generator(seed, offset)
    prologue = Prologue(generator, Cells(memory.at(0), memory.at(1)), consumed, CPU)
    for i in range(replays):
        prologue.run()
        assert (memory[0], memory[1]) == (seed, offset + i * consumed)
    assert generator.offset == offset + replays * consumed


def test_a_new_seed_is_seen_by_the_next_replay():
    memory, generator = Memory(2), Generator(1, 8)
    prologue = Prologue(generator, Cells(memory.at(0), memory.at(1)), 4, CPU)
    prologue.run()
    generator.seed, generator.offset = 2, 0
    prologue.run()
    assert (memory[0], memory[1], generator.offset) == (2, 0, 4)


def test_each_generator_has_its_own_cells_and_those_that_give_nothing_are_left_alone():
    memory = Memory(6)
    generators = [Generator(10 + i, 100 * i) for i in range(3)]
    cells = [[memory.at(2 * i), memory.at(2 * i + 1)] for i in range(3)]
    before = prologues([[2, 8], [0, 4], [1, 0]], cells, generators, CPU)
    assert len(before) == 2
    for prologue in before:
        prologue.run()
    assert [memory[i] for i in range(6)] == [10, 0, 0, 0, 12, 200]
    assert [g.offset for g in generators] == [4, 100, 208]


def snapshot(*addresses):
    """What the allocator shows with 8-byte blocks in use at ``addresses``, among others."""
    noise = [
        {"address": 1, "requested_size": 16, "state": "active_allocated"},
        {"address": 2, "requested_size": 8, "state": "inactive"},
    ]
    mine = [{"address": a, "requested_size": 8, "state": "active_allocated"} for a in addresses]
    return [{"blocks": noise}, {"blocks": mine}]


@pytest.mark.parametrize("made", [(), (512,), (512, 1024, 1536)])
def test_a_generator_whose_cells_are_not_two_blocks_is_refused(monkeypatch, made):
    class Graph:
        def register_generator_state(self, generator):
            seen.append(generator)

    seen = []
    snapshots = iter([snapshot(64), snapshot(64, *made)])
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda include_traces: next(snapshots))
    generator = object()
    with pytest.raises(CaptureError, match=f"made {len(made)} blocks of 8 bytes instead of 2"):
        Registered(generator, CPU)
    assert seen == [generator]
