# SPDX-License-Identifier: Apache-2.0
"""Data parallelism: replicas that share nothing, and replicas that are one world."""

from __future__ import annotations

import json
from itertools import product
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

from foundryd.engines.vllm import v0_22  # noqa: E402
from foundryd.engines.vllm.capture import fit  # noqa: E402
from foundryd.engines.vllm.v0_22_ranks import Place  # noqa: E402
from foundryd.errors import EngineUnsupported, HookMissing, IdentityMismatch, UsageError  # noqa: E402
from foundryd.rankpatch.mesh import Mesh  # noqa: E402

RANK = {"RANK": "0", "WORLD_SIZE": "1"}
WHOLE = [("FULL", n, n, 1) for n in (4, 2, 1)]


def graphs():
    """The graphs of the worker that started last."""
    return v0_22._current._graphs


def fallback():
    return v0_22._current.report.fallback


def dense(vllm, replica=0, local=None, **parallel):
    """A replica as vLLM's engine core leaves its configuration: alone, but for its number."""
    config = vllm.config.VllmConfig(**({"use_v2_model_runner": False} if parallel.pop("first", False) else {}))
    config.parallel_config.data_parallel_index = replica
    config.parallel_config.data_parallel_rank_local = replica if local is None else local
    config.parallel_config.disable_custom_all_reduce = True
    for name, value in parallel.items():
        setattr(config.parallel_config, name, value)
    return config


def experts(vllm, replica=0, replicas=2, **parallel):
    """A replica of a model with experts, which vLLM runs with its V1 runner."""
    config = dense(vllm, replica, first=True, **parallel)
    config.model_config.is_moe = True
    config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_rank = replicas, replica
    return config


def captured(vllm, config):
    """The same as it is captured: a launcher of one rank counts all of them."""
    config.parallel_config.distributed_executor_backend = "external_launcher"
    return config


def agreeing(monkeypatch, replicas=2):
    """Peers that have the same batch; without them the stand-in's collective fails, since there is no group."""

    def all_reduce(table, group):
        assert table.shape[1] == replicas
        table.copy_(table.sum(dim=1, keepdim=True).expand_as(table))

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)


# --- places -----------------------------------------------------------------------------------------------------------


def place(vllm, config, rank=0, local_rank=0):
    return Place.of(SimpleNamespace(rank=rank, local_rank=local_rank, vllm_config=config))


def test_replicas_of_a_dense_model_are_worlds_of_their_own_on_other_devices(vllm):
    found = [
        place(vllm, dense(vllm, replica, tensor_parallel_size=2), rank, rank)
        for replica, rank in product((0, 1, 2), (0, 1))
    ]
    assert [(p.replica, p.rank, p.local_rank, p.world) for p in found] == [
        *((0, 0, 0, 2), (0, 1, 1, 2)),
        *((1, 0, 2, 2), (1, 1, 3, 2)),
        *((2, 0, 4, 2), (2, 1, 5, 2)),
    ]


def test_replicas_with_experts_are_one_world_replica_by_replica(vllm):
    found = [
        place(vllm, experts(vllm, replica, tensor_parallel_size=2), rank, rank)
        for replica, rank in product((0, 1), (0, 1))
    ]
    assert [(p.replica, p.rank, p.local_rank, p.world) for p in found] == [(0, n, n, 4) for n in range(4)]


def test_replicas_on_another_node_count_devices_from_the_first_there(vllm):
    assert place(vllm, experts(vllm, 3, 4, data_parallel_rank_local=1)).local_rank == 1
    assert place(vllm, dense(vllm, 3, 1)).local_rank == 1


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_device_is_the_one_that_vllm_takes_itself(vllm, tensor, replica):
    config = dense(vllm, replica, tensor_parallel_size=tensor)
    before = place(vllm, config, tensor - 1, tensor - 1)
    worker = vllm.worker.Worker(config, tensor - 1, tensor - 1, "tcp://")
    worker.init_device()
    assert before.local_rank == worker.local_rank == replica * tensor + tensor - 1


