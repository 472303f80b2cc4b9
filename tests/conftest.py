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
