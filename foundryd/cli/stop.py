# SPDX-License-Identifier: Apache-2.0
"""``foundryd stop``."""

from __future__ import annotations

from typing import Annotated

import typer

from foundryd.cli.start import RuntimeOption, runtime_path
from foundryd.daemon.launch import stop_daemon


def stop(
    runtime_dir: RuntimeOption = None,
    timeout: Annotated[float, typer.Option(help="Seconds until it must be gone.")] = 10.0,
) -> None:
    """Stops the daemon; attached ranks keep their memory and lose their leases."""
    stopped = stop_daemon(runtime_path(runtime_dir), timeout)
    leases = f", and {stopped.leases} leases ended with it" if stopped.leases else ""
    typer.echo(f"foundryd (pid {stopped.pid}) stopped after {stopped.ms:.0f} ms{leases}")
