# SPDX-License-Identifier: Apache-2.0
"""One rank of the demo: ``python -P -m foundryd.demo.worker``.

RANK, LOCAL_RANK and WORLD_SIZE come from the environment, everything else from flags.  The last line of standard
output is one JSON object: what the rank did, or the error that ended it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

from foundryd.demo import config
from foundryd.demo.device import Device
from foundryd.demo.engine import Disturbance, Engine
from foundryd.demo.rendezvous import FakeStore, SocketStore, Store
from foundryd.errors import FoundrydError, UsageError
from foundryd.session.arena import ARENAS, arena
from foundryd.session.driver import software_driver
from foundryd.session.graphset import GraphSet
from foundryd.settings import Mode, settings


def parser() -> argparse.ArgumentParser:
    """The flags of a worker."""
    out = argparse.ArgumentParser(prog="foundryd.demo.worker", description="One rank of the demo engine.")
    config.add_arguments(out)
    out.add_argument("--store", type=Path, help="socket of the rendezvous; a world of one rank needs none")
    out.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for other ranks")
    out.add_argument("--late-bytes", type=int, default=0, help="once graphs are ready, fill so much in each arena")
    out.add_argument("--disturb", type=Disturbance.parse, help="change an allocation: extra:kv, larger:io …")
    return out


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one rank and says what it did."""
    start = perf_counter()
    env = settings()
    c = config.from_args(args, world=env.world_size)
    store = _store(args, env.mode, env.world_size)
    graphs = GraphSet.from_env(store=store)
    device = Device(env.local_rank)
    engine = Engine(c, env.rank, device, graphs, store, timeout=args.timeout, disturbance=args.disturb)
    engine.prepare()
    late = _allocate_late(device, args.late_bytes) if args.late_bytes else []
    # A rank that is captured alone has no peers to decode with.
    tokens = {} if graphs.mode is Mode.CAPTURE else engine.decode()
    result: dict[str, Any] = {
        "rank": env.rank,
        "world_size": env.world_size,
        "mesh": str(c.mesh),
        "cell": c.cell(env.rank),
        "mode": graphs.mode.value,
        "restored": graphs.restored,
        "fallback": _failure(graphs.fallback),
        "restore": _restore(graphs),
        "graphs": len(c.batch_sizes),
        "tokens": {str(batch): sampled.tolist() for batch, sampled in tokens.items()},
        "counters": counters(),
        "late": late,
        "timings": engine.timings,
    }
    engine.close()
    store.close()
    result["timings"]["total_ms"] = (perf_counter() - start) * 1e3
    return result


def _allocate_late(device: Device, size: int) -> list[tuple[int, int]]:
    """(address, bytes) of new memory in each arena, filled as an engine's later work would."""
    ranges: list[tuple[int, int]] = []
    for place in ARENAS:
        with arena(place):
            ranges += device.poison(size)
    return ranges


def counters() -> dict[str, dict[str, int]] | None:
    """What reached the software driver so far, by who called: ``engine`` and ``communication``; None on a GPU."""
    if not software_driver():
        return None
    names = ("launches", "captures", "graph_launches", "instantiations", "module_loads", "allocations")
    read = ctypes.CDLL("libcuda.so.1").softcuda_counters
    out: dict[str, dict[str, int]] = {}
    for number, owner in enumerate(("engine", "communication")):
        values = (ctypes.c_uint64 * len(names))()
        read(ctypes.c_uint32(number), values)
        out[owner] = dict(zip(names, values, strict=True))
    return out


def _store(args: argparse.Namespace, mode: Mode, world: int) -> Store:
    if mode is Mode.CAPTURE or (world == 1 and args.store is None):
        return FakeStore()
    if args.store is None:
        raise UsageError(f"WORLD_SIZE is {world} and there is no --store: give the socket of the rendezvous")
    return SocketStore(args.store, timeout=args.timeout)


def _restore(graphs: GraphSet) -> dict[str, Any] | None:
    session = graphs.session
    if session is None or not session.restored:
        return None
    return {
        "phases": dict(session.phases),
        "background_ms": session.background_ms,
        "patched_words": len(session.plan.writes),
        "archive_memory": session.archive_memory,
    }


def _failure(error: FoundrydError | None) -> dict[str, str] | None:
    return None if error is None else {"reason": error.reason, "message": str(error)}


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        result = run(parser().parse_args(argv))
    except FoundrydError as error:
        print(json.dumps({"rank": settings().rank, "error": _failure(error)}), flush=True)
        print(f"rank {settings().rank}: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
