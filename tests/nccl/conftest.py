# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import fcntl
import importlib.util
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def cuda_nccl() -> ModuleType:
    return load("cuda_nccl")


RunRanks = Callable[..., list[str]]


@pytest.fixture
def run_ranks(cuda_nccl: ModuleType, tmp_path: Path) -> RunRanks:
    """Runs ``program.py check`` once for each rank; fails with what a failing rank wrote.  Returns their outputs.

    ``killed`` are ranks that are expected to end by a signal.
    """

    def run(
        program: str, check: str, size: int, *, deadline: float = 90, killed: tuple[int, ...] = (), **env: str
    ) -> list[str]:
        unique = cuda_nccl.Nccl(cuda_nccl.soft_nccl()).unique_id().raw().hex()
        children = []
        for rank in range(size):
            command = [
                sys.executable,
                "-P",
                str(HERE / f"{program}.py"),
                check,
                str(rank),
                str(size),
                unique,
                str(tmp_path),
            ]
            log = (tmp_path / f"{check}.{rank}.log").open("w+")
            child = subprocess.Popen(command, stdout=log, stderr=log, env=cuda_nccl.environment(**env))
            children.append((child, log))
        end = time.monotonic() + deadline
        try:
            for child, _ in children:
                child.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pass
        finally:
            late = [rank for rank, (child, _) in enumerate(children) if child.poll() is None]
            for child, _ in children:
                child.kill()
                child.wait()
        outputs = []
        for _, log in children:
            log.seek(0)
            outputs.append(log.read())
            log.close()
        codes = [child.returncode for child, _ in children]
        report = "\n".join(
            f"--- rank {r}: {c}\n{o[-3000:]}" for r, (c, o) in enumerate(zip(codes, outputs, strict=True))
        )
        assert not late, f"ranks {late} were still running after {deadline} s\n{report}"
        for rank, code in enumerate(codes):
            assert (code < 0) if rank in killed else (code == 0), report
        return outputs

    return run


def held(segment: Path) -> bool:
    """Whether some process holds a lock on a segment, as every rank of a communicator does."""
    get_lock, write_lock, unlocked = 36, 1, 2  # F_OFD_GETLK, F_WRLCK, F_UNLCK
    try:
        with segment.open("r+b") as file:
            answer = fcntl.fcntl(file, get_lock, struct.pack("hh4xqqi4x", write_lock, os.SEEK_SET, 0, 0, 0))
    except FileNotFoundError:
        return True  # its last rank joined meanwhile
    return int(struct.unpack_from("h", answer)[0]) != unlocked


def segments() -> set[Path]:
    """Segments that nobody uses.  Programs beside the tests may have some of their own."""
    return {path for path in Path("/dev/shm").glob("foundryd-nccl-*") if not held(path)}


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    before = segments()
    yield
    assert segments() <= before, "a test left segments in /dev/shm"
