# SPDX-License-Identifier: Apache-2.0
"""What an engine allocates and overwrites after a restore never touches what the graphs use."""

from __future__ import annotations

import pytest

MIB = 1 << 20


@pytest.mark.parametrize("size", [4096, 64 * MIB])
def test_tokens_stay_right_when_later_memory_is_overwritten(e2e, worlds, pair, size):
    late = e2e.Change(flags=["--late-bytes", str(size)])
    ranks = worlds.run(pair.config, pair.env(), every=late)
    assert [r.result["restored"] for r in ranks] == [True, True]
    assert e2e.right_tokens(pair.config, ranks)
