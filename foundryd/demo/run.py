# SPDX-License-Identifier: Apache-2.0
"""``foundryd demo``: capture on one device, a daemon, every rank restored, tokens compared with the reference."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from foundryd.archive.reader import ArchiveReader
from foundryd.capture.orchestrate import CaptureResult, capture
from foundryd.capture.runs import CaptureSpec
from foundryd.cli.environment import restore_environment
from foundryd.daemon.launch import start_daemon, stop_daemon
from foundryd.demo.config import DemoConfig
from foundryd.demo.launch import choose_driver, driver_environment, launch_ranks, mismatches, worker_command
from foundryd.demo.reference import expected
from foundryd.errors import DaemonNotRunning

Progress = Callable[[str], None]


def run_demo(
    config: DemoConfig, *, driver: str, keep: Path | None = None, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """Runs the whole path and returns its figures: counts, milliseconds (the largest over ranks), bytes.

    Raises ``FoundrydError``; whatever was started is stopped then too.
    """
    chosen = choose_driver(driver)
    env = driver_environment(chosen, os.environ)
    with tempfile.TemporaryDirectory(prefix="foundryd-demo-") as folder:
        archive = keep.absolute() if keep else Path(folder) / "demo.foundry"
        runtime = Path(folder) / "run"
        spec = CaptureSpec(str(config.mesh), worker_command(config), environment=env)
        captured = capture(archive, spec, progress=progress)
        progress(f"starting a daemon with {archive.stat().st_size:,} bytes of archive")
        try:
            start_daemon(runtime, [f"demo={archive}"])
            progress(f"restoring and decoding in {config.mesh.world} processes")
            started = time.monotonic()
            results = launch_ranks(config, env | _restore(env, runtime, config))
            decode_ms = (time.monotonic() - started) * 1000
        finally:
            with suppress(DaemonNotRunning):  # it did not start, or failed: that is said
                stop_daemon(runtime)
        progress("comparing tokens with the reference")
        wrong = mismatches(config, results, expected(config))
        return _figures(config, chosen, archive, captured, results, wrong) | {"ranks_ms": decode_ms}


def _restore(env: dict[str, str], runtime: Path, config: DemoConfig) -> dict[str, str]:
    variables = restore_environment(env, archive="demo", group="demo", variant=str(config.mesh))
    return variables | {"FOUNDRYD_RUNTIME_DIR": str(runtime)}


def _figures(
    config: DemoConfig,
    driver: str,
    archive: Path,
    captured: CaptureResult,
    results: list[dict[str, Any]],
    wrong: list[str],
) -> dict[str, Any]:
    with ArchiveReader.open(archive) as reader:
        variant = reader.index.variants[0]
        notes = reader.index.notes[variant.name]
        templates = sum(len(v.templates) for v in reader.index.variants)
        graphs = len(variant.members)
    restores = [r["restore"] for r in results if r["restore"] is not None]
    fallbacks = sorted({f"{r['fallback']['reason']}: {r['fallback']['message']}" for r in results if r["fallback"]})
    quiet = all(
        r["counters"] is None or (r["counters"]["engine"]["captures"] == 0 and r["counters"]["engine"]["launches"] == 0)
        for r in results
    )
    return {
        "ok": not wrong and not fallbacks and quiet and len(restores) == config.mesh.world,
        "driver": driver,
        "ranks": config.mesh.world,
        "variant": captured.variant,
        "capture_devices": 1,
        "captured_ranks": captured.captured,
        "control_ranks": captured.controls,
        "heldout_rank": captured.confirmed[0].rank if captured.confirmed else None,
        "graphs": graphs,
        "templates": templates,
        "comm_nodes": int(notes["comm_nodes"]),
        "patched_words": max((r["patched_words"] for r in restores), default=0),
        "rules": captured.rules,
        "image_bytes": captured.image_bytes,
        "pruned_image_bytes": captured.pruned_image_bytes,
        "archive_bytes": archive.stat().st_size,
        "capture_ms": captured.total_ms,
        "attach_ms": max((r["phases"]["attach"] for r in restores), default=0.0),
        "restore_ms": max((sum(ms for p, ms in r["phases"].items() if p != "attach") for r in restores), default=0.0),
        "phases_ms": {p: max(r["phases"][p] for r in restores) for p in (restores[0]["phases"] if restores else {})},
        "resident_copies": len({r["archive_memory"] for r in restores}),
        "engine_counters_quiet": quiet,
        "tokens_match": not wrong,
        "wrong": wrong[:8],
        "fallbacks": fallbacks,
    }


def show(figures: dict[str, Any]) -> None:
    """Prints the figures for a person."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(title=f"foundryd demo: {figures['variant']}, {figures['ranks']} ranks, driver {figures['driver']}")
    table.add_column("what")
    table.add_column("figure", justify="right")
    rules = ", ".join(f"{n} {name}" for name, n in figures["rules"].items()) or "none"
    phases = ", ".join(f"{p} {ms:.0f}" for p, ms in figures["phases_ms"].items())
    rows = [
        (
            "captured as ranks",
            ", ".join(map(str, figures["captured_ranks"])) + f" on {figures['capture_devices']} device",
        ),
        ("control, held-out rank", f"{figures['control_ranks']}, {figures['heldout_rank']}"),
        ("graphs, templates", f"{figures['graphs']}, {figures['templates']}"),
        ("collectives in graphs", f"{figures['comm_nodes']}"),
        ("words by rule", rules),
        ("words patched in a rank", f"{figures['patched_words']}"),
        ("archive", f"{figures['archive_bytes']:,} bytes"),
        ("images in it", f"{figures['pruned_image_bytes']:,} of {figures['image_bytes']:,} bytes"),
        ("capture, all launches", f"{figures['capture_ms'] / 1000:.1f} s"),
        ("attach, slowest rank", f"{figures['attach_ms']:.0f} ms"),
        ("restore, slowest rank", f"{figures['restore_ms']:.0f} ms"),
        ("of which (each phase's slowest)", phases),
        ("copies of the archive in memory", f"{figures['resident_copies']}"),
        ("warm-ups and captures by engines", "none" if figures["engine_counters_quiet"] else "some"),
        ("tokens", "as the reference" if figures["tokens_match"] else "WRONG"),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for line in [*figures["fallbacks"], *figures["wrong"]]:
        console.print(line, style="red")
    console.print("ok" if figures["ok"] else "NOT ok", style="bold green" if figures["ok"] else "bold red")
