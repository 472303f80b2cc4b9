# SPDX-License-Identifier: Apache-2.0
"""What the proofs' kernels say of device memory is what NumPy says of the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from foundryd.cli.environment import device_answers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not device_answers(), reason="no CUDA driver answers with a device"),
]
CHECK = Path(__file__).parents[1] / "capture" / "kernel_check.py"


@pytest.mark.parametrize("seed", range(3))
def test_the_driver_compiles_kernels_that_agree_with_numpy(seed):
    done = subprocess.run(
        [sys.executable, "-P", CHECK, str(seed)], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert not figures["software"]
    assert figures["surveyed"] > 100
    assert figures["put"] > 100
    assert min(figures["judged"]) > 100
