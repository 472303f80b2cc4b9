# SPDX-License-Identifier: Apache-2.0
"""An engine that records what its script says, without a GPU: ``scripted_engine.py SCRIPT FOLDER``.

Its one graph has one kernel.  Its first parameter is a struct: a number that follows the rank, a flag, a byte of
garbage in the padding behind the flag, and a number of each script's own; the second a large struct that no kernel
reads, the third an empty struct.  Its allocations may be filled.  Launches are counted in FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from foundryd._native import _hook, _rankpatch
from foundryd.archive import index as ix
from foundryd.capture.canonical import KERNEL, NONE, Graph
from foundryd.capture.journal import Journal, read_strays
from foundryd.capture.recording import ContentRecord, ModuleRecord, Proofs, Recording, load, save
from foundryd.rankpatch.infer import RankView
from foundryd.rankpatch.mesh import Mesh
from foundryd.rankpatch.noise import Strays, noise_candidates, noise_dtype, stray_candidates
from foundryd.session.arena import ARENAS
from foundryd.settings import Settings

BASE, STRIDE = 0x600000000000, 256 << 30
UNREAD = 400  # bytes of the second parameter
GARBAGE = 24  # in the second parameter, a stale address
FIELDS = [(0, 16), (16, UNREAD), (16 + UNREAD, 1)]


@dataclass(frozen=True)
class Launch:
    """One launch: which rank, for the how-many-th time from 1, and whether it is a control.

    ``first``: it is the first of this rank as a rank, or the first control.
    """

    rank: int
    time: int
    control: bool
    first: bool


def few_values(launch: Launch) -> dict[str, int]:
    """Garbage of one bit, which rank 1 repeats and rank 0 does not."""
    return {"garbage": (launch.rank * 5 + (launch.time if launch.rank == 0 else 0)) % 2}


def surprise(launch: Launch) -> dict[str, int]:
    """Garbage that only the first launch of rank 4, which is held out, has."""
    return {"garbage": int(launch.rank == 4 and launch.time == 1)}


def settled(launch: Launch) -> dict[str, int]:
    """Garbage that each rank repeats."""
    return {"garbage": launch.rank == 2}


def late(launch: Launch) -> dict[str, int]:
    """Garbage that each rank repeats, and no sampled one has."""
    return {"garbage": launch.rank == 4}


def beside(launch: Launch) -> dict[str, int]:
    """Garbage of which one byte differs in every launch, and the next only on a rank that is held out."""
    return {"garbage": launch.time | (launch.rank == 4) << 8}


def scratch(launch: Launch) -> dict[str, object]:
    """Allocations that only held-out ranks fill: one each, and rank 6 what ranks 4 and 5 do."""
    return {"filled": {4: [0], 5: [1], 6: [0, 1]}.get(launch.rank, [])}


def scratch_and_garbage(launch: Launch) -> dict[str, object]:
    """An allocation that only rank 4 fills, beside garbage that only it has and repeats."""
    return scratch(launch) | late(launch) if launch.rank == 4 else {}


def scratch_and_surprise(launch: Launch) -> dict[str, object]:
    """An allocation that only rank 4 fills, and garbage that only the first launch of rank 5 has."""
    return scratch(launch) if launch.rank == 4 else {"garbage": int(launch.rank == 5 and launch.time == 1)}


def read(launch: Launch) -> dict[str, object]:
    """An allocation that only rank 4 fills, and on which outputs depend."""
    return scratch(launch) if launch.rank == 4 else {}


def read_when_sampled(launch: Launch) -> dict[str, object]:
    """An allocation that only rank 2 fills, and on which outputs depend."""
    return {"filled": [0] if launch.rank == 2 else []}


def wanted(launch: Launch) -> dict[str, int]:
    """A number that the rank decides and no coordinate explains, and on which outputs depend."""
    return {"own": launch.rank**2}


def stack(launch: Launch) -> dict[str, object]:
    """What earlier calls left: bytes of few values and of many, some always alike on a rank, some on all but one."""
    always, now = np.random.default_rng(launch.rank), np.random.default_rng((launch.rank, launch.time))
    left = np.zeros(UNREAD + 1, np.uint8)
    for at in range(UNREAD + 1):
        values = int(always.integers(1, 256)) if at % 7 == 0 else (2, 3, 5, 256)[at % 4]
        left[at] = (always if at % 3 == 0 else now).integers(0, values)
    return {"left": left, "garbage": launch.rank % 2}


def squares(launch: Launch) -> dict[str, int]:
    """A number that the rank decides and no coordinate explains."""
    return {"own": launch.rank**2}


def tuned(launch: Launch) -> dict[str, object]:
    """Code that each rank compiles for itself in its first launch, and a kernel's grid that its compiler chose."""
    return cold(launch) | {"image": b"an image of rank %d" % launch.rank, "grid": (32, 64, 16)[launch.rank**2 % 3]}


