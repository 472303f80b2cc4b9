# SPDX-License-Identifier: Apache-2.0
"""The command and the demo's ranks as real processes, archives to restore from, and changed copies of them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from foundryd._native import _hook
from foundryd.archive import index as ix
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.writer import ArchiveWriter
from foundryd.capture.recording import Ranked, Recording, make_index, pack, unpack, unpack_ranked
from foundryd.cli.environment import driver_environment, restore_environment
from foundryd.demo.config import DemoConfig
from foundryd.demo.launch import mismatches, rank_environment, worker_command
from foundryd.demo.reference import Expected, expected
from foundryd.demo.rendezvous import StoreServer
from foundryd.rankpatch.mesh import Mesh
from foundryd.session.arena import ARENAS

# Small, so that a world is up in a second: what these tests ask does not depend on size.
SMALL: dict[str, Any] = {"layers": 1, "batch_sizes": (1, 3)}


def config_of(parallel: str, **changes: Any) -> DemoConfig:
    """The small engine on a mesh."""
    return DemoConfig(mesh=Mesh.parse(parallel), **(SMALL | changes))


def clean_environment() -> dict[str, str]:
    """This process's environment without what would change a restore; the software driver comes first."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FOUNDRYD_", "NCCL_")) and k != "LD_PRELOAD"}
    return kept | driver_environment("soft", kept) | {"OPENBLAS_NUM_THREADS": "1", "FOUNDRYD_NCCL_TIMEOUT": "30"}


# --- the command -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out.splitlines()[-1])


def run_command(*arguments: object, env: Mapping[str, str | None] | None = None, timeout: float = 90.0) -> Done:
    """``foundryd`` with these arguments; fails the test if it does not end in time."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "foundryd.cli", *map(str, arguments)],
        env=changed(clean_environment(), env or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"foundryd {' '.join(map(str, arguments))} hung: {process.communicate()}")
    return Done(process.returncode, out, err)


def changed(env: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """``env`` with variables set, or removed where the value is None."""
    merged: dict[str, str | None] = {**env, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@pytest.fixture(scope="session")
def foundryd() -> Callable[..., Done]:
    return run_command


# --- worlds of ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What one rank does differently: variables, flags of the worker, or a program of its own in its place.

    A program has ``argv`` (the worker's flags, ``--store`` among them).
    """

    env: Mapping[str, str | None] = field(default_factory=dict)
    flags: Sequence[str] = ()
    program: str | None = None


@dataclass(frozen=True)
class Ended:
    """How a rank ended: its exit code, the JSON object that it printed last, and its standard error."""

    rank: int
    code: int
    result: dict[str, Any]
    err: str

    @property
    def fallback(self) -> tuple[str, str]:
        """Reason and message of the error for which the rank captured natively."""
        error = self.result["fallback"]
        assert error is not None, f"rank {self.rank} restored: {self.result}"
        return error["reason"], error["message"]


@lru_cache(maxsize=32)
def tokens_of(config: DemoConfig) -> Expected:
    return expected(config)


class Worlds:
    """Runs the ranks of a world side by side."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    def run(
        self,
        config: DemoConfig,
        env: Mapping[str, str],
        *,
        changes: Mapping[int, Change] | None = None,
        every: Change | None = None,
        timeout: float = 60.0,
    ) -> list[Ended]:
        """Runs every rank to its end; fails the test when one has not ended in time.  Nothing stays behind."""
        self._count += 1
        folder = self._folder / str(self._count)
        folder.mkdir()
        with ExitStack() as stack:
            store = folder / "store"
            stack.enter_context(StoreServer(store))
            running = []
            for rank in range(config.mesh.world):
                change = (changes or {}).get(rank) or every or Change()
                line = worker_command(config, store=store, flags=change.flags)
                if change.program is not None:
                    line = [*line[:2], "-c", change.program, *line[4:]]
                running.append(
                    stack.enter_context(
                        _process(
                            line,
                            changed(rank_environment(env, rank, config.mesh.world), change.env),
                            folder / f"{rank}.out",
                            folder / f"{rank}.err",
                        )
                    )
                )
            end = time.monotonic() + timeout
            for rank, process in enumerate(running):
                try:
                    process.wait(max(0.0, end - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pytest.fail(f"rank {rank} did not end in {timeout} s: {(folder / f'{rank}.err').read_text()}")
        return [_ended(rank, process, folder) for rank, process in enumerate(running)]


@contextmanager
def _process(line: Sequence[str], env: Mapping[str, str], out: Path, err: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own, which is killed as a whole when the block ends."""
    with out.open("wb") as sink, err.open("wb") as errors:
        process = subprocess.Popen(
            line, env=dict(env), stdin=subprocess.DEVNULL, stdout=sink, stderr=errors, start_new_session=True
        )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _ended(rank: int, process: subprocess.Popen[bytes], folder: Path) -> Ended:
    lines = (folder / f"{rank}.out").read_text(errors="replace").splitlines()
    result: Any = {}
    with suppress(IndexError, ValueError):
        result = json.loads(lines[-1])
    err = (folder / f"{rank}.err").read_text(errors="replace")
    return Ended(rank, process.returncode, result if isinstance(result, dict) else {}, err)


@pytest.fixture
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    return Worlds(tmp_path_factory.mktemp("w"))


def right_tokens(config: DemoConfig, ended: Sequence[Ended]) -> bool:
    """Whether every rank ended well, with the tokens of the reference; fails the test with what is wrong."""
    for rank in ended:
        assert rank.code == 0, f"rank {rank.rank} ended with {rank.code}: {rank.err[-2000:]}"
    assert mismatches(config, [rank.result for rank in ended], tokens_of(config)) == []
    return True


