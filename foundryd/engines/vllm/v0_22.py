# SPDX-License-Identifier: Apache-2.0
"""The seams of vLLM 0.22.1: where its workers are wrapped, and what its objects are called.

In the order in which a worker passes them (V2 model runner)::

    WorkerWrapperBase.init_worker       the seams below are put in
    Worker.init_device                  attach; then the context, process groups and the runner's buffers (arena io)
    Worker.load_model                   parameters (arena weights); their values come outside of arenas
    Worker.determine_available_memory   profiling runs as always; the archive says how large the KV cache is
    Worker.initialize_from_config       KV cache, block tables, buffers of the attention (arena kv)
    Worker.compile_or_warm_up_model     warm-ups, then GPUModelRunner.capture_model, then warm-ups that replay
      CudaGraphManager.capture          graphs are recorded or restored instead
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, cast

from foundryd.engines.vllm import seam, support, v0_22_pieces, versions
from foundryd.engines.vllm.report import StartUp
from foundryd.engines.vllm.seam import Seam
from foundryd.errors import CaptureError, FoundrydError, UsageError
from foundryd.settings import Mode, Settings, settings

log = logging.getLogger("foundryd.vllm")

_current: Any = None  # the adapter of this process's worker; a process has one worker at a time


def install() -> None:
    """Lets every worker of this process have the seams; a second call changes nothing."""
    seam.install(ENTRY)


# --- the worker -------------------------------------------------------------------------------------------------------


def _init_worker(real: Callable[..., Any], wrapper: Any, *arguments: Any, **named: Any) -> Any:
    """Only a worker's process needs the seams, and only now all that they import is imported anyway."""
    config = settings()
    try:
        seam.install(WORKER)
        if config.mode is Mode.CAPTURE:
            seam.install(LONE)
    except FoundrydError as error:
        if config.mode is Mode.CAPTURE:
            raise
        log.warning("vLLM starts as if foundryd were not installed (%s): %s", error.reason, error)
    return real(wrapper, *arguments, **named)


def _init_device(real: Callable[..., Any], worker: Any) -> Any:
    global _current
    from foundryd.engines.vllm.adapter import Adapter  # needs torch, which this process has by now
    from foundryd.engines.vllm.identity import VllmFacts

    version, config = versions.installed(), worker.vllm_config
    own = worker_settings(settings(), worker)
    _current = adapter = Adapter(own, StartUp(f"vLLM {version}", own.rank))
    with adapter.report.phase("attach"):
        adapter.attach(
            VllmFacts(version, config), lambda: support.check(config, dict(os.environ)), pynccl_communicators
        )
    if adapter.capturing:
        # One device stands for that of every local rank.
        worker.local_rank = adapter.device.index
    with adapter.report.phase("init_device"):
        return real(worker)


def worker_settings(config: Settings, worker: Any) -> Settings:
    """The process's settings with the worker's place in the world, which only vLLM knows; a capture's is given.

    Raises ``UsageError`` if a capture is of another place.
    """
    place = (int(worker.rank), int(worker.local_rank), int(worker.vllm_config.parallel_config.world_size))
    if config.mode is Mode.CAPTURE and (config.rank, config.world_size) != (place[0], place[2]):
        raise UsageError(
            f"this is captured as rank {config.rank} of {config.world_size} and vLLM's worker is rank {place[0]} of "
            f"{place[2]}: give vLLM the parallel sizes of --variant, and start it with python -m "
            "foundryd.engines.vllm.capture"
        )
    return replace(config, rank=place[0], local_rank=place[1], world_size=place[2])


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
    # What is inside is not counted twice.
    _current.report.phases["warm_up"] -= _current.report.phases.get("graphs", 0.0) - graphs
    _current.publish()
    return times


def _shutdown(real: Callable[..., Any], worker: Any) -> Any:
    if _current is not None:
        _current.close()
    return real(worker)


# --- memory -----------------------------------------------------------------------------------------------------------


def _runner_init(real: Callable[..., Any], runner: Any, *arguments: Any, **named: Any) -> Any:
    with _arena("io"):
        return real(runner, *arguments, **named)


