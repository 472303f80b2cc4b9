# SPDX-License-Identifier: Apache-2.0
"""A stand-in for vLLM (see ``standin/vllm/__init__.py``), and graphs that need no GPU."""

from __future__ import annotations

import importlib
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from foundryd.archive.identity import MachineIdentity, check
from foundryd.engines.vllm import collector, seam, v0_22
from foundryd.errors import FoundrydError
from foundryd.settings import Mode, settings

STANDIN = Path(__file__).parent / "standin"


class Graph:
    """A graph on the CPU: what was captured is called again, and writes where it wrote before."""

    def __init__(self, fn, result):
        self._fn, self._result = fn, result

    def replay(self):
        for old, new in zip(tree_leaves(self._result), tree_leaves(self._fn()), strict=True):
            if hasattr(old, "copy_"):
                old.copy_(new)


def tree_leaves(thing):
    from torch.utils import _pytree

    return _pytree.tree_leaves(thing)


class CpuGraphs:
    """``WorkerGraphs`` without a GPU: the identity check, the fallback and the order of calls are the real ones.

    ``archive`` holds what the last capture wrote.
    """

    archive = None

    def __init__(self, config, provider, communicators):
        from vllm.log import note

        note("attach")
        self.config, self.mode, self.fallback, self.session = config, config.mode, None, None
        self.device = SimpleNamespace(index=0)
        self.resolved, self.sizes, self.recorded = {}, {}, {}
        self.bound, self.vary, self.vary_graph, self.closed, self._graphs = {}, None, None, False, {}
        self._facts = MachineIdentity.of(provider.identity_facts()).fields
        if config.mode is Mode.RESTORE:
            try:
                check(CpuGraphs.archive["identity"], MachineIdentity.of(provider.identity_facts()))
                self.recorded = CpuGraphs.archive["vllm"]
                self.session = SimpleNamespace(phases={"layout": 1.0, "graphs": 2.0})
            except FoundrydError as error:
                self.give_up(error)

    @contextmanager
    def _arena(self, name):
        from vllm.log import arena

        arena.append(name)
        yield
        arena.pop()

    def arena(self, name):
        return nullcontext() if self.fallback is not None else self._arena(name)

    def bind(self, name, tensors):
        self.bound |= tensors

    def use_current_stream(self):
        pass

    def give_up(self, error):
        import logging

        self.session, self.fallback = None, error
        logging.getLogger("foundryd").warning("capturing natively (%s): %s", error.reason, error)

    def prepare(self):
        from foundryd.engines.vllm.adapter import compare

        if self.session is None:
            return
        try:
            compare(self.recorded["resolved"], self.resolved)
        except FoundrydError as error:
            self.give_up(error)

    def capture_or_restore(self, key, fn, *, warmups=1):
        if self.session is not None:
            return CpuGraphs.archive["graphs"][key]
        for _ in range(warmups):
            fn()
        result = fn()
        self._graphs[key] = Graph(fn, result), result
        return self._graphs[key]

    def finish(self, vary=None, vary_graph=None):
        self.vary, self.vary_graph = vary, vary_graph
        if self.mode is Mode.CAPTURE:
            recorded = {"resolved": self.resolved, "sizes": self.sizes}
            CpuGraphs.archive = {"identity": self._facts, "vllm": recorded, "graphs": self._graphs}

    def close(self):
        self.closed = True


class Standin:
    """The stand-in's modules, and a way to start its engine."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.log = importlib.import_module("vllm.log")
        self.config = importlib.import_module("vllm.config")
        self.compilation = importlib.import_module("vllm.config.compilation")
        self.worker = importlib.import_module("vllm.v1.worker.gpu_worker")
        self.runner = importlib.import_module("vllm.v1.worker.gpu.model_runner")
        self.first_runner = importlib.import_module("vllm.v1.worker.gpu_model_runner")
        self.context = importlib.import_module("vllm.forward_context")
        self.monitor = importlib.import_module("vllm.compilation.monitor")
        self.graphs = importlib.import_module("vllm.v1.worker.gpu.cudagraph_utils")
        self.loader = importlib.import_module("vllm.model_executor.model_loader.base_loader")
        self.pieces = importlib.import_module("vllm.compilation.cuda_graph")
        self.parallel = importlib.import_module("vllm.distributed.parallel_state")

    def environment(self, **variables):
        """Settings of the process from now on."""
        names = ("FOUNDRYD_MODE", "FOUNDRYD_STARTUP_REPORT", "FOUNDRYD_KV_RESERVE", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        for name in names:
            self._monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            self._monkeypatch.setenv(name, str(value))
        settings.cache_clear()

    def start(self, mode="", config=None, rank=0, local_rank=0, spawned=False, **variables):
        """The worker of an engine that has started in this mode; its ranks are those within its replica.

        One that was ``spawned`` has a process of its own, which begins with the worker.
        """
        self.environment(**({"FOUNDRYD_MODE": mode} if mode else {}), **variables)
        first = v0_22.V1 if "vllm.v1.worker.gpu_model_runner" in sys.modules else ()  # it is imported late
        alone = (*v0_22.LONE, *v0_22.LONE_V2)
        seam.remove((*v0_22.ENTRY, *v0_22.WORKER, *v0_22.SCRATCH, *first, *v0_22.V2, *alone))
        v0_22._current = None
        collector.thaw()
        self.log.events.clear()
        self.monitor.cudagraph_capturing_enabled = True
        self.pieces.CUDAGraphWrapper._all_instances.clear()  # each start is one of a new process
        sys.modules.pop("vllm.plugins", None)
        sys.modules.pop("vllm.engine", None)
        return importlib.import_module("vllm.engine").start(
            config or self.config.VllmConfig(), rank, local_rank, spawned
        )

    def what(self):
        """What happened, without arenas."""
        return [what for what, _ in self.log.events]


@pytest.fixture(scope="session")
def standin(tmp_path_factory):
    """Folders for a path of Python's, with which the stand-in is a package that is installed as vLLM 0.22.1."""
    folder = tmp_path_factory.mktemp("installed")
    metadata = folder / "vllm-0.22.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.22.1\n")
    return [str(STANDIN), str(folder)]


@pytest.fixture
def vllm(monkeypatch, standin):
    """The stand-in, with graphs of the CPU."""
    pytest.importorskip("torch", reason="PyTorch is not installed; the project's own CI has none, so this skips")

    def forget():
        for name in [name for name in sys.modules if name == "vllm" or name.startswith("vllm.")]:
            del sys.modules[name]

    forget()
    for folder in standin:
        monkeypatch.syspath_prepend(folder)
    adapter = importlib.import_module("foundryd.engines.vllm.adapter")
    monkeypatch.setattr(adapter, "WorkerGraphs", CpuGraphs)
    monkeypatch.setattr(CpuGraphs, "archive", None)
    yield Standin(monkeypatch)
    forget()
    collector.thaw()
    v0_22._current = None
    settings.cache_clear()
