# SPDX-License-Identifier: Apache-2.0
"""What one captured rank left behind, in memory and as a file.

A recording is an archive with a single rank; the archive that ranks restore from is packed by the same code from the
reference rank's recording and the rules.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import blake3
import msgspec
import numpy as np

import foundryd
from foundryd._native import _hook, _rankpatch
from foundryd.archive import index as ix
from foundryd.archive.dtypes import noise_dtype, template_noise_dtype
from foundryd.archive.format import image_section
from foundryd.archive.members import GraphParts, TemplateReader, add_template
from foundryd.archive.noise import to_store
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.capture.canonical import Graph, field_table, template_key
from foundryd.capture.pinned import on_host
from foundryd.errors import ArchiveFormatError, CaptureError
from foundryd.rankpatch.noise import span_bytes
from foundryd.session.arrays import decode_outputs, encode_outputs, freeze_key

_PATIENCE = 3600.0  # seconds; whoever announced a recording ends those who wait long before


@dataclass
class ModuleRecord:
    """A module instance: its image, and the globals that the program changed (name, bytes)."""

    api: int
    image: bytes
    globals: list[tuple[str, np.ndarray]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """blake3 of the image, hexadecimal."""
        return blake3.blake3(self.image).hexdigest()


@dataclass
class ContentRecord:
    """The bytes (uint8) of a live allocation at the end of the capture."""

    address: int
    arena: int
    ordinal: int
    data: np.ndarray


@dataclass
class Proofs:
    """What a control proved about its rank.

    Attributes
    ----------
    dead : addresses of ranges whose content no replay depends on.
    noise, strays : rows of ``noise_dtype`` on which no output depends: words in which two captures of a rank differ,
        and words that ``Strays`` named.
    varied : whether this holds in more than one state of the engine.
    seconds : what the proofs took, by their part.
    unsteady : the places of graphs that do not do the same twice from the same memory.
    """

    dead: list[int] = field(default_factory=list)
    noise: np.ndarray = field(default_factory=lambda: np.zeros(0, noise_dtype))
    strays: np.ndarray = field(default_factory=lambda: np.zeros(0, noise_dtype))
    varied: bool = False
    seconds: dict[str, float] = field(default_factory=dict)
    unsteady: list[int] = field(default_factory=list)


@dataclass
class Recording:
    """One rank's capture, canonical: equal between ranks but for what depends on the rank."""

    variant: str
    world: int
    rank: int
    identity: dict[str, ix.IdentityField]
    arena_base: int
    arena_stride: int
    allocations: np.ndarray  # allocation_dtype, by arena and ordinal
    graphs: list[Graph]
    functions: list[ix.Function]
    modules: list[ModuleRecord]
    symbols: list[ix.Symbol]
    relocations: np.ndarray  # relocation_dtype; `block` is the graph
    communicators: list[ix.Communicator]
    comm_ops: np.ndarray  # comm_op_dtype, `group` as the nodes number it
    contents: list[ContentRecord]
    global_relocations: np.ndarray = field(  # `block` is the place in the list of all modules' globals
        default_factory=lambda: np.zeros(0, _rankpatch.relocation_dtype)
    )
    windows: np.ndarray = field(default_factory=lambda: np.zeros(0, _hook.window_dtype))  # see archive.windows.with_own
    own_window: bool = False  # whether the rank's own memory was open, too
    engine: dict[str, Any] = field(default_factory=dict)  # what the engine's adapter compares when it restores
    notes: dict[str, Any] = field(default_factory=dict)
    proofs: Proofs | None = None  # of a control

    def blocks(self) -> list[np.ndarray]:
        """Every block, in the order in which rules number them (uint8 arrays)."""
        return [
            *(g.block for g in self.graphs),
            _bytes(self.comm_ops),
            *(c.data for c in self.contents),
            *(data for m in self.modules for _, data in m.globals),
            *([_bytes(self.windows)] if len(self.windows) else []),
        ]

    def fields(self) -> list[np.ndarray | None]:
        """Field boundaries of each block (see ``field_table``); None where the content has no known fields."""
        layouts = [f.fields for f in self.functions]
        plain = len(self.contents) + sum(len(m.globals) for m in self.modules)
        return [
            *(field_table(g.nodes, layouts) for g in self.graphs),
            _row_fields(self.comm_ops),
            *([None] * plain),
            *([_row_fields(self.windows)] if len(self.windows) else []),
        ]

    def describe(self, block: int, offset: int) -> str:
        """Names a byte of a block for an error message."""
        if block < len(self.graphs):
            return self._describe_member(self.graphs[block], offset)
        block -= len(self.graphs)
        if block == 0:
            return _describe_row(self.comm_ops, offset, "communication op")
        block -= 1
        if block < len(self.contents):
            content = self.contents[block]
            return f"byte {offset} of allocation {content.ordinal} of arena {arena_name(content.arena)}"
        block -= len(self.contents)
        flat = [(i, name) for i, m in enumerate(self.modules) for name, _ in m.globals]
        if block == len(flat):
            return _describe_row(self.windows, offset, "window")
        return f"byte {offset} of global {flat[block][1]} of module {flat[block][0]}"

    def is_content(self, block: int) -> bool:
        """Whether a block is the content of an allocation."""
        return 0 <= block - len(self.graphs) - 1 < len(self.contents)

    def _describe_member(self, graph: Graph, offset: int) -> str:
        start = graph.param_start()
        itemsize = graph.nodes.dtype.itemsize
        if offset < start:
            node, within = divmod(offset, itemsize)
            names = list(graph.nodes.dtype.names or ())
            what = [n for n in names if graph.nodes.dtype.fields[n][1] <= within][-1]  # type: ignore[index]
        else:
            node, within = (int(found[0]) for found in graph.nodes_at(np.array([offset])))
            what = f"parameter byte {within}"
            function = int(graph.nodes["function"][node])
            if function < len(self.functions):
                places = [i for i, (o, n) in enumerate(self.functions[function].fields) if o <= within < o + n]
                if places:
                    first = self.functions[function].fields[places[0]][0]
                    what = f"parameter {places[0]} byte {within - first}"
        function = int(graph.nodes["function"][node])
        name = self.functions[function].name if function < len(self.functions) else f"type {graph.nodes['type'][node]}"
        return f"{what} of node {node} ({name}) of graph {graph.key!r}"

    def structure(self) -> dict[str, Any]:
        """What ranks of one class have in common, by name of the part; compared with ``==``."""
        return {
            "graphs": [g.key for g in self.graphs],
            "outputs": [encode_outputs(g.outputs) for g in self.graphs],
            "engine": self.engine,
            "templates": [blake3.blake3(template_key(g)).digest() for g in self.graphs],
            "functions": self.functions,
            "modules": [(m.api, [(name, len(data)) for name, data in m.globals]) for m in self.modules],
            "symbols": self.symbols,
            "relocations": self.relocations.tobytes(),
            "relocations of globals": self.global_relocations.tobytes(),
            "communicators": [(c.size, c.axes, c.declared) for c in self.communicators],
            "comm ops": len(self.comm_ops),
            "windows": (len(self.windows), self.own_window),
            "arenas": (self.arena_base, self.arena_stride),
        }

    def structure_key(self) -> bytes:
        """Equal for ranks that can share a class but for pinned host memory, for which see ``structure.alike``.

        A rank may come from this process or from a file, which has dicts in another order, and lists for tuples.
        """
        digest = blake3.blake3(msgspec.msgpack.encode(self.structure(), order="deterministic"))
        digest.update(self.allocations[~on_host(self.allocations)].tobytes())
        return digest.digest()


