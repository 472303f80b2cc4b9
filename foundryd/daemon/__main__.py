# SPDX-License-Identifier: Apache-2.0
"""The daemon's process: ``python -P -m foundryd.daemon``.  ``foundryd start`` is what people run."""

from __future__ import annotations

import argparse
import json
import logging
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from prometheus_client import disable_created_metrics

from foundryd.daemon.notify import Notifier
from foundryd.daemon.runtime import RuntimeDir
from foundryd.daemon.server import Daemon
from foundryd.daemon.store import Store, parse_archives
from foundryd.daemon.tools import ArchiveTools
from foundryd.errors import FoundrydError
from foundryd.logs import handler
from foundryd.settings import settings

log = logging.getLogger("foundryd.daemon")


def main(arguments: list[str] | None = None, tools: ArchiveTools | None = None) -> int:
    """Runs the daemon in this process; returns its exit status, 1 after a failure that it logged and reported."""
    parser = argparse.ArgumentParser(prog="python -P -m foundryd.daemon", description=__doc__)
    parser.add_argument("--runtime-dir", type=Path, required=True)
    parser.add_argument("--group", type=int, help="group id whose members may attach")
    parser.add_argument("--log-level", default="info", choices=["debug", "info", "warning", "error"])
    parser.add_argument("--log-format", default="json", choices=["json", "text"])
    parser.add_argument("--http", type=int, help="port of health and metrics on loopback, 0 for a free one")
    parser.add_argument("--report-fd", type=int, help="descriptor that gets a failure as one JSON object")
    parser.add_argument("archives", nargs="*", help="FILE or NAME=FILE")
    options = parser.parse_args(arguments)

    os.umask(0o077)
    logging.basicConfig(level=options.log_level.upper(), handlers=[handler(options.log_format)], force=True)
    disable_created_metrics()  # type: ignore[no-untyped-call]
    if options.report_fd is not None:
        os.set_inheritable(options.report_fd, False)
    try:
        _raise_descriptor_limit()
        runtime = RuntimeDir(options.runtime_dir.absolute())
        runtime.prepare(options.group)
        archives = parse_archives(options.archives)
        limits = settings()
        store = Store(tools, max_archives=limits.max_archives, max_bytes=limits.max_bytes)
        Daemon(runtime, archives, store, group=options.group, notifier=Notifier(), http=options.http).run()
    except FoundrydError as error:
        log.error("%s", error)
        _report(options.report_fd, error.reason, str(error))
        return 1
    except Exception as error:
        log.exception("the daemon failed")
        _report(options.report_fd, "daemon", f"the daemon failed ({error!r}): see its log, and report it")
        return 1
    return 0


def _report(fd: int | None, reason: str, message: str) -> None:
    if fd is not None:
        with suppress(OSError):  # whoever started us is gone; the log has it
            os.write(fd, json.dumps({"reason": reason, "message": message}).encode())


def _raise_descriptor_limit() -> None:
    """Each connection is a descriptor, and the default soft limit is made for ``select``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
