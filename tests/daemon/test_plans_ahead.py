# SPDX-License-Identifier: Apache-2.0
"""Plans are there before ranks ask for them, within bounds, and hinder nobody who asks for something else."""

import http.client
import os
import signal
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foundryd.daemon.launch import command
from foundryd.daemon.plans import SHARE
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonError
from foundryd.settings import settings

PLAN = len(b"model ep=8 0")  # bytes of each


@pytest.fixture
def begin(monkeypatch, start):
    """Starts a daemon with settings that this process does not have."""
    settings()

    def begin(*archives, **env):
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, str(value))
            return start(*archives, http=0).status.http_port

    return begin


@pytest.fixture
def one(folder, tiny):
    return lambda **extra: tiny.write(folder / "model.foundry", variants={"ep=8": 8}, **extra)


def computed(port):
    """How many plans the daemon has computed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/metrics")
        families = text_string_to_metric_families(connection.getresponse().read().decode())
        return next(s.value for f in families for s in f.samples if s.name == "foundryd_plan_seconds_count")
    finally:
        connection.close()


def settled(port, seconds=0.6):
    """The same when it has not changed for a while."""
    last, since = computed(port), time.monotonic()
    while time.monotonic() - since < seconds:
        time.sleep(0.05)
        if (now := computed(port)) != last:
            last, since = now, time.monotonic()
    return last


def test_ranks_get_plans_that_were_computed_before(begin, one, join, control, eventually):
    port = begin(one(plan_delay=0.1))
    eventually(lambda: computed(port) == 8, "every rank's plan is there")
    assert control().status().resident_bytes == 65536 + 8 * PLAN
    plans = [bytes(join(rank).plan) for rank in range(8)]
    assert plans == [f"model ep=8 {rank}".encode() for rank in range(8)]
    assert settled(port) == 8


def test_a_rank_waits_for_one_plan_of_others_at_most(begin, folder, tiny, join):
    begin(tiny.write(folder / "model.foundry", variants={"ep=64": 64}, plan_delay=0.3))
    asked = time.monotonic()
    assert bytes(join(63, variant="ep=64").plan) == b"model ep=64 63"
    assert time.monotonic() - asked < 64 * 0.3 / 4


def test_a_rank_whose_plan_is_being_computed_shares_it(begin, one, join):
    port = begin(one(plan_delay=0.3))
    assert bytes(join(0).plan) == b"model ep=8 0"
    assert settled(port, 1.0) == 8


@pytest.mark.parametrize(("allowed", "plans"), [(0, 0), (3 * PLAN + 1, 3)])
def test_no_more_bytes_are_taken_than_may_be(begin, one, join, allowed, plans):
    port = begin(one(), FOUNDRYD_PLANS_AHEAD=allowed)
    assert settled(port) == plans
    assert [bytes(join(rank).plan) for rank in (0, 7)] == [b"model ep=8 0", b"model ep=8 7"]


def test_descriptors_are_left_for_ranks(folder, tiny, runtime_dir, spawn, join, control, eventually):
    many = tiny.write(folder / "many.foundry", variants={"ep=64": 64})
    limit = "import os, resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)); "
    line = command(runtime_dir, [str(many)], http=0, program=(tiny.__file__,))
    spawn(limit + "os.execv(sys.argv[1], sys.argv[1:])", *line, stderr=-3)
    eventually(lambda: RuntimeDir(runtime_dir).answering(), "it answers")
    client = control()
    eventually(lambda: client.status().ready, "it is ready")
    assert settled(client.status().http_port) == 256 // SHARE
    assert bytes(join(63, variant="ep=64").plan) == b"many ep=64 63"


def test_a_plan_that_cannot_be_computed_is_told_to_who_asks(begin, one, join, control):
    begin(one(plan_fault=True))
    assert control().status().ready
    with pytest.raises(DaemonError, match="the plan of rank 7 of ep=8 in the archive model cannot be computed"):
        join(7)


def test_a_fault_before_anybody_asks_harms_nobody(begin, one, join, eventually):
    port = begin(one(plan_delay=0.1), FOUNDRYD_FAULT="plan:error:2")
    eventually(lambda: computed(port) == 7, "the others are there")
    assert bytes(join(1).plan) == b"model ep=8 1"


def test_an_archive_that_is_unloaded_meanwhile_takes_its_plans_along(begin, one, folder, tiny, join, control):
    port = begin(one())
    before = settled(port)
    client = control()
    slow = tiny.write(folder / "slow.foundry", variants={"ep=64": 64}, plan_delay=0.2)
    held = client.status().resident_bytes
    descriptors = len(os.listdir(f"/proc/{client.daemon.pid}/fd"))
    client.load(slow)
    time.sleep(0.25)
    client.unload("slow")
    assert settled(port, 1.0) < before + 32
    assert client.status().resident_bytes == held
    assert len(os.listdir(f"/proc/{client.daemon.pid}/fd")) == descriptors
    client.load(slow)
    assert bytes(join(9, archive="slow", variant="ep=64").plan) == b"slow ep=64 9"


def test_ranks_that_come_back_have_their_plans(begin, one, join, eventually):
    path = one()
    begin(path)
    rank = join(3)
    os.kill(rank.daemon.pid, signal.SIGKILL)
    port = begin(path)
    eventually(lambda: rank.lease.returned, "the rank is back")
    assert settled(port) == 0
    assert bytes(join(4).plan) == b"model ep=8 4"
