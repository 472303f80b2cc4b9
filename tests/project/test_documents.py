# SPDX-License-Identifier: Apache-2.0
"""What the documents say is shown by a test is shown by one, and their links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md"])


def named_tests(text: str) -> list[tuple[str, str]]:
    """(file, test) of each ``tests/….py::test_…``; a ``::test_…`` alone is in the file named before it."""
    found, last = [], ""
    for file, test in re.findall(r"`(tests/[\w/]+\.py)?(?:::(test_\w+))?`", text):
        last = file or last
        if file or test:
            found.append((last, test))
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_tests_that_are_named_exist(path: Path) -> None:
    for file, test in named_tests(path.read_text()):
        assert (ROOT / file).is_file(), file
        assert not test or re.search(rf"^ *def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{test}"


def test_the_guarantees_of_security_name_tests() -> None:
    text = (ROOT / "docs" / "security.md").read_text()
    rows = [line for line in text.split("## Guarantees")[1].split("##")[0].splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    for row in rows[1:]:
        assert named_tests(row), row


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_documents_lead_to_files(path: Path) -> None:
    for target in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", path.read_text()):
        assert (path.parent / target).exists(), target
