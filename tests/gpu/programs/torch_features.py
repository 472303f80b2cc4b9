# SPDX-License-Identifier: Apache-2.0
"""Captures, restores or natively runs every case of ``features.py`` on one GPU, and reports digests of its replays.

The last line of standard output is the report, one JSON object: for each case its digests, or the error it met.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.distributed as dist
from features import CASES, Site
from torch import Tensor

import foundryd.engines.torch as fdy
from foundryd.settings import Mode, settings

SEED = 7


def leaves(value: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Every leaf of nested outputs with its place, in order."""
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{at}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from leaves(part, f"{at}.{i}")
    else:
        yield at, value


def digest(outputs: Any) -> str:
    """Of every leaf: bytes, shape, stride and type of tensors, and the representation of anything else."""
    state = hashlib.blake2b(digest_size=16)
    for at, leaf in leaves(outputs):
        state.update(at.encode())
        if isinstance(leaf, Tensor):
            state.update(f"{tuple(leaf.shape)} {leaf.stride()} {leaf.dtype} {leaf.device.type}".encode())
            state.update(leaf.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            state.update(repr(leaf).encode())
    return state.hexdigest()


def feed(site: Site, values: torch.Generator) -> None:
    """Gives every input of a case its next value."""
    torch.cuda.synchronize()  # a pinned input may still be read
    for tensor, limit in site.inputs:
        if limit:
            tensor.copy_(torch.randint(limit, tensor.shape, generator=values))
        else:
            tensor.copy_(torch.randn(tensor.shape, generator=values))
    torch.cuda.synchronize()


def replays(site: Site, graph: Any, outputs: Any, count: int) -> list[str]:
    """Digests of ``count`` replays with inputs that change; generators start anew, go on, and start anew again."""
    values = torch.Generator().manual_seed(SEED)
    digests = []
    for i in range(count):
        if i % 4 == 0:
            torch.cuda.manual_seed(SEED + i)
            for place, generator in enumerate(site.generators):
                generator.manual_seed(SEED + i + 100 * place)
        feed(site, values)
        graph.replay()
        torch.cuda.synchronize()
        digests.append(digest(outputs))
    return digests


def report(names: list[str], count: int) -> dict[str, Any]:
    """Runs the cases one after another in one process, as an engine with many graphs would."""
    graphs = fdy.GraphSet.from_env()
    dist.init_process_group("nccl", device_id=graphs.device)
    # Each case's inputs first: a restore wants all of them before its first graph.
    sites = {name: Site(graphs.device, graphs.arena) for name in names}
    steps = {name: CASES[name](site) for name, site in sites.items()}
    for name, site in sites.items():
        for i, (tensor, _) in enumerate(site.inputs):
            graphs.bind(f"{name}.{i}", tensor)
    ready, errors = {}, {}
    for name in names:
        try:
            ready[name] = graphs.capture_or_restore(name, steps[name], generators=tuple(sites[name].generators))
        except Exception as error:  # one case must not hide the others; the report says which failed and how
            errors[name] = f"{type(error).__name__}: {error}"
    graphs.finish()
    digests = {}
    if settings().mode is not Mode.CAPTURE:
        digests = {name: replays(sites[name], *ready[name], count) for name in ready}
    fallback = graphs.fallback
    result = {
        "mode": settings().mode.value,
        "restored": graphs.restored,
        "fallback": None if fallback is None else f"{type(fallback).__name__}: {fallback}",
        "graphs": len(ready),
        "phases": dict(graphs.session.phases) if graphs.session is not None else {},
        "errors": errors,
        "digests": digests,
    }
    ready.clear()
    graphs.close()
    dist.destroy_process_group()
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", action="append", choices=tuple(CASES), help="only this one; repeat for more")
    parser.add_argument("--skip", action="append", default=[], choices=tuple(CASES), help="all but this one")
    parser.add_argument("--replays", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the report too")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    args = parser.parse_args()
    if args.list:
        print("\n".join(CASES))
        return 0
    result = report([name for name in args.case or CASES if name not in args.skip], args.replays)
    text = json.dumps(result)
    if args.json:
        args.json.write_text(text)
    print(text, flush=True)
    return 1 if result["errors"] else 0


if __name__ == "__main__":
    sys.exit(main())
