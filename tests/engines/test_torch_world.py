# SPDX-License-Identifier: Apache-2.0
"""A world without peers: what it changes of ``torch.distributed``, what it refuses, and that it puts all back."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")
dist = pytest.importorskip("torch.distributed", reason="this PyTorch was built without torch.distributed")
pytest.importorskip(
    "torch.testing._internal.distributed.fake_pg", reason="this PyTorch has no process groups without peers"
)

from foundryd.engines.torch.groups import connect  # noqa: E402
from foundryd.engines.torch.world import LoneWorld  # noqa: E402
from foundryd.errors import UsageError  # noqa: E402

PATCHED = (
    (dist, "init_process_group"),
    (dist.distributed_c10d, "init_process_group"),
    (dist, "new_group"),
    (dist.distributed_c10d, "new_group"),
    (torch.cuda, "set_device"),
)


def functions():
    return [getattr(owner, name) for owner, name in PATCHED]


@pytest.fixture
def calls(monkeypatch):
    """What reaches torch's own functions, by name, instead of being done."""
    seen = {}
    for owner, name in PATCHED:

        def record(*arguments, _name=name, **named):
            seen.setdefault(_name, []).append((arguments, named))

        monkeypatch.setattr(owner, name, record)
    return seen


@pytest.fixture
def world(calls):
    lone = LoneWorld(3, 8)
    lone.enter()
    yield lone
    lone.leave()


def test_leaving_puts_everything_back(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    before = functions()
    lone = LoneWorld(0, 2)
    lone.enter()
    assert all(now is not then for now, then in zip(functions(), before, strict=True))
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "0"
    lone.leave()
    assert all(now is then for now, then in zip(functions(), before, strict=True))
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ
    lone.leave()
    assert all(now is then for now, then in zip(functions(), before, strict=True))


@pytest.mark.parametrize("asked", [None, "nccl", "gloo", "cpu:gloo,cuda:nccl"])
def test_every_default_group_is_fake_on_the_cpu_and_nccl_on_the_gpu(world, calls, asked):
    dist.init_process_group(asked, init_method="tcp://127.0.0.1:1", store=object(), group_name="mine")
    ((arguments, named),) = calls["init_process_group"]
    assert arguments == ("cpu:fake,cuda:nccl",)
    assert (named["rank"], named["world_size"], named["group_name"]) == (3, 8, "mine")
    assert named["store"].get("unknown") == bytes(128)
    assert "init_method" not in named


@pytest.mark.parametrize(("rank", "size"), [(-1, -1), (3, -1), (-1, 8), (3, 8)])
def test_the_place_that_is_captured_may_be_asked_for(world, calls, rank, size):
    dist.init_process_group("nccl", rank=rank, world_size=size)
    ((_, named),) = calls["init_process_group"]
    assert (named["rank"], named["world_size"]) == (3, 8)


@pytest.mark.parametrize(("rank", "size"), [(2, 8), (3, 4), (0, 1), (4, -1), (-1, 2)])
def test_another_rank_or_world_size_is_refused_with_both(world, calls, rank, size):
    with pytest.raises(UsageError, match=f"for rank {rank} of {size}, and this process is captured as rank 3 of 8"):
        dist.distributed_c10d.init_process_group("nccl", rank=rank, world_size=size)
    assert calls == {}


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        (None, None),
        ("gloo", "fake"),
        ("GLOO", "fake"),
        ("nccl", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu:fake,cuda:nccl"),
        ("cuda:nccl,cpu:gloo", "cuda:nccl,cpu:fake"),
        ("fake", "fake"),
    ],
)
@pytest.mark.parametrize("where", [dist, dist.distributed_c10d], ids=["dist", "distributed_c10d"])
def test_gloo_groups_become_fake_ones(world, calls, where, asked, made):
    where.new_group([0, 3], backend=asked)
    (((ranks, _, backend), _),) = calls["new_group"]
    assert (ranks, backend) == ([0, 3], made)


def test_other_arguments_of_groups_pass_through(world, calls):
    dist.new_group([1, 3], None, "gloo", "options", use_local_synchronization=True, group_desc="tp")
    ((arguments, named),) = calls["new_group"]
    assert arguments == ([1, 3], None, "fake", "options")
    assert named == {"use_local_synchronization": True, "group_desc": "tp"}


@pytest.mark.parametrize(
    ("asked", "given"), [(5, 1), ("cuda:7", 1), (torch.device("cuda", 2), 0), ("cuda:1", 1), ("cuda", None)]
)
def test_a_device_that_is_not_here_is_stood_in_for(world, calls, monkeypatch, asked, given):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    wanted = torch.device("cuda", given) if given is not None else torch.device("cuda")
    torch.cuda.set_device(asked)
    dist.init_process_group("nccl", device_id=asked if not isinstance(asked, str) else torch.device(asked))
    dist.new_group([3], device_id=torch.device("cuda", asked) if isinstance(asked, int) else torch.device(asked))
    assert calls["set_device"] == [((wanted,), {})]
    assert calls["init_process_group"][0][1]["device_id"] == wanted
    assert calls["new_group"][0][1]["device_id"] == wanted


