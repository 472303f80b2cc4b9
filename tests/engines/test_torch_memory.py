# SPDX-License-Identifier: Apache-2.0
"""Named tensors and blocks are compared one by one, and the first that is elsewhere is named."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd._native import _hook  # noqa: E402
from foundryd.archive import index as ix  # noqa: E402
from foundryd.capture.canonical import KERNEL, Graph  # noqa: E402
from foundryd.engines.torch import memory  # noqa: E402
from foundryd.engines.torch.graphset import GraphSet  # noqa: E402
from foundryd.engines.torch.memory import Arenas, Bound, check, describe, referred_to  # noqa: E402
from foundryd.errors import CaptureError, IdentityMismatch, LayoutDiverged, UsageError  # noqa: E402
from foundryd.session.arena import ARENAS  # noqa: E402
from foundryd.settings import Mode  # noqa: E402

BASE, STRIDE = 0x600000000000, 1 << 38

addresses = st.integers(BASE // 512, (BASE + 5 * STRIDE) // 512).map(lambda a: a * 512)
tensors = st.builds(
    lambda address, shape, dtype: [address, shape, [1] * len(shape), dtype],
    addresses,
    st.lists(st.integers(1, 64), max_size=3),
    st.sampled_from(["float32", "int64", "bfloat16"]),
)
names = st.text("abc.", min_size=1, max_size=5)
bounds = st.dictionaries(names, tensors, max_size=5)
blocks = st.dictionaries(
    st.sampled_from(["weights", "kv", "io"]),
    st.lists(st.tuples(addresses, st.integers(1, 1 << 30)).map(list), max_size=5).map(sorted),
)


@settings(deadline=None)
@given(bounds, blocks)
def test_equal_memory_is_accepted(bound, there):
    check({"bound": bound, "blocks": there}, copy.deepcopy(bound), copy.deepcopy(there))


def _another(value):
    return value + 512 if isinstance(value, int) else [*value, 1] if isinstance(value, list) else "float16"


@settings(deadline=None)
@given(st.data(), bounds.filter(bool), blocks)
@pytest.mark.parametrize("place", range(4), ids=("address", "shape", "strides", "dtype"))
def test_a_tensor_that_changed_is_named_with_both_values(place, data, bound, there):
    name = data.draw(st.sampled_from(sorted(bound)))
    now = copy.deepcopy(bound)
    now[name][place] = _another(now[name][place])
    with pytest.raises(LayoutDiverged) as caught:
        check({"bound": bound, "blocks": there}, now, there)
    said = str(caught.value)
    assert said.startswith(f"the {('address', 'shape', 'strides', 'dtype')[place]} of the tensor {name!r} is")
    for value in (bound[name][place], now[name][place]):
        assert (hex(value) if isinstance(value, int) else str(value)) in said


@settings(deadline=None)
@given(st.data(), bounds.filter(bool))
def test_of_several_moved_tensors_the_first_is_named(data, bound):
    moved = data.draw(st.sets(st.sampled_from(sorted(bound)), min_size=1))
    now = {name: [t[0] + 512 * (name in moved), *t[1:]] for name, t in bound.items()}
    first = next(name for name in bound if name in moved)
    with pytest.raises(LayoutDiverged) as caught:
        check({"bound": bound, "blocks": {}}, now, {})
    assert f"the tensor {first!r}" in str(caught.value)


@settings(deadline=None)
@given(st.data(), bounds.filter(bool))
def test_a_tensor_bound_on_one_side_only_is_named(data, bound):
    name = data.draw(st.sampled_from(sorted(bound)))
    rest = {other: tensor for other, tensor in bound.items() if other != name}
    with pytest.raises(LayoutDiverged) as caught:
        check({"bound": bound, "blocks": {}}, rest, {})
    assert f"the tensor {name!r} was bound when capturing" in str(caught.value)
    with pytest.raises(LayoutDiverged) as caught:
        check({"bound": rest, "blocks": {}}, bound, {})
    assert f"the tensor {name!r} is bound here" in str(caught.value)


@settings(deadline=None)
@given(st.data(), blocks.filter(lambda b: any(b.values())))
def test_the_first_block_that_moved_or_was_resized_is_named(data, there):
    arena = data.draw(st.sampled_from(sorted(name for name in there if there[name])))
    place = data.draw(st.integers(0, len(there[arena]) - 1))
    column = data.draw(st.integers(0, 1))
    now = copy.deepcopy(there)
    for block in now[arena][place:]:
        block[column] += 512
    with pytest.raises(LayoutDiverged) as caught:
        check({"bound": {}, "blocks": there}, {}, now)
    said = str(caught.value)
    assert f"arena {arena!r}" in said
    for address, size in (there[arena][place], now[arena][place]):
        assert f"{address:#x} with {size} bytes" in said


@pytest.mark.parametrize("arena", ["weights", "kv", "io"])
def test_a_block_more_or_less_is_refused_with_both_counts(arena):
    one, two = [[BASE, 512]], [[BASE, 512], [BASE + 512, 512]]
    with pytest.raises(LayoutDiverged, match=f"arena '{arena}' holds 1 tensors here and 2 in the archive"):
        check({"bound": {}, "blocks": {arena: two}}, {}, {arena: one})
    with pytest.raises(LayoutDiverged, match=f"arena '{arena}' holds 2 tensors here and 1 in the archive"):
        check({"bound": {}, "blocks": {arena: one}}, {}, {arena: two})
    with pytest.raises(LayoutDiverged, match=f"arena '{arena}' holds 0 tensors here and 1 in the archive"):
        check({"bound": {}, "blocks": {arena: one}}, {}, {})
    with pytest.raises(LayoutDiverged, match=f"arena '{arena}' holds 1 tensors here and 0 in the archive"):
        check({"bound": {}, "blocks": {}}, {}, {arena: one})


def test_an_arena_that_was_chosen_and_left_empty_is_as_one_that_was_not():
    check({"bound": {}, "blocks": {"kv": []}}, {}, {})
    check({"bound": {}, "blocks": {}}, {}, {"kv": []})


def test_a_module_is_bound_by_its_parameters_and_buffers():
    module = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    bound = Bound()
    bound.add("model", module)
    bound.add("caches", {"k": torch.zeros(2), "v": torch.zeros(2)})
    bound.add("tokens", torch.zeros(4, 2).t())
    recorded = bound.recorded()
    assert {f"model.{n}" for n in module.state_dict()} <= set(recorded)
    assert recorded["model.0.weight"] == describe(module[0].weight)
    assert recorded["tokens"][1:] == [[2, 4], [1, 2], "float32"]
    assert {"caches.k", "caches.v"} <= set(recorded)


def test_a_name_cannot_be_bound_twice():
    bound = Bound()
    bound.add("a.b", torch.zeros(1))
    with pytest.raises(UsageError, match=r"'a\.b' was bound twice"):
        bound.add("a", {"b": torch.zeros(1)})


def allocation(tensor, name, *, live=True):
    """The hook's row for an allocation that begins a little before the tensor."""
    row = np.zeros(1, _hook.allocation_dtype)
    row["arena"], row["live"] = ARENAS.index(name), live
    row["address"], row["bytes"] = tensor.data_ptr() - 512, 1 << 20
    return row


