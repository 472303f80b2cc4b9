# SPDX-License-Identifier: Apache-2.0
"""A worker with one thing wrong, on rank 1 mostly: ``python -P mutant.py NAME …`` and then the worker's own flags."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from cuda.bindings import driver

from foundryd.demo import device, engine, images, model, nccl, worker

Arguments = tuple[Any, ...]


def argument(kernel: str, change: Callable[[list[Any]], None]) -> Callable[[], None]:
    """Changes the arguments of every launch of a kernel."""

    def start(self: model.Kernels) -> None:
        launch = getattr(self, kernel)

        def changed(items: int, *args: Any) -> None:
            values = list(args)
            change(values)
            launch(items, *values)

        setattr(self, kernel, changed)

    return lambda: after_load(start)


def after_load(action: Callable[[model.Kernels], None]) -> None:
    """Does something to the kernels once they are loaded."""
    original = model.Kernels.__init__

    def patched(self: model.Kernels, *args: Any) -> None:
        original(self, *args)
        action(self)

    model.Kernels.__init__ = patched  # type: ignore[method-assign]


def variable(module: int, name: str, value: list[int]) -> Callable[[], None]:
    """Gives a module's global other bytes."""

    def start(self: model.Kernels) -> None:
        address, size = self.owners[module].variable(name)
        values = np.array(value, dtype=np.int32)
        assert values.nbytes <= size
        device.checked(driver.cuMemcpyHtoD, address, values.ctypes.data, values.nbytes)

    return lambda: after_load(start)


def baking(**numbers: int) -> Callable[[], None]:
    """Bakes other numbers into the image."""

    def start() -> None:
        original = images.SoftImages.image

        def image(self: images.SoftImages, name: str, right: images.Baking) -> bytes:
            return original(self, name, dataclasses.replace(right, **numbers))

        images.SoftImages.image = image  # type: ignore[method-assign]

    return start


def without(call: str) -> Callable[[], None]:
    """Leaves out one driver call of the step, so that its target stays stale."""

    def start() -> None:
        original = model.checked

        def checked(function: Callable[..., Any], *args: Any) -> Any:
            return None if function.__name__ == call else original(function, *args)

        model.checked = checked

    return start


def silent_collective() -> None:
    nccl.Communicator.all_reduce = lambda self, buffer, count, stream: None  # type: ignore[method-assign]


def one_block() -> None:
    device.MAX_BLOCKS = 1


def wide_blocks() -> None:
    device.THREADS = 1024


def stale(args: list[Any]) -> None:
    args[0].page_table = args[0].slopes = args[0].semaphore = 0xDEAD


def no_rope(self: model.Kernels) -> None:
    self.rope_table = lambda *args: None  # type: ignore[assignment]


def decay_elsewhere(args: list[Any]) -> None:
    args[0].decay = args[0].qkv


def zero(place: int) -> Callable[[list[Any]], None]:
    return lambda args: args.__setitem__(place, 0)


# On rank 1, whose first token is not 0 in the meshes of the tests, or whose first expert is not.
HARMLESS: dict[str, Callable[[], None]] = {
    "nothing": lambda: None,
    "grid of one block": one_block,
    "wide blocks": wide_blocks,
    "other stale pointers": argument("attend", stale),
}
TP: dict[str, Callable[[], None]] = {
    "argument: vocabulary start": argument("slice_argmax", zero(4)),
    "image: first token": baking(first_token=0),
    "global: slice start": variable(2, "slice_start", [0]),
    "no all-reduce": silent_collective,
}
EP: dict[str, Callable[[], None]] = {
    "argument: first expert": argument("expert_down", zero(9)),
    "image: first expert": baking(first_expert=0),
    "global: place": variable(4, "place", [0, 0]),
    "global: decay": variable(4, "decay", [0] * 64),
    "address of a global": argument("attend", decay_elsewhere),
    "constant table": lambda: after_load(no_rope),
    "memset": without("cuMemsetD32Async"),
    "memcpy from the host": without("cuMemcpyHtoDAsync"),
    "memcpy to the input": without("cuMemcpyDtoDAsync"),
}
ALL = {**HARMLESS, **TP, **EP}
EVERYWHERE = {"no all-reduce"}  # one rank without it would keep the others waiting


def main() -> int:
    name, *rest = sys.argv[1:]
    assert engine.Kernels is model.Kernels
    if os.environ["RANK"] == "1" or name in EVERYWHERE:
        ALL[name]()
    return worker.main(rest)


if __name__ == "__main__":
    sys.exit(main())
