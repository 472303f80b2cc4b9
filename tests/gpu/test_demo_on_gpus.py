# SPDX-License-Identifier: Apache-2.0
"""The demo on real GPUs: captured on one, restored on all there are, with the real NCCL."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from foundryd.cli.environment import device_answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not device_answers(), reason="no CUDA driver answers with a device"),
]


def foundryd(*arguments):
    done = subprocess.run(
        [sys.executable, "-P", "-m", "foundryd.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # The figures say why a demo is not ok.
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{done.stdout[-3000:]}"
    return done.stdout


def demo(*arguments):
    figures = json.loads(foundryd("demo", "--driver", "cuda", "--json", *arguments))
    assert figures["ok"], figures
    assert figures["driver"] == "cuda"
    assert figures["tokens_match"]
    return figures


def test_one_gpu_restores_what_it_captured():
    assert demo("--ranks", "1")["resident_copies"] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("--parallel", "tp=2"),
        ("--parallel", "ep=2"),
        ("--parallel", "ep=2", "--dispatch", "allgather"),
        ("--parallel", "dp=2"),
    ],
    ids=" ".join,
)
def test_two_ranks_restore_what_one_gpu_captured(arguments):
    """On two GPUs, or on one that they share."""
    figures = demo(*arguments)
    assert figures["capture_devices"] == 1
    assert figures["engine_counters_quiet"]


@pytest.mark.parametrize("variant", ["ep=8", "dp=2,tp=4", "tp=2,ep=4"])
def test_one_gpu_captures_eight_ranks_and_the_held_out_one_comes_out_equal(variant, tmp_path):
    archive = tmp_path / "eight.foundry"
    worker = [sys.executable, "-P", "-m", "foundryd.demo.worker", "--parallel", variant, "--batch-sizes", "1-8"]
    figures = json.loads(
        foundryd("capture", "-o", str(archive), "--variant", variant, "--driver", "cuda", "--json", "--", *worker)
    )
    assert figures["heldout_ranks"]
    assert any(name.startswith("affine") for name in figures["rules"])
    foundryd("verify", str(archive))
