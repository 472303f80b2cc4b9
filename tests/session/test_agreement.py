# SPDX-License-Identifier: Apache-2.0
"""Ranks either all agree on what they will issue, or each learns who does not."""

from __future__ import annotations

import threading
import time

import msgpack
import numpy as np
import pytest

from foundryd._native import _hook
from foundryd.errors import (
    DeadlineExceeded,
    DriverCallFailed,
    LayoutDiverged,
    OpListMismatch,
    PeerFailed,
    ProtocolError,
)
from foundryd.session.agreement import Agreement, check_op_lists, describe_ops


class MemoryStore:
    """A store within one process, for threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout: float) -> bytes:
        with self._changed:
            if not self._changed.wait_for(lambda: key in self._values, timeout):
                raise TimeoutError(key)
            return self._values[key]


def on_every_rank(world, body, deadline=10.0, store=None):
    store = store or MemoryStore()
    results = [None] * world

    def run(rank):
        agreement = Agreement(store, rank, world, group="g", deadline=deadline)
        try:
            agreement.join()
            results[rank] = body(agreement, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(r,)) for r in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def ops(*rows):
    out = np.zeros(len(rows), _hook.comm_op_dtype)
    for row, values in zip(out, rows, strict=True):
        for name, value in values.items():
            row[name] = value
    return out


def test_every_rank_gets_every_value_by_rank():
    results = on_every_rank(5, lambda agreement, rank: agreement.exchange("p", rank * rank))
    assert results == [[0, 1, 4, 9, 16]] * 5


def test_a_rank_that_gives_up_takes_the_others_along_with_its_reason():
    def body(agreement, rank):
        if rank == 1:
            agreement.fail(("p", "q"), "its layout diverged")
            return None
        return agreement.exchange("p", rank)

    results = on_every_rank(3, body)
    for rank in (0, 2):
        assert isinstance(results[rank], PeerFailed)
        assert "rank 1" in str(results[rank])
        assert "its layout diverged" in str(results[rank])


def test_a_silent_rank_is_named_with_the_phase():
    results = on_every_rank(2, lambda a, rank: a.exchange("ops", rank) if rank == 0 else None, deadline=0.2)
    assert isinstance(results[0], DeadlineExceeded)
    assert "rank 1" in str(results[0])
    assert "'ops'" in str(results[0])


@pytest.mark.parametrize(("key", "phase", "named"), [("p/1", "p", 1), ("join/1", "join", 1), ("life", "join", 0)])
def test_a_message_of_another_kind_is_refused(key, phase, named):
    class Garbling(MemoryStore):
        def get(self, wanted, timeout):
            value = super().get(wanted, timeout)
            return b"\xc1 not msgpack" if wanted.endswith(f"/{key}") else value

    results = on_every_rank(3, lambda a, rank: a.exchange("p", rank), store=Garbling(), deadline=2.0)
    errors = [str(r) for r in results if isinstance(r, ProtocolError)]
    assert errors
    for error in errors:
        assert error.startswith(f"rank {named} published something that is not a message of phase '{phase}'")


def test_equal_lists_pass_whatever_the_addresses_and_peers():
    a = describe_ops(
        ops({"kind": 0, "count": 8, "send": 1, "peer": 0xFFFFFFFF}, {"kind": 8, "count": 4, "peer": 1}),
        lambda _: (0, 1),
    )
    b = describe_ops(
        ops({"kind": 0, "count": 8, "send": 9, "peer": 0xFFFFFFFF}, {"kind": 9, "count": 4, "peer": 0}),
        lambda _: (0, 1),
    )
    check_op_lists(a, 0, [a, b])
    check_op_lists(b, 1, [a, b])


@pytest.mark.parametrize(
    ("field", "value", "said"), [("count", 16, "16 elements"), ("kind", 1, "all-gather"), ("datatype", 3, "type 3")]
)
def test_the_first_different_op_is_named_with_both_ranks(field, value, said):
    same = {"kind": 0, "count": 8, "peer": 0xFFFFFFFF}
    mine = describe_ops(ops(same, same), lambda _: (0, 1))
    theirs = describe_ops(ops(same, {**same, field: value}), lambda _: (0, 1))
    with pytest.raises(OpListMismatch, match=r"collective 1 that ranks 0 and 1 share") as caught:
        check_op_lists(mine, 0, [mine, theirs])
    assert said in str(caught.value)


def test_a_missing_op_is_named():
    one = {"kind": 0, "count": 8}
    mine = describe_ops(ops(one, one), lambda _: (0, 1))
    with pytest.raises(OpListMismatch, match="missing on rank 1"):
        check_op_lists(mine, 0, [mine, [mine[0], mine[1][:1]]])


def test_ops_that_two_ranks_do_not_share_are_not_compared():
    mine = describe_ops(ops({"kind": 0, "count": 8}), lambda _: (0, 1))
    other = describe_ops(ops({"kind": 0, "count": 99}), lambda _: (2, 3))
    check_op_lists(mine, 0, [mine, mine, other, other])


def test_a_group_of_other_ranks_is_named():
    mine = describe_ops(ops({"kind": 0, "count": 8}), lambda _: (0, 1, 2))
    theirs = describe_ops(ops({"kind": 0, "count": 8}), lambda _: (0, 1))
    with pytest.raises(OpListMismatch, match=r"over ranks \[0, 1, 2\] on rank 0 .* over ranks \[0, 1\] on rank 1"):
        check_op_lists(mine, 0, [mine, theirs])


def test_groups_are_compared_by_their_ranks_and_not_by_their_places():
    groups = {0: (0, 1), 1: (0, 2), 2: (0, 1, 2)}
    mine = describe_ops(ops({"communicator": 1, "count": 4}, {"communicator": 0, "count": 8}), groups.__getitem__)
    theirs = describe_ops(ops({"communicator": 0, "count": 8}, {"communicator": 2, "count": 9}), groups.__getitem__)
    other = describe_ops(ops({"communicator": 1, "count": 4}), groups.__getitem__)
    with pytest.raises(OpListMismatch, match=r"collective 1 that ranks 0 and 1 share is missing on rank 0 and .* of 9"):
        check_op_lists(mine, 0, [mine, theirs, other])
    check_op_lists(mine, 0, [mine, [theirs[0], theirs[1][:1]], other])


def test_communicators_over_the_same_ranks_are_told_apart_by_their_order():
    """A group for tensors and one for experts often join the same ranks."""
    groups = {0: (0, 1, 2), 3: (0, 1), 4: (0, 1), 6: (1, 0), 7: (0, 1)}
    rows = [{"communicator": c, "group": g, "count": 8 + c} for g, c in enumerate((4, 3, 7, 0, 6, 3, 4))]
    mine = describe_ops(ops(*rows), groups.__getitem__)
    outside = describe_ops(ops(rows[3]), groups.__getitem__)
    for rank in (0, 1, 2):
        lists = [mine, mine, outside]
        check_op_lists(lists[rank], rank, msgpack.unpackb(msgpack.packb(lists)))
    swapped = [mine[0], [[{1: 2, 2: 1}.get(op[0], op[0]), *op[1:]] for op in mine[1]]]
    with pytest.raises(OpListMismatch, match="collective 0 that ranks 0 and 1 share"):
        check_op_lists(mine, 0, [mine, swapped, outside])


@pytest.mark.parametrize(
    "published", [None, 3, [], [[0], []], [[[0, 1]]], [[[0, 1]], [[1, 0, 7, 0, 8, 0]]], [[[0, 1], 0, 7, 0, 8, 0]] * 2]
)
def test_a_list_of_another_build_is_refused(published):
    mine = describe_ops(ops({"kind": 0, "count": 8}), lambda _: (0, 1))
    with pytest.raises(ProtocolError, match=r"rank 1 published .* that rank 0 cannot read: use one foundryd"):
        check_op_lists(mine, 0, [mine, published])


def test_the_lists_of_a_large_world_are_small_and_quickly_compared():
    """An all-to-all over 64 ranks is a send and a receive for each of them, in every layer of every graph."""
    rows = [{"kind": kind, "count": 64, "peer": peer} for _ in range(8) for peer in range(64) for kind in (8, 9)]
    mine = describe_ops(ops(*rows), lambda _: tuple(range(64)))
    assert len(msgpack.packb(mine)) < 12 * len(rows) + 1000
    begin = time.monotonic()
    check_op_lists(mine, 5, (msgpack.unpackb(msgpack.packb(mine)) for _ in range(64)))
    assert time.monotonic() - begin < 2


def test_a_driver_call_that_failed_because_a_peer_gave_up_is_the_peer_s_failure():
    ranks = on_every_rank(3, lambda agreement, rank: agreement)
    call, layout = DriverCallFailed("cuIpcOpenMemHandle failed"), LayoutDiverged("allocation 3 is larger")
    assert ranks[0].blame(("ops", "done"), call) is call
    ranks[2].fail(("ops", "done"), "its memory diverged")
    cause = ranks[0].blame(("ops", "done"), call)
    assert isinstance(cause, PeerFailed)
    assert "rank 2 gave up" in str(cause)
    assert "its memory diverged" in str(cause)
    assert ranks[0].blame(("ops", "done"), layout) is layout
    assert ranks[2].blame(("ops", "done"), call) is call
