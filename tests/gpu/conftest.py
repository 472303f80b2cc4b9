# SPDX-License-Identifier: Apache-2.0
"""What several tests of scripts share."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "vllm"
NAMES = ("answers", "compare", "launch", "replicas", "results", "servers", "serving", "setups", "steps")


@pytest.fixture
def script(monkeypatch):
    """A module of the script that compares vLLM with itself, by name."""
    for name in NAMES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(FOLDER.parent))
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in NAMES:
        sys.modules.pop(name, None)
