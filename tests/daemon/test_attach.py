# SPDX-License-Identifier: Apache-2.0
"""Leases, and the memory that comes with them."""

import os
import signal

import pytest

from foundryd.errors import (
    DaemonError,
    DaemonNotRunning,
    LeaseLost,
    NotInArchiveError,
    RankTaken,
    UsageError,
)
from foundryd.session.client import attach

HOLDER = """
import sys
from pathlib import Path
from foundryd.session.client import attach
a = attach(runtime_dir=Path(sys.argv[1]), rank=int(sys.argv[2]), variant="ep=8", timeout=20)
print(a.lease.number, a.generation, len(a.archive), flush=True)
sys.stdin.read()
"""


def inode_of_mapping(pid, name):
    """(device, inode) of the mapping of a memfd in a process."""
    with open(f"/proc/{pid}/maps") as maps:
        found = {tuple(line.split()[3:5]) for line in maps if f"memfd:{name}" in line}
    assert len(found) == 1, found
    return found.pop()


def test_a_rank_gets_archive_and_its_own_plan(start, archive, join):
    started = start(archive)
    attachments = [join(rank) for rank in (0, 5)]
    for rank, attachment in zip((0, 5), attachments, strict=True):
        assert bytes(attachment.plan) == f"model ep=8 {rank}".encode()
        assert bytes(attachment.archive).rstrip(b"\0") == archive.read_bytes()
        assert attachment.archive.readonly
        assert attachment.plan.readonly
        assert (attachment.name, attachment.variant, attachment.group) == ("model", "ep=8", "default")
        assert attachment.daemon.pid == started.process.pid
        assert not attachment.lost
    assert attachments[0].generation == attachments[1].generation


def test_the_variant_is_found_in_any_spelling_of_its_mesh(start, archive, join):
    start(archive)
    assert join(3, variant="tp=2,ep=4").variant == "ep=4,tp=2"


def test_the_archive_is_found_by_name_by_digest_and_alone(start, folder, tiny, join):
    a, b = tiny.write(folder / "a.foundry"), tiny.write(folder / "b.foundry", bytes=8192)
    status = start(a, f"other={b}").status
    digest = {x.name: x.digest for x in status.archives}
    assert join(0, group="1", archive="a").digest == digest["a"]
    assert join(0, group="2", archive="other").name == "other"
    assert join(0, group="3", archive=digest["other"][:8]).name == "other"
    with pytest.raises(NotInArchiveError, match=r"no archive 'b' but a, other"):
        join(0, group="4", archive="b")
    with pytest.raises(UsageError, match=r"no archive is named and the daemon holds a, other"):
        join(0, group="4", archive="")


def test_what_is_not_in_the_archive_is_refused_with_what_is(start, archive, join, control):
    start(archive)
    for variant, rank, message in (
        ("ep=16", 0, r"has the variants ep=8, ep=4,tp=2 and 'ep=16' is asked for"),
        ("nonsense", 0, r"has the variants ep=8, ep=4,tp=2 and 'nonsense' is asked for"),
        ("", 0, r"has the variants ep=8, ep=4,tp=2"),
        ("ep=8", 8, r"has the ranks 0-7 and rank 8 is asked for"),
        ("ep=8", -1, r"rank -1 is asked for"),
        ("ep=8", 1 << 63, r"is asked for"),
    ):
        with pytest.raises(NotInArchiveError, match=message):
            join(rank, variant=variant)
    assert control().status().leases == []


def test_a_taken_rank_is_refused_and_the_holder_named(start, archive, join, spawn, runtime_dir):
    start(archive)
    holder = spawn(HOLDER, runtime_dir, 3)
    assert holder.stdout.readline()
    with pytest.raises(RankTaken, match=rf"rank 3 of group default is held by pid {holder.pid} .* pid {os.getpid()}"):
        join(3)
    assert join(3, group="replica-1").rank == 3
    assert join(4).rank == 4


def test_a_group_runs_one_variant(start, archive, join):
    start(archive)
    first = join(0)
    with pytest.raises(UsageError, match=r"group default runs ep=8 of model .* rank 1 asks for ep=4,tp=2"):
        join(1, variant="ep=4,tp=2")
    generation = first.generation
    first.close()
    assert join(1, variant="ep=4,tp=2").generation > generation


def test_a_lease_ends_with_close(start, archive, join, control, eventually):
    start(archive)
    client = control()
    attachment = join(2)
    assert [(x.rank, x.pid) for x in client.status().leases] == [(2, os.getpid())]
    attachment.lease.close()
    assert attachment.lost
    with pytest.raises(LeaseLost, match="it was closed"):
        attachment.lease.check()
    eventually(lambda: not client.status().leases, "the lease is gone")
    assert bytes(attachment.plan) == b"model ep=8 2"
    attachment.lease.close()


