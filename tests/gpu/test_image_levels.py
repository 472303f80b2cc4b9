# SPDX-License-Identifier: Apache-2.0
"""What an image shows in which it is unlike the archive's is told, and times are those of the fastest turn."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("image_levels")


WAYS = ["archived", "cut", "stripped"]


@pytest.fixture
def loaded(script):
    """A load as it should be, with changes."""

    def make(ms=1.0, **changes):
        seen = {"functions": {"k": [[0, 32], [0, 8]]}, "variables": {"table": b"1234", "address": b"at 1"}}
        return script.Loaded(ms, ms, **seen | changes)

    return make


@pytest.fixture
def judged(script, loaded):
    """The rows of one image of which the way that strips was loaded as given; its addresses differ by load."""

    def rows(*stripped, reasons=None):
        ways = {way: bytes(n) for way, n in zip(WAYS, (90, 50, 20), strict=True)}
        image = script.Image(
            1, ["k"], ["table", "address"], ways if not reasons else {"archived": bytes(90)}, reasons or {}
        )
        loads = {
            "archived": [loaded(4.0), loaded(3.0, variables={"table": b"1234", "address": b"at 2"})],
            "cut": [] if reasons else [loaded(2.0), loaded(2.5)],
            "stripped": [] if reasons else [loaded(0.5), *stripped],
        }
        return script.rows([image], [loads], WAYS)

    return rows


def test_a_way_that_shows_the_same_is_the_same_and_has_its_fastest_turn(judged, loaded):
    row, total = judged(loaded(0.25, variables={"table": b"1234", "address": b"at 9"}))
    assert row["verdict"] == total["verdict"] == "same"
    assert [row[f"{way} bytes"] for way in WAYS] == [90, 50, 20]
    assert [row[f"{way} ms"] for way in WAYS] == [total[f"{way} ms"] for way in WAYS] == [6.0, 4.0, 0.5]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"error": "cuLibraryLoadData failed"}, "cuLibraryLoadData failed"),
        ({"functions": {"k": [[0, 31], [0, 8]]}}, "the function k is another"),
        ({"functions": {}}, "the function k is another"),
        ({"variables": {"table": b"1234"}}, "the variable address has no bytes, not 4"),
        ({"variables": {"table": b"12345", "address": b"at 1"}}, "the variable table has 5 bytes, not 4"),
        ({"variables": {"table": b"1235", "address": b"at 1"}}, "the variable table starts otherwise"),
    ],
)
def test_whatever_is_unlike_in_any_turn_is_told(judged, loaded, changes, told):
    row, total = judged(loaded(**changes))
    assert row["verdict"] == f"stripped: {told}"
    assert total["verdict"] == "not the same: [0]"


def test_where_a_way_was_not_possible_the_archived_image_counts_and_the_reason_is_told(judged):
    row, total = judged(reasons={"cut": "it is odd", "stripped": "it is odd"})
    assert (row["verdict"], row["why not"]) == ("same", "it is odd")
    assert [row[f"{way} bytes"] for way in WAYS] == [90, None, None]
    assert [total[f"{way} bytes"] for way in WAYS] == [90, 90, 90]
