# SPDX-License-Identifier: Apache-2.0
"""The default process group's store, as foundryd's own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class TorchStore:
    """A ``foundryd.session.store.Store`` over a ``torch.distributed.Store``."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: bytes) -> None:
        """Publishes ``value`` under ``key``."""
        self._store.set(key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits at most ``timeout`` seconds for ``key``; raises ``TimeoutError``."""
        try:
            self._store.wait([key], timedelta(seconds=timeout))
        except RuntimeError as error:  # a DistStoreError; which kind it is, only its text says
            raise TimeoutError(f"nobody set {key} within {timeout:g} s ({error})") from error
        return bytes(self._store.get(key))


def default_store() -> TorchStore | None:
    """The store of the default process group, or None where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    return TorchStore(dist.distributed_c10d._get_default_store())
