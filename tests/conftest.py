# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of this user's alone, with a name that is short enough for paths of sockets in it."""
    path = Path(tempfile.mkdtemp(prefix="fdy-", dir="/tmp"))
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def large_pages() -> None:
    """Skips where the system has no large pages for who asks for them."""
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists() or "[never]" in enabled.read_text():
        pytest.skip("this system has no large pages")
