# SPDX-License-Identifier: Apache-2.0
"""The ``foundryd`` command: one module a subcommand."""

from __future__ import annotations

import logging
import os
import signal
import sys
from importlib import import_module
from typing import Annotated

import typer

from foundryd import __version__
from foundryd.errors import FoundrydError

_COMMANDS = ("demo", "capture", "run", "start", "stop", "status", "ls", "logs", "verify", "inspect", "doctor")


def build() -> typer.Typer:
    """The command with all its subcommands; a module may give typer's options for its own in ``OPTIONS``."""
    app = typer.Typer(
        name="foundryd",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_foundryd)
    for name in _COMMANDS:
        module = import_module(f"foundryd.cli.{name}")
        app.command(name, **getattr(module, "OPTIONS", {}))(getattr(module, name))
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"foundryd {__version__}")
        raise typer.Exit


def _foundryd(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Restore the CUDA graphs of LLM engines instead of capturing them."""


def main() -> None:
    """Entry point: a failure is one sentence on standard error and exit code 1."""
    # Before NumPy loads: its BLAS threads save nothing here, and get in the way of ranks on the same machine.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    logging.basicConfig(
        level=os.environ.get("FOUNDRYD_LOG", "warning").upper(),
        format="foundryd: %(levelname)s: %(message)s",
        stream=sys.stderr,
    )
    # Told to stop, a command ends as if it had failed: it takes along the processes and files that it made.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        build()()
    except FoundrydError as error:
        print(f"foundryd: {error}", file=sys.stderr)
        sys.exit(1)
