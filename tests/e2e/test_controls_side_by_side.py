# SPDX-License-Identifier: Apache-2.0
"""Controls that start with the ranks and share the proofs find what one control after them finds."""

from __future__ import annotations

import re

from foundryd.archive.dtypes import noise_dtype, records
from foundryd.archive.reader import ArchiveReader

SHARED = ("--jobs", "8", "--controls", "2")


def found(path):
    """What a capture decided: rules, what is kept of content, which graphs have noise."""
    with ArchiveReader.open(path) as reader:
        (variant,) = reader.index.variants
        noise = set(reader.array(variant.noise, noise_dtype)["block"].tolist()) if variant.noise else set()
        rules = reader.array(variant.rules, records().rule)
        return rules.tolist(), [(c.address, c.bytes) for c in variant.contents], noise, len(variant.members)


def test_an_archive_is_the_same(e2e, pair, tmp_path):
    shared = e2e.capture_archive(tmp_path / "shared.foundry", pair.config, *SHARED)
    assert found(shared.path) == found(pair.path)
    assert found(shared.path)[2:] == ({0, 1}, 2)  # each control had a graph, with noise
    assert shared.figures["control_ranks"] == pair.figures["control_ranks"]
    assert e2e.run_command("verify", shared.path).code == 0


def test_they_start_before_the_ranks_have_ended(e2e, tmp_path):
    config = e2e.config_of("tp=1")
    done = e2e.run_command(
        "capture", "-o", tmp_path / "a.foundry", "--variant", "tp=1", "--driver", "soft", *SHARED,
        "--", *e2e.worker_command(config),
    )  # fmt: skip
    assert done.code == 0, done.err
    started = [float(s) for s in re.findall(r"([\d.]+) s  capturing as one of 2 controls", done.err)]
    (rank,) = (float(s) for s in re.findall(r"([\d.]+) s  capturing as rank 0", done.err))
    assert len(started) == 2
    assert max(started) - rank < 0.5  # and a launch takes longer
