# SPDX-License-Identifier: Apache-2.0
"""The NCCL communicators behind process groups, declared in one order on both sides with their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foundryd.errors import UsageError

Declare = Callable[[int, Sequence[int]], None]


def connect(device: torch.device, declare: Declare, wanted: Callable[[int], bool] = lambda place: True) -> None:
    """Declares the communicators of the process groups that this rank is in, in the order of the groups.

    PyTorch makes one at a group's first collective unless told otherwise; a restoring engine runs no warm-up, so its
    first would come too late.  So those of groups whose place (from 0, among groups of NCCL) is ``wanted`` are made
    here if they are not there yet.  ``declare(handle, ranks)`` is called for each group, with the handle 0 for one
    without a communicator: each costs a second and a gigabyte where no other rank needs it.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    backends = ((group, _nccl_backend(group, device)) for group in list(dist.distributed_c10d._world.pg_map))
    for place, (group, backend) in enumerate((g, b) for g, b in backends if b is not None):
        ranks = dist.get_process_group_ranks(group)
        # Connecting a group that is connected makes a second communicator, which nothing uses.
        if backend._comm_ptr() == 0 and wanted(place):
            backend.eager_connect_single_device(device)
            if backend._comm_ptr() == 0:
                raise UsageError(
                    f"the process group of ranks {ranks} has no NCCL communicator on {device}: make groups after "
                    "setting the device"
                )
        declare(int(backend._comm_ptr()), ranks)


def _nccl_backend(group: Any, device: torch.device) -> Any:
    """The NCCL back-end of a group, or None."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # no back-end for this kind of device
        return None
    return backend if backend.name() == "nccl" else None
