# SPDX-License-Identifier: Apache-2.0
"""Lines of the log: JSON or text, and the id by which a rank's lines and the daemon's belong together.

A record that belongs to an attach has the attribute ``attach``; so an engine that formats its log itself can show it.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

TIME = "%Y-%m-%dT%H:%M:%S%z"


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, logger, message, the attach, and the traceback where there is one."""
        line = {
            "time": self.formatTime(record, TIME),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        if attach := getattr(record, "attach", ""):
            line["attach"] = attach
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


class TextFormatter(logging.Formatter):
    """One line for people, more with a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The same in the same order; what a message breaks into lines is joined again."""
        attach = getattr(record, "attach", "")
        message = " ".join(record.getMessage().splitlines())
        who = f"{record.name}[{record.process}]"
        text = f"{self.formatTime(record, TIME)} {record.levelname.lower():7} {who}: {message}"
        if attach:
            text += f" (attach {attach})"
        if record.exc_info:
            text += f"\n{self.formatException(record.exc_info)}"
        return text


class _Unconfigured(logging.StreamHandler[TextIO]):
    """Writes as long as the program has no handlers of its own, which get every record otherwise."""

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            super().emit(record)


def attach_field(attach_id: str) -> dict[str, str]:
    """``extra`` of a logging call that belongs to this attach."""
    return {"attach": attach_id}


def handler(form: str) -> logging.Handler:
    """A handler for standard error in the format ``json`` or ``text``."""
    out = logging.StreamHandler(sys.stderr)
    out.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    return out


def set_up_rank(form: str, level: str) -> None:
    """The ``foundryd`` logger of an engine's process; a second call changes nothing.

    A format that was asked for is written to standard error whatever the engine logs.  Without one the engine's own
    configuration holds, and text is written where there is none.
    """
    logger = logging.getLogger("foundryd")
    if logger.handlers:
        return
    if form:
        logger.addHandler(handler(form))
        logger.setLevel(level.upper())
        logger.propagate = False
    else:
        quiet = _Unconfigured(sys.stderr)
        quiet.setFormatter(TextFormatter())
        logger.addHandler(quiet)
