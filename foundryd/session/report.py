# SPDX-License-Identifier: Apache-2.0
"""Telling the daemon how a restore ended.  It is for its metrics only: what goes wrong here never disturbs the rank."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping

from foundryd.daemon import messages, wire
from foundryd.daemon.client import open_door
from foundryd.daemon.messages import REPORTS, Report
from foundryd.daemon.runtime import RuntimeDir
from foundryd.errors import DaemonNotRunning, FoundrydError
from foundryd.logs import attach_field
from foundryd.session.client import Attachment
from foundryd.settings import Settings

log = logging.getLogger("foundryd.session")

DEADLINE = 1.0  # seconds that a rank without a lease spends on it at most


def new_attach_id() -> str:
    """What connects the lines of this rank's log with the daemon's."""
    return secrets.token_hex(8)


def is_file(archive: str) -> bool:
    """Whether this names an archive's file rather than one that the daemon knows."""
    return "/" in archive or archive.endswith(".foundry")


def of_restore(config: Settings, attach_id: str, phases: Mapping[str, float]) -> Report:
    """The report of a restore that succeeded."""
    return Report("restored", attach_id, config.group[:256], config.rank, phases=dict(phases))


def of_fallback(config: Settings, attach_id: str, error: FoundrydError, phases: Mapping[str, float]) -> Report:
    """The report of a rank that captures natively."""
    text = messages.printable(error)[: messages.MAX_TEXT]
    return Report("fallback", attach_id, config.group[:256], config.rank, error.reason[:64], text, dict(phases))


def over_lease(attachment: Attachment, report: Report) -> None:
    """Sends a report over the lease's own connection, without waiting; an older daemon gets none."""
    lease, daemon = attachment.lease, attachment.daemon
    if lease is None or daemon is None or daemon.protocol < REPORTS:
        return
    try:
        lease.send(messages.encode(report))
    except Exception as error:
        _lost(error, report)


def without_lease(config: Settings, report: Report, error: FoundrydError) -> None:
    """Sends the report of a rank that got no lease, because of ``error``, over a connection of its own."""
    if is_file(config.archive) or isinstance(error, DaemonNotRunning):
        return
    try:
        sock, welcome = open_door(RuntimeDir(config.runtime_dir), time.monotonic() + DEADLINE)
        with sock:
            if welcome.protocol >= REPORTS:
                wire.send(sock, messages.encode(report))
    except Exception as failure:
        _lost(failure, report)


def _lost(error: Exception, report: Report) -> None:
    log.debug("the daemon is not told (%s)", error, extra=attach_field(report.attach_id))
