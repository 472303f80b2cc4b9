# SPDX-License-Identifier: Apache-2.0
"""Inside a capturing engine: turns what the hook saw into a recording."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from foundryd._native import _hook
from foundryd.archive import index as ix
from foundryd.archive.members import Bytes, plain_key
from foundryd.archive.windows import with_own
from foundryd.capture.canonical import COMM, Numbering, canonical
from foundryd.capture.device import MemoryKernels, chunks_of
from foundryd.capture.modules import GlobalRange, RecordedModules, record_modules
from foundryd.capture.pinned import HOST, needed, on_host
from foundryd.capture.recording import ContentRecord, Recording
from foundryd.capture.symbols import Symbols
from foundryd.errors import CaptureError
from foundryd.rankpatch.mesh import Mesh
from foundryd.session.arena import ARENAS
from foundryd.session.arrays import freeze_key
from foundryd.session.communicators import communicators
from foundryd.session.native import CapturedGraph
from foundryd.settings import Settings

# Arenas whose bytes restore must bring: the others are filled by the engine.
_CONTENT_ARENAS = tuple(ARENAS.index(a) for a in ("default", "graph", "host"))


class Recorder:
    """Collects graphs as the engine captures them; ``recording`` assembles the whole."""

    def __init__(self, hook: _hook.Hook, settings: Settings, identity: dict[str, ix.IdentityField]) -> None:
        self._hook = hook
        self._settings = settings
        self._identity = identity
        hook.set_rank(settings.rank)
        self._captured: list[tuple[Any, Any, CapturedGraph]] = []
        self._keys: set[Any] = set()
        self.module_ids: list[int] = []  # the hook's module for each module of the last recording

    def add(self, key: Any, native: CapturedGraph) -> None:
        """Reads a captured graph.

        Raises ``UnsupportedNode`` if it has a node that cannot be restored exactly, and ``UsageError`` or
        ``CaptureError`` if a restored engine could not ask for it by its key.
        """
        plain_key(key)
        # An archive does not tell a list from a tuple, nor whoever asks for a graph True from 1.
        if (frozen := freeze_key(key)) in self._keys:
            raise CaptureError(f"the graph {key!r} was captured twice: give every graph a key of its own")
        self._captured.append((key, self._hook.read_graph(int(native.graph)), native))
        self._keys.add(frozen)

    def parameters(self) -> list[Bytes]:
        """The parameters of every graph that was added, and of its child graphs."""
        found, left = [], [arrays for _, arrays, _ in self._captured]
        while left:
            arrays = left.pop()
            found.append(arrays.params)
            left += arrays.children
        return found

    def recording(self, engine: dict[str, Any] | None = None, named: Iterable[int] = ()) -> Recording:
        """The recording as things are now; call when every graph is captured and no work is in flight.

        ``engine`` is what the engine's adapter wants to find again when it restores, ``named`` the addresses in it.
        """
        hook = self._hook
        mesh = Mesh.parse(self._settings.variant)
        report = hook.report()
        ops = hook.comm_ops()
        functions, groups = Numbering(), Numbering()
        op_rows = {int(g): ops[ops["group"] == g] for g in np.unique(ops["group"])}

        def group_key(group: int) -> bytes:
            rows = op_rows[group].copy()
            rows["group"] = 0
            return bytes(rows.tobytes())

        graphs = [
            canonical(
                key,
                arrays,
                functions,
                groups,
                group_key,
                outputs=native.outputs,
                instantiate_flags=native.instantiate_flags,
            )
            for key, arrays, native in self._captured
        ]
        modules = Numbering()
        described = self._functions(functions, modules)
        # Kernels are given addresses of globals of other modules, too.
        beside = self._globals_beside(modules)
        for module in sorted({symbol.module for graph in graphs for symbol in beside.mentioned(graph.params)}):
            modules.of(module)
        self.module_ids = list(modules.numbers)
        users = {m: [f.name for f in described if f.module == slot] for m, slot in modules.numbers.items()}
        recorded = record_modules(
            hook,
            modules.numbers,
            users,
            self._identity,
            allow_opaque=self._settings.allow_opaque_modules,
            cut=self._settings.cut,
        )
        beside = self._globals_beside(modules)
        self._refuse_beside(recorded, beside)
        symbols = Symbols(recorded.ranges)
        relocations = symbols.replace_in_graphs(graphs)
        global_relocations = symbols.replace_in_globals(recorded)
        windows = hook.windows()
        referring = [*(graph.params for graph in graphs), ops.view(np.uint8).reshape(-1)]
        referring += [data for module in recorded.records for _, data in module.globals]
        named = list(named)
        allocations, contents = self._memory(referring, named)
        everywhere = [symbols, beside]
        return Recording(
            variant=str(mesh),
            world=mesh.world,
            rank=self._settings.rank,
            identity=self._identity,
            arena_base=report.arena_base,
            arena_stride=report.arena_stride,
            allocations=allocations,
            graphs=graphs,
            functions=described,
            modules=recorded.records,
            symbols=symbols.used,
            relocations=relocations,
            global_relocations=global_relocations,
            communicators=self._communicators(mesh, ops),
            comm_ops=self._distinct_ops(groups, ops.dtype),
            contents=contents,
            windows=with_own(windows, report, self._settings.rank),
            own_window=bool((windows["rank"] == self._settings.rank).any()),
            engine=engine or {},
            notes={
                "comm_nodes": sum(int((g.nodes["type"] == COMM).sum()) for g in graphs),
                # What a control proves dead may hold them.
                "global_addresses": [
                    [content.address, found[0], found[1].name]
                    for content in contents
                    for found in (some.first_in(content.data) for some in everywhere)
                    if found is not None
                ],
                # A merge looks again at what refers to pinned memory.
                "named_on_host": [int(a) for a in named if (a - report.arena_base) // report.arena_stride == HOST],
                "opaque_modules": sorted(recorded.opaque.items()),
                "images": [[i.bytes, i.kept_because, i.cut_bytes, i.uncut_because, i.cut] for i in recorded.images],
            },
        )

    def _functions(self, functions: Numbering, modules: Numbering) -> list[ix.Function]:
        """Describes the functions that ``functions`` numbered, and numbers their modules by first use."""
        table, fields, settings, names = self._hook.functions()
        loaded = {int(m["id"]): m for m in self._hook.modules()}
        described = []
        for number in functions.numbers:
            row, name = table[number], names[number]
            module = int(row["module"])
            if loaded[module]["communication"]:
                raise CaptureError(
                    f"the kernel {name} belongs to a communication library but was captured outside its calls: its "
                    "state cannot be archived"
                )
            own = fields[row["param_first"] :][: row["param_count"]]
            last = settings[row["setting_first"] :][: row["setting_count"]]
            described.append(
                ix.Function(
                    modules.of(module),
                    name,
                    int(row["param_bytes"]),
                    [(int(f["offset"]), int(f["bytes"])) for f in own],
                    [(int(s["attribute"]), int(s["value"])) for s in last],
                )
            )
        return described

    def _globals_beside(self, modules: Numbering) -> Symbols:
        """Globals that the program asked for, of modules that are not numbered; symbols have the hook's numbers."""
        ranges = []
        for module in self._hook.modules():
            number = int(module["id"])
            if number in modules.numbers or not module["live"] or module["communication"]:
                continue
            table, names = self._hook.module_globals(number, [])
            for row, name in zip(table, names, strict=True):
                ranges.append(GlobalRange(int(row["address"]), int(row["bytes"]), ix.Symbol(number, name)))
        return Symbols(ranges)

    @staticmethod
    def _refuse_beside(recorded: RecordedModules, beside: Symbols) -> None:
        for slot, module in enumerate(recorded.records):
            for name, data in module.globals:
                for symbol in sorted(beside.mentioned(data), key=str):
                    raise CaptureError(
                        f"global {name} of module {slot} holds the address of global {symbol.name} of a module of "
                        "which no graph uses a kernel or an address, so that it is not archived: give the address to "
                        "a kernel as a parameter"
                    )

    def _memory(self, referring: Sequence[Bytes], named: Iterable[int]) -> tuple[np.ndarray, list[ContentRecord]]:
        """The allocations that a restore has to have, and what those hold that the engine does not fill.

        Looking allocates, so they are listed first.
        """
        every = self._hook.allocations()
        every = every[np.lexsort((every["ordinal"], every["arena"]))]
        host = on_host(every)
        contents, pinned = self._contents(every[~host]), self._contents(every[host])
        held = [(c.ordinal, c.data) for c in pinned]
        rows = needed(every[host], referring, [c.data for c in contents], named, held)
        return np.concatenate([every[~host], rows]), contents + [c for c in pinned if c.ordinal < len(rows)]

    def _communicators(self, mesh: Mesh, ops: np.ndarray) -> list[ix.Communicator]:
        """Communicators in creation order, by the mesh axes they span where they span any."""
        used = set(ops["communicator"].tolist())
        out = []
        for here in communicators(self._hook):
            members = here.ranks
            if not members and here.size == mesh.world:
                members = tuple(range(mesh.world))
            if not members and here.slot in used:
                raise CaptureError(
                    f"communicator {here.slot} of {here.size} ranks is used in a graph, but nobody said which ranks it "
                    "joins: call declare_communicator(handle, ranks) after creating it"
                )
            axes = mesh.axes_of(self._settings.rank, members) if members else None
            if axes is not None and mesh.group(self._settings.rank, axes) != members:
                axes = None  # axes say which ranks, and that they ascend
            out.append(
                ix.Communicator(
                    here.size,
                    None if axes is None else list(axes),
                    list(members) if axes is None and members else None,
                    here.declared,
                )
            )
        return out

    def _distinct_ops(self, groups: Numbering, dtype: np.dtype[Any]) -> np.ndarray:
        parts = []
        for content, number in groups.numbers.items():
            rows = np.frombuffer(content, dtype).copy()
            rows["group"] = number
            parts.append(rows)
        return np.concatenate(parts) if parts else np.zeros(0, dtype)

    def _contents(self, allocations: np.ndarray) -> list[ContentRecord]:
        """Every live one of ``allocations`` in the content arenas that is not all zero."""
        rows = allocations[np.isin(allocations["arena"], _CONTENT_ARENAS) & (allocations["live"] == 1)]
        on_device = rows[~on_host(rows)]
        zero = _all_zero([(int(r["address"]), int(r["bytes"])) for r in on_device])
        out = []
        for row in rows:
            address, size = int(row["address"]), int(row["bytes"])
            if address not in zero:
                data = self._hook.download(address, size)
                if data.any():
                    out.append(ContentRecord(address, int(row["arena"]), int(row["ordinal"]), data))
        return out


def _all_zero(ranges: list[tuple[int, int]]) -> set[int]:
    """Addresses of those ranges of device memory that hold only zeros."""
    if not ranges:
        return set()
    with MemoryKernels() as kernels:
        chunks = chunks_of(ranges)
        kernels.watch(chunks)
        survey = kernels.survey()
    filled = chunks["address"][survey.mixed | (survey.first != 0)]
    starts = np.array([address for address, _ in ranges], np.uint64)
    order = np.argsort(starts)
    owners = starts[order][np.searchsorted(starts[order], filled, side="right") - 1]
    return set(starts.tolist()) - set(owners.tolist())
