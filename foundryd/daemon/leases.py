# SPDX-License-Identifier: Apache-2.0
"""Who is attached: what living connections said, and nothing else.  A closed connection leaves no trace."""

from __future__ import annotations

import itertools

import msgspec

from foundryd.daemon.messages import LeaseState, Report, reason_label
from foundryd.errors import RankTaken, UsageError

MAX_NAME = 256  # characters of a group


class Leases:
    """Leases by (group, rank).

    A group is made by its first lease, with a generation that no earlier group of this daemon had, and is gone with
    its last one.  All its ranks have one variant of one archive.
    """

    def __init__(self) -> None:
        self._leases: dict[tuple[str, int], LeaseState] = {}
        self._numbers = itertools.count(1)
        self._generations = itertools.count(1)

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
        attach_id: str = "",
    ) -> LeaseState:
        """A new lease.

        Raises
        ------
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
        other = next((lease for lease in self._leases.values() if lease.group == group), None)
        if other is not None and (other.variant, other.digest) != (variant, digest):
            raise UsageError(
                f"group {group} runs {other.variant} of {other.archive} ({other.digest[:12]}; rank {other.rank} is pid "
                f"{other.pid}) and rank {rank} asks for {variant} of {archive} ({digest[:12]}): use another group"
            )
        lease = LeaseState(
            number=next(self._numbers),
            group=group,
            rank=rank,
            variant=variant,
            archive=archive,
            digest=digest,
            pid=pid,
            uid=uid,
            generation=other.generation if other is not None else next(self._generations),
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

    def all(self) -> list[LeaseState]:
        """All leases, by group and rank."""
        return [self._leases[key] for key in sorted(self._leases)]

    def __len__(self) -> int:
        return len(self._leases)
