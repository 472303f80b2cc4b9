# SPDX-License-Identifier: Apache-2.0
"""Several controls of one rank that share its graphs: one recording of what each captured and proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from foundryd.capture.recording import Proofs, Recording
from foundryd.capture.structure import alike, host_rows


def joined(controls: Sequence[Recording], references: Sequence[Recording]) -> Recording:
    """The recording of all controls as of one; of those not built like the first, the first as it is.

    Each graph comes from the control that proved it (``Journal.graphs``), since a proof is of the values that its own
    capture has.  A range is dead if it is so for the graphs of every control.  Content that not all offered to their
    proofs, because some found zeros there as ``references`` did, counts as these zeros.
    """
    # Its graphs, too, may use the pinned memory that only one control still had to record.
    first = max(controls, key=lambda control: len(host_rows(control)))
    for other in controls:
        if other is not first and not alike(first, [other]):
            return other
    graphs = [controls[number % len(controls)].graphs[number] for number in range(len(first.graphs))]
    offered = [{c.address for c in r.contents} for r in controls]
    common = set.intersection(*offered) | {c.address for r in references for c in r.contents}
    proofs = [control.proofs or Proofs() for control in controls]
    return replace(
        first,
        graphs=graphs,
        contents=[c for c in first.contents if c.address in common],
        proofs=Proofs(
            sorted(set.intersection(*(set(p.dead) for p in proofs))),
            _by_block([p.noise for p in proofs]),
            _by_block([p.strays for p in proofs]),
            all(p.varied for p in proofs),
            unsteady=sorted({place for p in proofs for place in p.unsteady}),
        ),
    )


def _by_block(words: Sequence[np.ndarray]) -> np.ndarray:
    """Words of different graphs, ascending."""
    every = np.concatenate(words)
    return every[np.argsort(every["block"], kind="stable")]
