# SPDX-License-Identifier: Apache-2.0
"""Memory that is not the archive's is refused by name, and the engine captures natively with the right tokens."""

from __future__ import annotations

import pytest

ARENAS = ("weights", "kv", "io")
WHAT = {
    "extra": "is made here and not in the archive",
    "missing": "is in the archive and was not made here",
    "larger": "is {actual} bytes here and {expected} in the archive",
}


@pytest.mark.parametrize("arena", ARENAS)
@pytest.mark.parametrize("kind", WHAT)
def test_a_different_allocation_is_named_and_the_engine_captures(e2e, worlds, solo, kind, arena):
    (rank,) = worlds.run(solo.config, solo.env(), every=e2e.Change(flags=["--disturb", f"{kind}:{arena}"]))
    assert e2e.right_tokens(solo.config, [rank])
    reason, message = rank.fallback
    assert reason == "layout_diverged"
    ordinal, expected, actual = divergence(e2e, solo, kind, arena)
    assert message.startswith(f"allocation {ordinal} of arena {arena!r} ")
    what = WHAT[kind].format(expected=expected, actual=actual)
    assert what in message
    if kind != "larger":
        assert f"({actual if kind == 'extra' else expected} bytes)" in message
    assert e2e.sentence(message)
    assert rank.result["restored"] is False
    assert rank.result["counters"]["engine"]["captures"] == len(solo.config.batch_sizes)
    # Said once, to whoever reads the engine's log.
    assert rank.err.count("capturing natively") == 1


def divergence(e2e, captured, kind, arena):
    """(ordinal, bytes in the archive, bytes made) of the first allocation that is not as recorded."""
    recorded = [size for _, size in e2e.allocations(captured.path, arena)]
    if kind == "extra":
        return len(recorded), 0, 4096
    if kind == "missing":
        return len(recorded) - 1, recorded[-1], 0
    return 0, recorded[0], recorded[0] + 4096


@pytest.mark.parametrize("arena", ARENAS)
def test_one_rank_that_diverges_takes_the_others_along(e2e, worlds, pair, arena):
    ranks = worlds.run(pair.config, pair.env(), changes={1: e2e.Change(flags=["--disturb", f"larger:{arena}"])})
    assert e2e.right_tokens(pair.config, ranks)
    reason, message = ranks[1].fallback
    assert reason == "layout_diverged"
    peer_reason, peer_message = ranks[0].fallback
    assert peer_reason == "peer_failed"
    # The others hear why, too.
    assert "rank 1" in peer_message
    assert message in peer_message


def test_without_the_hook_the_engine_captures(e2e, worlds, solo):
    (rank,) = worlds.run(solo.config, solo.env(LD_PRELOAD=None))
    assert e2e.right_tokens(solo.config, [rank])
    reason, message = rank.fallback
    assert reason == "hook_missing"
    assert "foundryd run" in message


def test_one_rank_without_the_hook_takes_the_others_along(e2e, worlds, pair):
    ranks = worlds.run(pair.config, pair.env(), changes={0: e2e.Change(env={"LD_PRELOAD": None})})
    assert e2e.right_tokens(pair.config, ranks)
    assert ranks[0].fallback[0] == "hook_missing"
    assert ranks[1].fallback[0] == "peer_failed"


EARLY_CONTEXT = """
import sys
from cuda.bindings import driver
from foundryd.demo.worker import main
assert driver.cuInit(0)[0] == 0
status, device = driver.cuDeviceGet(0)
status, context = driver.cuDevicePrimaryCtxRetain(device)
assert status == 0
sys.exit(main(sys.argv[1:]))
"""


def test_attaching_after_a_context_exists_is_refused(e2e, worlds, solo):
    (rank,) = worlds.run(solo.config, solo.env(), every=e2e.Change(program=EARLY_CONTEXT))
    assert e2e.right_tokens(solo.config, [rank])
    reason, message = rank.fallback
    assert reason == "attach_too_late"
    assert "1 CUDA context" in message
    assert e2e.sentence(message)
