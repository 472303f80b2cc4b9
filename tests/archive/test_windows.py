# SPDX-License-Identifier: Apache-2.0
"""Windows in an archive: what may be said of them, and who may read it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from foundryd.archive import format as frame
from foundryd.archive.index import Block, Variant
from foundryd.archive.inflate import inflate
from foundryd.archive.reader import ArchiveReader
from foundryd.archive.verify import violations
from foundryd.archive.windows import window_base, with_own
from foundryd.errors import ArchiveVersionError

replace = msgspec.structs.replace
BASE, STRIDE = 0x600000000000, 1 << 38


class Layout:
    arena_base, arena_stride = BASE, STRIDE


def rows(*windows: tuple[int, int, int]) -> Any:
    """``fdy_window`` of (rank, offset in the window, bytes)."""
    from foundryd._native import _hook

    table = [(window_base(Layout(), rank) + offset, size, BASE + offset, rank, 0) for rank, offset, size in windows]
    return np.array(table, _hook.window_dtype)


@pytest.fixture
def windowed(draft: Any) -> Any:
    draft.windows = rows((0, 4096, 100), (1, 4096, 100), (1, 8192, 64))
    return draft


def found_in(path: Path) -> list[str]:
    with ArchiveReader.open(path) as reader:
        reader.verify()
        return violations(reader, deep=True)


def test_an_archive_with_windows_holds(windowed: Any, tmp_path: Path) -> None:
    assert found_in(windowed.write(tmp_path / "a.foundry")) == []


def test_a_reader_without_windows_refuses_only_archives_that_have_some(
    windowed: Any, make_draft: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = make_draft()
    for draft in (windowed, without):  # tables that are stored field by field want a newer reader
        draft.noise, draft.template_noise = draft.noise[:0], draft.template_noise[:0]
    paths = windowed.write(tmp_path / "with.foundry"), without.write(tmp_path / "without.foundry")
    inflated = tmp_path / "inflated.foundry"
    with ArchiveReader.open(paths[0]) as reader, inflated.open("w+b") as target:
        inflate(reader, target)
    monkeypatch.setattr(frame, "MINOR", 0)
    monkeypatch.setattr("foundryd.archive.reader.MINOR", 0)
    ArchiveReader.open(paths[1]).close()
    for path in (paths[0], inflated):
        with pytest.raises(ArchiveVersionError, match=r"needs a reader of 1\.1"):
            ArchiveReader.open(path)


def put(row: int, field: str, value: Any) -> Callable[[Any], None]:
    def change(draft: Any) -> None:
        draft.windows[field][row] = value

    return change


def edit(change: Callable[[Variant], Variant]) -> Callable[[Any], None]:
    def apply(draft: Any) -> None:
        draft.edit = change

    return apply


def windows(**parts: Any) -> Callable[[Any], None]:
    return edit(lambda v: replace(v, windows=replace(v.windows, **parts)))


WRONG: dict[str, tuple[Callable[[Any], None], str]] = {
    "rank": (put(1, "rank", 8), "window 1 is of a rank that is not one of 8"),
    "no window": (put(1, "rank", 2**32 - 1), "window 1 is of a rank that is not one of 8"),
    "flag": (put(0, "reserved", 1), "window 0 has a flag"),
    "no bytes": (put(0, "bytes", 0), "window 0 has no bytes"),
    "an arena's address": (put(0, "address", BASE), "window 0 does not lie in the window of its rank"),
    "a peer's window": (put(1, "rank", 0), "window 1 does not lie in the window of its rank"),
    "wild bytes": (put(0, "bytes", 2**64 - 1), "window 0 does not lie in the window of its rank"),
    "origin below": (put(0, "origin", BASE - 1), "window 0 shows memory that is in no arena"),
    "origin beyond": (put(2, "origin", BASE + 6 * STRIDE), "window 2 shows memory that is in no arena"),
    "overlap": (put(1, "bytes", 5000), "window 1 is not wholly before the next one"),
    "order": (lambda d: setattr(d, "windows", d.windows[::-1].copy()), "is not wholly before the next one"),
    "nothing": (lambda d: setattr(d, "windows", d.windows[:0]), "has windows, and nothing was open"),
    "section": (windows(section="none"), "its windows are said to be in section 'none'"),
    "block": (windows(block=9), "has windows in block 9, and there are 6 blocks"),
    "block kind": (windows(block=1), "has windows in block 1, which is member 1"),
    "high arenas": (edit(lambda v: replace(v, arena_base=2**64 - 7 * STRIDE)), "has windows that do not fit"),
    "block section": (
        edit(lambda v: replace(v, blocks=[*v.blocks[:5], Block("windows", 0, "x")])),
        "block 5: names section 'x'",
    ),
    "block index": (
        edit(lambda v: replace(v, blocks=[*v.blocks[:5], Block("windows", 1)])),
        "block 5: is windows 1, and there are 1",
    ),
    "block without windows": (edit(lambda v: replace(v, windows=None)), "block 5: is windows 0, and there are 0"),
}


@pytest.mark.parametrize(("change", "sentence"), WRONG.values(), ids=WRONG.keys())
def test_wrong_windows_are_named(windowed: Any, tmp_path: Path, change: Callable[[Any], None], sentence: str) -> None:
    change(windowed)
    sentences = found_in(windowed.write(tmp_path / "a.foundry"))
    assert any(sentence in text for text in sentences), sentences


def test_own_memory_is_listed_where_ranks_open_only_their_peers() -> None:
    on = {0: rows((1, 64, 8), (2, 64, 8)), 1: rows((0, 64, 8), (2, 64, 8)), 2: rows((0, 64, 8), (1, 64, 8))}
    lists = [with_own(table, Layout(), rank).tobytes() for rank, table in on.items()]
    assert lists == [rows((0, 64, 8), (1, 64, 8), (2, 64, 8)).tobytes()] * 3


def test_own_memory_is_left_as_it_is_where_ranks_open_it() -> None:
    table = rows((2, 0, 8), (0, 64, 8), (1, 64, 8))
    assert with_own(table, Layout(), 2).tobytes() == rows((0, 64, 8), (1, 64, 8), (2, 0, 8)).tobytes()
    assert len(with_own(rows(), Layout(), 2)) == 0