@pytest.mark.parametrize("name", ARENAS)
def test_only_arenas_that_a_restoring_engine_fills_hold_bound_tensors(name):
    bound = Bound()
    tensor = torch.zeros(4)
    bound.add("x", tensor)
    if name in ("weights", "kv", "io", "host"):
        bound.require_in_arenas(allocation(tensor, name))
    else:
        with pytest.raises(CaptureError, match=f"'x' is bound and lies at {tensor.data_ptr():#x}, in the arena {name}"):
            bound.require_in_arenas(allocation(tensor, name))


def test_a_bound_tensor_outside_all_arenas_is_refused():
    bound = Bound()
    tensor = torch.zeros(4)
    bound.add("x", tensor)
    beside = allocation(tensor, "kv")
    beside["address"] += 4096
    for allocations in (beside, allocation(tensor, "kv", live=False), beside[:0]):
        with pytest.raises(CaptureError, match=r"'x' is bound and lies .* in the arena none"):
            bound.require_in_arenas(allocations)


def test_a_bound_tensor_without_elements_may_lie_anywhere():
    bound = Bound()
    bound.add("x", torch.zeros(3, 0))
    bound.require_in_arenas(np.zeros(0, _hook.allocation_dtype))


def test_a_tensor_that_moves_after_it_was_bound_is_named():
    bound = Bound()
    module = torch.nn.Linear(2, 3)
    bound.add("model", module)
    bound.recorded()
    module.weight.data = torch.zeros(3, 2)
    with pytest.raises(UsageError, match=r"'model\.weight' was float32 \[3, 2\] at 0x\w+ when it was bound and is"):
        bound.recorded()


