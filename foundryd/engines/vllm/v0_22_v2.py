# SPDX-License-Identifier: Apache-2.0
"""The V2 model runner of vLLM 0.22.1: its tensors, its graphs, and how it captures them.

``CudaGraphManager`` has a graph for each batch, which writes into hidden states that all share, and walks its batches
itself; pieces of the model have graphs of their own (``v0_22_pieces``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from foundryd.engines.vllm import v0_22_pieces
from foundryd.engines.vllm.v0_22_pieces import Key

if TYPE_CHECKING:
    from foundryd.engines.vllm.adapter import Adapter  # needs torch


def facts(runner: Any) -> dict[str, Any]:
    """What vLLM decided when it made the KV cache, and a restore compares."""
    return {
        "attention_backends": sorted(backends(runner)),
        "block_sizes": [int(size) for size in runner.block_tables.block_sizes],
        "kernel_block_sizes": [int(size) for size in runner.block_tables.kernel_block_sizes],
        "resolved_cudagraph_mode": str(runner.cudagraph_manager.cudagraph_mode.name),
    }


def backends(runner: Any) -> frozenset[str]:
    """The names of the attention back-ends of all layers."""
    return frozenset(str(backend.get_name()) for backend in runner.attn_backends.values())


def filled(runner: Any) -> dict[str, Any]:
    """The tensors that graphs use and the worker fills, by name."""
    from foundryd.engines.vllm import v0_22_lora  # needs torch
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
    return tensors | v0_22_lora.filled(runner)


def states(runner: Any, captured: Iterable[Key]) -> Any:
    """Other states of the worker, for the proofs of its graphs ``captured``."""
    from foundryd.engines.vllm.v0_22_lora import Adapters  # needs torch
    from foundryd.engines.vllm.vary import States

    # With LoRA every graph has adapters in it; they do nothing for a batch without.
    ahead = None if runner.lora_config is None else Adapters(runner, v0_22_pieces.tokens_of)
    return States(runner, captured, ahead=ahead)


def keys(runner: Any) -> list[Key]:
    """The names of all graphs that vLLM would capture; raises ``EngineUnsupported`` if pieces have none."""
    return _keys(runner.cudagraph_manager, _modes())


def give(runner: Any, restored: Mapping[Key, tuple[Any, Any]]) -> None:
    """Lets vLLM have every graph, as if it had captured them."""
    manager, modes = runner.cudagraph_manager, _modes()
    for batch in manager._capture_descs.get(modes.FULL, ()):
        manager.graphs[batch], outputs = restored[key_of(batch)]
        # vLLM makes these in its first warm-up, and every graph writes into the same.
        manager.hidden_states = outputs["hidden_states"]
        manager.aux_hidden_states = outputs["aux_hidden_states"]
    for tokens, index, wrapper in _pieces(manager, modes):
        v0_22_pieces.give(
            wrapper, tokens, runner.lora_config is not None, *restored[v0_22_pieces.key_of(index, tokens)]
        )
    manager._graphs_captured = True


def record(adapter: Adapter, manager: Any, create_forward_fn: Callable[[Any], tuple[Any, Any]]) -> dict[Any, Any]:
    """What vLLM's own loop does, with each graph captured into the recording."""
    parallel = importlib.import_module("vllm.distributed.parallel_state")
    modes = _modes()
    states: dict[Any, Any] = {}
    wanted = _keys(manager, modes)  # pieces that cannot be told apart are found out before anything is captured
    with parallel.graph_capture(device=manager.device):
        adapter.begin_capture()
        for batch in manager._capture_descs.get(modes.PIECEWISE, ()):
            forward, states[batch] = create_forward_fn(batch)
            forward(modes.NONE)
            with v0_22_pieces.recording(adapter.capture):
                forward(modes.PIECEWISE)
        for batch in manager._capture_descs.get(modes.FULL, ()):
            warm, _ = create_forward_fn(batch)
            warm(modes.NONE)
            # vLLM captures with a fresh state of the attention, since some back-ends fill theirs in the warm-up.
            forward, states[batch] = create_forward_fn(batch)
            manager.graphs[batch], _ = adapter.capture(key_of(batch), _recorded(manager, forward, modes))
    v0_22_pieces.require(wanted, adapter.captured)
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


def _keys(manager: Any, modes: Any) -> list[Key]:
    """The names of all graphs that vLLM would capture."""
    pieces = [v0_22_pieces.key_of(index, tokens) for tokens, index, _ in _pieces(manager, modes)]
    return pieces + [key_of(batch) for batch in manager._capture_descs.get(modes.FULL, ())]


def key_of(batch: Any) -> Key:
    """The stable name of a batch: its mode, tokens, requests and tokens of each request; 0 is any number."""
    return (str(batch.cg_mode.name), batch.num_tokens, batch.num_reqs or 0, batch.uniform_token_count or 0)


def _modes() -> Any:
    return importlib.import_module("vllm.config.compilation").CUDAGraphMode