def staging(launch: Launch) -> dict[str, int]:
    """As many staging buffers as happened to be in use, and garbage that has the address of the last."""
    return {"staged": 1 + (launch.rank * 3 + launch.time) % 4}


def cold(launch: Launch) -> dict[str, int]:
    """Each rank's first launch compiles, and allocates for it."""
    return {"compiled": int(launch.time == 1)}


def told(launch: Launch) -> dict[str, int]:
    """Each rank's first launch compiles, and says so."""
    return cold(launch)


def chilly(launch: Launch) -> dict[str, int]:
    """Rank 1 compiles in its first launch, and so does the first control, which is of that rank."""
    return {"compiled": int(launch.rank == 1 and launch.first)}


def moved(launch: Launch) -> dict[str, int]:
    """An address that the graph needs, elsewhere in each rank's first launch, beside memory of its compilers."""
    return {"own": 7 + (launch.time == 1)}


def adrift(launch: Launch) -> dict[str, int]:
    """An address that the graph needs, elsewhere in every launch."""
    return {"own": launch.time}


def fatal(launch: Launch) -> dict[str, int]:
    """Two trials of the control end its process."""
    return {"garbage": launch.time}


def outside(launch: Launch) -> dict[str, int]:
    """Its adapter found tensors in no arena."""
    return {}


def failing(launch: Launch) -> dict[str, int]:
    """Rank 2 fails while all others wait for ever."""
    if launch.rank == 2:
        time.sleep(1)
        sys.exit(3)
    time.sleep(300)
    return {}


def forgetful(launch: Launch) -> dict[str, int]:
    """Launches are cold at first, and the second one of rank 1 writes nothing."""
    if launch.rank == 1 and launch.time == 3:
        sys.exit(0)
    return {"compiled": int(launch.time == 1)}


SCRIPTS = {
    f.__name__: f
    for f in (
        few_values, surprise, settled, late, beside, scratch, scratch_and_garbage, scratch_and_surprise, read,
        read_when_sampled, stack, wanted, squares, tuned, staging, cold, told, chilly, moved, adrift, fatal, outside,
        failing, forgetful,
    )
}  # fmt: skip
VARIED = ("settled", "late", "scratch_and_garbage", "stack", "wanted")  # can put themselves into other states
READ = ("read", "read_when_sampled")  # their graph depends on what its allocations held before


def host_rows(count: int) -> np.ndarray:
    """The first so many allocations of pinned memory."""
    rows = np.zeros(count, _hook.allocation_dtype)
    rows["arena"], rows["ordinal"] = ARENAS.index("host"), np.arange(count)
    rows["address"], rows["bytes"], rows["live"] = BASE + 5 * STRIDE + 4096 * np.arange(count), 4096, 1
    return rows


def put(params: np.ndarray, offset: int, address: int) -> None:
    params[offset : offset + 8] = np.array([address], "<u8").view(np.uint8)


