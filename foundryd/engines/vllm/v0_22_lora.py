# SPDX-License-Identifier: Apache-2.0
"""LoRA in vLLM 0.22.1: where adapters lie, and which of them each token of a batch has.

Adapters lie in buffers with ``max_loras`` places, each for a rank of ``max_lora_rank``; vLLM copies one there when a
request asks for it.  Which token has which adapter, and where an adapter's tokens are, vLLM writes into tensors on the
device ahead of a step.  The host decides two things only: whether a batch has adapters at all, for which there are
graphs of their own, and how many may be in one, which is ``max_loras`` and tokens without.  So graphs are good for any
adapters of one ``LoRAConfig``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from foundryd.engines.vllm.v0_22_pieces import Key

_SCALE = 0.02  # of values in an adapter's second matrix, so that they matter and nothing overflows


def filled(runner: Any) -> dict[str, torch.Tensor]:
    """The tensors of adapters and of their places, by name; none without LoRA."""
    manager = _manager(runner)
    if manager is None:
        return {}
    found = dict(_adapters(manager))
    for i, wrapper in enumerate(_wrappers(manager)):
        found |= _tensors(wrapper, f"lora_tokens.{i}")
        for name in ("token_mapping_meta", "prompt_mapping_meta"):
            found |= _tensors(getattr(wrapper, name), f"lora_tokens.{i}.{name}")
    return found


class Adapters:
    """Adapters in the states that proofs are made in (an ``Ahead`` of ``foundryd.engines.vllm.vary``).

    ``tokens`` says how many tokens a graph runs adapters for; 0 if it has none.

    The kernels for the first matrix share the sum over its columns among thread blocks, which add their parts to the
    result as they come (``SPLIT_K`` of vLLM's Triton kernels): with any values no two replays would do the same, and
    nothing could be proven.  So each of its rows has one value that is not zero, and all parts but one are zeros.
    """

    def __init__(self, runner: Any, tokens: Callable[[Key], int]) -> None:
        self._manager = _manager(runner)
        self._tokens = tokens
        self._generator = torch.Generator(runner.device)
        adapters = _adapters(self._manager)
        buffers: dict[str, torch.Tensor] = {}
        for i, wrapper in enumerate(_wrappers(self._manager)):
            buffers |= _tensors(wrapper.token_mapping_meta, str(i), without="_cpu")
            # The other row is for words that adapters once could add.
            buffers[f"{i}.embeddings"] = wrapper._embeddings_indices[1]
        self.buffers: Mapping[str, torch.Tensor] = buffers
        self._first = [t for name, t in adapters.items() if _is_content(name, ".lora_a_stacked")]
        self._second = [t for name, t in adapters.items() if _is_content(name, ".lora_b_stacked")]

    def enter(self, seed: int) -> None:
        """Gives every adapter other values."""
        random = torch.Generator().manual_seed(seed)
        for buffer in self._first:
            # On the host, since nothing may be allocated on the device.
            values = torch.zeros(buffer.shape, dtype=buffer.dtype)
            columns = torch.randint(0, buffer.shape[-1], (*buffer.shape[:-1], 1), generator=random)
            buffer.copy_(values.scatter_(-1, columns, 1.0))
        self._generator.manual_seed(seed)
        for buffer in self._second:
            buffer.normal_(0, _SCALE, generator=self._generator)

    def build(self, key: Key, seed: int) -> None:
        """Lets vLLM write which adapter each of that graph's tokens has: some have none, and at least one has one."""
        tokens, slots = self._tokens(key), int(self._manager.lora_slots)
        if not tokens:
            return
        random = torch.Generator().manual_seed(seed)
        chosen = torch.randint(0, slots + 1, (tokens,), generator=random)  # 0 is none
        chosen[seed % tokens] = 1 + seed % slots
        ids = tuple(chosen.tolist())
        mapping = importlib.import_module("vllm.lora.layers").LoRAMapping(ids, ids, is_prefill=True)
        before = self._manager.lora_index_to_id
        self._manager.lora_index_to_id = list(range(1, slots + 1))
        try:
            self._manager._set_adapter_mapping(mapping)
        finally:
            self._manager.lora_index_to_id = before


def _manager(runner: Any) -> Any:
    return None if runner.lora_config is None else runner.lora_manager._adapter_manager


def _wrappers(manager: Any) -> list[Any]:
    """What has the tokens' adapters; layers share one."""
    return list({id(wrapper): wrapper for wrapper in manager.punica_wrapper_mapping.values()}.values())


def _adapters(manager: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, module in manager.modules.items():
        found |= _tensors(module, f"lora.{name}")
    return found


def _is_content(name: str, matrix: str) -> bool:
    return matrix in name and not name.endswith("_2d")  # which is a view


def _tensors(thing: Any, prefix: str, without: str = "") -> dict[str, torch.Tensor]:
    """An object's own tensors, and those in its tuples; without those whose names end so."""
    return {name: tensor for name, tensor in _walk(thing, prefix) if not without or not name.endswith(without)}


def _walk(thing: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in vars(thing).items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}.{name}", value
        elif isinstance(value, tuple | list):
            yield from (
                (f"{prefix}.{name}.{i}", part) for i, part in enumerate(value) if isinstance(part, torch.Tensor)
            )
