# SPDX-License-Identifier: Apache-2.0
"""Stands for vLLM's groups: by name as weak references, each with communicators of its own where it has peers."""

from contextlib import contextmanager

_groups = {}

captures = 0


@contextmanager
def graph_capture(device):
    """Stands for the stream that captures run on, and what peers exchange when it is left."""
    global captures
    captures += 1
    yield


def in_the_same_node_as(pg, source_rank=0):
    raise AssertionError("a collective without peers would wait for ever")
