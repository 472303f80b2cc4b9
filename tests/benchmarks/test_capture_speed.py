# SPDX-License-Identifier: Apache-2.0
"""What a capture takes beside its launches: recordings written and read, rules inferred, the archive written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recordings import captured

from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.capture.merge import merge, write_archive
from foundryd.capture.recording import load, save

Calls = Callable[[Callable[[], Any]], int]

SHAPES = pytest.mark.parametrize(
    ("graphs", "nodes", "noise"), [(8, 612, 16000), (64, 612, 16000), (8, 100, 2600), (8, 2600, 68000)]
)

pytestmark = pytest.mark.benchmark(min_rounds=2, max_time=0.3, warmup=False)


@SHAPES
def test_write_and_read_a_recording(benchmark: Any, tmp_path: Path, graphs: int, nodes: int, noise: int) -> None:
    _, control = captured(graphs=graphs, nodes=nodes, noise=noise)
    path = tmp_path / "a.recording"

    def both() -> Any:
        save(control, path)
        return load(path)

    found = benchmark(both)
    assert [graph.params.tobytes() for graph in found.graphs] == [graph.params.tobytes() for graph in control.graphs]
    assert (found.proofs.noise == control.proofs.noise).all()
    benchmark.extra_info["bytes"] = path.stat().st_size


@SHAPES
def test_infer_what_follows_no_rank(benchmark: Any, graphs: int, nodes: int, noise: int) -> None:
    rank, control = captured(graphs=graphs, nodes=nodes, noise=noise)
    merged = benchmark(lambda: merge([rank], control, [0]))
    assert merged.inference.rules["width"].sum() == control.proofs.noise["width"].sum()


@SHAPES
def test_write_the_archive(benchmark: Any, tmp_path: Path, graphs: int, nodes: int, noise: int) -> None:
    rank, control = captured(graphs=graphs, nodes=nodes, noise=noise)
    merged = merge([rank], control, [0])
    path = tmp_path / "a.foundry"
    benchmark.pedantic(lambda: write_archive(path, [merged]), rounds=2)
    with ArchiveReader.open(path) as reader:
        assert len(reader.index.variants[0].members) == graphs
        benchmark.extra_info.update(stored_bytes(reader))


@pytest.mark.parametrize("step", ["merge", "save"])
def test_calls_grow_with_graphs_in_proportion_at_most(calls: Calls, tmp_path: Path, step: str) -> None:
    def taken(graphs: int) -> int:
        rank, control = captured(graphs=graphs, nodes=34, noise=400)
        if step == "merge":
            return calls(lambda: merge([rank], control, [0]))
        return calls(lambda: save(control, tmp_path / "a.recording"))

    few, some, many = taken(4), taken(16), taken(64)
    assert many - some <= 1.1 * (64 - 16) / (16 - 4) * (some - few)
