# SPDX-License-Identifier: Apache-2.0
"""Stands for the context of a forward pass: what pieces are told of the batch."""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple


class BatchDescriptor(NamedTuple):
    num_tokens: int
    num_reqs: int | None = None
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0


_context = []


def get_forward_context():
    return _context[-1]


@contextmanager
def set_forward_context(mode, tokens, batch=None):
    batch = batch or BatchDescriptor(num_tokens=tokens, has_lora=False)
    _context.append(SimpleNamespace(cudagraph_runtime_mode=mode, batch_descriptor=batch))
    yield
    _context.pop()
