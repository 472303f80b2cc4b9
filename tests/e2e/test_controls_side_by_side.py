# SPDX-License-Identifier: Apache-2.0
"""Controls that start with the ranks and share the proofs find what one control after them finds."""

from __future__ import annotations

import re

from foundryd.archive.dtypes import records, template_noise_dtype
from foundryd.archive.reader import ArchiveReader

SHARED = ("--jobs", "8", "--controls", "2")


def found(path):
    """What a capture decided: rules, what is kept of content, how many members of each template have noise."""
    with ArchiveReader.open(path) as reader:
        (variant,) = reader.index.variants
        assert not variant.noise
        noise = reader.array(variant.template_noise, template_noise_dtype)
        noisy = [noise["members"][noise["template"] == t].max(initial=0) for t in range(len(variant.templates))]
        members = [len(template.members) for template in variant.templates]
        rules = reader.array(variant.rules, records().rule)
        return rules.tolist(), [(c.address, c.bytes) for c in variant.contents], noisy, members


def test_an_archive_is_the_same(e2e, pair, tmp_path):
    shared = e2e.capture_archive(tmp_path / "shared.foundry", pair.config, *SHARED)
    assert found(shared.path) == found(pair.path)
    noisy, members = found(shared.path)[2:]
    assert sum(members) == 2
    assert noisy == members  # each control had a graph, with noise
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
