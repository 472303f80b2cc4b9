# SPDX-License-Identifier: Apache-2.0
"""The key-value store through which ranks of a group agree; the engine brings it."""

from __future__ import annotations

from typing import Protocol


class Store(Protocol):
    """What foundryd needs of a store: ``torch.distributed.Store`` has it, with a thin adapter."""

    def set(self, key: str, value: bytes) -> None:
        """Publishes ``value`` under ``key``."""

    def get(self, key: str, timeout: float) -> bytes:
        """Waits at most ``timeout`` seconds for ``key``; raises ``TimeoutError`` when it does not come."""
