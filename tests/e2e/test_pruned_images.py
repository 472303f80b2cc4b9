# SPDX-License-Identifier: Apache-2.0
"""An archive has of each image only the code for its device, and a wrong choice of that code would be seen."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from blake3 import blake3

from foundryd import _native
from foundryd.archive.format import image_section
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.sizes import stored_bytes
from foundryd.archive.verify import violations
from foundryd.capture.images import pruned
from foundryd.demo.images import BAKED, Baking, SoftImages
from foundryd.demo.launch import driver_environment

LEVELS = Path(__file__).parents[1] / "gpu" / "image_levels.py"

# The demo's worker, with images that lose a function with the code for other devices.
LIAR = """
import runpy, sys
from foundryd.capture import modules
honest = modules.pruned
def lie(image, device):
    kept = honest(image, device)
    return kept.replace(b"\\0rms_norm\\0", b"\\0rms_lost\\0")
modules.pruned = lie
runpy.run_module("foundryd.demo.worker", run_name="__main__", alter_sys=True)
"""


def wholes(config):
    """The images of the demo's ranks, by what is left of each."""
    experts = config.experts // config.mesh.world
    bakings = {BAKED: [Baking(0, experts * rank) for rank in range(config.mesh.world)]}
    names = [p.stem.removeprefix("demo_") for p in _native.image(f"demo_{BAKED}").parent.glob("demo_*.fatbin")]
    images = [SoftImages().image(n, baking) for n in names for baking in bakings.get(n, [Baking(0, 0)])]
    return {pruned(image, (9, 0)): image for image in images}


def test_an_archive_has_one_code_of_each_image_and_restores(e2e, worlds, pair):
    known = wholes(pair.config)
    with ArchiveReader.open(pair.path) as reader:
        (variant,) = reader.index.variants
        kept = [[bytes(reader.section(image_section(d))) for d in m.digests] for m in variant.modules]
    assert all(image in known for images in kept for image in images)
    assert pair.figures["pruned_image_bytes"] == sum(len(images[0]) for images in kept)
    assert pair.figures["image_bytes"] == sum(len(known[images[0]]) for images in kept)
    assert e2e.right_tokens(pair.config, ranks := worlds.run(pair.config, pair.env()))
    assert all(rank.result["restored"] for rank in ranks)


def test_whole_images_make_a_larger_archive(e2e, pair, tmp_path):
    known = wholes(pair.config)

    def refill(recording, ranked):
        for module in recording.modules:
            module.image = known[module.image]
        digest_of = {d: blake3(known[i]).hexdigest() for images in ranked.images for d, i in images.items()}
        ranked.images[:] = [{digest_of[d]: known[i] for d, i in images.items()} for images in ranked.images]
        ranked.by_rank[:] = [owners and [digest_of[d] for d in owners] for owners in ranked.by_rank]

    whole = e2e.rewrite(pair.path, tmp_path / "whole.foundry", edit=refill)
    with ArchiveReader.open(whole) as reader:
        assert violations(reader, deep=True) == []
    stored = {}
    for path in (whole, pair.path):
        with ArchiveReader.open(path) as reader:
            stored[path] = stored_bytes(reader)["modules"]
    assert stored[pair.path] < stored[whole] * 0.6
    assert pair.path.stat().st_size < whole.stat().st_size


def test_a_function_that_would_be_lost_is_seen_and_its_image_stays_whole(foundryd, e2e, worlds, solo, tmp_path):
    path = tmp_path / "liar.foundry"
    engine = [sys.executable, "-P", "-c", LIAR, *solo.config.to_args()]
    done = foundryd("capture", "-o", path, "--variant", "tp=1", "--driver", "soft", "--json", "--", *engine)
    assert done.code == 0, done.err
    (line,) = [line for line in done.err.splitlines() if "stays whole" in line]
    assert line.endswith("without the code for other devices it has no function rms_norm")
    (kept,) = [
        m for m in foundryd("inspect", path, "--json").json["variants"][0]["module_details"] if m["whole_because"]
    ]
    assert kept["targets"] == ["sm_100", "sm_80", "sm_90"]
    assert kept["bytes"] == kept["loaded_bytes"]
    assert done.json["pruned_image_bytes"] == solo.figures["pruned_image_bytes"] + kept["bytes"] - len(dense_alone())
    assert e2e.right_tokens(solo.config, worlds.run(solo.config, solo.env(path)))


def dense_alone():
    return pruned(_native.image("demo_dense").read_bytes(), (9, 0))


def test_the_images_of_an_archive_are_loaded_and_compared_in_every_way_that_there_is(e2e, solo, tmp_path):
    def levels(path):
        done = subprocess.run(
            [sys.executable, "-P", LEVELS, path, "--repeats", "2", "--json"],
            env=driver_environment("soft", e2e.clean_environment()),
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.stdout, done.stderr
        return done.returncode, json.loads(done.stdout)

    status, rows = levels(solo.path)
    assert status == 0
    *images, total = rows
    assert [row["verdict"] for row in rows] == ["same"] * len(rows)
    assert total["archived bytes"] == sum(row["archived bytes"] for row in images) == solo.figures["pruned_image_bytes"]
    assert all(row["archived ms"] > 0 for row in rows)
    # Host libraries are never cut.
    assert {row["stripped bytes"] for row in images} == {None}

    def lose(recording, ranked):
        (number,) = {f.module for f in recording.functions if f.name == "rms_norm"}
        module = recording.modules[number]
        module.image = module.image.replace(b"\0rms_norm\0", b"\0rms_lost\0")
        ranked.images[number] = {module.digest: module.image}

    status, rows = levels(e2e.rewrite(solo.path, tmp_path / "lost.foundry", edit=lose))
    assert status == 1
    (lost,) = [row for row in rows[:-1] if row["verdict"] != "same"]
    assert lost["verdict"].startswith("archived: cu")
