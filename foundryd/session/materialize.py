# SPDX-License-Identifier: Apache-2.0
"""The steps of a restore: modules, content, communication, graphs, each for one rank."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any

import numpy as np

from foundryd._native import _hook
from foundryd.archive import index as ix
from foundryd.archive.format import image_section
from foundryd.archive.members import block_bytes
from foundryd.archive.reader import ArchiveReader
from foundryd.errors import DeadlineExceeded, LayoutDiverged, WindowMissing
from foundryd.rankpatch.plan import Plan
from foundryd.session import communicators
from foundryd.session.arena import ARENAS
from foundryd.session.arrays import decode_outputs, freeze_key
from foundryd.session.building import Bindings, BuiltGraph, Needs, SmallGraphs
from foundryd.session.executables import Executables, Member, RestoredGraph
from foundryd.session.patching import MemberBlocks
from foundryd.session.policy import RestorePolicy

# What a driver keeps of the host's memory for a node of an executable, about (docs/benchmarks.md).
_HOST_BYTES = 8 << 10
_LARGE_PAGE = 2 << 20  # bytes


def check_layout(hook: _hook.Hook) -> None:
    """Raises ``LayoutDiverged`` naming the first allocation that is not as recorded."""
    divergence = hook.divergence()
    kind, arena = divergence.kind, ARENAS[divergence.arena]
    ordinal, expected, actual = divergence.ordinal, divergence.expected_bytes, divergence.actual_bytes
    if kind == 0:
        return
    what = {
        1: f"is {actual} bytes here and {expected} in the archive",
        2: f"({actual} bytes) is made here and not in the archive",
        3: f"({expected} bytes) is in the archive and was not made here",
        4: "is freed on one side and alive on the other",
        5: f"({actual} bytes) is mapped by the engine itself at another address than in the archive",
    }.get(kind, f"diverged in a way this version does not know ({kind})")
    raise LayoutDiverged(
        f"allocation {ordinal} of arena {arena!r} {what}: restore with the configuration that was captured, or "
        "capture again"
    )


def check_windows(hook: _hook.Hook, wanted: np.ndarray, rank: int, *, own: bool) -> None:
    """Raises ``WindowMissing`` naming the first of peers' allocations that is not open as it was at the capture.

    ``wanted`` are ``fdy_window`` of this rank; those of its own memory matter only if ``own``.
    """
    here = {int(w["address"]): (int(w["rank"]), int(w["bytes"])) for w in hook.windows()}
    for window in wanted:
        peer, address, size = int(window["rank"]), int(window["address"]), int(window["bytes"])
        if peer == rank and not own:
            continue
        if (found := here.get(address)) != (peer, size):
            state = "is not open" if found is None else f"is open with {found[1]} bytes"
            raise WindowMissing(
                f"the allocation of rank {peer} at {address:#x} ({size} bytes), which graphs may use, {state} on rank "
                f"{rank}: exchange the same IPC handles as at the capture before restoring"
            )


class Materializer:
    """Turns an archive's variant and a rank's plan into live driver objects."""

    def __init__(self, hook: _hook.Hook, reader: ArchiveReader, variant: ix.Variant, plan: Plan) -> None:
        self._hook = hook
        self._reader = reader
        self._variant = variant
        self._plan = plan
        self._bindings: Bindings | None = None
        self._needs: list[Needs] = []  # of each of the first graphs
        self._small = SmallGraphs(hook)
        self._process = os.getpid()
        self._slots = np.zeros(0, np.uint32)
        self._members = MemberBlocks(reader, variant, plan)
        self._memory: _hook.BuildMemory | None = None
        self._room: _hook.HeapRoom | None = None
        self.executables: Executables | None = None
        ops = next(i for i, b in enumerate(variant.blocks) if b.kind == "comm_ops")
        self.comm_ops: np.ndarray = self._block(ops).view(_hook.comm_op_dtype)

    def check_windows(self) -> None:
        """Raises ``WindowMissing`` unless what was open of peers' memory at the capture is open now."""
        windows = self._variant.windows
        if windows is not None:
            wanted = self._block(windows.block).view(_hook.window_dtype)
            check_windows(self._hook, wanted, self._plan.rank, own=windows.own)

    def load_modules(self) -> None:
        """Gives the driver the images that the first graphs use; another graph's follow when it is built.

        Where graphs have collectives it is all images, since bringing code into a context waits for what is in flight
        there and holds up launches meanwhile (rows ``flight.loaded_beside_work`` and ``flight.launched_while_loading``
        of the conformance tests): a rank that waits for a collective cannot launch what its peers wait for.
        """
        variant, executables = self._variant, self._arranged()
        self._bindings = Bindings(self._hook, self._load, variant.functions, variant.symbols)
        self._needs = [self._members.needs(member) for member in executables.first]
        wanted = {place for place, module in enumerate(variant.modules) if module.globals or len(self.comm_ops)}
        wanted.update(place for needs in self._needs for place in self._bindings.modules_of(needs))
        for place in sorted(wanted):
            self._bindings.module(place)
        if len(self.comm_ops):
            # A library comes into the context with the first of its functions.
            firsts = {function.module: number for number, function in reversed(list(enumerate(variant.functions)))}
            self._needs.append(Needs(np.array(sorted(firsts.values()), int)))

    def bind_functions(self) -> None:
        """Loads the functions that come first in full, resolves symbols and puts changed globals in place."""
        bindings = self._bound()
        for needs in self._needs:
            bindings.need(needs)
        for place, module in enumerate(self._variant.modules):
            for changed in module.globals:
                address, _ = self._hook.global_address(bindings.module(place), changed.name)
                block = self._block(changed.block)
                # A global may hold the address of another.
                bindings.relocate(block, self._members.relocations_of(changed.block))
                self._hook.upload(address, block)

    def upload_content(self) -> None:
        """Fills the held ranges that had content when the capture ended."""
        for content in self._variant.contents:
            self._hook.upload(content.address, self._block(content.block))

    def match_communicators(self) -> None:
        """Finds this process's communicators; raises ``CommunicatorMismatch`` unless they are those of the plan."""
        known = self._variant.communicators
        self._slots = communicators.match(self._hook, self._plan, known, self.comm_ops)

    def reissue(self) -> None:
        """Issues every distinct group of collectives once, under capture; all ranks do so in the same order."""
        ops = self.comm_ops.copy()
        ops["communicator"] = self._slots[ops["communicator"]]
        self._small.issue(ops)

    def arrange(self, policy: RestorePolicy, *, extra: dict[str, str]) -> None:
        """Takes in the policy; raises ``NotInArchiveError`` or ``UsageError`` if it does not fit the archive."""
        members = [
            Member(place, freeze_key(m.key), m.template, decode_outputs(m.outputs))
            for place, m in enumerate(self._variant.members)
        ]
        who = f"rank {self._plan.rank}"
        self.executables = Executables(self._build, members, policy, done=self._give_back, who=who, extra=extra)

    def build_graphs(self) -> dict[Any, RestoredGraph]:
        """Builds and instantiates the members that the policy wants first; every member can be replayed then."""
        executables = self._arranged()
        executables.build_first()
        return executables.graphs

    def close(self) -> None:
        """Executables, graphs, small graphs, in this order; modules stay, for work may still be in flight.

        Raises what ``Executables.close`` raises, after which the small graphs stay too if it was ``DeadlineExceeded``.
        In a forked child there is nothing of the driver's to destroy.
        """
        if os.getpid() != self._process:
            return
        with ExitStack() as last:
            last.callback(self._small.close)
            last.callback(self._give_back)
            if self.executables is not None:
                try:
                    self.executables.close()
                except DeadlineExceeded:
                    last.pop_all()
                    raise

    def _build(self, member: Member) -> BuiltGraph:
        """The graph of a member, for this rank; needs no other rank, since collectives were issued before."""
        bindings = self._bound()
        graph = self._members.patched(member, bindings)
        if self._memory is None:
            self._memory = self._hook.build_memory()
        host = len(graph.nodes) * _HOST_BYTES
        # Of small graphs a process would have a large page, or two, that it does not fill.
        if host >= _LARGE_PAGE:
            self._room = self._room or _hook.HeapRoom()
            self._room.make(host)
        return BuiltGraph(
            self._hook,
            graph.nodes,
            graph.edges,
            graph.attributes,
            graph.params,
            bindings.functions,
            self._small.handles,
            self._variant.members[member.place].instantiate_flags,
            instantiate=False,
            memory=self._memory,
        )

    def _give_back(self) -> None:
        """Lets go of what building graphs needed; to be called again."""
        self._memory = self._room = None
        self._members.give_back()

    def _load(self, place: int) -> int:
        """The hook's module for the image that this rank has of a module."""
        image = self._reader.section(image_section(self._plan.modules[place]))
        return self._hook.load_module(self._variant.modules[place].api, image)

    def _bound(self) -> Bindings:
        assert self._bindings is not None, "load_modules comes first"
        return self._bindings

    def _arranged(self) -> Executables:
        assert self.executables is not None, "arrange comes first"
        return self.executables

    def _block(self, number: int) -> np.ndarray:
        """The bytes of a block for this rank."""
        data = block_bytes(self._reader, self._variant, number)
        self._plan.apply(number, data)
        return data