def _initialize_model(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _arena("weights"):
        return real(*arguments, **named)


def _process_weights(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _arena("weights"):
        return real(*arguments, **named)


def _init_model_state(real: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with _arena("io"):
        return real(*arguments, **named)


def _arena(name: str) -> AbstractContextManager[None]:
    """The worker's arena; loaders and runners also run under workers of other devices, which have none."""
    return nullcontext() if _current is None else cast(AbstractContextManager[None], _current.arena(name))


def _initialize_kv_cache(real: Callable[..., Any], runner: Any, kv_cache_config: Any) -> Any:
    adapter = _current
    if adapter is None:
        return real(runner, kv_cache_config)
    adapter.report.kv_blocks = int(kv_cache_config.num_blocks)
    adapter.resolve(num_gpu_blocks=int(kv_cache_config.num_blocks))
    with adapter.arena("kv"):
        done = real(runner, kv_cache_config)
    if not adapter.active:
        return done
    names = frozenset(str(backend.get_name()) for backend in runner.attn_backends.values())
    adapter.resolve(
        attention_backends=sorted(names),
        block_sizes=[int(size) for size in runner.block_tables.block_sizes],
        kernel_block_sizes=[int(size) for size in runner.block_tables.kernel_block_sizes],
        resolved_cudagraph_mode=str(runner.cudagraph_manager.cudagraph_mode.name),
    )
    with adapter.guarded():
        support.check_backends(names)
    return done


# --- graphs -----------------------------------------------------------------------------------------------------------


def _capture_model(real: Callable[..., Any], runner: Any) -> Any:
    import torch

    from foundryd.engines.vllm.vary import States

    adapter = _current
    if adapter is None:
        return real(runner)
    with adapter.report.phase("graphs"):
        if adapter.active:
            with adapter.guarded():
                adapter.bind(filled(runner))
        used = real(runner)
        if adapter.active and adapter.capturing:
            with torch.inference_mode():  # as the worker's own steps
                states = States(runner, adapter.captured)
                states.rest()
                adapter.write(states.enter, states.enter_for)
        elif adapter.active:
            adapter.start_background()
    return used


def filled(runner: Any) -> dict[str, Any]:
    """The tensors that graphs use and the worker fills, by name."""
    from foundryd.engines.vllm.vary import schedules

    tensors: dict[str, Any] = {f"model.{name}": t for name, t in runner.model.named_parameters()}
    tensors |= {f"model.{name}": t for name, t in runner.model.named_buffers()}
    buffers = runner.input_buffers
    names = ("input_ids", "positions", "query_start_loc", "seq_lens", "dcp_local_seq_lens")
    tensors |= {f"inputs.{name}": getattr(buffers, name) for name in names}
    tables = runner.block_tables
    tensors |= {f"block_table.{i}": t for i, t in enumerate(tables.input_block_tables)}
    tensors["slot_mappings"] = tables.slot_mappings
    tensors |= {f"schedule.{name}": t for name, t in schedules(runner).items()}
    tensors |= {f"kv.{i}": t for i, t in enumerate(runner.kv_caches)}
    return tensors


def _capture(
    real: Callable[..., Any], manager: Any, create_forward_fn: Any, progress_bar_desc: str = "Capturing CUDA graphs"
) -> Mapping[Any, Any]:
    """Records or restores what vLLM would capture; anything else is left to vLLM."""
    adapter = _current
    if adapter is None or adapter.off:
        return real(manager, create_forward_fn, progress_bar_desc)  # type: ignore[no-any-return]
    modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    if adapter.capturing:
        return _record(manager, create_forward_fn, modes)
    restored = adapter.restore(lambda: _keys(manager, modes))
    if restored is None:
        return real(manager, create_forward_fn, progress_bar_desc)  # type: ignore[no-any-return]
    for batch in manager._capture_descs.get(modes.FULL, ()):
        manager.graphs[batch], outputs = restored[key_of(batch)]
        # vLLM makes these in its first warm-up, and every graph writes into the same.
        manager.hidden_states = outputs["hidden_states"]
        manager.aux_hidden_states = outputs["aux_hidden_states"]
    for tokens, index, wrapper in _pieces(manager, modes):
        v0_22_pieces.give(wrapper, tokens, *restored[v0_22_pieces.key_of(index, tokens)])
    manager._graphs_captured = True
    # The states of the attention are for a drafter's capture, and there is no drafter.
    return {}


def _record(manager: Any, create_forward_fn: Any, modes: Any) -> dict[Any, Any]:
    """What vLLM's own loop does, with each graph captured into the recording."""
    parallel = importlib.import_module("vllm.distributed.parallel_state")
    states: dict[Any, Any] = {}
    wanted = _keys(manager, modes)  # pieces that cannot be told apart are found out before anything is captured
    with parallel.graph_capture(device=manager.device):
        _current.begin_capture()
        for batch in manager._capture_descs.get(modes.PIECEWISE, ()):
            forward, states[batch] = create_forward_fn(batch)
            forward(modes.NONE)
            with v0_22_pieces.recording(_current.capture):
                forward(modes.PIECEWISE)
        for batch in manager._capture_descs.get(modes.FULL, ()):
            warm, _ = create_forward_fn(batch)
            warm(modes.NONE)
            # vLLM captures with a fresh state of the attention, since some back-ends fill theirs in the warm-up.
            forward, states[batch] = create_forward_fn(batch)
            manager.graphs[batch], _ = _current.capture(key_of(batch), _recorded(manager, forward, modes))
    if missing := sorted(set(wanted) - set(_current.captured)):
        raise CaptureError(
            f"vLLM captured {len(missing)} of {len(wanted)} graphs by itself, {missing[0]} for one, so an archive "
            "would lack them: choose cudagraph_mode FULL_DECODE_ONLY"
        )
    manager._graphs_captured = True
    return states


def _recorded(manager: Any, forward: Any, modes: Any) -> Callable[[], Any]:
    def fn() -> Any:
        forward(modes.NONE)
        return {"hidden_states": manager.hidden_states, "aux_hidden_states": list(manager.aux_hidden_states)}

    return fn


def _pieces(manager: Any, modes: Any) -> list[tuple[int, int, Any]]:
    """(tokens, index, wrapper) of every graph of a piece that vLLM would capture; raises ``EngineUnsupported``."""
    batches = manager._capture_descs.get(modes.PIECEWISE, ())
    found = v0_22_pieces.wrappers(modes) if batches else {}
    return [(int(batch.num_tokens), index, wrapper) for batch in batches for index, wrapper in found.items()]


def _keys(manager: Any, modes: Any) -> list[tuple[str, int, int, int]]:
    """The names of all graphs that vLLM would capture."""
    pieces = [v0_22_pieces.key_of(index, tokens) for tokens, index, _ in _pieces(manager, modes)]
    return pieces + [key_of(batch) for batch in manager._capture_descs.get(modes.FULL, ())]


def key_of(batch: Any) -> tuple[str, int, int, int]:
    """The stable name of a batch: its mode, tokens, requests and tokens of each request; 0 is any number."""
    return (str(batch.cg_mode.name), batch.num_tokens, batch.num_reqs or 0, batch.uniform_token_count or 0)


# --- ranks ------------------------------------------------------------------------------------------------------------


def pynccl_communicators() -> Iterator[tuple[int, Sequence[int]]]:
    """(handle, ranks) of vLLM's own NCCL communicators, in the order in which its groups were made."""
    groups = importlib.import_module("vllm.distributed.parallel_state")._groups
    for reference in list(groups.values()):
        group = reference()
        communicator = getattr(getattr(group, "device_communicator", None), "pynccl_comm", None)
        if communicator is not None and communicator.available:
            handle = communicator.comm
            yield int(getattr(handle, "value", handle)), list(group.ranks)


def _no_message_queue(real: Callable[..., Any], *_: Any, **__: Any) -> None:
    """A rank without peers has no readers to wait for."""


def _same_node(real: Callable[..., Any], pg: Any, source_rank: int = 0) -> list[bool]:
    """The ranks that a capture stands for are on one node; more nodes are not known yet."""
    return [True] * int(pg.size() if callable(getattr(pg, "size", None)) else pg.world_size)


_WORKER = "vllm.v1.worker.gpu_worker"
_RUNNER = "vllm.v1.worker.gpu.model_runner"
_LOADER = "vllm.model_executor.model_loader.base_loader"

ENTRY = (Seam("vllm.v1.worker.worker_base", "WorkerWrapperBase", "init_worker", ("self", "all_kwargs"), _init_worker),)

WORKER = (
    Seam(_WORKER, "Worker", "init_device", ("self",), _init_device),
    Seam(_WORKER, "Worker", "load_model", ("self", "load_dummy_weights"), _load_model),
    Seam(_WORKER, "Worker", "determine_available_memory", ("self",), _determine_available_memory),
    Seam(_WORKER, "Worker", "initialize_from_config", ("self", "kv_cache_config"), _initialize_from_config),
    Seam(_WORKER, "Worker", "compile_or_warm_up_model", ("self",), _compile_or_warm_up_model),
    Seam(_WORKER, "Worker", "shutdown", ("self",), _shutdown),
    Seam(_RUNNER, "GPUModelRunner", "__init__", ("self", "vllm_config", "device"), _runner_init),
    Seam(_RUNNER, "GPUModelRunner", "initialize_kv_cache", ("self", "kv_cache_config"), _initialize_kv_cache),
    Seam(_RUNNER, "GPUModelRunner", "capture_model", ("self",), _capture_model),
    Seam(_RUNNER, "", "init_model_state", ("vllm_config", "model"), _init_model_state),
    Seam(_LOADER, "", "initialize_model", ("vllm_config",), _initialize_model),
    Seam(_LOADER, "", "process_weights_after_loading", ("model", "model_config"), _process_weights),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager",
        "capture",
        ("self", "create_forward_fn", "progress_bar_desc"),
        _capture,
    ),
)

# Only where a rank is captured, which has no peers.
LONE = (
    Seam(
        "vllm.distributed.device_communicators.shm_broadcast",
        "MessageQueue",
        "create_from_process_group",
        ("pg", "max_chunk_bytes", "max_chunks"),
        _no_message_queue,
    ),
    Seam("vllm.distributed.parallel_state", "", "in_the_same_node_as", ("pg", "source_rank"), _same_node),
)