def test_a_capture_counts_as_its_launcher_does(vllm):
    config = captured(vllm, experts(vllm, 1, tensor_parallel_size=2))
    assert place(vllm, config, 3, 3) == Place(3, 3, 4, 0)


# --- replicas that share nothing --------------------------------------------------------------------------------------


def test_one_archive_serves_every_replica_on_its_own_device_and_in_its_own_group(vllm, tmp_path):
    vllm.start("capture", dense(vllm), **RANK)
    for replica, group in ((0, "default"), (1, "default-1"), (2, "default-2")):
        worker = vllm.start("restore", dense(vllm, replica), FOUNDRYD_STARTUP_REPORT=tmp_path)
        assert fallback() is None
        assert "native capture" not in vllm.what()
        config = graphs().config
        assert (config.rank, config.world_size, config.local_rank, config.group) == (0, 1, replica, group)
        assert config.local_rank_unused  # or the second replica would be refused
        assert worker.local_rank == replica
    reports = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert set(reports) == {"rank-0.json", "replica-1-rank-0.json", "replica-2-rank-0.json"}
    assert {name: (r["replica"], r["way"]) for name, r in reports.items()} == {
        "rank-0.json": (0, "restored"),
        "replica-1-rank-0.json": (1, "restored"),
        "replica-2-rank-0.json": (2, "restored"),
    }


def test_a_group_that_the_user_named_is_each_replicas_first_part(vllm):
    vllm.environment(FOUNDRYD_MODE="restore", FOUNDRYD_GROUP="blue")
    worker = SimpleNamespace(rank=0, local_rank=0, vllm_config=dense(vllm, 1))
    assert v0_22.worker_settings(v0_22.settings(), worker).group == "blue-1"


def test_replicas_of_a_dense_model_that_a_launcher_put_into_one_world_are_refused(vllm):
    config = captured(vllm, dense(vllm, data_parallel_size=2))
    with pytest.raises(EngineUnsupported, match="in one world of a model without experts"):
        vllm.start("capture", config, RANK="0", WORLD_SIZE="2")


