# SPDX-License-Identifier: Apache-2.0
"""Who is attached: what living connections said, and nothing else.  A closed connection leaves no trace."""

from __future__ import annotations

import itertools
import time

import msgspec

from foundryd.daemon.messages import LeaseState, Report, reason_label
from foundryd.errors import GenerationFenced, LimitReached, RankTaken, UsageError

MAX_NAME = 256  # characters of a group
MAX_GENERATION = 1 << 53


class Leases:
    """Leases by (group, rank).

    A group is made by its first lease, with a generation that no earlier group had, of this daemon or another one, and
    is gone with its last one.  All its ranks have one variant of one archive.
    """

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._leases: dict[tuple[str, int], LeaseState] = {}
        self._numbers = itertools.count(1)
        # The largest so far.  It begins with the time in microseconds: an earlier daemon did so too, and what it gave
        # since is not known here while its ranks do not come back.
        self._generation = time.time_ns() // 1000

    def take(
        self,
        *,
        group: str,
        rank: int,
        variant: str,
        archive: str,
        digest: str,
        pid: int,
        uid: int,
        generation: int | None = None,
        own_memory: bool = False,
        attach_id: str = "",
    ) -> LeaseState:
        """A new lease; with a ``generation`` the one that an earlier daemon gave, for a rank that comes back.

        Raises
        ------
        LimitReached : there are as many leases as there may be.
        GenerationFenced : the group was made anew meanwhile.
        RankTaken : the rank of that group has a lease; the message names its holder.
        UsageError : the group runs something else, or its name is too long.
        """
        if not group or len(group) > MAX_NAME:
            raise UsageError(f"the group {group[:20]!r} has {len(group)} characters: use 1 to {MAX_NAME}")
        holder = self._leases.get((group, rank))
        if holder is not None:
            raise RankTaken(
                f"rank {rank} of group {group} is held by pid {holder.pid} (user {holder.uid}, lease {holder.number}) "
                f"and pid {pid} asks for it: end that process or use another group"
            )
        if len(self._leases) >= self._most:
            raise LimitReached(
                f"the daemon has {len(self._leases)} leases and may have {self._most}: end a rank, or raise "
                "FOUNDRYD_MAX_CLIENTS"
            )
        other = next((lease for lease in self._leases.values() if lease.group == group), None)
        if other is not None and (other.variant, other.digest) != (variant, digest):
            raise UsageError(
                f"group {group} runs {other.variant} of {other.archive} ({other.digest[:12]}; rank {other.rank} is pid "
                f"{other.pid}) and rank {rank} asks for {variant} of {archive} ({digest[:12]}): use another group"
            )
        if generation is not None and not 0 < generation <= MAX_GENERATION:
            raise UsageError(f"the generation {generation} is not 1 to {MAX_GENERATION}: correct the client")
        if other is not None and generation not in (None, other.generation):
            raise GenerationFenced(
                f"group {group} is in generation {other.generation} (rank {other.rank} is pid {other.pid}) and rank "
                f"{rank} (pid {pid}) is of generation {generation}: restart that rank"
            )
        if generation is None:
            generation = other.generation if other is not None else self._generation + 1
        self._generation = max(self._generation, generation)
        lease = LeaseState(
            number=next(self._numbers),
            group=group,
            rank=rank,
            variant=variant,
            archive=archive,
            digest=digest,
            pid=pid,
            uid=uid,
            generation=generation,
            own_memory=own_memory,
            attach_id=attach_id,
        )
        self._leases[group, rank] = lease
        return lease

    def note(self, lease: LeaseState, report: Report) -> LeaseState:
        """Keeps what the rank reported; the lease from here on."""
        noted = msgspec.structs.replace(
            lease,
            outcome=report.outcome,
            reason=reason_label(report.reason) if report.reason else "",
            restore_ms=sum(report.phases.values()),
        )
        self._leases[lease.group, lease.rank] = noted
        return noted

    def release(self, lease: LeaseState) -> None:
        """Ends a lease."""
        del self._leases[lease.group, lease.rank]

    def holders(self, digest: str) -> list[LeaseState]:
        """Leases on an archive."""
        return [lease for lease in self._leases.values() if lease.digest == digest]

    def digests(self) -> set[str]:
        """Archives that there are leases on."""
        return {lease.digest for lease in self._leases.values()}

    def all(self) -> list[LeaseState]:
        """All leases, by group and rank."""
        return [self._leases[key] for key in sorted(self._leases)]

    def __len__(self) -> int:
        return len(self._leases)
