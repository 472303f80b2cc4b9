# SPDX-License-Identifier: Apache-2.0
"""Arenas as memory pools of PyTorch's caching allocator, and proof that tensors lie where they lay.

The hook places the segments that the allocator asks for, and compares their sequence.  Inside a segment the allocator
decides; so what it placed there is recorded and compared too, block by block, and tensors that the engine names are
compared by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from foundryd.archive.members import Bytes
from foundryd.capture.canonical import wide_words
from foundryd.capture.mentions import Mentions
from foundryd.capture.recording import Recording
from foundryd.errors import CaptureError, LayoutDiverged, UsageError
from foundryd.session.arena import ARENAS, arena
from foundryd.session.driver import call

# What the engine itself fills: what was allocated there must be found again.
FILLED = ("weights", "kv", "io")


class Arenas:
    """A memory pool for each arena that the engine fills; made at first use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pools: dict[str, torch.cuda.MemPool] = {}

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Tensors made inside come from that arena; ``host`` and ``default`` are where others go by themselves."""
        if name not in ARENAS or name == "graph":
            raise UsageError(f"there is no arena {name!r} to choose: use one of {', '.join((*FILLED, 'host'))}")
        if name not in FILLED:
            yield
            return
        if name not in self._pools:
            self._pools[name] = torch.cuda.MemPool()
        # The pool first: leaving it gives nothing back to the driver, so no call is made outside of the arena.
        with torch.cuda.use_mem_pool(self._pools[name], self._device), arena(name):
            yield

    def blocks(self) -> dict[str, list[list[int]]]:
        """[address, bytes] of every block that is in use, by arena."""
        return {
            name: sorted(
                [block["address"], block["requested_size"]]
                for segment in pool.snapshot(include_traces=False)
                for block in segment["blocks"]
                if block["state"] == "active_allocated"
            )
            for name, pool in sorted(self._pools.items())
        }


def unpooled_blocks(state: str = "active_allocated") -> list[tuple[int, int]]:
    """(address, bytes) of every block outside of all pools in a state: tensors of no arena, and workspaces."""
    segments = torch.cuda.memory_snapshot(include_traces=False)
    return sorted(
        (block["address"], block["size"])
        for segment in segments
        if tuple(segment["segment_pool_id"]) == (0, 0)
        for block in segment["blocks"]
        if block["state"] == state
    )


def clear_unused(parameters: Sequence[Bytes]) -> None:
    """Fills what the allocator keeps for later tensors with zeros, outside of all pools; nothing may be in flight.

    What earlier tensors left there differs in every process, and lies beside tensors that graphs use, in the same
    allocations of the driver.  Pools are left alone: those of graphs have no tensors that are alive, but their graphs'.
    So is every block that ``parameters`` of graphs have an address of: a graph may still read what a tensor left there
    that the program has let go.
    """
    blocks = unpooled_blocks("inactive")
    mentions = Mentions(*_columns(blocks))
    mentions.see(parameters)
    for (address, size), mentioned in zip(blocks, mentions.found, strict=True):
        if not mentioned:
            call("cuMemsetD8", address, 0, size)
    call("cuCtxSynchronize")


def referred_to(blocks: Sequence[tuple[int, int]], recording: Recording) -> list[tuple[int, int]]:
    """Those of ``blocks`` that a parameter of some graph points into, by its value."""
    mentions = Mentions(*_columns(blocks))
    layouts = [f.fields for f in recording.functions]
    for graph in recording.graphs if len(blocks) else ():
        places = (wide_words(graph, layouts) - graph.param_start()) // 8
        values = graph.params[: len(graph.params) // 8 * 8].view(np.uint64)[places]
        mentions.see([values.view(np.uint8)], aligned=True)
    return [block for block, used in zip(blocks, mentions.found, strict=True) if used]


def _columns(blocks: Sequence[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [address for address, _ in blocks], [size for _, size in blocks]


def describe(tensor: torch.Tensor) -> list[Any]:
    """[address, shape, strides, dtype] of a tensor."""
    return [
        tensor.data_ptr(),
        list(tensor.shape),
        list(tensor.stride()),
        str(tensor.dtype).removeprefix("torch."),
    ]


class Bound:
    """Tensors that the engine named: each must have the address and form that it had when graphs were captured."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[torch.Tensor, list[Any]]] = {}  # with what they were when they were bound

    def add(self, name: str, thing: torch.Tensor | torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
        """Takes in a tensor, a module's parameters and buffers, or tensors by name."""
        if isinstance(thing, torch.nn.Module):
            named = [*thing.named_parameters(), *thing.named_buffers()]
        elif isinstance(thing, Mapping):
            named = list(thing.items())
        else:
            named = [("", thing)]
        for part, tensor in named:
            full = f"{name}.{part}" if part else name
            if full in self._tensors:
                raise UsageError(f"the name {full!r} was bound twice: give every tensor a name of its own")
            self._tensors[full] = (tensor, describe(tensor))

    def recorded(self) -> dict[str, list[Any]]:
        """The tensors by name, as they are now; raises ``UsageError`` if one has moved since it was bound."""
        for name, (tensor, before) in self._tensors.items():
            now = describe(tensor)
            if now != before:
                raise UsageError(
                    f"the tensor {name!r} was {_shown(before)} when it was bound and is {_shown(now)} now: bind it "
                    "when it is where it stays"
                )
        return {name: before for name, (_, before) in self._tensors.items()}

    def require_in_arenas(self, allocations: np.ndarray) -> None:
        """Raises ``CaptureError`` if a named tensor lies where a restoring engine would not put it again.

        ``allocations`` are the hook's, of every arena.
        """
        live = np.sort(allocations[allocations["live"] == 1], order="address")
        for name, (address, shape, _, _) in self.recorded().items():
            place = int(np.searchsorted(live["address"], np.uint64(address), side="right")) - 1
            inside = place >= 0 and address < int(live["address"][place]) + int(live["bytes"][place])
            where = ARENAS[int(live["arena"][place])] if inside else "none"
            if 0 not in shape and where not in (*FILLED, "host"):
                raise CaptureError(
                    f"the tensor {name!r} is bound and lies at {address:#x}, in the arena {where}: make it inside "
                    f"graphs.arena(name) with one of {', '.join(FILLED)}"
                )

    def clear(self) -> None:
        """Lets go of the tensors."""
        self._tensors.clear()


def _shown(described: list[Any]) -> str:
    address, shape, _, dtype = described
    return f"{dtype} {shape} at {address:#x}"


def check(recorded: Mapping[str, Any], bound: Mapping[str, list[Any]], blocks: Mapping[str, list[list[int]]]) -> None:
    """Raises ``LayoutDiverged`` at the first tensor or block that is not where it was."""
    for name, then in recorded["bound"].items():
        now = bound.get(name)
        if now is None:
            raise LayoutDiverged(
                f"the tensor {name!r} was bound when capturing and is not now: bind it before the graphs"
            )
        for what, old, new in zip(("address", "shape", "strides", "dtype"), then, now, strict=True):
            if old != new:
                shown = (f"{old:#x}", f"{new:#x}") if what == "address" else (old, new)
                raise LayoutDiverged(
                    f"the {what} of the tensor {name!r} is {shown[1]} here and {shown[0]} in the archive: make "
                    "the same tensors in the same order, or capture again"
                )
    for name in (name for name in bound if name not in recorded["bound"]):
        raise LayoutDiverged(f"the tensor {name!r} is bound here and was not when capturing: capture again")
    for name in sorted({*recorded["blocks"], *blocks}):
        then, now_there = recorded["blocks"].get(name, []), blocks.get(name, [])
        for old, new in zip(then, now_there, strict=False):
            if list(old) != list(new):
                raise LayoutDiverged(
                    f"a tensor of arena {name!r} lies at {new[0]:#x} with {new[1]} bytes here and at {old[0]:#x} with "
                    f"{old[1]} bytes in the archive: make the same tensors in the same order, or capture again"
                )
        if len(then) != len(now_there):
            raise LayoutDiverged(
                f"arena {name!r} holds {len(now_there)} tensors here and {len(then)} in the archive: "
                "make the same tensors, or capture again"
            )
