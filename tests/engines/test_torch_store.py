# SPDX-License-Identifier: Apache-2.0
"""Stores: one whose peers have always just answered, and torch's own as foundryd's."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")
dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")

from foundryd.engines.torch.store import TorchStore, default_store  # noqa: E402
from foundryd.engines.torch.world import LoneStore  # noqa: E402

UNKNOWN = bytes(128)  # an ncclUniqueId


def from_python(store):
    return store


def from_cpp(store):
    """Callers in C++ reach a store as this one does, through its virtual functions."""
    return dist.PrefixStore("prefix", store)


@pytest.fixture(params=[from_python, from_cpp], ids=lambda f: f.__name__)
def reached(request):
    lone = LoneStore()  # kept: C++ holds no reference to the Python part
    yield request.param(lone)
    del lone


def test_what_was_set_is_read(reached):
    reached.set("key", b"value")
    assert reached.get("key") == b"value"


def test_unknown_keys_read_as_a_unique_id(reached):
    assert reached.get("0//cuda//0") == UNKNOWN
    assert reached.multi_get(["a", "b"]) == [UNKNOWN, UNKNOWN]


@pytest.mark.timeout(20)
def test_waiting_takes_no_time(reached):
    started = time.monotonic()
    reached.wait(["absent"])
    reached.wait(["absent", "too"], timedelta(seconds=60))
    assert time.monotonic() - started < 5


def test_check_tells_the_truth(reached):
    assert not reached.check(["key"])
    reached.get("key")
    reached.wait(["key"])
    assert not reached.check(["key"])
    reached.set("key", b"")
    assert reached.check(["key"])
    assert not reached.check(["key", "other"])


def test_add_counts(reached):
    assert [reached.add("n", step) for step in (1, 2, -5, 0)] == [1, 3, -2, -2]
    assert reached.get("n") == b"-2"


def test_compare_set_changes_only_what_was_expected(reached):
    assert reached.compare_set("key", "", "first") == b"first"
    assert reached.compare_set("key", "", "second") == b"first"
    assert reached.compare_set("key", "wrong", "second") == b"first"
    assert reached.compare_set("key", "first", "second") == b"second"
    assert reached.get("key") == b"second"


def test_keys_are_counted_and_deleted(reached):
    reached.set("a", b"1")
    reached.add("b", 1)
    assert reached.num_keys() == 2
    assert reached.delete_key("a")
    assert not reached.delete_key("a")
    assert reached.num_keys() == 1


def test_several_keys_at_once(reached):
    assert reached.has_extended_api()
    reached.multi_set(["a", "b"], [b"1", b"2"])
    reached.append("a", b"0")
    assert reached.multi_get(["a", "b"]) == [b"10", b"2"]


def test_a_clone_sees_what_the_store_sees(reached):
    reached.clone().set("key", b"value")
    assert reached.get("key") == b"value"


def test_prefixes_keep_keys_apart():
    lone = LoneStore()
    dist.PrefixStore("a", lone).set("key", b"of a")
    assert dist.PrefixStore("b", lone).get("key") == UNKNOWN
    assert lone.get("a/key") == b"of a"


keys = st.sampled_from("abc")
values = st.sampled_from(["", "x", "yy"])
calls = st.one_of(
    st.tuples(st.just("set"), keys, values),
    st.tuples(st.just("check"), st.lists(keys, min_size=1, max_size=2)),
    st.tuples(st.just("compare_set"), keys, values, values),
    st.tuples(st.just("delete_key"), keys),
    st.tuples(st.just("append"), keys, values),
    st.tuples(st.just("add"), st.just("n"), st.integers(-3, 3)),
    st.tuples(st.just("num_keys")),
)


@settings(deadline=None)
@given(st.lists(calls, max_size=12))
def test_to_its_one_client_it_is_a_store_like_torchs_own(several):
    lone, real = LoneStore(), dist.HashStore()
    for name, *arguments in several:
        assert getattr(lone, name)(*arguments) == getattr(real, name)(*arguments)
    for key in "abcn":
        if real.check([key]):
            assert lone.get(key) == real.get(key)


def test_threads_do_not_lose_counts():
    lone = LoneStore()
    store = dist.PrefixStore("p", lone)
    threads = [threading.Thread(target=lambda: [store.add("n", 1) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert store.add("n", 0) == 800


@pytest.fixture(params=["hash", "tcp"])
def two_ranks(request):
    """The stores of two ranks that reach each other."""
    if request.param == "hash":
        shared = dist.HashStore()
        return TorchStore(shared), TorchStore(shared)

    def client(port, serve):
        return dist.TCPStore("127.0.0.1", port, 2, serve, timeout=timedelta(seconds=60), wait_for_workers=False)

    first = client(0, True)
    return TorchStore(first), TorchStore(client(first.port, False))


def test_what_one_rank_publishes_another_reads(two_ranks):
    mine, theirs = two_ranks
    theirs.set("key", b"\0value\xff")
    assert mine.get("key", 30.0) == b"\0value\xff"


@pytest.mark.timeout(40)
def test_a_key_that_comes_in_time_is_waited_for(two_ranks):
    mine, theirs = two_ranks
    timer = threading.Timer(0.3, theirs.set, ("key", b"late"))
    timer.start()
    assert mine.get("key", 30.0) == b"late"
    timer.join()


@pytest.mark.timeout(40)
def test_a_key_that_does_not_come_is_a_timeout_that_names_it(two_ranks):
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"nobody set ops/1 within 0\.5 s"):
        two_ranks[0].get("ops/1", 0.5)
    assert 0.3 < time.monotonic() - started < 20


def test_without_a_process_group_there_is_no_store():
    assert not dist.is_initialized()
    assert default_store() is None


def test_the_default_process_group_s_store_is_used():
    given_store = dist.HashStore()
    dist.init_process_group("gloo", store=given_store, rank=0, world_size=1)
    try:
        store = default_store()
        assert store is not None
        store.set("key", b"value")
        assert bytes(dist.distributed_c10d._get_default_store().get("key")) == b"value"
    finally:
        dist.destroy_process_group()