def test_a_lease_ends_when_its_process_is_killed(start, archive, control, spawn, eventually, runtime_dir):
    start(archive)
    client = control()
    child = spawn(HOLDER, runtime_dir, 1)
    assert child.stdout.readline()
    assert [x.pid for x in client.status().leases] == [child.pid]
    child.kill()
    eventually(lambda: not client.status().leases, "the lease is gone")


def test_a_forked_child_does_not_keep_the_lease(start, archive, join, control, eventually):
    start(archive)
    client = control()
    attachment = join(0)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        lost = attachment.lost and attachment.lease.fileno() == -1
        plan = bytes(attachment.plan) == b"model ep=8 0"
        os.write(write, b"y" if lost and plan else b"n")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(read, 1) == b"y"
        assert not attachment.lost
        assert len(client.status().leases) == 1
        attachment.close()
        eventually(lambda: not client.status().leases, "the lease is gone while the child lives")
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def test_the_mapping_survives_the_daemons_death(start, archive, join, eventually):
    started = start(archive)
    attachment = join(7)
    before = bytes(attachment.archive)
    started.process.kill()
    started.process.wait()
    eventually(lambda: attachment.lost, "the loss is seen")
    with pytest.raises(LeaseLost, match="the daemon is gone"):
        attachment.lease.check()
    assert bytes(attachment.archive) == before
    assert bytes(attachment.plan) == b"model ep=8 7"


def test_a_stopped_daemon_says_so_to_its_leases(start, archive, join, control, eventually):
    start(archive)
    attachment = join(0)
    control().stop()
    eventually(lambda: attachment.lost, "the loss is seen")
    with pytest.raises(LeaseLost, match="the daemon was asked to stop"):
        attachment.lease.check()


def test_all_clients_and_the_daemon_share_one_copy(start, archive, join, spawn, runtime_dir):
    started = start(archive)
    join(0)
    children = [spawn(HOLDER, runtime_dir, rank) for rank in (1, 2)]
    for child in children:
        assert child.stdout.readline()
    pids = [started.process.pid, os.getpid(), *(c.pid for c in children)]
    assert len({inode_of_mapping(pid, "foundryd:model") for pid in pids}) == 1


def test_replicas_share_one_plan(start, archive, join, runtime_dir):
    start(archive)
    one, two = join(0, group="a"), join(0, group="b")
    assert bytes(one.plan) == bytes(two.plan)
    with open("/proc/self/maps") as maps:
        plans = {tuple(line.split()[3:5]) for line in maps if "memfd:foundryd:plan:ep=8:0" in line}
    assert len(plans) == 1


def test_an_attach_waits_for_an_archive_that_is_being_loaded(start, archive, join, control, folder, tiny):
    start(archive)
    slow = tiny.write(folder / "slow.foundry", delay=0.5)
    loader = control()
    import threading

    thread = threading.Thread(target=lambda: loader.load(slow))
    thread.start()
    try:
        client = control()
        while not any(a.name == "slow" for a in client.archives()):
            pass
        assert join(0, archive="slow").name == "slow"
    finally:
        thread.join(20)


def test_a_failing_plan_refuses_the_rank_and_frees_it(start, folder, tiny, join, control):
    start(tiny.write(folder / "bad.foundry", plan_fault=True))
    with pytest.raises(DaemonError, match=r"the plan of rank 1 of ep=8 in the archive bad cannot be computed"):
        join(1)
    assert control().status().leases == []


def test_a_client_that_leaves_while_its_plan_is_computed_leaves_nothing(start, folder, tiny, join, control, eventually):
    start(tiny.write(folder / "slow.foundry", plan_delay=0.5))
    with pytest.raises(DaemonError, match="did not answer in time"):
        join(1, timeout=0.2)
    client = control()
    eventually(lambda: not client.status().leases, "the lease is gone")
    assert bytes(join(1).plan) == b"slow ep=8 1"


def test_without_a_daemon_the_error_has_the_command(runtime_dir):
    with pytest.raises(DaemonNotRunning, match=rf"foundryd start --runtime-dir {runtime_dir} ARCHIVE"):
        attach(runtime_dir=runtime_dir)


def test_closing_keeps_memory_that_is_still_read(start, archive, join):
    start(archive)
    attachment = join(0)
    view = attachment.archive[:64]
    attachment.close()
    attachment.close()
    assert bytes(view) == archive.read_bytes()[:64]
