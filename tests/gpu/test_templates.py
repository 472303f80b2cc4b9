# SPDX-License-Identifier: Apache-2.0
"""Pairs of batch sizes are of one template where executables are updated, and neighbours, so that little differs."""

from __future__ import annotations

import argparse
import importlib
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

FOLDER = Path(__file__).parent
KEPT = FOLDER.parent / "archive" / "kept" / "format-1.3.archive"

# Of ranks of one class, and of two.
numbers = st.integers(0, 3)
layouts = st.one_of(
    st.dictionaries(st.integers(1, 40), st.tuples(numbers), max_size=20),
    st.dictionaries(st.integers(1, 40), st.tuples(numbers, numbers), max_size=20),
)


@pytest.fixture(scope="module")
def templates():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("templates")


@given(known=layouts)
def test_pairs_of_one_template_are_neighbours_among_its_sizes(templates, known):
    chosen = templates.choose(known)
    for first, second in chosen.same:
        assert known[first] == known[second]
        of_it = sorted(batch for batch, template in known.items() if template == known[first])
        assert (first, second) in pairwise(of_it)
    sizes = [batch for pair in chosen.same for batch in pair]
    assert len(set(sizes)) == len(sizes)
    assert chosen.templates == len(set(known.values()))


@given(known=layouts)
def test_they_are_the_smallest_and_the_largest_that_there_are(templates, known):
    shared = [batch for batch in known if list(known.values()).count(known[batch]) > 1]
    same = templates.choose(known).same
    assert bool(same) == bool(shared)
    if same:
        assert same[0][0] == min(shared)
        # Left out only where the one pair that there would be has a size of the first.
        _, last = same[-1]
        assert last == max(shared) or len([b for b in shared if known[b] == known[max(shared)]]) <= 3
    assert len(same) <= 2


@given(known=layouts)
def test_a_pair_of_different_templates_is_the_first_of_all_neighbours_that_is_one(templates, known):
    def differ(pair):
        return all(one != other for one, other in zip(known[pair[0]], known[pair[1]], strict=True))

    expected = [pair for pair in pairwise(sorted(known)) if differ(pair)][:1]
    assert list(templates.choose(known).across) == expected


@given(known=layouts, order=st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_graphs(templates, known, order):
    shuffled = list(known.items())
    order.shuffle(shuffled)
    assert templates.choose(dict(shuffled)) == templates.choose(known)


def test_what_is_chosen_of_a_decoder_with_several_templates(templates):
    known = dict.fromkeys(range(1, 65), (2,)) | {1: (0,), 2: (1,), 64: (3,)}
    chosen = templates.choose(known)
    assert (chosen.same, chosen.across, chosen.templates) == (((3, 4), (62, 63)), ((1, 2),), 4)


def test_templates_are_read_from_an_archive(templates):
    assert templates.of_archive(KEPT) == dict.fromkeys((1, 2, 4, 8), (0,))


def test_pairs_that_share_a_template_in_some_rank_classes_only_are_refused(templates):
    known = {1: (0, 0), 2: (0, 1)}
    assert templates.choose(known) == templates.Chosen((), (), 2)
    with pytest.raises(templates.RunFailed, match="in some rank classes only"):
        templates.sort_out(known, [(1, 2)])


def test_pairs_are_listed_in_any_order_and_a_list_that_has_none_is_refused(templates):
    assert templates.listed("8,7,1,2") == ((8, 7), (1, 2))
    for wrong in ("1", "1,2,3", "1,x", "1-4", "3,3", ""):
        with pytest.raises(argparse.ArgumentTypeError, match="no list of pairs"):
            templates.listed(wrong)
