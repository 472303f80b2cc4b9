# SPDX-License-Identifier: Apache-2.0
"""Archives of realistic size and what the benchmarks share.  Times are recorded and never judged.

Everything runs on the software driver or without any.  ``--benchmark-min-rounds``, ``--benchmark-max-time`` and
``--benchmark-json`` are pytest-benchmark's own; the modules ask for so few rounds that the folder takes seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from patched_rank import Rank  # noqa: E402
from synthetic import Decoder, Shape  # noqa: E402

from foundryd import _native  # noqa: E402
from foundryd.archive.inflate import inflate  # noqa: E402
from foundryd.archive.reader import ArchiveReader  # noqa: E402


@pytest.fixture(scope="session")
def archive_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes the archive of a shape, once a session: ``archive_of(graphs=64)``."""
    folder = tmp_path_factory.mktemp("decoders")
    known: dict[Shape, Path] = {}

    def path(**shape: int) -> Path:
        wanted = Shape(**shape)
        if wanted not in known:
            known[wanted] = Decoder(wanted).write(folder / f"{len(known)}.foundry")
        return known[wanted]

    return path


@pytest.fixture(scope="session")
def served_archive_of(archive_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The same as a daemon serves it, with nothing to decode, once a session."""
    folder = tmp_path_factory.mktemp("served")

    def path(**shape: int) -> Path:
        stored = archive_of(**shape)
        served = folder / stored.name
        if not served.exists():
            with ArchiveReader.open(stored) as reader, served.open("wb+") as file:
                inflate(reader, file)
        return served

    return path


@pytest.fixture(scope="session")
def run() -> Callable[..., dict[str, Any]]:
    """Runs a program of ``child`` with an environment and arguments: the object that it prints last."""

    def run(program: str, environment: Mapping[str, str], *arguments: object) -> dict[str, Any]:
        line = [sys.executable, "-P", str(HERE / "child" / program), *map(str, arguments)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return answer

    return run


@pytest.fixture(scope="session")
def rank_of(archive_of: Callable[..., Path]) -> Iterator[Callable[..., Rank]]:
    """A rank of the archive of a shape."""
    ranks: list[Rank] = []

    def rank(number: int = 5, **shape: int) -> Rank:
        ranks.append(Rank(archive_of(**shape), number))
        return ranks[-1]

    yield rank
    for one in ranks:
        one.reader.close()


@pytest.fixture
def calls() -> Callable[[Callable[[], Any]], int]:
    """Counts the calls, of Python's functions and native ones, that a function makes."""

    def count(function: Callable[[], Any]) -> int:
        found = 0

        def note(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal found
            found += event in ("call", "c_call")

        before = sys.getprofile()
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
        return found

    return count


@pytest.fixture(scope="session")
def driver_environment() -> Callable[[bool], dict[str, str]]:
    """The environment of a child on the software driver, with the hook in restore mode or without it."""

    def environment(hook: bool) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FOUNDRYD_", "SOFTCUDA_", "LD_"))}
        env["LD_LIBRARY_PATH"] = str(_native.soft_folder())
        env["OPENBLAS_NUM_THREADS"] = "1"
        if hook:
            env |= {"LD_PRELOAD": str(_native.hook_library()), "FOUNDRYD_MODE": "restore"}
        return env

    return environment
