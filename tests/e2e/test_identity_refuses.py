# SPDX-License-Identifier: Apache-2.0
"""An archive of another machine, library or environment is refused by field, before there is any context."""

from __future__ import annotations

import pytest

from foundryd.archive.index import IdentityField

# Facts in the archive that this machine does not meet: field, value there, value here.
FACTS = [
    ("compute_capability", IdentityField("8.0"), "9.0"),
    ("cuda", IdentityField("13.1", "compatible"), "13.0"),
    ("cuda", IdentityField("12.8", "compatible"), "13.0"),
    ("driver", IdentityField("999.1", "compatible"), None),
    ("nccl", IdentityField("2.27.5"), "2.28.9"),
    ("sm_count", IdentityField(7), None),
    ("env.NCCL_ALGO", IdentityField("Ring"), "not set"),
    ("engine", IdentityField("demo 7"), "not set"),
]


@pytest.mark.parametrize(("field", "archived", "here"), FACTS)
def test_a_fact_that_differs_is_named_with_both_values(e2e, worlds, solo, tmp_path, field, archived, here):
    other = e2e.rewrite(solo.path, tmp_path / "other.foundry", identity={field: archived})
    (rank,) = worlds.run(solo.config, solo.env(other), every=e2e.Change(program=e2e.ATTACH))
    assert rank.result["type"] == "IdentityMismatch", rank
    message = rank.result["message"]
    assert f"{field} is " in message
    assert f"the archive has {archived.value} (" in message
    if here is not None:
        assert f"{field} is {here} " in message
    assert e2e.sentence(message)
    # Whoever falls back now can still choose where its memory lies.
    assert rank.result["contexts"] == 0
    assert rank.result["layout"] is False


ENVIRONMENTS = [
    ({"FOUNDRYD_NCCL_VERSION": "22907"}, "nccl is 2.29.7 and the archive has 2.28.9"),
    ({"NCCL_ALGO": "Tree"}, "env.NCCL_ALGO is Tree and the archive has not set"),
    ({"NCCL_GRAPH_REGISTER": "1"}, "env.NCCL_GRAPH_REGISTER is 1 and the archive has 0"),
    ({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, "env.CUDA_DEVICE_MAX_CONNECTIONS is 1 and the archive has not set"),
]


@pytest.mark.parametrize(("env", "what"), ENVIRONMENTS)
def test_an_engine_in_another_environment_captures(e2e, worlds, solo, env, what):
    (rank,) = worlds.run(solo.config, solo.env(**env))
    assert e2e.right_tokens(solo.config, [rank])
    reason, message = rank.fallback
    assert reason == "identity"
    assert what in message
    assert e2e.sentence(message)


def test_variables_that_only_log_do_not_matter(e2e, worlds, solo):
    (rank,) = worlds.run(solo.config, solo.env(NCCL_DEBUG="INFO", OMP_NUM_THREADS="3"))
    assert rank.result["restored"] is True
    assert e2e.right_tokens(solo.config, [rank])


def test_one_rank_in_another_environment_takes_the_others_along(e2e, worlds, pair):
    ranks = worlds.run(pair.config, pair.env(), changes={1: e2e.Change(env={"NCCL_ALGO": "Tree"})})
    assert e2e.right_tokens(pair.config, ranks)
    assert ranks[1].fallback[0] == "identity"
    reason, message = ranks[0].fallback
    assert reason == "peer_failed"
    assert "env.NCCL_ALGO" in message
