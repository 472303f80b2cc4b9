# SPDX-License-Identifier: Apache-2.0
"""The states that a capture's proofs are made in: valid for every batch, repeatable, and made without allocating."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm.vary import States, build_schedule, schedules  # noqa: E402


@pytest.fixture(autouse=True)
def _installed(vllm):
    """The stand-in's builders are what computes schedules."""


def runner(*, blocks=100, requests=8, tokens=32, block=16, max_model_len=4096, dtype=torch.bfloat16):
    width = -(-max_model_len // block)
    attention = importlib.import_module("vllm.v1.worker.gpu.attn_utils")
    builders = [attention.Builder(requests), SimpleNamespace(build_for_cudagraph_capture=lambda common: None)]
    builders[0].scheduler_metadata.fill_(1)
    return SimpleNamespace(
        vocab_size=1000,
        attn_groups=[[SimpleNamespace(get_metadata_builder=lambda i, b=b: b) for b in builders]],
        max_model_len=max_model_len,
        kv_cache_config=SimpleNamespace(num_blocks=blocks),
        kv_caches=[torch.zeros(2, blocks, block, 2, 4, dtype=dtype) for _ in range(2)],
        input_buffers=SimpleNamespace(
            input_ids=torch.zeros(tokens, dtype=torch.int32),
            positions=torch.zeros(tokens, dtype=torch.int64),
            query_start_loc=torch.zeros(requests + 1, dtype=torch.int32),
            seq_lens=torch.zeros(requests, dtype=torch.int32),
        ),
        block_tables=SimpleNamespace(
            kernel_block_sizes=[block],
            input_block_tables=[torch.zeros(requests, width, dtype=torch.int32)],
            slot_mappings=torch.zeros(1, tokens, dtype=torch.int64),
        ),
    )


def tensors(r):
    b, t = r.input_buffers, r.block_tables
    fixed = [b.input_ids, b.positions, b.query_start_loc, b.seq_lens, t.input_block_tables[0], t.slot_mappings]
    return [*fixed, *r.kv_caches]


def state(seed, **sizes):
    made = runner(**sizes)
    States(made).enter(seed)
    return made


@pytest.mark.parametrize("blocks", [2, 5, 6, 20, 33, 100])
@pytest.mark.parametrize("max_model_len", [16, 40, 4096])
def test_every_token_has_a_slot_of_its_own_inside_the_blocks_of_its_request(blocks, max_model_len):
    r = state(1, blocks=blocks, max_model_len=max_model_len)
    b, t = r.input_buffers, r.block_tables
    real = int((b.seq_lens > 0).sum())
    assert real == min(8, (blocks - 1) // min(4, -(-max_model_len // 16)))
    assert bool((b.seq_lens[:real] <= max_model_len).all())
    assert torch.equal(b.positions[:real], b.seq_lens[:real].long() - 1)
    slots = t.slot_mappings[0]
    assert len(set(slots[:real].tolist())) == real
    assert bool((slots[real:] == -1).all())
    for i in range(real):
        position = int(b.positions[i])
        assert int(t.input_block_tables[0][i, position // 16]) == int(slots[i]) // 16
        assert int(slots[i]) % 16 == position % 16
    assert int(t.input_block_tables[0].max()) < blocks
    assert 0 not in [int(s) // 16 for s in slots[:real]]  # block 0 is vLLM's own


@pytest.mark.parametrize("blocks", [6, 100])
def test_queries_are_one_token_for_each_request_and_none_for_padding(blocks):
    b = state(1, blocks=blocks).input_buffers
    lengths = b.query_start_loc.diff()
    assert torch.equal(lengths, (b.seq_lens > 0).int())


DRAFTED = [("FULL", 16, 4, 4), ("FULL", 4, 1, 4), ("PIECE", 0, 16, 0)]


@pytest.mark.parametrize(("blocks", "tokens"), [(2, 64), (20, 64), (100, 64), (100, 18)])
@pytest.mark.parametrize("max_model_len", [4, 16, 40, 4096])
def test_requests_have_as_many_tokens_as_graphs_are_for_where_vllm_speculates(blocks, tokens, max_model_len):
    r = runner(blocks=blocks, tokens=tokens, max_model_len=max_model_len)
    States(r, DRAFTED).enter(1)
    b, t = r.input_buffers, r.block_tables
    real = int((b.seq_lens > 0).sum())
    assert real == min(8, tokens // 4, (blocks - 1) // min(4, -(-max_model_len // 16)))
    assert b.query_start_loc.diff().tolist() == [4] * real + [0] * (8 - real)
    slots, positions = t.slot_mappings[0], b.positions
    assert bool((slots[4 * real :] == -1).all())
    assert len(set(slots[: 4 * real].tolist())) == 4 * real
    for i in range(real):
        length, own = int(b.seq_lens[i]), slice(4 * i, 4 * i + 4)
        assert positions[own].tolist() == list(range(length - 4, length))
        assert 4 <= length <= max_model_len
        for slot, position in zip(slots[own].tolist(), positions[own].tolist(), strict=True):
            assert int(t.input_block_tables[0][i, position // 16]) == slot // 16 != 0
            assert slot % 16 == position % 16


def test_graphs_of_any_spread_of_tokens_are_proven_with_one_token_a_request():
    for keys in ([("FULL", 16, 8, 0)], [("FULL", 16, 4, 4), ("FULL", 16, 8, 0)], [("PIECE", 0, 16, 0)], []):
        r = runner(tokens=64)
        States(r, keys).enter(1)
        assert r.input_buffers.query_start_loc.diff().tolist() == [1] * 8


def test_one_seed_is_one_state_and_another_seed_another():
    one, again, other = tensors(state(1)), tensors(state(1)), tensors(state(2))
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    changed = [not torch.equal(a, b) for a, b in zip(one, other, strict=True)]
    # Starts of queries and block tables are those of as many requests.
    assert changed == [True, True, False, True, False, True, True, True]


def test_a_state_does_not_depend_on_the_one_before():
    r = runner()
    states = States(r)
    states.enter(2)
    states.enter(1)
    assert all(torch.equal(a, b) for a, b in zip(tensors(r), tensors(state(1)), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.uint8])
def test_only_blocks_of_requests_get_content_and_it_is_finite(dtype):
    r = state(1, dtype=dtype)
    for cache in r.kv_caches:
        values = cache.view(torch.float8_e4m3fn) if dtype is torch.uint8 else cache
        assert bool(values.float().isfinite().all())
        assert bool((values[:, 1:33].float() != 0).any())
        assert not bool((values[:, 0].float() != 0).any())
        assert not bool((values[:, 33:].float() != 0).any())


def test_no_graph_reads_the_schedule_of_another_batch():
    r, other = state(1), runner()
    States(other).rest()
    for made in (r, other):
        [schedule] = schedules(made).values()
        assert not bool(schedule.any())
    # A state that only rests is otherwise as it was.
    assert all(torch.equal(a, b) for a, b in zip(tensors(other), tensors(runner()), strict=True))


KEYS = [("FULL", 8, 8, 1), ("FULL", 4, 4, 1), ("FULL", 1, 1, 1), ("FULL", 21, 8, 0), ("PIECE", 0, 8, 0)]


@pytest.mark.parametrize("blocks", [2, 20, 100])
@pytest.mark.parametrize("seed", [0, 1, 5])
def test_a_graph_gets_the_schedule_of_its_own_batch_and_of_the_states_lengths(blocks, seed):
    r = runner(blocks=blocks)
    states = States(r, KEYS)
    states.enter(seed)
    [schedule] = schedules(r).values()
    for key in KEYS[:-1]:
        states.enter_for(list(key), seed)
        other = runner(blocks=blocks)
        other.input_buffers = r.input_buffers
        build_schedule(other, key)
        [expected] = schedules(other).values()
        assert torch.equal(schedule, expected)
        assert bool((schedule[: key[2]] == r.input_buffers.seq_lens[: key[2]] // 16 + 1).all())


def test_a_graph_of_a_piece_has_no_attention_and_gets_no_schedule():
    r = runner()
    states = States(r, KEYS)
    states.enter(1)
    states.enter_for(("PIECE", 0, 8, 0), 1)
    assert not any(bool(schedule.any()) for schedule in schedules(r).values())


def test_a_state_leaves_no_schedule_of_the_one_before():
    r = runner()
    states = States(r, KEYS)
    states.enter_for(("FULL", 8, 8, 1), 0)
    states.enter(1)
    assert not any(bool(schedule.any()) for schedule in schedules(r).values())


def test_computing_schedules_ahead_leaves_the_worker_as_it_is():
    r, untouched = runner(), runner()
    for made in (r, untouched):
        made.input_buffers.seq_lens.fill_(7)
        made.input_buffers.query_start_loc.fill_(3)
    States(r, KEYS)
    assert all(torch.equal(a, b) for a, b in zip(tensors(r), tensors(untouched), strict=True))
    assert torch.equal(*(next(iter(schedules(made).values())) for made in (r, untouched)))


def test_every_tensor_stays_where_it_was_and_states_allocate_no_schedule(monkeypatch):
    r = runner()
    before = [t.data_ptr() for t in tensors(r)]
    states = States(r, KEYS)
    [builder] = [g for g in (group.get_metadata_builder(0) for group in r.attn_groups[0]) if hasattr(g, "rounded")]
    monkeypatch.setattr(builder, "build_for_cudagraph_capture", None)
    states.enter(3)
    states.enter_for(KEYS[0], 3)
    assert [t.data_ptr() for t in tensors(r)] == before
