# SPDX-License-Identifier: Apache-2.0
"""A rank that joins lives of a group on a store, for ``test_lives``.

Flags: rank, world, kind of the store and where it is, and a JSON list of what to do in each life.  Begins when it reads
a line, after it said that it is ready.  Prints a line of JSON for each life: the values of each phase, or the error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from foundryd.demo.rendezvous import SocketStore
from foundryd.errors import FoundrydError
from foundryd.session.agreement import PHASES, Agreement
from foundryd.session.store import Store

RANK, WORLD = int(sys.argv[1]), int(sys.argv[2])


class Ending:
    """A store whose process is killed right after it set a key of that kind."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.last = ""
        self.slow = 0.0  # seconds before it is looked for the end of a life

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)
        if self.last and self.last in key.split("/"):
            os.kill(os.getpid(), signal.SIGKILL)

    def get(self, key: str, timeout: float) -> bytes:
        if key.endswith("/closed") and self.slow:
            time.sleep(self.slow)
            self.slow = 0.0
            raise TimeoutError(key)
        return self._store.get(key, timeout)


def connect(kind: str, place: str) -> Ending:
    if kind == "socket":
        return Ending(SocketStore(Path(place)))
    import torch.distributed as dist

    from foundryd.engines.torch.store import TorchStore

    host, _, port = place.partition(":")
    return Ending(TorchStore(dist.TCPStore(host, int(port), None, False, timeout=timedelta(seconds=30))))


def live(store: Ending, what: dict[str, Any]) -> Any:
    time.sleep(what.get("late", 0.0))
    store.last = what.get("dies_after", "")
    store.slow = what.get("slow_to_read", 0.0)
    agreement = Agreement(store, RANK, WORLD, group="g", deadline=what.get("deadline", 20.0))
    try:
        agreement.join(what.get("gave_up", ""))
        if what.get("gave_up"):
            return "told"
        if "fails" in what:
            agreement.fail(PHASES, what["fails"])
            return "failed"
        return [agreement.exchange(phase, [phase, what["says"], RANK]) for phase in PHASES]
    except FoundrydError as error:
        return {"reason": error.reason, "message": str(error)}


store = connect(sys.argv[3], sys.argv[4])
print("ready", flush=True)
sys.stdin.readline()
for number, what in enumerate(json.loads(sys.argv[5])):
    print(json.dumps({"life": number, "what": live(store, what)}), flush=True)
