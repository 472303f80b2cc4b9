# SPDX-License-Identifier: Apache-2.0
"""Which pinned host memory an archive of several recordings demands of a restore.

A recording has all that anything in it mentions.  Much of what mentions staging buffers is garbage in parameters, and
only where two captures of a rank can be compared is it known for that: see ``capture.control``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from foundryd.archive.members import Bytes
from foundryd.capture.pinned import HOST, needed, on_host
from foundryd.capture.recording import Recording
from foundryd.capture.structure import host_rows
from foundryd.rankpatch.noise import span_bytes

_ADDRESS = 8  # bytes


def demanded_host(recordings: Sequence[Recording], noise: np.ndarray) -> np.ndarray:
    """Rows of the host arena up to the last that anything but noise refers to in one of the recordings.

    The recordings are alike and their content is what an archive would have; ``noise`` are the rows of ``noise_dtype``
    that hold for all of their graphs, by block.
    """
    longest = max((host_rows(recording) for recording in recordings), key=len)
    exact = [recording.comm_ops.view(np.uint8).reshape(-1) for recording in recordings]
    exact += [data for recording in recordings for module in recording.modules for _, data in module.globals]
    words = (part for recording in recordings for part in _words(recording, noise))
    contents = [content for recording in recordings for content in recording.contents]
    held = [(content.ordinal, content.data) for content in contents if content.arena == HOST]
    elsewhere = (content.data for content in contents if content.arena != HOST)
    named = {address for recording in recordings for address in recording.notes.get("named_on_host", [])}
    return needed(longest, exact, chain(words, elsewhere), named, held)


def with_host(recording: Recording, rows: np.ndarray) -> Recording:
    """The recording with these rows of the host arena, and of the content there what they hold."""
    others = recording.allocations[~on_host(recording.allocations)]
    contents = [c for c in recording.contents if c.arena != HOST or c.ordinal < len(rows)]
    return replace(recording, allocations=np.concatenate([others, rows]), contents=contents)


def _words(recording: Recording, noise: np.ndarray) -> Iterator[Bytes]:
    """For each graph all 8 bytes of its parameters that may be an address, end to end: none of them is noise."""
    bounds = np.searchsorted(noise["block"], np.arange(len(recording.graphs) + 1)).tolist()
    for graph, (first, last) in zip(recording.graphs, pairwise(bounds), strict=True):
        if len(graph.params) < _ADDRESS:
            continue
        offset = span_bytes(noise["offset"][first:last], noise["width"][first:last])
        noisy = np.zeros(len(graph.params), bool)
        # A copy reads its source whatever it is, so that only what a kernel is given may be garbage.
        noisy[offset[graph.in_kernels(offset)] - graph.param_start()] = True
        clear = ~sliding_window_view(noisy, _ADDRESS).any(axis=1)
        yield sliding_window_view(graph.params, _ADDRESS)[clear].reshape(-1)
