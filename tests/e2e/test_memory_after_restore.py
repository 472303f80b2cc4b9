# SPDX-License-Identifier: Apache-2.0
"""What an engine allocates and overwrites after a restore never touches what the graphs use."""

from __future__ import annotations

import pytest

from foundryd.session.arena import ARENAS

MIB = 1 << 20


@pytest.mark.parametrize("size", [4096, 64 * MIB])
def test_tokens_stay_right_when_later_memory_is_overwritten(e2e, worlds, pair, size):
    late = e2e.Change(flags=["--late-bytes", str(size)])
    ranks = worlds.run(pair.config, pair.env(), every=late)
    assert [r.result["restored"] for r in ranks] == [True, True]
    assert e2e.right_tokens(pair.config, ranks)
    # Most of what a step uses it also writes, so that tokens alone would not tell.
    recorded = [row for arena in ARENAS for row in e2e.allocations(pair.path, arena)]
    assert recorded
    for rank in ranks:
        new = rank.result["late"]
        assert len(new) == 2 * len(ARENAS)
        for address, size in new:
            assert not [r for r in recorded if address < r[0] + r[1] and r[0] < address + size]
