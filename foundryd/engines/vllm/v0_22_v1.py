# SPDX-License-Identifier: Apache-2.0
"""The V1 model runner of vLLM 0.22.1: its tensors, its graphs, and how it captures them.

vLLM takes this runner for every model but dense Qwen3 without quantization.  The model is a ``CUDAGraphWrapper`` of its
own, with a graph for each batch, around pieces that are wrapped too; a forward pass says which of them may replay.  So
all graphs are in wrappers (``v0_22_pieces``), and a dispatcher says which batches there are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from foundryd.engines.vllm import v0_22_pieces
from foundryd.engines.vllm.v0_22_pieces import Key
from foundryd.errors import EngineUnsupported

if TYPE_CHECKING:
    from foundryd.engines.vllm.adapter import Adapter  # needs torch


def facts(runner: Any) -> dict[str, Any]:
    """What vLLM decided when it made the KV cache, and a restore compares."""
    return {
        "attention_backends": sorted(backends(runner)),
        "block_sizes": [int(size) for size in runner._init_block_sizes],
        "kernel_block_sizes": [int(size) for size in runner._kernel_block_sizes],
        "resolved_cudagraph_mode": str(runner.cudagraph_dispatcher.cudagraph_mode.name),
    }


def backends(runner: Any) -> frozenset[str]:
    """The names of the attention back-ends of all layers; raises ``EngineUnsupported`` for positions of more axes."""
    if runner.uses_mrope or runner.uses_xdrope_dim > 0:
        raise EngineUnsupported(
            "positions of several axes (M-RoPE, XD-RoPE) cannot be restored yet: use a model with one position a token"
        )
    return frozenset(str(group.backend.get_name()) for groups in runner.attn_groups for group in groups)


def filled(runner: Any) -> dict[str, Any]:
    """The tensors that graphs use and the worker fills, by name."""
    from foundryd.engines.vllm import v0_22_drafts, v0_22_lora  # need torch
    from foundryd.engines.vllm.vary import schedules

    model, view = runner.get_model(), _view(runner)
    tensors: dict[str, Any] = {f"model.{name}": t for name, t in model.named_parameters()}
    tensors |= {f"model.{name}": t for name, t in model.named_buffers()}
    tensors |= {f"inputs.{name}": t for name, t in vars(view.input_buffers).items()}
    tensors |= {f"block_table.{i}": t for i, t in enumerate(view.block_tables.input_block_tables)}
    tensors |= {f"slot_mapping.{i}": t for i, t in enumerate(view.block_tables.slot_mappings)}
    tensors |= {f"schedule.{name}": t for name, t in schedules(runner).items()}
    tensors |= {f"kv.{i}": t for i, t in enumerate(runner.kv_caches)}
    if _batches_of_drafts(runner):
        tensors |= v0_22_drafts.filled(runner.drafter)
    return tensors | v0_22_lora.filled(runner)


def _view(runner: Any) -> Any:
    """The runner's tensors under the names that they have in the V2 runner."""
    tables = runner.input_batch.block_table.block_tables
    return SimpleNamespace(
        vocab_size=runner.input_batch.vocab_size,
        max_model_len=runner.max_model_len,
        kv_cache_config=runner.kv_cache_config,
        kv_caches=runner.kv_caches,
        attn_groups=runner.attn_groups,
        input_buffers=SimpleNamespace(
            input_ids=runner.input_ids.gpu,
            positions=runner.positions,
            query_start_loc=runner.query_start_loc.gpu,
            seq_lens=runner.seq_lens,
        ),
        block_tables=SimpleNamespace(
            kernel_block_sizes=runner._kernel_block_sizes,
            input_block_tables=[table.block_table.gpu for table in tables],
            slot_mappings=[table.slot_mapping.gpu for table in tables],
        ),
    )


def states(runner: Any, captured: Iterable[Key]) -> Any:
    """Other states of the worker, for the proofs of its graphs ``captured``."""
    from foundryd.engines.vllm.v0_22_drafts import Drafts  # needs torch
    from foundryd.engines.vllm.v0_22_lora import Adapters
    from foundryd.engines.vllm.vary import Ahead, States

    ahead: Ahead | None = None
    if runner.lora_config is not None:
        # Batches without adapters have graphs without.
        ahead = Adapters(runner, _tokens_with_adapters)
    elif _batches_of_drafts(runner):
        ahead = Drafts(runner.drafter, int(runner.input_batch.vocab_size))
    return States(_view(runner), captured, lambda key: _build_schedule(runner, key), ahead)


def _tokens_with_adapters(key: Key) -> int:
    return 0 if len(key) == 4 else v0_22_pieces.tokens_of(key)


def _build_schedule(runner: Any, key: Key) -> None:
    """Lets vLLM's builders fill their schedules for that graph's batch, as they did when it was captured.

    Lengths and starts are those that the runner's buffers on the device have.
    """
    tokens, requests, each = key[1], key[2], key[3]
    starts = runner.query_start_loc.cpu
    before = starts.clone()
    starts[: requests + 1] = runner.query_start_loc.gpu[: requests + 1].cpu()
    mappings = _view(runner).block_tables.slot_mappings
    try:
        runner._build_attention_metadata(
            num_tokens=tokens,
            num_reqs=requests,
            # As vLLM has it for a batch that it captures.
            max_query_len=each or tokens,
            num_tokens_padded=tokens,
            for_cudagraph_capture=True,
            slot_mappings={i: mapping[:tokens] for i, mapping in enumerate(mappings)},
            use_spec_decode=runner.speculative_config is not None,
        )
    finally:
        starts.copy_(before)


