# SPDX-License-Identifier: Apache-2.0
"""A recording in memory and the same one from its file are built alike for whoever compares them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from foundryd.capture.recording import load, save
from foundryd.rankpatch.mesh import Mesh

sys.path.insert(0, str(Path(__file__).parent))
from scripted_engine import recording

SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text(max_size=4)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4)
    ),
    max_leaves=12,
)
DESCRIPTIONS = st.dictionaries(st.text(max_size=3), TREES, max_size=5)


def described(engine, outputs=None):
    made = recording(0, Mesh.parse("ep=8"))
    made.graphs[0].outputs = outputs
    return replace(made, engine=engine)


@settings(max_examples=60, deadline=None)
@given(engine=DESCRIPTIONS, outputs=TREES)
def test_a_file_says_the_same_of_how_it_is_built(tmp_path_factory, engine, outputs):
    made, path = described(engine, outputs), tmp_path_factory.mktemp("recording") / "a.recording"
    save(made, path)
    assert load(path).structure_key() == made.structure_key()


def test_what_is_built_otherwise_is_told_apart():
    variants = [{}, {"a": 1}, {"a": 2}, {"a": [1]}, {"a": {"b": 1}}, {"a": {"c": 1}}, {"b": 1}]
    keys = {described(engine).structure_key() for engine in variants}
    keys |= {described({}, outputs).structure_key() for outputs in (1, (1,), [1], {"a": 1})}
    assert len(keys) == len(variants) + 4
