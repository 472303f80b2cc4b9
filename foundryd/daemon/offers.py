# SPDX-License-Identifier: Apache-2.0
"""Memory that ranks of an earlier daemon offer, between its examination and the loading that uses it."""

from __future__ import annotations

import threading
import time

from foundryd.daemon.resident import Resident, free

EXAMINATION = 120.0  # seconds after which a loading no longer waits for an examination


class Offers:
    """Memory by digest, of at most one rank each.  Every method may be called from any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expected: dict[str, float] = {}  # until when somebody may still come
        self._examined: set[str] = set()
        self._good: dict[str, Resident] = {}
        self._closed: set[str] = set()  # loaded: too late

    def expect(self, digest: str, seconds: float) -> None:
        """Makes ``taken`` wait so long for somebody who has this content."""
        with self._changed:
            self._expected[digest] = time.monotonic() + seconds

    def begin(self, digest: str) -> None:
        """Makes ``taken`` wait until ``end``, or until ``EXAMINATION`` has passed."""
        with self._changed:
            self._examined.add(digest)

    def end(self, digest: str) -> None:
        """The examination is over, whatever came of it."""
        with self._changed:
            self._examined.discard(digest)
            self._changed.notify_all()

    def put(self, resident: Resident) -> bool:
        """What an examination found to be good; False when it is too late, and the memory the caller's again."""
        with self._changed:
            if resident.digest in self._closed or resident.digest in self._good:
                return False
            self._good[resident.digest] = resident
            self._changed.notify_all()
            return True

    def has(self, digest: str) -> bool:
        """Whether there is good memory."""
        with self._changed:
            return digest in self._good

    def taken(self, digest: str) -> Resident | None:
        """The good memory of a content, after whoever is expected has come or is too late; None: there is none."""
        give_up = time.monotonic() + EXAMINATION
        with self._changed:
            while digest not in self._good:
                now = time.monotonic()
                until = give_up if digest in self._examined else min(give_up, self._expected.get(digest, 0.0))
                if now >= until:
                    return None
                self._changed.wait(until - now)
            return self._good[digest]

    def close(self, digest: str) -> Resident | None:
        """The good memory, which the caller now owns; none is taken any more."""
        with self._changed:
            self._closed.add(digest)
            self._expected.pop(digest, None)
            return self._good.pop(digest, None)

    def reopen(self, digest: str) -> None:
        """The content was unloaded: its memory may be offered again."""
        with self._changed:
            self._closed.discard(digest)

    def free(self) -> None:
        """Lets all memory go."""
        with self._changed:
            for resident in self._good.values():
                free(resident)
            self._good.clear()
