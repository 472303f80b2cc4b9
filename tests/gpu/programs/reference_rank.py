# SPDX-License-Identifier: Apache-2.0
"""One process of the reference implementation, foundry-core 0.1 or newer, with the graphs of the benchmark's decoder.

``save`` captures the graphs and writes them to a folder, ``load`` reads them and replays them; both need its hook in
``LD_PRELOAD``.  ``native`` captures through ``torch.cuda.graph``, without it.  All of them report digests of what
replays put out.  The last line of standard output is the report.

Its memory is one sequence of addresses, so ``save`` and ``load`` allocate alike up to the first graph.  Kernels that a
graph needs are warmed up outside of that sequence, before they are captured.  Times of ``load`` are those of its own
calls, as if they had followed each other: modules, which it has to load before any weights, then everything from the
first allocation for graphs until the graph of the largest batch was replayed (``hottest_ms``) and until every graph can
be (``all_served_ms``), which each has an executable of its own then.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch
from bench import arguments, capture_natively, timed
from decode import digest
from engine import Requests, config_of
from models import Decoder
from torch import Tensor

from foundryd.rankpatch.mesh import Mesh

# As its integrations of engines choose them.
BASE, SIZE = 0x6000_0000_0000, 256 << 30
THREADS = 4
LAYOUT = "layout.json"

Graph = Any


class Rank(Requests):
    """The one rank, without communicators; it allocates alike in every process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.config = config_of(args)
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.generator = None
        self.steps_called = 0
        self.batch_sizes = sorted(args.batch_sizes, reverse=True)
        self.graphs: dict[int, tuple[Graph, dict[str, Tensor]]] = {}
        self.model = Decoder(self.config, self.device)
        self.model.load()
        torch.cuda.empty_cache()
        self.caches = self.model.cache()
        self.tokens, self.positions = (
            torch.empty(self.config.max_batch, dtype=torch.int64, device=self.device) for _ in range(2)
        )
        self.reset()

    def addresses(self) -> dict[str, int]:
        """Where everything lies that graphs read."""
        found = {name: tensor.data_ptr() for name, tensor in self.model.state_dict().items()}
        for i, cache in enumerate(self.caches):
            found |= {f"keys.{i}": cache.keys.data_ptr(), f"values.{i}": cache.values.data_ptr()}
        return found | {"tokens": self.tokens.data_ptr(), "positions": self.positions.data_ptr()}

    def digests(self) -> dict[str, list[str]]:
        """Of two replays of every graph, from a state of requests of its own each."""
        found: dict[str, list[str]] = {}
        for batch, (graph, outputs) in self.graphs.items():
            found[str(batch)] = []
            for seed in (2 * batch, 2 * batch + 1):
                self.vary(seed)
                graph.replay()
                found[str(batch)].append(digest(outputs | {"next": self.tokens}))
        return found

    def figures(self) -> dict[str, Any]:
        """What every role reports."""
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "asked": len(self.batch_sizes),
            "memory": {"device_used": total - free},
            "versions": {"torch": torch.__version__},
            "device": torch.cuda.get_device_name(self.device),
        }


def native(args: argparse.Namespace) -> dict[str, Any]:
    """Captured and replayed by torch alone."""
    rank = Rank(args)
    pool = torch.cuda.graph_pool_handle()
    for batch in rank.batch_sizes:
        captured = capture_natively(partial(rank.step, batch), pool)
        rank.graphs[batch] = (captured.graph, captured.outputs)
    return rank.figures() | {"digests": rank.digests()}


