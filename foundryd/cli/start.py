# SPDX-License-Identifier: Apache-2.0
"""``foundryd start``."""

from __future__ import annotations

import grp
import os
from pathlib import Path
from typing import Annotated

import typer

from foundryd.daemon.launch import command, start_daemon
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import UsageError
from foundryd.settings import parse_http, settings

RuntimeOption = Annotated[
    Path | None,
    typer.Option("--runtime-dir", help="Where the daemon lives.  [default: FOUNDRYD_RUNTIME_DIR, or of the system]"),
]


def start(
    archives: Annotated[
        list[str] | None, typer.Argument(metavar="[ARCHIVE...]", help="FILE or NAME=FILE; the name is else the stem.")
    ] = None,
    runtime_dir: RuntimeOption = None,
    group: Annotated[str, typer.Option(help="Group whose members may attach too, by name or number.")] = "",
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay: for systemd and containers.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until every archive must be resident.")] = 300.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="json or text.  [default: FOUNDRYD_LOG_FORMAT, else json]")] = "",
    http: Annotated[
        str,
        typer.Option(help="Loopback port of health and metrics, 0: a free one.  [default: FOUNDRYD_HTTP, else off]"),
    ] = "",
) -> None:
    """Starts the daemon of this node and waits until every archive is verified and resident."""
    folder = runtime_path(runtime_dir)
    gid = _group_id(group) if group else None
    if log_level not in {"debug", "info", "warning", "error"}:
        raise UsageError(f"the log level is {log_level!r}: use debug, info, warning or error")
    form = (log_format or settings().log_format or "json").lower()
    if form not in {"json", "text"}:
        raise UsageError(f"the log format is {log_format!r}: use json or text")
    port = parse_http(http, "--http") if http else settings().http
    if foreground:
        line = command(folder, archives or [], group=gid, log_level=log_level, log_format=form, http=port)
        os.execv(line[0], line)  # the service manager then watches the daemon itself
    started = start_daemon(
        folder, archives or [], group=gid, log_level=log_level, log_format=form, http=port, timeout=timeout
    )
    typer.echo(f"foundryd is ready: pid {started.status.pid}, {RuntimeDir(folder).door}")
    if started.status.http_port:
        typer.echo(f"  health and metrics: http://127.0.0.1:{started.status.http_port}")
    for archive in started.status.archives:
        typer.echo(f"  {archive.name}  {archive.digest[:12]}  {archive.bytes} bytes  {archive.path}")


def runtime_path(option: Path | None) -> Path:
    """The runtime directory of the option or of the environment."""
    return (settings().runtime_dir if option is None else option).absolute()


def _group_id(text: str) -> int:
    if text.isdigit():
        return int(text)
    try:
        return grp.getgrnam(text).gr_gid
    except KeyError:
        raise UsageError(f"there is no group {text!r}: use one that `getent group` shows, or a number") from None
