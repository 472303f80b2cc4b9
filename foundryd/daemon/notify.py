# SPDX-License-Identifier: Apache-2.0
"""What systemd wants to hear from a service of ``Type=notify``; nothing happens outside systemd."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from contextlib import suppress


class Notifier:
    """Sends states to ``NOTIFY_SOCKET``, which is taken out of the environment so that no child speaks for us."""

    def __init__(self, env: MutableMapping[str, str] | None = None) -> None:
        env = os.environ if env is None else env
        self._address = env.pop("NOTIFY_SOCKET", "")
        microseconds = env.pop("WATCHDOG_USEC", "")
        pid = env.pop("WATCHDOG_PID", "")
        wanted = self._address and microseconds.isdigit() and pid in {"", str(os.getpid())}
        # Twice as often as asked for, as systemd advises; None: no watchdog.
        self.watchdog: float | None = int(microseconds) / 2e6 if wanted else None

    def send(self, state: str) -> None:
        """Sends ``READY=1``, ``STOPPING=1``, ``WATCHDOG=1`` or ``STATUS=text``; a missing listener is no error."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.setblocking(False)
            sock.sendto(state.encode(), address)
