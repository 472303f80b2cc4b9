# SPDX-License-Identifier: Apache-2.0
"""A policy puts every key of an archive somewhere, once, or is refused in one sentence."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foundryd.errors import NotInArchiveError, UsageError
from foundryd.session.policy import RestorePolicy
from foundryd.settings import Settings

KEYS = [("decode", batch) for batch in (8, 4, 2, 1)]
some = st.lists(st.sampled_from(KEYS), max_size=6)


@given(st.none() | st.just("all") | some, some)
def test_every_key_has_one_place_and_the_wanted_ones_come_early(first, then):
    ready, rest = RestorePolicy(first, then).arrange(KEYS)
    assert sorted([*ready, *rest]) == sorted(KEYS)
    wanted = {None: KEYS[:1], "all": KEYS}.get(first) if first is None or first == "all" else first
    assert ready == list(dict.fromkeys(wanted))
    early = [key for key in dict.fromkeys(then) if key not in ready]
    assert rest[: len(early)] == early
    late = rest[len(early) :]
    assert late == sorted(late, key=KEYS.index)


def test_thousands_of_graphs_are_put_in_order_at_once():
    """An engine with a graph for each piece of its model and each batch has so many."""
    keys = [("PIECE", piece, tokens, 0) for tokens in range(100) for piece in range(60)]
    begun = time.monotonic()
    assert RestorePolicy("all").arrange(keys) == (keys, [])
    assert RestorePolicy(keys[::-1]).arrange(keys) == (keys[::-1], [])
    assert RestorePolicy((), keys[::-1]).arrange(keys) == ([], keys[::-1])
    assert time.monotonic() - begun < 0.5


def test_keys_may_be_lists_as_they_are_in_json():
    settings = Settings.from_env({"FOUNDRYD_RESTORE_FIRST": '[["decode", 2]]', "FOUNDRYD_EXECUTABLES": "3"})
    policy = RestorePolicy.from_settings(settings)
    assert policy == RestorePolicy((["decode", 2],), (), True, 3)
    assert policy.arrange(KEYS) == ([("decode", 2)], [("decode", 8), ("decode", 4), ("decode", 1)])


def test_an_empty_environment_makes_the_first_captured_ready_and_the_others_follow():
    assert RestorePolicy.from_settings(Settings.from_env({})) == RestorePolicy()
    assert RestorePolicy().arrange(KEYS) == (KEYS[:1], KEYS[1:])
    assert RestorePolicy().arrange([]) == ([], [])


@pytest.mark.parametrize("policy", [RestorePolicy([("decode", 3)]), RestorePolicy(None, [("decode", 3)])])
def test_a_key_that_was_not_captured_is_named(policy):
    with pytest.raises(NotInArchiveError, match=r"\('decode', 3\)"):
        policy.arrange(KEYS)


@pytest.mark.parametrize(
    "arguments",
    [{"first": "decode"}, {"then": "all"}, {"executables": 0}, {"executables": 1, "first": KEYS[:2]}],
)
def test_a_policy_that_cannot_be_is_refused(arguments):
    with pytest.raises(UsageError):
        RestorePolicy(**arguments)


def test_all_first_does_not_fit_fewer_executables_than_graphs():
    with pytest.raises(UsageError, match="all 4 graphs"):
        RestorePolicy("all", executables=3).arrange(KEYS)
    assert RestorePolicy("all", executables=4).arrange(KEYS) == (KEYS, [])