@pytest.mark.parametrize("name", ["graph", "weight", ""])
def test_an_arena_that_cannot_be_chosen_is_refused_by_name(name):
    with pytest.raises(UsageError, match=f"no arena '{name}' to choose"), Arenas(torch.device("cpu")).use(name):
        pytest.fail("the block ran")


@pytest.mark.parametrize("name", ["default", "host"])
def test_where_tensors_go_by_themselves_needs_no_pool(name):
    arenas = Arenas(torch.device("cpu"))
    with arenas.use(name):
        torch.zeros(1)
    assert arenas.blocks() == {}


@pytest.mark.parametrize(
    ("mode", "fallback"), [(Mode.OFF, None), (Mode.RESTORE, IdentityMismatch("another torch"))], ids=["off", "fallback"]
)
def test_a_process_that_compares_nothing_needs_no_pools(monkeypatch, mode, fallback):
    """Its allocator may have none: cudaMallocAsync is one reason to fall back."""
    monkeypatch.setattr(torch.cuda, "MemPool", lambda: pytest.fail("a pool was made"))
    graphs = GraphSet.__new__(GraphSet)  # making one asks for a GPU
    graphs.mode, graphs.fallback, graphs._arenas = mode, fallback, Arenas(torch.device("cpu"))
    with graphs.arena("weights"):
        torch.zeros(1)


def graph_with(*words):
    nodes = np.zeros(1, _hook.node_dtype)
    nodes["type"], nodes["param_bytes"] = KERNEL, 8 * len(words)
    none = np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype)
    return Graph(("g",), nodes, *none, np.array(words, "<u8").view(np.uint8))


def test_blocks_that_graphs_refer_to_are_found_by_any_address_inside():
    blocks = [(BASE, 512), (BASE + 512, 1024), (BASE + 8192, 512), (BASE + 16384, 64)]
    recording = SimpleNamespace(
        graphs=[graph_with(7, BASE + 1535, BASE - 1), graph_with(BASE + 8192, BASE + 16448, 0)],
        functions=[ix.Function(0, "k", 24, [(0, 8), (8, 16)], [])],
    )
    assert referred_to(blocks, recording) == [blocks[1], blocks[2]]
    assert referred_to([], recording) == []


@pytest.mark.parametrize("shift", [0, 3])
def test_what_the_allocator_keeps_outside_of_pools_is_cleared_but_for_what_graphs_point_to(monkeypatch, shift):
    states = ("active_allocated", "inactive", "active_pending_free", "inactive", "inactive")

    def segment(pool, base):
        blocks = [{"address": base + 512 * n, "size": 512, "state": state} for n, state in enumerate(states)]
        return {"segment_pool_id": pool, "blocks": blocks}

    done, base = [], 7 << 20
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda **_: [segment((0, 0), base), segment((0, 1), 9 << 20)])
    monkeypatch.setattr(memory, "call", lambda *what: done.append(what))
    params = np.zeros(64, np.uint8)
    params[16 + shift : 24 + shift] = np.array([base + 3 * 512 + 511], np.uint64).view(np.uint8)
    memory.clear_unused([np.zeros(40, np.uint8), params])
    assert done == [
        *(("cuMemsetD8", base + 512 * place, 0, 512) for place in (1, 4)),
        ("cuCtxSynchronize",),
    ]
