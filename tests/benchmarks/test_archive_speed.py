# SPDX-License-Identifier: Apache-2.0
"""What an archive of 512 graphs of 612 nodes costs in bytes and in time, without a driver."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foundryd.archive.inflate import inflated_size
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.archive.verify import verify
from foundryd.daemon.loop import Loop
from foundryd.daemon.plans import Plans
from foundryd.daemon.store import Store
from foundryd.daemon.worker import Worker
from foundryd.rankpatch.plan import Plan, compute_plan

pytestmark = pytest.mark.benchmark(min_rounds=3, max_time=0.5, warmup=False)

# Words of a graph that are proven noise: few, and as many as captures of PyTorch had.
NOISE = pytest.mark.parametrize("noise", [120, 7500], ids=["few noise words", "many noise words"])


def test_open_and_check_the_digests(benchmark: Any, archive_of: Callable[..., Path]) -> None:
    path = archive_of()

    def opened() -> int:
        with ArchiveReader.open(path) as reader:
            reader.verify()
            return len(reader.index.variants[0].members)

    assert benchmark(opened) == 512
    with ArchiveReader.open(path) as reader:
        benchmark.extra_info.update(stored_bytes(reader), file=path.stat().st_size, inflated=inflated_size(reader))


@NOISE
def test_verify_everything_that_has_to_hold(benchmark: Any, archive_of: Callable[..., Path], noise: int) -> None:
    path = archive_of(graphs=64, noise=noise)

    def verified() -> None:
        with ArchiveReader.open(path) as reader:
            verify(reader)

    benchmark(verified)


@NOISE
def test_plan_for_one_rank_of_64(benchmark: Any, archive_of: Callable[..., Path], noise: int) -> None:
    with ArchiveReader.open(archive_of(noise=noise)) as reader:
        variant = reader.index.variants[0]
        ranks = itertools.cycle(range(64))
        compute_plan(reader, variant.name, 0)  # the sections are decoded, as in the daemon's memory
        plan = benchmark(lambda: compute_plan(reader, variant.name, next(ranks)))
        assert len(plan.writes) == 512 * 13
        benchmark.extra_info.update(
            rules=reader.entry(variant.rules).length // 32,
            noise=reader.entry(variant.template_noise).length // 16,
            stored=sum(reader.entry(name).stored for name in (variant.rules, variant.template_noise)),
        )


def test_read_a_plan_from_memory(benchmark: Any, rank_of: Callable[..., Any]) -> None:
    data = rank_of().plan.to_bytes()
    assert len(benchmark(lambda: Plan.from_buffer(data)).writes) == 512 * 13
    benchmark.extra_info["bytes"] = len(data)


@NOISE
def test_expand_and_patch_a_member(benchmark: Any, rank_of: Callable[..., Any], noise: int) -> None:
    rank = rank_of(noise=noise)
    places = itertools.cycle(range(512))
    for _ in range(4):  # every template's memory is ready
        rank.patched(next(places))
    graph = benchmark(lambda: rank.patched(next(places)))
    assert len(graph.nodes) == 612
    template = rank.variant.templates[0]
    benchmark.extra_info.update(
        block=graph.nodes.nbytes + graph.params.nbytes,
        words=rank.reader.entry(template.positions).length // 4,
        stored_a_member=sum(rank.reader.entry(t.columns).stored for t in rank.variant.templates) / 512,
    )


@pytest.mark.benchmark(max_time=0.2)
@pytest.mark.parametrize("graphs", [1, 64, 512])
def test_open_by_the_number_of_graphs(benchmark: Any, archive_of: Callable[..., Path], graphs: int) -> None:
    path = archive_of(graphs=graphs)
    benchmark(lambda: ArchiveReader.open(path).close())


@pytest.mark.benchmark(max_time=0.2)
@pytest.mark.parametrize("nodes", [100, 1000, 5000])
def test_expand_and_patch_by_the_number_of_nodes(benchmark: Any, rank_of: Callable[..., Any], nodes: int) -> None:
    rank = rank_of(graphs=8, nodes=nodes)
    places = itertools.cycle(range(8))
    for _ in range(4):
        rank.patched(next(places))
    assert len(benchmark(lambda: rank.patched(next(places))).nodes) == nodes


@pytest.mark.benchmark(max_time=0.2)
@pytest.mark.parametrize("world", [1, 8, 64])
def test_plan_by_the_number_of_ranks(benchmark: Any, archive_of: Callable[..., Path], world: int) -> None:
    with ArchiveReader.open(archive_of(graphs=8, world=world)) as reader:
        assert benchmark(lambda: compute_plan(reader, f"ep={world}", world - 1)).world == world


def test_a_plan_that_the_daemon_has_kept(benchmark: Any, archive_of: Callable[..., Path]) -> None:
    store, loop = Store(), Loop()
    plans = Plans(store, Worker(loop))
    resident = store.load(archive_of())
    arrived: list[Any] = []
    plans.request(resident, "ep=64", 5, lambda plan: (arrived.append(plan), loop.stop()))
    loop.later(20, loop.stop)
    loop.run()
    assert len(arrived) == 1, "the plan was not computed in time"
    benchmark(lambda: plans.request(resident, "ep=64", 5, arrived.append))
    assert plans.computed == 1
    assert all(plan is arrived[0] for plan in arrived)
    plans.close()
    store.close()
    loop.close()
