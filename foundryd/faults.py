# SPDX-License-Identifier: Apache-2.0
"""Named places where a test can let this process die, fail or hang: ``FOUNDRYD_FAULT=POINT:ACTION[:N]``.

| point | in the daemon | in a rank |
|---|---|---|
| ``publish`` | an archive is in sealed memory and nobody may find it yet | its memory is about to be offered |
| ``attach`` | a lease is asked for | the door is open and nothing was asked for |
| ``map`` | memory is about to be mapped | memory is about to be mapped |
| ``plan`` | a plan is about to be computed | archive and plan are mapped, and nobody has them yet |
| ``restore`` | offered memory is about to be examined | a restore begins |
| ``detach`` | a lease ends | an attachment is closed |
| ``reattach`` | a rank comes back | the rank has found a daemon again |
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter

from foundryd.errors import InjectedFault
from foundryd.settings import Fault, settings

HANG = 600.0  # seconds: longer than any deadline, but not for ever

_passes: Counter[str] = Counter()
_lock = threading.Lock()


def fault(point: str) -> None:
    """Does nothing, unless the environment arms this point."""
    armed = settings().fault
    if armed is not None and armed.point == point:
        _pass(armed)


def _pass(armed: Fault) -> None:
    with _lock:
        _passes[armed.point] += 1
        if _passes[armed.point] != armed.number:
            return
    if armed.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif armed.action == "hang":
        time.sleep(HANG)
    raise InjectedFault(
        f"the fault point {armed.point} is armed with {armed.action}: unset FOUNDRYD_FAULT to run without it"
    )
