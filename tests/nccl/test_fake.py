# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

CHECKS = re.findall(r"^def (check_\w+)", (Path(__file__).parent / "fake_program.py").read_text(), re.MULTILINE)


@pytest.mark.parametrize("check", CHECKS)
def test_fake(check: str, run_ranks: Callable[..., list[str]]) -> None:
    (said,) = run_ranks("fake_program", check, 1)
    assert f"{check} holds" in said.splitlines()
