# SPDX-License-Identifier: Apache-2.0
"""Sums are exact in any order, and tables are what their names say."""

from __future__ import annotations

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from foundryd.demo import numerics


@given(st.integers(0, 2**32 - 1), st.integers(1, 4096))
def test_a_bounded_product_does_not_depend_on_the_order_of_its_sum(seed: int, length: int) -> None:
    rng = np.random.default_rng(seed)
    a = rng.integers(-numerics.ACTIVATION, numerics.ACTIVATION + 1, length).astype(np.float32)
    w = rng.integers(-numerics.WEIGHT, numerics.WEIGHT + 1, length).astype(np.float32)
    exact = int(np.dot(a.astype(np.int64), w.astype(np.int64)))
    products = a * w
    shuffled = rng.permutation(products)
    assert np.dot(a, w) == products.sum(dtype=np.float32) == np.cumsum(shuffled, dtype=np.float32)[-1] == exact


@given(st.floats(-300, 300, width=32), st.sampled_from([31, 63, 127]))
def test_quantising_gives_bounded_whole_numbers_and_keeps_them(x: float, bound: int) -> None:
    once = numerics.quantise(np.array([x], dtype=np.float32), bound)
    assert once.dtype == np.float32
    assert float(once[0]).is_integer()
    assert abs(once[0]) <= bound
    assert abs(once[0] - np.clip(x, -bound, bound)) <= 0.5
    assert np.array_equal(numerics.quantise(once, bound), once)


def test_the_decay_table_halves_every_octave() -> None:
    table = numerics.decay_table()
    assert table.shape == (numerics.DECAY_STEPS,)
    assert np.all(np.diff(table) <= 0)
    assert [table[i * numerics.DECAY_OCTAVE] for i in range(5)] == [16, 8, 4, 2, 1]
    assert table[-1] == 0


def test_the_rope_table_is_cosine_and_sine() -> None:
    table = numerics.rope_table(100, 4)
    wavelength = np.array([8, 32, 128, 512])
    angle = 2 * np.pi * (np.arange(100)[:, None] / wavelength)
    assert np.abs(table[..., 0] - numerics.ROPE * np.cos(angle)).max() <= 0.52
    assert np.abs(table[..., 1] - numerics.ROPE * np.sin(angle)).max() <= 0.52


@given(st.integers(0, 2**32 - 1), st.text(), st.integers(0, 2**40))
def test_hashed_numbers_follow_from_whole_number_arithmetic_alone(seed: int, name: str, index: int) -> None:
    mask = 2**64 - 1
    x = index + (seed << 32 | zlib.crc32(name.encode())) & mask
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
    x = (x ^ x >> 31) * 0x9E3779B97F4A7C15 & mask
    assert int(numerics.hashed(seed, name, np.array([index], dtype=np.uint64))[0]) == x ^ x >> 29


def test_prompts_differ_by_cell_and_batch_and_have_no_special_token() -> None:
    first = numerics.prompts(1, 0, 64, 2, 256)
    assert first.shape == (64, 2)
    assert first.min() >= numerics.SPECIAL_TOKENS
    assert first.max() < 256
    assert not np.array_equal(first, numerics.prompts(1, 1, 64, 2, 256))
    assert not np.array_equal(first[:32], numerics.prompts(1, 0, 32, 2, 256))
