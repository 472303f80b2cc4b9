# SPDX-License-Identifier: Apache-2.0
"""``foundryd capture``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from foundryd.errors import UsageError

OPTIONS = {"context_settings": {"ignore_unknown_options": True, "allow_interspersed_args": False}}


def capture(
    command: Annotated[list[str], typer.Argument(help="The engine's own command, after --.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The archive to write.")],
    variant: Annotated[str, typer.Option(help="Parallel configuration: ep=8, tp=2,ep=4, dp=2,tp=4.")],
    world_size: Annotated[int | None, typer.Option(help="Ranks of the world, to check the variant against.")] = None,
    sample: Annotated[str | None, typer.Option(help="Ranks to capture, as in 0,1,2,31,63.")] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Ranks that the rules must predict, as in 37,40; by default one.")
    ] = None,
    append: Annotated[bool, typer.Option(help="Keep the other variants of an archive that exists.")] = False,
    driver: Annotated[str, typer.Option(help="auto, cuda, or soft for the software driver.")] = "auto",
    deadline: Annotated[float, typer.Option(help="Seconds for one launch of the engine.")] = 900.0,
    jobs: Annotated[int, typer.Option(min=1, help="Launches side by side on the device, if memory allows.")] = 1,
    controls: Annotated[
        int, typer.Option(min=1, help="Controls that share the proofs side by side; they start early if --jobs allows.")
    ] = 1,
    logs: Annotated[Path | None, typer.Option(help="A folder to keep the output of every launch in.")] = None,
    allow_opaque_modules: Annotated[
        bool,
        typer.Option(
            "--allow-opaque-modules",
            help="Capture modules whose globals cannot be listed: a value that only device code gave one is lost.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Capture an engine as a few ranks of a world, one after another on one GPU, and write the archive."""
    from foundryd.capture.orchestrate import capture as run_capture
    from foundryd.capture.runs import CaptureSpec
    from foundryd.cli.environment import driver_environment

    spec = CaptureSpec(
        variant,
        command,
        _ranks("--sample", sample),
        world_size,
        deadline,
        driver_environment(driver),
        logs,
        jobs=jobs,
        allow_opaque_modules=allow_opaque_modules,
        held_out=_ranks("--held-out", held_out),
        controls=controls,
    )
    started = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {text}", file=sys.stderr, flush=True)

    result = run_capture(output, spec, append=append, progress=progress)
    if as_json:
        figures = {
            "archive": str(output),
            "variant": result.variant,
            "captured_ranks": result.captured,
            "control_ranks": result.controls,
            "heldout_ranks": [r.rank for r in result.confirmed],
            "compared": [
                {"rank": r.rank, "bytes": r.bytes, "noise_bytes": r.noise_bytes, "patched_words": r.patched_words}
                for r in result.confirmed
            ],
            "rules": result.rules,
            "image_bytes": result.image_bytes,
            "pruned_image_bytes": result.pruned_image_bytes,
            "archive_bytes": output.stat().st_size,
            "capture_ms": result.total_ms,
        }
        print(json.dumps(figures))
    else:
        print(
            f"{output}: {result.variant}, {output.stat().st_size:,} bytes, captured as ranks {result.captured} "
            f"in {result.total_ms / 1000:.1f} s; {result.pruned_image_bytes:,} of {result.image_bytes:,} bytes of "
            "images"
        )


def _ranks(option: str, text: str | None) -> list[int] | None:
    try:
        return [int(rank) for rank in text.split(",")] if text else None
    except ValueError:
        raise UsageError(f"{option} is {text!r}, not ranks joined by commas as in 0,1,2,7") from None
