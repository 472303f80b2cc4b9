# SPDX-License-Identifier: Apache-2.0
"""The table of checks, and running it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foundryd.doctor import device, system
from foundryd.doctor.finding import Finding, Level, Surroundings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Check:
    """One row: what it is called when it fails itself, and what it does."""

    name: str
    run: Callable[[Surroundings], list[Finding]]


CHECKS = (
    Check("driver", device.gpus),
    Check("nccl", device.libraries),
    Check("shm", system.shared_memory),
    Check("memory", system.memory),
    Check("preload", system.preloaded),
    Check("runtime", system.runtime_directory),
    Check("daemon", system.daemon),
)


def examine(around: Surroundings) -> Iterator[Finding]:
    """Everything that the checks say, as they say it; a check that fails itself is an error, and the others go on."""
    for check in CHECKS:
        try:
            yield from check.run(around)
        except Exception as error:
            log.debug("the check %s failed", check.name, exc_info=True)
            yield Finding(check.name, Level.ERROR, f"the check failed ({error!r})", "report it with this line")
