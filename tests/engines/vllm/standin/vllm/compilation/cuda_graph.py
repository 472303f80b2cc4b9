# SPDX-License-Identifier: Apache-2.0
"""Stands for the wrapper of a piece: runs it, captures it, or replays its graph, as the forward pass's context says."""

import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from vllm.compilation import monitor
from vllm.forward_context import get_forward_context
from vllm.log import note


def weak_ref_tensors(tensors):
    """Stands for tensors at the same places that keep no memory in use."""
    if isinstance(tensors, torch.Tensor):
        return tensors.view_as(tensors)
    return tuple(t.view_as(t) if isinstance(t, torch.Tensor) else t for t in tensors)


@dataclass
class CUDAGraphEntry:
    batch_descriptor: Any
    cudagraph: Any = None
    output: Any = None
    input_addresses: Any = None


@dataclass
class CUDAGraphOptions:
    weak_ref_output: bool = False


class CUDAGraphWrapper:
    _all_instances: ClassVar = weakref.WeakSet()

    def __init__(self, runnable, vllm_config, runtime_mode, cudagraph_options=None):
        self.runnable, self.runtime_mode = runnable, runtime_mode
        self.cudagraph_options = cudagraph_options or CUDAGraphOptions()
        self.concrete_cudagraph_entries = {}
        CUDAGraphWrapper._all_instances.add(self)

    def __getattr__(self, name):
        return getattr(self.runnable, name)

    def __call__(self, *args, **kwargs):
        context = get_forward_context()
        if context.cudagraph_runtime_mode is not self.runtime_mode:
            return self.runnable(*args, **kwargs)
        entry = self.concrete_cudagraph_entries.get(context.batch_descriptor)
        if entry is not None:
            # The real one compares only where it logs for debugging.
            assert [a.data_ptr() for a in args if isinstance(a, torch.Tensor)] == entry.input_addresses
            note("replay of a piece" if self.runtime_mode.name == "PIECEWISE" else "replay")
            entry.cudagraph.replay()
            return entry.output
        assert monitor.cudagraph_capturing_enabled
        note("native capture of a piece" if self.runtime_mode.name == "PIECEWISE" else "native capture")
        output = self.runnable(*args, **kwargs)
        inputs = [a.data_ptr() for a in args if isinstance(a, torch.Tensor)]

        def again():
            for old, new in zip(_tensors(output), _tensors(self.runnable(*args, **kwargs)), strict=True):
                old.copy_(new)

        made = CUDAGraphEntry(context.batch_descriptor, _Native(again), output, inputs)
        self.concrete_cudagraph_entries[context.batch_descriptor] = made
        return output


def _tensors(output):
    return [output] if isinstance(output, torch.Tensor) else [t for part in output for t in _tensors(part)]


@dataclass
class _Native:
    replay: Any
