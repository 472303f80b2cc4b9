# SPDX-License-Identifier: Apache-2.0
"""A kernel whose code differs between ranks has an image for each, and no rank runs another's."""

from __future__ import annotations

import struct

from foundryd.archive.format import image_section
from foundryd.archive.reader import ArchiveReader
from foundryd.demo import images
from foundryd.rankpatch.plan import Plan
from foundryd.session.client import attach_file


def numbers_in(image):
    """First token and first expert that are baked into an image; None for other images."""
    mark = b"foundryd-baked-1"
    assert mark == images._MARK
    if mark not in image:
        return None
    return struct.unpack_from("<ii", image, image.index(mark) + len(mark))


def by_rank(path):
    """For each module of the only variant, each rank's image."""
    with ArchiveReader.open(path) as reader:
        (variant,) = reader.index.variants
        return [
            [
                bytes(reader.section(image_section(module.digests[place])))
                for place in (module.by_rank or [0] * variant.world)
            ]
            for module in variant.modules
        ]


def test_only_the_image_that_differs_is_kept_for_each_rank(pair):
    with ArchiveReader.open(pair.path) as reader:
        (variant,) = reader.index.variants
    ranked = [m for m in variant.modules if m.by_rank is not None]
    shared = [m for m in variant.modules if m.by_rank is None]
    assert len(ranked) == 1
    assert len(ranked[0].digests) == 2
    assert ranked[0].by_rank == [0, 1]
    assert shared
    assert all(len(m.digests) == 1 for m in shared)


def test_each_rank_s_image_has_its_own_numbers(pair):
    baked = [[numbers_in(image) for image in ranks] for ranks in by_rank(pair.path)]
    experts = pair.config.experts // 2
    assert [row for row in baked if row != [None, None]] == [[(0, 0), (0, experts)]]


def test_a_plan_names_the_rank_s_image(pair):
    with ArchiveReader.open(pair.path) as reader:
        (variant,) = reader.index.variants
    for rank in range(2):
        with attach_file(pair.path, rank=rank) as attachment:
            plan = Plan.from_buffer(bytes(attachment.plan))
        wanted = [m.digests[0 if m.by_rank is None else m.by_rank[rank]] for m in variant.modules]
        assert list(plan.modules) == wanted


def test_another_rank_s_image_would_show(e2e, worlds, pair, tmp_path):
    """The tokens do depend on it, so right tokens elsewhere are evidence."""

    def swap(recording, ranked):
        (place,) = [i for i, owners in enumerate(ranked.by_rank) if owners is not None]
        ranked.by_rank[place].reverse()

    swapped = e2e.rewrite(pair.path, tmp_path / "swapped.foundry", edit=swap)
    ranks = worlds.run(pair.config, pair.env(swapped))
    assert [r.result["restored"] for r in ranks] == [True, True]
    assert e2e.mismatches(pair.config, [r.result for r in ranks], e2e.tokens_of(pair.config))


def test_an_archive_that_promises_a_rank_without_its_image_is_refused(e2e, worlds, pair, tmp_path):
    def forget(recording, ranked):
        (place,) = [i for i, owners in enumerate(ranked.by_rank) if owners is not None]
        ranked.by_rank[place][1] = None

    partial = e2e.rewrite(pair.path, tmp_path / "partial.foundry", edit=forget)
    ranks = worlds.run(pair.config, pair.env(partial))
    assert e2e.right_tokens(pair.config, ranks)
    for rank in ranks:
        reason, message = rank.fallback
        assert reason == "archive_format"
        assert "has no image for a rank" in message
        assert e2e.sentence(message)