def _bytes(rows: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(rows).view(np.uint8).reshape(-1)


def _row_fields(rows: np.ndarray) -> np.ndarray:
    """(offset, bytes) of every field of an array of structs."""
    dtype = rows.dtype
    row = np.array([(dtype.fields[n][1], dtype.fields[n][0].itemsize) for n in dtype.names], np.int64)  # type: ignore[index,union-attr]
    starts = np.arange(len(rows)) * dtype.itemsize
    fields = row[None, :, :] + np.stack([starts, np.zeros_like(starts)], axis=1)[:, None, :]
    return np.asarray(fields.reshape(-1, 2))


def _describe_row(rows: np.ndarray, offset: int, what: str) -> str:
    at, within = divmod(offset, rows.dtype.itemsize)
    name = [n for n in rows.dtype.names or () if rows.dtype.fields[n][1] <= within][-1]  # type: ignore[index]
    return f"field {name} of {what} {at}"


def arena_name(number: int) -> str:
    """Name of an ``fdy_arena``."""
    from foundryd.session.arena import ARENAS

    return ARENAS[number] if number < len(ARENAS) else str(number)


@dataclass
class Ranked:
    """What a merge adds to the reference rank's recording."""

    rules: np.ndarray
    tables: np.ndarray
    noise: np.ndarray  # noise_dtype, ordered by (block, offset)
    rank_class: ix.RankClass
    # For each module the images by digest, and each world rank's digest; None where all ranks share one.
    images: list[dict[str, bytes]]
    by_rank: list[list[str | None] | None]
    # Of an archive, whose members have the noise of their templates already; and the templates' members.
    template_noise: tuple[np.ndarray, list[list[int]]] | None = None


def unranked(recording: Recording) -> Ranked:
    """No rules, one rank: what makes a recording an archive."""
    return Ranked(
        rules=np.zeros(0, _rankpatch.rule_dtype),
        tables=np.zeros(0, np.uint64),
        noise=np.zeros(0, noise_dtype),
        rank_class=ix.RankClass([recording.rank], [recording.rank], None, None),
        images=[{m.digest: m.image} for m in recording.modules],
        by_rank=[None] * len(recording.modules),
    )


def pack(writer: ArchiveWriter, recording: Recording, ranked: Ranked) -> ix.Variant:
    """Adds a variant's sections to ``writer`` and returns what the index says of it."""
    templates, members = _pack_graphs(writer, recording, ranked.noise)
    noise, shared = to_store(ranked.noise, ranked.template_noise, [template.members for template in templates])
    blocks = [ix.Block("member", i) for i in range(len(recording.graphs))]
    ops = writer.put("comm_ops", recording.comm_ops)
    blocks.append(ix.Block("comm_ops", 0, ops))
    contents = []
    for i, content in enumerate(recording.contents):
        section = writer.put("content", content.data)
        contents.append(ix.Content(content.address, len(content.data), content.arena, section, len(blocks)))
        blocks.append(ix.Block("content", i, section))
    modules, flat = [], 0
    for i, module in enumerate(recording.modules):
        changed = []
        for name, data in module.globals:
            changed.append(ix.Global(name, len(blocks)))
            blocks.append(ix.Block("global", flat, writer.put("global", data)))
            flat += 1
        digests = list(ranked.images[i])
        for image in ranked.images[i].values():
            writer.add_image(image)
        owners = ranked.by_rank[i]
        by_rank = None if owners is None else [-1 if d is None else digests.index(d) for d in owners]
        modules.append(ix.Module(module.api, digests, by_rank, changed))
    windows = None
    if len(recording.windows):
        windows = ix.Windows(writer.put("windows", recording.windows), len(blocks), recording.own_window)
        blocks.append(ix.Block("windows", 0, windows.section))
    return ix.Variant(
        name=recording.variant,
        world=recording.world,
        rank_class=ranked.rank_class,
        arena_base=recording.arena_base,
        arena_stride=recording.arena_stride,
        allocations=writer.put("allocations", recording.allocations),
        functions=recording.functions,
        modules=modules,
        symbols=recording.symbols,
        templates=templates,
        members=members,
        communicators=recording.communicators,
        comm_ops=ops,
        contents=contents,
        blocks=blocks,
        rules=writer.put("rules", ranked.rules),
        tables=writer.put("tables", ranked.tables),
        relocations=writer.put("relocations", np.concatenate([recording.relocations, _in_blocks(recording)])),
        windows=windows,
        engine=recording.engine,
        noise=writer.put_rows("noise", noise) if len(noise) else "",
        template_noise=writer.put_rows("noise", shared) if len(shared) else "",
    )


def _in_blocks(recording: Recording) -> np.ndarray:
    """The relocations of globals, by number of the block."""
    out = recording.global_relocations.copy()
    out["block"] += len(recording.graphs) + 1 + len(recording.contents)
    return out


def _pack_graphs(
    writer: ArchiveWriter, recording: Recording, noise: np.ndarray
) -> tuple[list[ix.Template], list[ix.Member]]:
    """Templates and members; noise of a member has the values that it has in the template's first one.

    The control has tried exactly these: see ``control.prove``.
    """
    groups: dict[bytes, list[int]] = {}
    for i, graph in enumerate(recording.graphs):
        groups.setdefault(template_key(graph), []).append(i)
    bounds = np.searchsorted(noise["block"], np.arange(len(recording.graphs) + 1))
    templates: list[ix.Template] = []
    numbers: dict[int, int] = {}
    for places in groups.values():
        first = recording.graphs[places[0]]
        parts = []
        for place in places:
            graph, mine = recording.graphs[place], noise[bounds[place] : bounds[place + 1]]
            at = span_bytes(mine["offset"], mine["width"]) - graph.param_start()
            params = graph.params.copy()
            params[at] = first.params[at]
            parts.append(GraphParts(graph.nodes, graph.edges, graph.attributes, params))
        numbers |= dict.fromkeys(places, len(templates))
        templates.append(add_template(writer, parts, places))
    members = [
        ix.Member(g.key, numbers[i], encode_outputs(g.outputs), g.instantiate_flags)
        for i, g in enumerate(recording.graphs)
    ]
    return templates, members


def make_index(
    kind: Any, identity: dict[str, ix.IdentityField], variants: list[ix.Variant], notes: dict[str, Any]
) -> ix.Index:
    """The root of an index written now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return ix.Index(kind, now, f"foundryd {foundryd.__version__}", identity, variants, notes)


def save(recording: Recording, path: Path) -> None:
    """Writes a recording; raises ``ArchiveError``."""
    proofs = recording.proofs
    with ArchiveWriter(path, fast=True) as writer:
        variant = pack(writer, recording, unranked(recording))
        notes = {"rank": recording.rank, **recording.notes}
        if proofs is not None:
            words = {name: writer.put_rows("noise", getattr(proofs, name)) for name in ("noise", "strays")}
            said = {name: getattr(proofs, name) for name in ("dead", "varied", "seconds", "unsteady")}
            notes["proofs"] = {**said, **words}
        writer.finish(make_index("recording", recording.identity, [variant], notes))


def announce(path: Path) -> None:
    """Says that the recording ``path`` is still to come, so that ``load`` waits for it; see ``deliver``."""
    path.with_suffix(".pending").touch()


def deliver(path: Path, source: Path) -> None:
    """Puts the file ``source`` where a recording was announced."""
    os.link(source, path)
    path.with_suffix(".pending").unlink()


def _await(path: Path) -> None:
    end = time.monotonic() + _PATIENCE
    while not path.exists() and path.with_suffix(".pending").exists():
        if time.monotonic() > end:
            raise CaptureError(
                f"the recording {path} was announced and has not come for {_PATIENCE:.0f} s: capture again, with fewer "
                "launches side by side if the others are slow"
            )
        time.sleep(0.05)


def load(path: Path) -> Recording:
    """Reads a recording back, once it is there if it was announced; raises ``ArchiveError`` and ``CaptureError``."""
    _await(path)
    with ArchiveReader.open(path) as reader:
        reader.verify()
        if reader.index.kind != "recording" or len(reader.index.variants) != 1:
            raise ArchiveFormatError(
                f"{path} is an archive for {len(reader.index.variants)} variants, not the recording of one rank"
            )
        recording = unpack(reader, reader.index.variants[0])
        if "proofs" in recording.notes:
            said = recording.notes.pop("proofs")
            said |= {name: np.array(reader.array(said[name], noise_dtype)) for name in ("noise", "strays")}
            recording.proofs = Proofs(**said)
        return recording


def unpack(reader: ArchiveReader, variant: ix.Variant) -> Recording:
    """The recording of a variant's reference rank."""

    def array(name: str, dtype: Any) -> np.ndarray:
        return np.array(reader.array(name, dtype))

    templates = [TemplateReader(reader, t) for t in variant.templates]
    graphs = []
    for i, member in enumerate(variant.members):
        template = templates[member.template]
        parts = template.graph(template.template.members.index(i))
        graphs.append(
            Graph(
                freeze_key(member.key),
                parts.nodes,
                np.array(parts.edges),
                np.array(parts.attributes),
                parts.params,
                decode_outputs(member.outputs),
                member.instantiate_flags,
            )
        )
    modules = []
    for module in variant.modules:
        changed = [(g.name, array(variant.blocks[g.block].section, np.uint8)) for g in module.globals]
        modules.append(ModuleRecord(module.api, bytes(reader.section(image_section(module.digests[0]))), changed))
    ordinals = array(variant.allocations, _hook.allocation_dtype)
    contents = []
    for content in variant.contents:
        at = (ordinals["address"] == content.address) & (ordinals["live"] == 1)
        ordinal = int(ordinals["ordinal"][at][0]) if at.any() else 0
        contents.append(ContentRecord(content.address, content.arena, ordinal, array(content.section, np.uint8)))
    relocations = array(variant.relocations, _rankpatch.relocation_dtype)
    of_globals = relocations[relocations["block"] >= len(graphs)]
    of_globals["block"] -= len(graphs) + 1 + len(contents)
    notes = dict(reader.index.notes)
    return Recording(
        variant=variant.name,
        world=variant.world,
        rank=variant.rank_class.captured[0],
        identity=reader.index.identity,
        arena_base=variant.arena_base,
        arena_stride=variant.arena_stride,
        allocations=ordinals,
        graphs=graphs,
        functions=variant.functions,
        modules=modules,
        symbols=variant.symbols,
        relocations=relocations[relocations["block"] < len(graphs)],
        global_relocations=of_globals,
        communicators=variant.communicators,
        comm_ops=array(variant.comm_ops, _hook.comm_op_dtype),
        contents=contents,
        engine=dict(variant.engine),
        notes=notes,
        **_unpack_windows(reader, variant),
    )


def _unpack_windows(reader: ArchiveReader, variant: ix.Variant) -> dict[str, Any]:
    if variant.windows is None:
        return {}
    table = np.array(reader.array(variant.windows.section, _hook.window_dtype))
    return {"windows": table, "own_window": variant.windows.own}


def unpack_ranked(reader: ArchiveReader, variant: ix.Variant) -> Ranked:
    """What a variant of an archive says beyond its reference rank: ``pack(writer, unpack(...), "
    "unpack_ranked(...))`` copies it."""
    return Ranked(
        rules=np.array(reader.array(variant.rules, _rankpatch.rule_dtype)),
        tables=np.array(reader.array(variant.tables, np.uint64)),
        noise=_noise(reader, variant.noise, noise_dtype),
        rank_class=variant.rank_class,
        images=[{d: bytes(reader.section(image_section(d))) for d in m.digests} for m in variant.modules],
        by_rank=[
            None if m.by_rank is None else [None if d < 0 else m.digests[d] for d in m.by_rank] for m in variant.modules
        ],
        # Before there was any, noise was of members.
        template_noise=(
            _noise(reader, variant.template_noise, template_noise_dtype),
            [t.members for t in variant.templates],
        )
        if variant.template_noise
        else None,
    )


def _noise(reader: ArchiveReader, section: str, dtype: np.dtype[Any]) -> np.ndarray:
    return np.array(reader.array(section, dtype)) if section else np.zeros(0, dtype)
