# SPDX-License-Identifier: Apache-2.0
"""Stands for what a step says of adapters: which number each token and each sampled token has; 0 is none."""

from dataclasses import dataclass


@dataclass
class LoRAMapping:
    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False