# --- replicas that are one world --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mode", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
def test_a_rank_that_is_captured_alone_believes_that_the_others_have_its_batch(vllm, mode, rank):
    """The stand-in's own collective would fail, and without peers' columns its runner would find no graph to run."""
    config = captured(vllm, experts(vllm, rank))
    config.compilation_config.cudagraph_mode = vllm.compilation.CUDAGraphMode[mode]
    own = torch.distributed.all_reduce
    worker = vllm.start("capture", config, rank, rank, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2")
    assert list(graphs()._graphs)[-3:] == WHOLE
    assert len(graphs()._graphs) == (3 if mode == "FULL_DECODE_ONLY" else 9)
    assert worker.model_runner.execute([3, 1]).abs().sum() > 0
    assert worker.local_rank == 0  # one device stands for all
    assert torch.distributed.all_reduce is own


@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE", "NONE"])
def test_the_second_runner_agrees_with_nobody_in_the_same_way(vllm, mode):
    config = captured(vllm, experts(vllm))
    config.use_v2_model_runner = True
    vllm.start("capture", config, RANK="0", WORLD_SIZE="2")
    from vllm.v1.worker.gpu.dp_utils import sync_cudagraph_and_dp_padding

    wanted = vllm.graphs.BatchExecutionDescriptor(vllm.compilation.CUDAGraphMode[mode], 4, 4, 1)
    for rank in (0, 1):
        batch, tokens = sync_cudagraph_and_dp_padding(None, wanted, 3, 3, 1, 2, rank)
        assert batch.cg_mode is wanted.cg_mode
        assert tokens.tolist() == [3, 3] if mode == "NONE" else [4, 4]


def test_an_error_while_replicas_agree_leaves_collectives_as_they_were(vllm):
    from foundryd.engines.vllm.v0_22_ranks import _same_batch

    own = torch.distributed.all_reduce
    with pytest.raises(ZeroDivisionError):
        _same_batch(lambda: 1 / 0)
    assert torch.distributed.all_reduce is own


def test_a_serving_rank_agrees_with_its_peers_and_restores_in_their_world(vllm, monkeypatch):
    vllm.start("capture", captured(vllm, experts(vllm, 1)), 1, 1, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    with pytest.raises(ValueError, match="Default process group has not been initialized"):
        vllm.start("restore", experts(vllm, 1))  # its last warm-up asks real peers
    agreeing(monkeypatch)
    worker = vllm.start("restore", experts(vllm, 1))
    assert fallback() is None
    assert not {"native capture", "trial capture"} & set(vllm.what())
    config = graphs().config
    assert (config.rank, config.world_size, config.local_rank, config.group) == (1, 2, 1, "default")
    assert worker.local_rank == 1


def test_another_number_of_replicas_or_another_spread_of_experts_is_refused(vllm, monkeypatch):
    vllm.start("capture", captured(vllm, experts(vllm)), RANK="0", WORLD_SIZE="2")
    for change in ({"replicas": 4}, {"expert_placement_strategy": "round_robin"}, {"enable_expert_parallel": True}):
        config = experts(vllm, **change)
        agreeing(monkeypatch, config.parallel_config.data_parallel_size)
        vllm.start("restore", config)
        assert isinstance(fallback(), IdentityMismatch)


def test_ranks_of_a_world_capture_on_trial_together_or_not_at_all(vllm, monkeypatch):
    """Ranks communicate there, and one that gave up before the others know would wait for them for ever."""

    def missing(*_):
        raise HookMissing("the hook is not in this process")

    def trials(config):
        vllm.start("restore", config)
        assert vllm.what().count("native capture") == 3
        return vllm.what().count("trial capture")

    agreeing(monkeypatch)
    unsupported = experts(vllm)
    unsupported.kv_transfer_config = object()
    assert trials(unsupported) == 1  # so it is on every rank
    monkeypatch.setattr("foundryd.engines.vllm.adapter.WorkerGraphs", missing)
    assert trials(experts(vllm)) == 0
    assert isinstance(fallback(), HookMissing)
    assert trials(dense(vllm, first=True)) == 1  # nobody waits for it


# --- arguments of a capture -------------------------------------------------------------------------------------------


def arguments(is_moe, **given):
    names = {
        **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1},
        **{"data_parallel_rank": None, "data_parallel_start_rank": None, "data_parallel_size_local": None},
        **{"data_parallel_hybrid_lb": False, "data_parallel_external_lb": False},
    }
    return SimpleNamespace(**(names | given), create_model_config=lambda: SimpleNamespace(is_moe=is_moe))


def test_a_dense_model_is_captured_as_one_replica_of_however_many(vllm):
    given = arguments(False, data_parallel_size=8, tensor_parallel_size=2, data_parallel_size_local=4)
    fit(given, Mesh.parse("tp=2"))
    assert (given.data_parallel_size, given.data_parallel_size_local) == (1, None)


@pytest.mark.parametrize("variant", ["dp=2,tp=4", "dp=2,tp=4,ep=dp*tp"])
def test_replicas_with_experts_are_captured_as_one_world_whoever_balances_their_load(vllm, variant):
    given = arguments(True, data_parallel_size=2, tensor_parallel_size=4, data_parallel_rank=1)
    given.data_parallel_external_lb = True
    fit(given, Mesh.parse(variant))
    assert (given.data_parallel_size, given.data_parallel_rank, given.data_parallel_external_lb) == (2, None, False)


@pytest.mark.parametrize(
    ("is_moe", "replicas", "variant", "fits"),
    [
        (True, 2, "tp=1", "dp=2"),
        (True, 2, "dp=2,ep=2", "dp=2"),
        (True, 2, "ep=2", "dp=2"),
        (False, 2, "dp=2", "tp=1"),
        (False, 1, "tp=2", "tp=1"),
    ],
)
def test_a_variant_that_is_not_vllms_world_is_refused_with_the_one_that_is(vllm, is_moe, replicas, variant, fits):
    given = arguments(is_moe, data_parallel_size=replicas)
    with pytest.raises(UsageError, match=f"capture with --variant {fits}, or with other arguments"):
        fit(given, Mesh.parse(variant))