@pytest.fixture
def running(monkeypatch):
    """Rank 37 of 64, with torch's own groups; this PyTorch may have no NCCL, so the GPU's part is left out."""
    real = dist.distributed_c10d.init_process_group

    def without_nccl(backend, **named):
        assert backend == "cpu:fake,cuda:nccl"
        real("cpu:fake", **named)

    monkeypatch.setattr(dist, "init_process_group", without_nccl)
    lone = LoneWorld(37, 64)
    lone.enter()
    dist.init_process_group("nccl")
    yield
    dist.destroy_process_group()
    lone.leave()


@pytest.mark.timeout(60)
def test_one_process_is_rank_37_of_64_and_waits_for_nobody(running):
    assert (dist.get_rank(), dist.get_world_size()) == (37, 64)
    dist.barrier()
    dist.all_reduce(torch.ones(4))
    objects = [None] * 64
    objects[37] = "mine"
    dist.broadcast_object_list(objects, src=37)
    mine = dist.new_group(list(range(32, 40)), backend="gloo")
    other = dist.new_group(list(range(8)), backend="gloo")
    assert dist.get_process_group_ranks(mine) == list(range(32, 40))
    assert dist.get_rank(mine) == 5
    assert dist.get_rank(other) == -1
    dist.barrier(mine)


def test_groups_without_nccl_have_no_communicators_to_declare(running):
    def refuse(handle, ranks):
        pytest.fail(f"a communicator {handle} of {ranks} was declared")

    connect(torch.device("cpu"), refuse)
    connect(torch.device("cuda", 0), refuse)


class Backend:
    """Stands in for the NCCL back-end of a group, which is ``connected`` or gets ``handle`` when it is."""

    def __init__(self, handle, connected, log):
        self._handle, self._connected, self._log = handle, connected, log

    def name(self):
        return "nccl"

    def eager_connect_single_device(self, device):
        self._log.append((self._handle, str(device)))
        self._connected = True

    def _comm_ptr(self):
        return self._handle if self._connected else 0


class Group:
    def __init__(self, ranks, handle, log, connected=False):
        self.ranks, self.backend = ranks, Backend(handle, connected, log)

    def _get_backend(self, device):
        return self.backend


@pytest.fixture
def declared(monkeypatch):
    """Connects groups of (ranks, handle[, connected]) and returns what was connected and declared, in order."""

    def run(*described, **more):
        connected, told = [], []
        groups = {Group(ranks, handle, connected, *there): None for ranks, handle, *there in described}
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist.distributed_c10d._world, "_pg_map", groups, raising=False)
        monkeypatch.setattr(type(dist.distributed_c10d._world), "pg_map", property(lambda self: groups))
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.ranks)
        connect(torch.device("cuda", 1), lambda handle, ranks: told.append((handle, ranks)), **more)
        return connected, told

    return run


def test_communicators_are_made_and_declared_in_the_order_of_groups(declared):
    connected, told = declared(([0, 1, 2, 3], 0xA0), ([2, 3], 0xB0), ([1, 3], 0xC0))
    assert connected == [(0xA0, "cuda:1"), (0xB0, "cuda:1"), (0xC0, "cuda:1")]
    assert told == [(0xA0, [0, 1, 2, 3]), (0xB0, [2, 3]), (0xC0, [1, 3])]


def test_a_group_that_is_connected_is_not_connected_again(declared):
    """PyTorch would make a second communicator, and keep both."""
    connected, told = declared(([0, 1], 0xA0, True), ([0, 1], 0xB0))
    assert connected == [(0xB0, "cuda:1")]
    assert told == [(0xA0, [0, 1]), (0xB0, [0, 1])]


def test_only_wanted_communicators_are_made_and_all_keep_their_places(declared):
    """Two groups of the same ranks are told apart by their place alone."""
    groups = ([0, 1], 0xA0), ([0, 1], 0xB0), ([0, 1], 0xC0, True), ([1], 0xD0)
    connected, told = declared(*groups, wanted={1, 2}.__contains__)
    assert connected == [(0xB0, "cuda:1")]
    assert told == [(0, [0, 1]), (0xB0, [0, 1]), (0xC0, [0, 1]), (0, [1])]


def test_a_group_without_a_communicator_is_refused_by_its_ranks(declared):
    with pytest.raises(UsageError, match=r"ranks \[2, 3\] has no NCCL communicator on cuda:1"):
        declared(([0, 1, 2, 3], 0xA0), ([2, 3], 0))