def recording(
    rank: int,
    mesh: Mesh,
    garbage: int = 0,
    own: int = 7,
    compiled: int = 0,
    left: object = 0,
    filled: Sequence[int] = (),
    image: bytes = b"an image",
    grid: int = 1,
    staged: int = 0,
) -> Recording:
    node = np.zeros(1, _hook.node_dtype)
    node["type"], node["child"], node["comm_group"], node["param_bytes"] = KERNEL, NONE, NONE, 17 + UNREAD
    node["grid"] = node["block"] = node["param_kind"] = 1
    node["grid"][:, 0] = grid
    params = np.zeros(432, np.uint8)
    params[:16] = np.array([100 + rank, 1 | garbage << 8, own, 0], "<u4").view(np.uint8)
    params[16 : 17 + UNREAD] = left
    graph = Graph(("g",), node, np.zeros(0, _hook.edge_dtype), np.zeros(0, _hook.attribute_dtype), params)
    allocations = np.zeros(compiled, _hook.allocation_dtype)
    allocations["bytes"], allocations["address"] = 4096, BASE
    allocations = np.concatenate([allocations, host_rows(staged)])
    if staged:
        put(params, GARBAGE, int(allocations["address"][-1]))
    arena = ARENAS.index("graph")
    contents = [ContentRecord(BASE + 4096 * n, arena, n, np.full(64, 16 + rank, np.uint8)) for n in filled]
    return Recording(
        variant=str(mesh), world=mesh.world, rank=rank, identity={}, arena_base=BASE, arena_stride=STRIDE,
        allocations=allocations, graphs=[graph], functions=[ix.Function(0, "k", 17 + UNREAD, FIELDS, [])],
        modules=[ModuleRecord(0, image)], symbols=[], relocations=np.zeros(0, _rankpatch.relocation_dtype),
        communicators=[], comm_ops=np.zeros(0, _hook.comm_op_dtype), contents=contents,
    )  # fmt: skip


def prove(ours: Recording, references: list[Recording], journal: Journal, script: str) -> np.ndarray:
    """Everything that may be noise is, but for an address that the graph needs."""
    if script == "fatal":
        for trial in ("one", "two"):
            journal.attempt((trial,), lambda: os._exit(9))
    same, *others = sorted(references, key=lambda r: r.rank != ours.rank)
    views = [RankView(r.rank, r.blocks()[:1]) for r in (ours, same, *others)]
    rows = noise_candidates(views[0], views[1], ours.fields()[:1], others=views[2:])
    return rows[:0] if script in ("moved", "adrift") else rows


def prove_dead(ours: Recording, references: list[Recording], script: str) -> list[int]:
    """The graph reads no allocation before it writes it, or all of them."""
    filled = {c.address for r in (ours, *references) for c in r.contents}
    return [] if script in READ else sorted(filled)


def prove_strays(ours: Recording, references: list[Recording], strays: Strays) -> np.ndarray:
    """Outputs depend on every number of the first parameter; only garbage is harmless."""
    views = [RankView(r.rank, r.blocks()[:1]) for r in (ours, *references)]
    rows = stray_candidates(views[0], views, strays, np.zeros(0, noise_dtype))
    start = ours.graphs[0].param_start()
    return rows[np.isin(rows["offset"], [start + 5, *range(start + 16, start + 17 + UNREAD)])]


def main() -> None:
    script, folder = sys.argv[1], Path(sys.argv[2])
    settings = Settings.from_env()
    assert settings.recording is not None
    with (folder / "launches").open("a") as file:
        file.write(f"{settings.rank}\n")
    with (folder / "pids").open("a") as file:
        file.write(f"{os.getpid()}\n")
    time = (folder / "launches").read_text().splitlines().count(str(settings.rank))
    control, name = bool(settings.references), settings.recording.name
    with (folder / "names").open("a") as file:
        file.write(f"{name}\n")
    first = "-0." in name if control else (folder / "names").read_text().splitlines().count(name) == 1
    launch = Launch(settings.rank, time, control, first)
    made = recording(settings.rank, Mesh.parse(settings.variant), **SCRIPTS[script](launch))
    if launch.control:
        references = [load(p) for p in settings.references]
        noise = prove(made, references, Journal(settings.journal), script)
        strays = read_strays(settings.strays) if script in VARIED else []
        dead = prove_dead(made, references, script)
        made.proofs = Proofs(dead, noise, prove_strays(made, references, strays), script in VARIED)
    if script == "outside":
        made.notes["outside"] = [[BASE + 512, 1000], [BASE + 4096, 24]]
    made.notes["cold"] = script == "told" and launch.time == 1
    # As the recorder notes an image: bytes, why it is whole, bytes that were cut, why none were.
    made.notes["images"] = [[8, "", 0, "its kernels are not known" if script == "outside" else ""]]
    save(made, settings.recording)


if __name__ == "__main__":
    main()