def save(args: argparse.Namespace) -> dict[str, Any]:
    """Captures every graph, the largest first, and writes them and their modules."""
    import foundry

    enter_region()
    rank = Rank(args)
    stream = foundry.graph.default_capture_stream
    with outside_region(), torch.cuda.stream(stream):
        for batch in rank.batch_sizes:
            rank.step(batch)
        torch.cuda.synchronize()
    settle()
    layout = {"start": foundry.get_current_alloc_offset(), "addresses": rank.addresses()}
    check_layout(layout, layout)
    pool = torch.cuda.graph_pool_handle()
    times: dict[str, float] = {}
    with timed(times, "save_ms"):
        for path, batch in zip(paths(args.folder, rank.batch_sizes), rank.batch_sizes, strict=True):
            graph = foundry.CUDAGraph()
            with foundry.graph(graph, pool=pool, stream=stream):
                outputs = rank.step(batch)
            graph.save(path, [outputs[name] for name in sorted(outputs)])
            rank.graphs[batch] = (graph, outputs)
        foundry.save_graph_manifest(str(args.folder))
        foundry.pack_fatbins_to_folder(str(args.folder))
    foundry.set_pack_fatbins_on_exit(False)
    layout |= {"end": foundry.get_current_alloc_offset(), "outputs": sorted(outputs)}
    (args.folder / LAYOUT).write_text(json.dumps(layout))
    return rank.figures() | times | {"version": foundry.__version__, "digests": rank.digests()}


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Loads every graph in the order in which they were saved."""
    import foundry

    layout = json.loads((args.folder / LAYOUT).read_text())
    files = paths(args.folder, sorted(args.batch_sizes, reverse=True))
    times: dict[str, float] = {}
    # So that the driver does not place anything in the region while it loads modules.
    os.environ |= {"FOUNDRY_EARLY_RESERVE_BASE": hex(BASE), "FOUNDRY_EARLY_RESERVE_SIZE": str(SIZE)}
    with timed(times, "modules"):
        foundry.load_cuda_modules_and_libraries(str(args.folder))
    enter_region()
    # In the background while weights are made; FOUNDRY_EXEC_POOL_PREWARM=0 turns it off.
    foundry.CUDAGraph.start_exec_pool_prewarm(files)
    rank = Rank(args)
    settle()
    check_layout(layout, {"start": foundry.get_current_alloc_offset(), "addresses": rank.addresses()})

    def finish(index: int, batch: int) -> None:
        graph, outputs = foundry.CUDAGraph.finish_one_graph_load(pending, index)
        rank.graphs[batch] = (graph, dict(zip(layout["outputs"], outputs, strict=True)))

    first, *others = rank.batch_sizes
    with timed(times, "all"):
        with timed(times, "hottest"):
            with timed(times, "memory"):
                if not foundry.preallocate_region(layout["end"] - layout["start"]):
                    raise SystemExit(f"{layout['end'] - layout['start']} bytes for graphs could not be allocated")
            pending = foundry.CUDAGraph.start_graph_builds(files, num_threads=THREADS)
            finish(0, first)
            rank.graphs[first][0].replay()
        for index, batch in enumerate(others, 1):
            finish(index, batch)
    # What torch keeps free may lie where graphs have their memory.
    torch.cuda.empty_cache()
    return rank.figures() | {
        "version": foundry.__version__,
        "shared": os.environ.get("FOUNDRY_ENABLE_EXEC_SHARE") == "1",
        "modules_ms": times["modules"],
        "memory_ms": times["memory"],
        "hottest_ms": times["modules"] + times["hottest"],
        "all_served_ms": times["modules"] + times["all"],
        "digests": rank.digests(),
    }


def enter_region() -> None:
    """From here on memory comes from the region that both processes have at one place, workspaces of cuBLAS first."""
    import foundry

    torch.cuda.init()
    torch.cuda.synchronize()
    foundry.set_allocation_region(BASE, SIZE)
    foundry.graph.default_capture_stream = torch.cuda.Stream()
    foundry.preallocate_cublas_workspaces()
    with torch.cuda.stream(foundry.graph.default_capture_stream):
        foundry.preallocate_cublas_workspaces()


@contextmanager
def outside_region() -> Iterator[None]:
    """What is allocated meanwhile lies elsewhere and is given back, so that the sequence is as if it had not been."""
    import foundry

    foundry.stop_allocation_region()
    yield
    settle()
    foundry.resume_allocation_region()


def settle() -> None:
    """Leaves torch's allocator without free memory, as it has to be in both processes before graphs."""
    gc.collect()
    torch.cuda.empty_cache()


def paths(folder: Path, sizes: Iterable[int]) -> list[str]:
    """Files of the graphs, numbered in the order of capture."""
    return [str(folder / f"graph_{index}_{batch}.json") for index, batch in enumerate(sizes)]


def check_layout(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Graphs would read other memory than they were captured with, unless all lies in the region where it lay."""
    for name, place in now["addresses"].items():
        # That the region could not be had is not reported otherwise.
        if not BASE <= place < BASE + SIZE:
            raise SystemExit(f"{name} is at {place:#x}, outside of the region at {BASE:#x}: run it again")
        was = saved["addresses"].get(name)
        if place != was:
            raise SystemExit(f"{name} is at {place} and was saved at {was}: save and load with equal arguments")
    if now["start"] != saved["start"]:
        raise SystemExit(f"graphs begin at {now['start']} of the region and were saved at {saved['start']}: save anew")


def main() -> None:
    roles = {"native": native, "save": save, "load": load}
    parser = arguments(__doc__, *roles)
    parser.add_argument("--folder", type=Path, help="where the graphs are saved; native needs none")
    args = parser.parse_args()
    if Mesh.parse(args.mesh).world != 1 or args.rng:
        parser.error(f"--mesh {args.mesh}{' --rng' * args.rng}: give one rank that takes the best token")
    if args.folder is None and args.role != "native":
        parser.error(f"{args.role} needs --folder")
    print(json.dumps(roles[args.role](args)), flush=True)


if __name__ == "__main__":
    main()