def keys(runner: Any) -> list[Key]:
    """The names of all graphs that vLLM would capture; raises ``EngineUnsupported`` if they have no place."""
    return [key for key, _, _ in _places(runner)]


def give(runner: Any, restored: Mapping[Key, tuple[Any, Any]]) -> None:
    """Lets vLLM have every graph, and leaves it as after its own capture."""
    for key, wrapper, batch in _places(runner):
        v0_22_pieces.enter(wrapper, batch, *restored[key])
    if runner.lora_config is not None:
        _load_kernels_of_adapters(runner)
    # From here on a graph that is missing is an error, and a workspace that graphs have seen does not move.
    importlib.import_module("vllm.compilation.monitor").set_cudagraph_capturing_enabled(False)
    importlib.import_module("vllm.v1.worker.workspace").lock_workspace()


def _load_kernels_of_adapters(runner: Any) -> None:
    """Runs small batches with adapters, without graphs, as vLLM does before it captures those of such batches.

    Nothing else that a worker runs while it starts has adapters, and Triton compiles a kernel for one row, for some
    numbers of rows and for others apart.
    """
    mode = importlib.import_module("vllm.config.compilation").CUDAGraphMode.NONE
    for tokens in (1, 2, 16):
        if tokens <= runner.max_num_tokens:
            runner._dummy_run(
                tokens,
                cudagraph_runtime_mode=mode,
                skip_eplb=True,
                num_active_loras=int(runner.lora_config.max_loras) + 1,
            )


def record(adapter: Adapter, real: Callable[..., Any], runner: Any, batches: Any, mode: Any) -> None:
    """What vLLM's own loop does for the batches of one mode, with each graph captured into the recording."""
    wanted = keys(runner)  # pieces that cannot be told apart are found out before anything is captured
    if not adapter.captured:
        adapter.begin_capture()
    with v0_22_pieces.recording(adapter.capture):
        real(runner, batch_descriptors=batches, cudagraph_runtime_mode=mode)
    own = ("FULL",) if mode.name == "FULL" else ("PIECE", "DRAFT")
    v0_22_pieces.require([key for key in wanted if key[0] in own], adapter.captured)


def _places(runner: Any) -> list[tuple[Key, Any, Any]]:
    """(key, wrapper, batch) of every graph that vLLM would capture, in its order."""
    modes = importlib.import_module("vllm.config.compilation").CUDAGraphMode
    places: list[tuple[Key, Any, Any]] = []
    for mode, batches in runner.cudagraph_dispatcher.get_capture_descs():
        if mode is modes.FULL:
            wrapper = _whole(runner, modes)
            places += [(v0_22_pieces.key_of_whole(batch), wrapper, batch) for batch in batches]
            continue
        pieces = v0_22_pieces.wrappers(modes)
        for batch in batches:
            tokens, adapters = int(batch.num_tokens), int(batch.num_active_loras)
            places += [(v0_22_pieces.key_of(i, tokens, adapters), wrapper, batch) for i, wrapper in pieces.items()]
    return places + _places_of_drafts(runner, modes, [key for key, _, _ in places])


def _places_of_drafts(runner: Any, modes: Any, keys: list[Key]) -> list[tuple[Key, Any, Any]]:
    """The same of the model that drafts, which vLLM captures with pieces of the other; ``keys`` are the other's."""
    found = [(mode, batch) for mode, batches in _batches_of_drafts(runner) for batch in batches]
    if not found:
        return []
    if {mode for mode, _ in found} != {modes.PIECEWISE} or not any(key[0] == "PIECE" for key in keys):
        raise EngineUnsupported(
            "the model that drafts has graphs where the other has none of the same kind, so nothing captures them: "
            "choose cudagraph_mode FULL_AND_PIECEWISE or FULL_DECODE_ONLY"
        )
    if runner.drafter.uses_mrope:
        raise EngineUnsupported(
            "positions of several axes (M-RoPE) of the model that drafts cannot be restored yet: choose cudagraph_mode "
            "FULL_DECODE_ONLY"
        )
    pieces = v0_22_pieces.wrappers(modes, drafts=True)
    return [
        (v0_22_pieces.key_of(i, int(batch.num_tokens), drafts=True), wrapper, batch)
        for _, batch in found
        for i, wrapper in pieces.items()
    ]


def _batches_of_drafts(runner: Any) -> list[tuple[Any, list[Any]]]:
    """The batches of which the model that drafts has graphs, by their mode; only some that draft have any."""
    dispatcher = getattr(getattr(runner, "drafter", None), "cudagraph_dispatcher", None)
    return [] if dispatcher is None else list(dispatcher.get_capture_descs())


def _whole(runner: Any, modes: Any) -> Any:
    wrapper = runner.model
    kind = importlib.import_module("vllm.compilation.cuda_graph").CUDAGraphWrapper
    if not isinstance(wrapper, kind) or wrapper.runtime_mode is not modes.FULL:
        raise EngineUnsupported(
            f"vLLM keeps graphs of the whole model in {type(wrapper).__name__}, which cannot be restored yet: start it "
            "without VLLM_USE_BREAKABLE_CUDAGRAPH"
        )
    return wrapper