def sentence(text: str) -> bool:
    """Whether a message is one sentence on one line, with what to do after the cause."""
    return bool(text) and "\n" not in text and "Traceback" not in text and (":" in text or ";" in text)


# --- what stays behind ----------------------------------------------------------------------------------------------


class Traces:
    """What a command could leave: processes that carry a mark, files of its temporary folder, shared memory."""

    def __init__(self, folder: Path) -> None:
        self._mark = uuid.uuid4().hex
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.env = {"TMPDIR": str(self.temporary), "FOUNDRYD_TEST_MARK": self._mark}
        self._shared = set(os.listdir("/dev/shm"))

    def processes(self) -> dict[int, str]:
        """Command lines of the living processes that carry the mark, by process id."""
        found = {}
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and self._mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:  # it ended, or it is not ours
                continue
        return found

    def shared(self) -> set[str]:
        """Shared memory that was not there before and that no process has mapped: others on this machine use theirs."""
        new = set(os.listdir("/dev/shm")) - self._shared
        mapped = ""
        for entry in Path("/proc").iterdir() if new else ():
            try:
                mapped += (entry / "maps").read_text() if entry.name.isdigit() else ""
            except OSError:
                continue
        return {name for name in new if f"/dev/shm/{name}" not in mapped}

    def nothing_is_left(self) -> bool:
        end = time.monotonic() + 10
        while self.processes() and time.monotonic() < end:
            time.sleep(0.02)
        assert self.processes() == {}
        assert list(self.temporary.iterdir()) == []
        assert self.shared() == set()
        return True


@pytest.fixture
def traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traces]:
    traces = Traces(tmp_path_factory.mktemp("t"))
    yield traces
    for pid in traces.processes():  # of a test that failed
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# --- archives --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Captured:
    """An archive that the command captured, and the engine that is in it."""

    path: Path
    config: DemoConfig
    figures: dict[str, Any]

    def env(self, archive: str | Path | None = None, **changes: str | None) -> dict[str, str]:
        """Environment of an engine that restores from this archive, by default from its file."""
        base = clean_environment()
        name = str(self.path if archive is None else archive)
        env = base | restore_environment(base, archive=name, group="e2e", variant=str(self.config.mesh))
        return changed(env, changes)


def capture_archive(
    path: Path, config: DemoConfig, *options: str, engine: Sequence[str] = (), timeout: float = 90.0
) -> Captured:
    """Captures with ``foundryd capture``, by default the demo's worker."""
    done = run_command(
        "capture", "-o", path, "--variant", str(config.mesh), "--driver", "soft", "--json", *options,
        "--", *(engine or worker_command(config)), timeout=timeout,
    )  # fmt: skip
    assert done.code == 0, done.err
    return Captured(path, config, done.json)


@pytest.fixture(scope="session")
def solo(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """A world of one rank."""
    return capture_archive(tmp_path_factory.mktemp("solo") / "solo.foundry", config_of("tp=1"))


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Captured:
    """Two ranks of an expert-parallel world; layers share their collectives."""
    return capture_archive(tmp_path_factory.mktemp("pair") / "pair.foundry", config_of("ep=2", layers=2))


def rewrite(
    source: Path,
    target: Path,
    *,
    identity: Mapping[str, ix.IdentityField | None] | None = None,
    edit: Callable[[Recording, Ranked], None] = lambda _recording, _ranked: None,
) -> Path:
    """Writes ``source`` again as ``target``, sound in itself, with facts (None: removed) or variants changed."""
    with ArchiveReader.open(source) as reader, ArchiveWriter(target) as writer:
        facts: dict[str, ix.IdentityField | None] = {**reader.index.identity, **(identity or {})}
        variants = []
        for variant in reader.index.variants:
            recording, ranked = unpack(reader, variant), unpack_ranked(reader, variant)
            edit(recording, ranked)
            variants.append(pack(writer, recording, ranked))
        kept = {name: fact for name, fact in facts.items() if fact is not None}
        writer.finish(make_index("archive", kept, variants, reader.index.notes))
    return target


def join(target: Path, *sources: Path) -> Path:
    """One archive with the variants of several."""
    with ArchiveWriter(target) as writer:
        variants, notes = [], {}
        for source in sources:
            with ArchiveReader.open(source) as reader:
                for variant in reader.index.variants:
                    variants.append(pack(writer, unpack(reader, variant), unpack_ranked(reader, variant)))
                    notes[variant.name] = reader.index.notes.get(variant.name, {})
                identity = reader.index.identity
        writer.finish(make_index("archive", identity, variants, notes))
    return target


@pytest.fixture(scope="session")
def e2e() -> Any:
    """The helpers above, for tests that cannot import this file."""
    return sys.modules[__name__]


def allocations(archive: Path, arena: str) -> list[tuple[int, int]]:
    """(address, bytes) of each allocation of an arena, in order, as recorded."""
    with ArchiveReader.open(archive) as reader:
        (variant,) = reader.index.variants
        rows = reader.array(variant.allocations, _hook.allocation_dtype)
        own = rows[rows["arena"] == ARENAS.index(arena)]
        return [(int(row["address"]), int(row["bytes"])) for row in own[own["ordinal"].argsort()]]


# A rank that only attaches, and says what came of it.
ATTACH = """
import json
from foundryd._native import _hook
from foundryd.errors import FoundrydError
from foundryd.session.session import attach
error = None
try:
    attach().close()
except FoundrydError as refused:
    error = refused
report = _hook.Hook().report()
print(json.dumps({
    "type": type(error).__name__, "message": str(error), "contexts": report.contexts,
    "layout": report.arena_base != 0,
}))
"""
