# SPDX-License-Identifier: Apache-2.0
"""Runs programs with the hook preloaded, on the software driver."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foundryd import _native

HERE = Path(__file__).parent
DEADLINE = 60.0  # seconds


@dataclass(frozen=True)
class Hooked:
    """Starts children with the hook."""

    hook: Path
    driver: Path

    def environment(self, mode: str | None, preload: Sequence[Path] = (), hook: bool = True) -> dict[str, str]:
        """An environment for a child: the hook first in ``LD_PRELOAD``, the software driver in ``LD_LIBRARY_PATH``."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("FOUNDRYD_", "SOFTCUDA_", "LD_"))}
        # A sanitizer's library comes first, see tests/project/sanitize.py.
        first = [p for p in os.environ.get("SANITIZER_PRELOAD", "").split(":") if p]
        env["LD_PRELOAD"] = ":".join(str(p) for p in [*first, *([self.hook] if hook else []), *preload])
        # And arenas lie where it has nothing.
        for name in ("ARENA_BASE", "ARENA_STRIDE"):
            if f"SANITIZER_{name}" in os.environ:
                env[f"FOUNDRYD_{name}"] = os.environ[f"SANITIZER_{name}"]
        env["LD_LIBRARY_PATH"] = str(self.driver)
        env["PYTHONPATH"] = str(HERE / "child")
        if mode:
            env["FOUNDRYD_MODE"] = mode
        return env

    def program(
        self,
        command: Sequence[str | Path],
        mode: str | None = None,
        *,
        given: object = None,
        env: dict[str, str] | None = None,
        preload: Sequence[Path] = (),
        hook: bool = True,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end; ``given`` is its standard input, as JSON."""
        done = subprocess.run(
            [str(c) for c in command],
            env=self.environment(mode, preload, hook) | (env or {}),
            input=json.dumps(given),
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        if check and done.returncode != 0:
            pytest.fail(f"{command[0]} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def python(self, source: str, mode: str | None = None, **options: Any) -> Any:
        """Runs Python source in a child; what it passes to ``fdyhook.answer``."""
        done = self.program([sys.executable, "-P", "-c", textwrap.dedent(source)], mode, **options)
        return json.loads(done.stdout)

    def graphs(self, body: str, mode: str = "capture", **options: Any) -> Any:
        """Runs a child that works with modules and graphs; ``hook`` is the bindings' Hook."""
        return self.python(textwrap.dedent(GRAPH_PRELUDE) + textwrap.dedent(body), mode, **options)


GRAPH_PRELUDE = """
    import base64, ctypes as c, struct
    import numpy as np
    from fdyhook import answer, given
    from graphkit import *
    from soft import CudaError, free, malloc, ok, start
    from foundryd._native import _hook
    hook = _hook.Hook()
"""


@pytest.fixture(scope="session")
def hooked() -> Hooked:
    return Hooked(_native.hook_library(), _native.soft_folder())


class Rank:
    """A running ``child/ipcpeer.py``; its functions are called by name."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def send(self, name: str, *arguments: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([name, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        if not select.select([self.process.stdout], [], [], DEADLINE)[0]:
            pytest.fail("a rank did not answer in time")
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(f"a rank ended with {self.process.wait(DEADLINE)}: {self.log()}")
        answer = json.loads(line)
        assert "failed" not in answer, answer["failed"]
        return answer["is"]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.send(name, *arguments)
            return self.answer()

        return call

    def log(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self) -> str:
        """Ends it; what it wrote to its log."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(DEADLINE)
        return self.log()


RunRank = Callable[..., contextlib.AbstractContextManager[Rank]]


@pytest.fixture(scope="session")
def run_rank(hooked: Hooked) -> RunRank:
    """Starts ``child/ipcpeer.py`` as a rank, and kills it at the end of the block."""

    @contextlib.contextmanager
    def run(rank: int | None, mode: str | None, **env: str) -> Iterator[Rank]:
        environment = hooked.environment(mode) | env
        environment.pop("RANK", None)
        if rank is not None:
            environment["RANK"] = str(rank)
        with subprocess.Popen(
            [sys.executable, "-P", "-m", "ipcpeer"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield Rank(process)
            finally:
                process.kill()

    return run


@pytest.fixture(scope="session")
def graph_prelude() -> str:
    return textwrap.dedent(GRAPH_PRELUDE)


Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compile_c(tmp_path_factory: pytest.TempPathFactory, hooked: Hooked) -> Compile:
    """Compiles C source: a program, or a shared library if the name ends with ``.so``."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")

    def build(name: str, source: str, *, cuda: bool = False, libraries: Sequence[Path] = ()) -> Path:
        folder = tmp_path_factory.mktemp("c")
        (folder / "source.c").write_text(textwrap.dedent(source))
        out = folder / name
        shared = ["-shared", "-fPIC"] if name.endswith(".so") else []
        driver = ["-L", str(hooked.driver), "-l:libcuda.so.1", "-Wl,--allow-shlib-undefined"] if cuda else []
        linked = [f for lib in libraries for f in (str(lib), f"-Wl,-rpath,{lib.parent}")]
        flags = ["-O1", "-D_GNU_SOURCE", "-I", str(HERE / "child"), "-Wl,--no-as-needed", *shared]
        subprocess.run(
            [compiler, *flags, "-o", out, folder / "source.c", *linked, *driver, "-ldl", "-lpthread"],
            check=True,
            timeout=DEADLINE,
        )
        return out

    return build
