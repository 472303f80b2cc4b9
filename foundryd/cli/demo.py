# SPDX-License-Identifier: Apache-2.0
"""``foundryd demo``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def demo(
    ranks: Annotated[int, typer.Option(help="Ranks of the world; without --parallel they form one ep axis.")] = 8,
    parallel: Annotated[str, typer.Option(help="A mesh, as in tp=2,ep=4 or dp=2,tp=4.")] = "",
    driver: Annotated[str, typer.Option(help="auto, cuda, or soft for the software driver.")] = "auto",
    dispatch: Annotated[str, typer.Option(help="How tokens reach experts: all-to-all or allgather.")] = "all-to-all",
    batch_sizes: Annotated[str, typer.Option(help="Decode graphs to capture, as in 1-64.")] = "1-64",
    layers: Annotated[int, typer.Option(help="Layers of the model.")] = 2,
    hidden: Annotated[int, typer.Option(help="Width of the model.")] = 64,
    experts: Annotated[int, typer.Option(help="Experts of each layer.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of weights and requests.")] = 1,
    keep: Annotated[Path | None, typer.Option(help="Keep the archive as this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Capture a small MoE engine on one device, restore it on every rank, and compare its tokens."""
    from foundryd.demo.config import DemoConfig, parse_sizes
    from foundryd.demo.run import run_demo, show
    from foundryd.rankpatch.mesh import Mesh

    mesh = Mesh.parse(parallel or f"ep={ranks}")
    config = DemoConfig(
        layers=layers,
        hidden=hidden,
        experts=max(experts, mesh.ep),
        seed=seed,
        dispatch=dispatch,
        batch_sizes=parse_sizes(batch_sizes),
        mesh=mesh,
    )
    figures = run_demo(config, driver=driver, keep=keep, progress=lambda text: print(text, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(figures))
    else:
        show(figures)
    raise typer.Exit(0 if figures["ok"] else 1)
