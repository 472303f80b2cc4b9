# SPDX-License-Identifier: Apache-2.0
"""What setups of the script for vLLM say of models, command lines and workers; none of it needs a GPU."""

from __future__ import annotations

import json

import pytest


def test_a_setup_of_replicas_says_its_variant_and_its_workers(script):
    every = script("setups").setups(8, 0.3)
    dense, experts, sliced = every["dp2"], every["moe_dp2"], every["tp2"]
    assert (dense.variant, dense.workers, dense.ranks) == ("tp=1", ["rank-0", "replica-1-rank-0"], 2)
    assert (experts.variant, experts.workers, experts.ranks) == ("dp=2,tp=1", ["rank-0", "rank-1"], 2)
    assert (sliced.variant, sliced.workers) == ("tp=2", ["rank-0", "rank-1"])


def test_a_setup_is_the_same_on_a_command_line(script):
    setup = script("setups").setups(8, 0.3)["tp2"]
    assert "--disable-custom-all-reduce" in setup.flags
    assert "--no-enable-prefix-caching" in setup.flags
    config = json.loads(setup.flags[setup.flags.index("--compilation-config") + 1])
    assert config == setup.options["compilation_config"]
    assert setup.ranks == 2
    other = setup.changed(max_num_seqs=3, environment={"A": "1"})
    assert (other.options["max_num_seqs"], other.environment["A"]) == (3, "1")
    assert setup.options["max_num_seqs"] == 8


def test_a_head_that_drafts_has_no_words_of_its_own(script):
    setups = script("setups")
    setup = setups.setups(8, 0.3)["eagle"].drafting("/head")
    assert setup.options["speculative_config"]["method"] == "eagle"
    shapes = setups.Model(1, 100, llama=True, head=True).shapes()
    assert shapes["fc.weight"] == (2048, 4096)
    assert not any("embed" in name or "input_layernorm" in name or "q_norm" in name for name in shapes)
    assert "layers.0.mlp.down_proj.weight" in shapes


@pytest.mark.parametrize("experts", [False, True])
def test_a_models_parameters_are_those_that_its_configuration_says(script, experts):
    model = script("setups").Model(2, 100, experts=experts)
    shapes = model.shapes()
    layers = {name.split(".")[2] for name in shapes if name.startswith("model.layers.")}
    assert layers == {"0", "1"}
    assert shapes["model.embed_tokens.weight"] == (100, model.config["hidden_size"])
    gates = [name for name in shapes if name.endswith("gate_proj.weight")]
    assert len(gates) == 2 * (model.config["num_experts"] if experts else 1)
