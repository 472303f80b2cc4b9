# SPDX-License-Identifier: Apache-2.0
"""A model that drafts in vLLM 0.22.1's V1 runner: what its pieces' graphs read.

It has tokens, positions and hidden states of its own, which it fills before each of its passes; between pieces its
attention runs without graphs, like that of the other model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from foundryd.engines.vllm.v0_22_pieces import Key

_POSITIONS = 256  # that states have at most; a model that drafts may know fewer than the other
_INPUTS = ("input_ids", "positions", "hidden_states")


def filled(drafter: Any) -> dict[str, torch.Tensor]:
    """The tensors that graphs use and the worker fills, by name; some parameters may be the other model's."""
    named = [*drafter.model.named_parameters(), *drafter.model.named_buffers()]
    return {f"draft.{name}": t for name, t in named} | {f"drafts.{name}": getattr(drafter, name) for name in _INPUTS}


class Drafts:
    """Other inputs of the model that drafts (an ``Ahead`` of ``foundryd.engines.vllm.vary``)."""

    def __init__(self, drafter: Any, vocabulary: int) -> None:
        self._drafter, self._vocabulary = drafter, vocabulary
        self.buffers: Mapping[str, torch.Tensor] = {}
        self._generator = torch.Generator(drafter.input_ids.device)

    def enter(self, seed: int) -> None:
        """Gives every token other values."""
        drafter, generator = self._drafter, self._generator.manual_seed(seed)
        drafter.input_ids.random_(0, self._vocabulary, generator=generator)
        drafter.positions.random_(0, min(_POSITIONS, int(drafter.max_model_len)), generator=generator)
        drafter.hidden_states.normal_(generator=generator)

    def build(self, key: Key, seed: int) -> None:
        """Every graph reads the beginning of the same inputs."""
