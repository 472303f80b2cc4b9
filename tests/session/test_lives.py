# SPDX-License-Identifier: Apache-2.0
"""Ranks that start again on a store that outlived them agree with those of their own life, or learn who is missing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from foundryd.demo.rendezvous import StoreServer
from foundryd.session.agreement import PHASES

WORLD = 3
RANK = Path(__file__).with_name("living.py")


@contextmanager
def tcp_store() -> Iterator[str]:
    distributed = pytest.importorskip("torch.distributed")
    server = distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    yield f"127.0.0.1:{server.port}"


@contextmanager
def socket_store(folder: Path) -> Iterator[str]:
    with StoreServer(folder / "store"):
        yield str(folder / "store")


class Group:
    """Ranks as processes on one store."""

    def __init__(self, kind: str, place: str) -> None:
        self._store = (kind, place)

    def run(self, *lives: dict[int, dict], timeout: float = 60.0) -> list[list]:
        """Runs these lives in one process for each rank; what each rank has of each life, or the code of its end.

        A life has what each rank does; a rank of which none has anything is not started.
        """
        with ExitStack() as stack:
            ranks = {}
            for rank in sorted({rank for life in lives for rank in life}):
                todo = json.dumps([life[rank] for life in lives])
                ranks[rank] = process = subprocess.Popen(
                    [sys.executable, str(RANK), str(rank), str(WORLD), *self._store, todo],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
            # Deadlines of lives are short, and some processes take longer to start than others.
            for process in ranks.values():
                process.stdout.readline()
            for process in ranks.values():
                process.stdin.write("\n")
                process.stdin.flush()
            end = time.monotonic() + timeout
            ended = {}
            for rank, process in ranks.items():
                out, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
                assert process.returncode in (0, -signal.SIGKILL), err
                said = [json.loads(line)["what"] for line in out.splitlines()]
                ended[rank] = said + [process.returncode] * (len(lives) - len(said))
        return [
            [ended[rank][number] if rank in ended else None for rank in range(WORLD)] for number in range(len(lives))
        ]


@pytest.fixture
def group(tmp_path_factory) -> Iterator[Group]:
    with socket_store(tmp_path_factory.mktemp("s")) as place:
        yield Group("socket", place)


def every(**what) -> dict[int, dict]:
    return {rank: dict(what) for rank in range(WORLD)}


def agreed(says) -> list:
    """What every rank has of a life in which all said this."""
    values = [[[phase, says, rank] for rank in range(WORLD)] for phase in PHASES]
    return [values] * WORLD


@pytest.mark.parametrize("late", range(WORLD))
def test_ranks_that_start_again_read_nothing_of_before_whoever_comes_last(group, late):
    """Who comes first finds all that the earlier life has left."""
    assert group.run(every(says="first")) == [agreed("first")]
    again = every(says="again")
    again[late]["late"] = 0.7
    assert group.run(again) == [agreed("again")]


def test_a_process_restores_as_often_as_it_likes(group):
    lives = [every(says=number) for number in range(4)]
    for number, life in enumerate(lives):
        life[number % WORLD]["late"] = 0.3
    assert group.run(*lives) == [agreed(number) for number in range(4)]


@pytest.mark.parametrize("gives_up", range(WORLD))
@pytest.mark.parametrize("how", ["gave_up", "fails"])
def test_who_gave_up_is_heard_in_its_own_life_only(group, gives_up, how):
    """Before it joined or after; the others go on to their next life when they have heard it."""
    broken = every(says="never")
    broken[gives_up][how] = "its layout diverged"
    whole = every(says="whole")
    first, second, third = group.run(broken, whole, broken)
    assert second == agreed("whole")
    for rank in set(range(WORLD)) - {gives_up}:
        for what in (first[rank], third[rank]):
            assert what["reason"] == "peer_failed"
            assert what["message"].startswith(f"rank {gives_up} gave up in or before phase '")
            assert what["message"].endswith("its layout diverged")


@pytest.mark.parametrize("slow", [1, 2])
def test_who_has_not_read_that_rank_0_gave_up_reads_it_after_rank_0_went_on(group, slow):
    """Not the next life, in which that one would take part with what it is about to do in this one."""
    broken, whole = every(says="never"), every(says="whole")
    broken[0]["gave_up"] = "its layout diverged"
    broken[slow]["slow_to_read"] = 1.0
    first, second = group.run(broken, whole)
    assert second == agreed("whole")
    assert first[slow]["message"].endswith("its layout diverged")


@pytest.mark.parametrize("dies", range(WORLD))
@pytest.mark.parametrize(("after", "missed_in"), [("join", "ops"), ("ops", "done")])
def test_a_rank_that_dies_in_a_life_is_missed_in_it_and_not_in_the_next(group, dies, after, missed_in):
    life = every(says="dies", deadline=2.0)
    # Rank 0 does not say that it joins: it closes the life.
    life[dies]["dies_after"] = "closed" if after == "join" and dies == 0 else after
    (ended,) = group.run(life)
    for rank, what in enumerate(ended):
        if rank == dies:
            assert what == -signal.SIGKILL
        else:
            missed = f"rank {dies} did not reach phase '{missed_in}' within 2 s of rank {rank}: look at its log"
            assert what == {"reason": "deadline", "message": missed}
    again = every(says="again")
    again[dies]["late"] = 0.7
    assert group.run(again) == [agreed("again")]


def test_a_life_that_rank_0_began_and_left_is_nobody_s(group):
    begun = every(says="dies", deadline=1.5)
    begun[0]["dies_after"] = "life"
    (ended,) = group.run(begun)
    for rank in (1, 2):
        missed = f"rank 0 did not reach phase 'join' within 2 s of rank {rank}: look at its log"
        assert ended[rank] == {"reason": "deadline", "message": missed}
    again = every(says="again")
    again[0]["late"] = 0.7
    assert group.run(again) == [agreed("again")]


@pytest.mark.parametrize("missing", [{0}, {1}, {2}, {1, 2}])
def test_who_does_not_come_is_named_by_all_who_wait(group, missing):
    assert group.run(every(says="first")) == [agreed("first")]
    (ended,) = group.run({rank: what for rank, what in every(says="x", deadline=3.0).items() if rank not in missing})
    names = f"rank {min(missing)} did" if len(missing) == 1 else "ranks 1, 2 did"
    for rank in set(range(WORLD)) - missing:
        assert f"{names} not reach phase 'join' within 3 s of rank" in ended[rank]["message"]
    assert group.run(every(says="again")) == [agreed("again")]


def test_a_rank_that_comes_alone_is_not_taken_for_the_one_before(group):
    """The others of its life are gone, though everything that they said is there."""
    assert group.run(every(says="first")) == [agreed("first")]
    (ended,) = group.run({1: {"says": "alone", "deadline": 1.0}})
    assert ended[1]["message"] == "rank 0 did not reach phase 'join' within 1 s of rank 1: look at its log"


def test_a_store_of_pytorch_may_outlive_its_ranks_too():
    with tcp_store() as place:
        group = Group("tcp", place)
        dies = every(says="dies", deadline=3.0)
        dies[2]["dies_after"] = "ops"
        whole, broken, (ended,) = *group.run(every(says="first"), every(says="x", gave_up="no")), group.run(dies)
        assert whole == agreed("first")
        assert {what if isinstance(what, str) else what["reason"] for what in broken} <= {"told", "peer_failed"}
        for rank in (0, 1):
            missed = f"rank 2 did not reach phase 'done' within 3 s of rank {rank}: look at its log"
            assert ended[rank] == {"reason": "deadline", "message": missed}
        again = every(says="again")
        again[0]["late"] = 0.7
        assert group.run(again, every(says="last")) == [agreed("again"), agreed("last")]
