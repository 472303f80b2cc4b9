# SPDX-License-Identifier: Apache-2.0
"""A rank's numbers are in the code of one image and of no other, whichever machine it is for."""

from __future__ import annotations

import pytest

from foundryd.demo.images import Baking, CompiledImages, Images, SoftImages
from foundryd.errors import UsageError

NAMES = ("dense", "attention", "moe", "baked", "sampling")


def compiled() -> CompiledImages:
    pytest.importorskip("cuda.bindings.nvrtc")
    images = CompiledImages("90")
    try:
        images.image("sampling", Baking(0, 0))
    except UsageError as error:
        if "cannot be loaded" in str(error):
            pytest.skip(f"{error}")
        raise
    return images


@pytest.mark.parametrize("kind", ["soft", "compiled"])
def test_only_the_baked_image_differs_by_rank(kind: str) -> None:
    images: Images = SoftImages() if kind == "soft" else compiled()
    for name in NAMES:
        one, two = images.image(name, Baking(0, 2)), images.image(name, Baking(64, 4))
        assert (one != two) == (name == "baked")
        assert images.image(name, Baking(0, 2)) == one


def test_a_baked_image_keeps_its_size() -> None:
    one, two = (SoftImages().image("baked", Baking(token, 0)) for token in (0, 1 << 20))
    assert len(one) == len(two)
    assert sum(a != b for a, b in zip(one, two, strict=True)) == 1


def test_a_source_that_does_not_compile_shows_the_compilers_words() -> None:
    compiled()
    with pytest.raises(UsageError, match=r"NVRTC answered NVRTC_ERROR_\w+ for baked\.cu"):
        CompiledImages("90").image("baked", Baking("no number", 0))  # type: ignore[arg-type]
