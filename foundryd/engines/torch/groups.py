# SPDX-License-Identifier: Apache-2.0
"""The NCCL communicators behind process groups: made in one order on both sides, and declared with their ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from foundryd.errors import UsageError

Declare = Callable[[int, Sequence[int]], None]


def connect(device: torch.device, declare: Declare) -> None:
    """Makes the communicator of every process group that this rank is in, in the order of the groups.

    PyTorch makes them at a group's first collective unless told otherwise; a restoring engine runs no warm-up, so its
    first would come too late.  ``declare(handle, ranks)`` is called for each.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    for group in list(dist.distributed_c10d._world.pg_map):
        backend = _nccl_backend(group, device)
        if backend is None:
            continue
        backend.eager_connect_single_device(device)
        handle = int(backend._comm_ptr())
        if handle == 0:
            ranks = dist.get_process_group_ranks(group)
            raise UsageError(
                f"the process group of ranks {ranks} has no NCCL communicator on {device}: make groups after setting "
                "the device"
            )
        declare(handle, dist.get_process_group_ranks(group))


def _nccl_backend(group: Any, device: torch.device) -> Any:
    """The NCCL back-end of a group, or None."""
    try:
        backend = group._get_backend(device)
    except RuntimeError:  # no back-end for this kind of device
        return None
    return backend if backend.name() == "nccl" else None
