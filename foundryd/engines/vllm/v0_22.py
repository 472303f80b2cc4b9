# SPDX-License-Identifier: Apache-2.0
"""The seams of vLLM 0.22.1: where its workers are wrapped, and what its objects are called.

In the order in which a worker passes them::

    WorkerWrapperBase.init_worker       plug-ins are loaded, if this process has not yet
    WorkerWrapperBase.init_device       the seams below are put in
    Worker.init_device                  attach; then the context, process groups and the runner's buffers (arena io)
    Worker.load_model                   parameters (arena weights); their values come outside of arenas
    Worker.determine_available_memory   profiling runs as always; the archive says how large the KV cache is
    Worker.initialize_from_config       KV cache, block tables, buffers of the attention (arena kv)
    Worker.compile_or_warm_up_model     warm-ups, then GPUModelRunner.capture_model, then warm-ups
      GPUModelRunner.capture_model      graphs are restored, or captured as each runner does it

There are two model runners, with a module each for what differs: ``v0_22_v2`` and ``v0_22_v1``.  ``v0_22_ranks`` knows
where a worker is among others.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from foundryd.engines.vllm import seam, support, v0_22_v1, v0_22_v2, versions
from foundryd.engines.vllm.report import StartUp
from foundryd.engines.vllm.seam import Seam
from foundryd.engines.vllm.v0_22_ranks import LONE, LONE_V2, Place, pynccl_communicators, worker_settings
from foundryd.errors import FoundrydError
from foundryd.settings import Mode, settings

log = logging.getLogger("foundryd.vllm")

_current: Any = None  # the adapter of the worker that started last in this process; one starts at a time
_adapters: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by worker, of which a program may make several


def install() -> None:
    """Lets every worker of this process have the seams; a second call changes nothing."""
    seam.install(ENTRY)


# --- the worker -------------------------------------------------------------------------------------------------------


def _init_wrapper(real: Callable[..., Any], wrapper: Any) -> Any:
    """Only a worker's process needs the seams, and only now all that they import is imported anyway.

    A process that vLLM starts anew for a worker loads plug-ins as it makes the worker, so nothing before is in time.
    """
    config = settings()
    second = bool(wrapper.vllm_config.use_v2_model_runner)
    try:
        seam.install((*WORKER, *SCRATCH, *(V2 if second else ())))
        if config.mode is Mode.CAPTURE:
            seam.install((*LONE, *(LONE_V2 if second else ())))
    except FoundrydError as error:
        if config.mode is Mode.CAPTURE:
            raise
        log.warning("vLLM starts as if foundryd were not installed (%s): %s", error.reason, error)
    return real(wrapper)


def _init_device(real: Callable[..., Any], worker: Any) -> Any:
    global _current
    from foundryd.engines.vllm.adapter import Adapter  # needs torch, which this process has by now
    from foundryd.engines.vllm.identity import VllmFacts

    version, config = versions.installed(), worker.vllm_config
    own = worker_settings(settings(), worker)
    _current = adapter = Adapter(own, StartUp(f"vLLM {version}", own.rank, replica=Place.of(worker).replica))
    _adapters[worker] = adapter
    with adapter.report.phase("attach"):
        adapter.attach(
            VllmFacts(version, config), lambda: support.check(config, dict(os.environ)), pynccl_communicators
        )
    if adapter.capturing:
        # One device stands for that of every local rank.
        worker.local_rank = adapter.device.index
    with adapter.report.phase("init_device"):
        if not config.use_v2_model_runner:
            # vLLM imports this runner only now, with whatever that asks of the device.
            with adapter.guarded():
                seam.install(V1)
        return real(worker)


def _load_model(real: Callable[..., Any], worker: Any, **named: Any) -> Any:
    with _current.report.phase("load_model"):
        return real(worker, **named)


def _determine_available_memory(real: Callable[..., Any], worker: Any) -> int:
    with _current.report.phase("profile"):
        measured = int(real(worker))
    # What the user fixed in bytes is equal on both sides already.
    return measured if worker.cache_config.kv_cache_memory_bytes else int(_current.kv_bytes(measured))


def _initialize_from_config(real: Callable[..., Any], worker: Any, kv_cache_config: Any) -> Any:
    with _current.report.phase("kv_cache"):
        return real(worker, kv_cache_config)


def _compile_or_warm_up_model(real: Callable[..., Any], worker: Any) -> Any:
    graphs = _current.report.phases.get("graphs", 0.0)
    with _current.report.phase("warm_up"):
        times = real(worker)
    seam.remove(SCRATCH)  # served requests call vLLM's own function
    # What is inside is not counted twice.
    _current.report.phases["warm_up"] -= _current.report.phases.get("graphs", 0.0) - graphs
    _current.publish()
    return times


def _shutdown(real: Callable[..., Any], worker: Any) -> Any:
    """Ends what this worker has; another one of the process goes on."""
    adapter = _adapters.pop(worker, None)
    try:
        if adapter is not None:
            adapter.close()
    finally:
        # A device that failed fails here too, and vLLM frees what it can all the same.
        done = real(worker)
    return done


# --- memory -----------------------------------------------------------------------------------------------------------


def _runner_init(real: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    with _made("io", "runner"):
        return real(runner, *arguments, **named)


def _initialize_model(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _made("weights", "parameters"):
        return real(*arguments, **named)


def _process_weights(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _made("weights", "kernel_format"):
        return real(*arguments, **named)


def _load_lora_model(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _made("weights", "lora"):
        return real(*arguments, **named)


def _init_model_state(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _made("io", "model_state"):
        return real(*arguments, **named)


@contextmanager
def _made(arena: str, part: str) -> Iterator[None]:
    """Inside, the worker makes tensors in that arena, as a part of its phase.

    Loaders and runners also run under workers of other devices, which have none.
    """
    if _current is None:
        yield
        return
    with _current.report.part(part), _current.arena(arena):
        yield


def _initialize_kv_cache(real: Callable[..., Any], runner: Any, kv_cache_config: Any, **named: Any) -> Any:
    adapter = _current
    if adapter is None or named.get("is_profiling"):
        return real(runner, kv_cache_config, **named)
    adapter.report.kv_blocks = int(kv_cache_config.num_blocks)
    adapter.resolve(num_gpu_blocks=int(kv_cache_config.num_blocks))
    with adapter.arena("kv"):
        done = real(runner, kv_cache_config, **named)
    if not adapter.active:
        return done
    kind = _kind(runner)
    with adapter.guarded():
        support.check_backends(kind.backends(runner))
        adapter.resolve(**kind.facts(runner))
    return done


# --- graphs -----------------------------------------------------------------------------------------------------------


class Kind(Protocol):
    """What a module knows of one of the two model runners."""

    def facts(self, runner: Any) -> dict[str, Any]:
        """What vLLM decided when it made the KV cache, and a restore compares."""

    def backends(self, runner: Any) -> frozenset[str]:
        """The names of the attention back-ends; raises ``EngineUnsupported``."""

    def filled(self, runner: Any) -> dict[str, Any]:
        """The tensors that graphs use and the worker fills, by name."""

    def states(self, runner: Any, captured: Iterable[Any]) -> Any:
        """Other states of the worker, for the proofs of its graphs ``captured``."""

    def keys(self, runner: Any) -> list[Any]:
        """The names of all graphs that vLLM would capture; raises ``EngineUnsupported``."""

    def give(self, runner: Any, restored: Mapping[Any, tuple[Any, Any]]) -> None:
        """Lets vLLM have every graph, as if it had captured them."""


def _workspace(real: Callable[..., Any], manager: Any, required_bytes: int) -> Any:
    """Scratch memory that layers share and graphs refer to: a restoring worker needs it too, and at the same place."""
    [current, *others] = manager._current_workspaces
    grows = current is None or current.numel() * current.element_size() < required_bytes
    if _current is None or others or not grows:
        return real(manager, required_bytes)
    with _current.arena("io"):
        return real(manager, required_bytes)


def _workspaces() -> dict[str, Any]:
    """The workspace by its name, if some layer asked for it."""
    module = importlib.import_module("vllm.v1.worker.workspace")
    if not module.is_workspace_manager_initialized():
        return {}
    found = module.current_workspace_manager()._current_workspaces
    return {f"workspace.{i}": tensor for i, tensor in enumerate(found) if tensor is not None}


def _kind(runner: Any) -> Kind:
    return v0_22_v2 if runner.vllm_config.use_v2_model_runner else v0_22_v1


def _profile_run(real: Callable[..., Any], runner: Any) -> Any:
    if _current is None:
        return real(runner)
    with _current.report.part("run"):
        done = real(runner)
    # It ends by collecting, and what compiled the model stays.
    _current.freeze()
    return done


def _load_compiled(real: Callable[..., Any], model: Any, aot_compilation_path: str) -> Any:
    if _current is None:
        return real(model, aot_compilation_path)
    # The cached model comes as hundreds of thousands of objects, all of which stay.
    with _current.report.part("load_compiled"), _current.uncollected():
        return real(model, aot_compilation_path)


def _compiled() -> bool:
    """Whether vLLM compiled something in this process instead of loading it."""
    counter = importlib.import_module("vllm.compilation.counter").compilation_counter
    return bool(counter.num_aot_compiles or counter.num_compiled_artifacts_saved)


def _part(name: str) -> Callable[..., Any]:
    """Times a function as a part of the worker's phase."""

    def around(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        with nullcontext() if _current is None else _current.report.part(name):
            return real(*arguments, **named)

    return around


def _capture_model(real: Callable[..., Any], runner: Any) -> Any:
    import torch

    adapter = _current
    if adapter is None:
        return real(runner)
    kind = _kind(runner)
    with adapter.report.phase("graphs"), torch.inference_mode():  # as the worker's own steps
        if adapter.restoring:
            adapter.tidy()
        if adapter.active:
            with adapter.guarded(), adapter.report.part("bind"):
                adapter.bind(kind.filled(runner) | _workspaces())
        if not adapter.capturing and not adapter.off:
            restored = adapter.restore(lambda: kind.keys(runner))
            if restored is not None:
                with adapter.report.part("give"):
                    kind.give(runner, restored)
                adapter.start_background()
                # The device memory that graphs took, which vLLM says in its log.
                return 0
        with adapter.report.part("vllm"):
            used = real(runner)
        if adapter.capturing:
            states = kind.states(runner, adapter.captured)
            states.rest()
            adapter.write(states.enter, states.enter_for, cold=_compiled())
    return used


def _capture_batches(
    real: Callable[..., Any], manager: Any, create_forward_fn: Any, progress_bar_desc: str = "Capturing CUDA graphs"
) -> Mapping[Any, Any]:
    """The V2 runner's loop over its batches, recorded."""
    if _current is None or not _current.capturing:
        return real(manager, create_forward_fn, progress_bar_desc)  # type: ignore[no-any-return]
    return v0_22_v2.record(_current, manager, create_forward_fn)


def _capture_cudagraphs(
    real: Callable[..., Any], runner: Any, batch_descriptors: Any, cudagraph_runtime_mode: Any
) -> None:
    """The V1 runner's loop over its batches of one mode, recorded."""
    if _current is None or not _current.capturing:
        real(runner, batch_descriptors=batch_descriptors, cudagraph_runtime_mode=cudagraph_runtime_mode)
    else:
        v0_22_v1.record(_current, real, runner, batch_descriptors, cudagraph_runtime_mode)


def _profile_cudagraph_memory(real: Callable[..., Any], runner: Any) -> int:
    """The V1 runner's trial captures with a small KV cache, which would come before the real one's in the arenas."""
    # An archive says how large the KV cache is, and its capture leaves a reserve.
    return int(real(runner)) if _current is None or not _current.without_trials else 0


_WORKER = "vllm.v1.worker.gpu_worker"
_V1_RUNNER = "vllm.v1.worker.gpu_model_runner"
_V2_RUNNER = "vllm.v1.worker.gpu.model_runner"
_LOADER = "vllm.model_executor.model_loader.base_loader"
_KV = ("self", "kv_cache_config")

ENTRY = (Seam("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_device", ("self",), _init_wrapper),)

WORKER = (
    Seam(_WORKER, "Worker", "init_device", ("self",), _init_device),
    Seam(_WORKER, "Worker", "load_model", ("self", "load_dummy_weights"), _load_model),
    Seam(_WORKER, "Worker", "determine_available_memory", ("self",), _determine_available_memory),
    Seam(_WORKER, "Worker", "initialize_from_config", _KV, _initialize_from_config),
    Seam(_WORKER, "Worker", "compile_or_warm_up_model", ("self",), _compile_or_warm_up_model),
    Seam(_WORKER, "Worker", "shutdown", ("self",), _shutdown),
    Seam(_WORKER, "", "kernel_warmup", ("worker",), _part("kernels")),
    Seam(_LOADER, "", "initialize_model", ("vllm_config",), _initialize_model),
    Seam(_LOADER, "", "process_weights_after_loading", ("model", "model_config"), _process_weights),
    Seam(
        "vllm.compilation.decorators",
        "",
        "_try_load_aot_compiled_fn",
        ("model", "aot_compilation_path"),
        _load_compiled,
    ),
    Seam("vllm.compilation.backends", "VllmBackend", "__call__", ("self", "graph"), _part("split_and_compile")),
)

# Only while the worker starts.
SCRATCH = (
    Seam(
        "vllm.v1.worker.workspace",
        "WorkspaceManager",
        "_ensure_workspace_size",
        ("self", "required_bytes"),
        _workspace,
    ),
)


def _runner(module: str) -> tuple[Seam, ...]:
    """What both of vLLM's runners have."""
    return (
        Seam(module, "GPUModelRunner", "__init__", ("self", "vllm_config", "device"), _runner_init),
        Seam(module, "GPUModelRunner", "load_lora_model", ("self", "model", "vllm_config", "device"), _load_lora_model),
        Seam(module, "GPUModelRunner", "initialize_kv_cache", _KV, _initialize_kv_cache),
        Seam(module, "GPUModelRunner", "profile_run", ("self",), _profile_run),
        Seam(module, "GPUModelRunner", "capture_model", ("self",), _capture_model),
    )


# One of these two, as vLLM chooses its runner.
V1 = (
    *_runner(_V1_RUNNER),
    Seam(_V1_RUNNER, "GPUModelRunner", "profile_cudagraph_memory", ("self",), _profile_cudagraph_memory),
    Seam(
        _V1_RUNNER,
        "GPUModelRunner",
        "_capture_cudagraphs",
        ("self", "batch_descriptors", "cudagraph_runtime_mode"),
        _capture_cudagraphs,
    ),
)
V2 = (
    *_runner(_V2_RUNNER),
    Seam(_V2_RUNNER, "", "init_model_state", ("vllm_config", "model"), _init_model_state),
    Seam(_WORKER, "", "warmup_kernels", ("model_runner",), _part("steps")),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager",
        "capture",
        ("self", "create_forward_fn", "progress_bar_desc"),
        _capture_batches,
    ),
)
