# SPDX-License-Identifier: Apache-2.0
"""A fake world: rank r of N alone in its process, for capturing without peers.

``torch.distributed`` gets a store that answers at once, CPU groups that are fakes of its own, and keeps its NCCL
back-end, which runs on the preloaded stub library.  Nothing waits for anybody.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from foundryd.errors import UsageError

# What the NCCL back-end asks the store for is an ncclUniqueId.
_UNIQUE_ID_BYTES = 128


def _bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


class LoneStore(dist.Store):  # type: ignore[misc]
    """A store whose other clients have always just answered.

    A key that nobody set reads as a unique id and is waited for by nobody; only ``check`` tells the truth, since
    watchdogs ask it for signs of trouble.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._values: dict[str, bytes] = {}
        self._timeout = timedelta(seconds=60)

    def set(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = _bytes(value)

    def get(self, key: str) -> bytes:
        with self._lock:
            return self._values.get(key, bytes(_UNIQUE_ID_BYTES))

    def add(self, key: str, value: int) -> int:
        with self._lock:
            total = int(self._values.get(key, b"0")) + value
            self._values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: Any, desired: Any) -> bytes:
        wanted, new = _bytes(expected), _bytes(desired)
        with self._lock:
            if self._values.get(key, b"") == wanted:
                self._values[key] = new
            return self._values.get(key, wanted)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self._values for key in keys)

    def num_keys(self) -> int:
        with self._lock:
            return len(self._values)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Returns at once: whoever would have set the keys has."""

    def append(self, key: str, value: Any) -> None:
        with self._lock:
            self._values[key] = self._values.get(key, b"") + (_bytes(value))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[Any]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def has_extended_api(self) -> bool:
        return True

    def clone(self) -> LoneStore:
        return self

    # C++ asks for these by its own names.
    getNumKeys = num_keys  # noqa: N815
    deleteKey = delete_key  # noqa: N815

    @property
    def timeout(self) -> timedelta:
        """How long a wait may take; nothing waits."""
        return self._timeout

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout


class LoneWorld:
    """``torch.distributed`` as rank ``rank`` of ``size``, without the others; undone by ``leave``."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store = LoneStore()  # C++ holds no reference of its own
        self._undo: list[Callable[[], None]] = []

    def enter(self) -> None:
        """From now on ``init_process_group`` needs no peer, and one device stands for every local rank's."""
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the back-end "fake"

        # Watchdogs that ask peers how they are have nobody to ask.
        for name in ("TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
            self._set_environment(name, "0")
        self._patch(dist, "init_process_group", self._init_process_group)
        self._patch(dist.distributed_c10d, "init_process_group", self._init_process_group)
        self._patch(dist, "new_group", self._new_group)
        self._patch(dist.distributed_c10d, "new_group", self._new_group)
        self._patch(torch.cuda, "set_device", self._set_device)

    def leave(self) -> None:
        """Puts ``torch.distributed`` back as it was."""
        while self._undo:
            self._undo.pop()()

    def _patch(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def patched(*arguments: Any, **named: Any) -> Any:
            return wrapper(real, *arguments, **named)

        setattr(owner, name, patched)
        self._undo.append(lambda: setattr(owner, name, real))

    def _set_environment(self, name: str, value: str) -> None:
        before = os.environ.get(name)
        os.environ[name] = value

        def undo() -> None:
            if before is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = before

        self._undo.append(undo)

    def _init_process_group(
        self,
        real: Callable[..., Any],
        backend: str | None = None,
        init_method: str | None = None,
        timeout: timedelta | None = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        group_name: str = "",
        pg_options: Any = None,
        device_id: Any = None,
        **more: Any,
    ) -> None:
        if world_size not in (-1, self.size) or rank not in (-1, self.rank):
            raise UsageError(
                f"init_process_group is asked for rank {rank} of {world_size}, and this process is captured as rank "
                f"{self.rank} of {self.size}: take both from RANK and WORLD_SIZE"
            )
        real(
            "cpu:fake,cuda:nccl",
            timeout=timeout,
            world_size=self.size,
            rank=self.rank,
            store=self._store,
            group_name=group_name,
            pg_options=pg_options,
            device_id=None if device_id is None else self._device(device_id),
            **more,
        )

    @staticmethod
    def _new_group(
        real: Callable[..., Any],
        ranks: Any = None,
        timeout: timedelta | None = None,
        backend: str | None = None,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        if backend is not None:
            backend = str(backend).lower()
            backend = "fake" if backend == "gloo" else backend.replace("cpu:gloo", "cpu:fake")
        if named.get("device_id") is not None:
            named["device_id"] = LoneWorld._device(named["device_id"])
        return real(ranks, timeout, backend, *arguments, **named)

    @staticmethod
    def _set_device(real: Callable[..., None], device: Any) -> None:
        real(LoneWorld._device(device))

    @staticmethod
    def _device(device: Any) -> torch.device:
        """``device``, or the one that stands for it where this machine has fewer."""
        asked = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if asked.type != "cuda" or asked.index is None:
            return asked
        return torch.device("cuda", asked.index % max(1, torch.cuda.device_count()))
