# SPDX-License-Identifier: Apache-2.0
"""``foundryd verify`` and ``foundryd inspect`` say what is true, to people and to programs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from foundryd.archive.identity import MachineIdentity
from foundryd.cli.inspect import inspect, ranges
from foundryd.cli.verify import verify
from foundryd.errors import ArchiveDigestError, ArchiveFormatError, FoundrydError, IdentityMismatch, UsageError

app = typer.Typer()
app.command()(verify)
app.command()(inspect)

FACTS = {
    "driver": "580.159.04",
    "cuda": "13.0",
    "compute_capability": "9.0",
    "sm_count": 132,
    "nccl": "2.28.9",
    "plugins": ["a", "b"],
    "env.NCCL_ALGO": "Ring",
}


def run(*arguments: Any) -> tuple[str, BaseException | None]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, FoundrydError), result.exception
    return result.stdout, result.exception


def machine(tmp_path: Path, **change: Any) -> Path:
    path = tmp_path / "machine.json"
    path.write_text(MachineIdentity.of(FACTS | change).to_json())
    return path


def test_a_good_archive_is_verified(sample: Path) -> None:
    out, error = run("verify", sample)
    assert error is None
    assert "every byte is as written" in out
    assert "sane" in out
    out, error = run("verify", sample, "--json")
    report = json.loads(out)
    assert error is None
    assert report["ok"] is True
    assert report["format"] == "1.3"
    assert report["bytes"] == sample.stat().st_size
    assert report["violations"] == []


def test_the_machine_of_the_archive_can_restore_it(sample: Path, tmp_path: Path) -> None:
    out, error = run("verify", sample, "--against", machine(tmp_path, driver="610.2"), "--json")
    assert error is None
    rows = {row["field"]: row for row in json.loads(out)["identity"]}
    assert set(rows) == set(FACTS)
    assert all(row["ok"] for row in rows.values())
    assert rows["driver"] == {
        "field": "driver",
        "archived": "580.159.04",
        "found": "610.2",
        "match": "compatible",
        "ok": True,
        "why": None,
        "advice": None,
    }


def test_another_machine_is_refused_with_each_reason(sample: Path, tmp_path: Path) -> None:
    other = machine(tmp_path, sm_count=78, **{"env.NCCL_PROTO": "LL"})
    out, error = run("verify", sample, "--against", other)
    assert isinstance(error, IdentityMismatch)
    assert "sm_count is 78 and the archive has 132" in str(error)
    assert "132" in out
    assert "78" in out
    out, error = run("verify", sample, "--against", other, "--json")
    report = json.loads(out)
    assert isinstance(error, IdentityMismatch)
    assert report["ok"] is False
    assert report["reason"] == "identity"
    assert {row["field"] for row in report["identity"] if not row["ok"]} == {"sm_count", "env.NCCL_PROTO"}
    _, error = run("verify", sample, "--against", tmp_path / "none.json")
    assert isinstance(error, UsageError)


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["table", "json"])
def test_a_damaged_archive_is_refused(sample: Path, tmp_path: Path, options: list[str]) -> None:
    data = bytearray(sample.read_bytes())
    data[4096] ^= 1
    (tmp_path / "a.foundry").write_bytes(data)
    out, error = run("verify", tmp_path / "a.foundry", *options)
    assert isinstance(error, ArchiveDigestError)
    if options:
        report = json.loads(out)
        assert report["ok"] is False
        assert report["reason"] == "archive_digest"
        assert report["error"] == str(error)
    (tmp_path / "a.foundry").write_bytes(data[:5000])
    _, error = run("verify", tmp_path / "a.foundry", *options)
    assert isinstance(error, ArchiveFormatError)


def test_contradictions_are_listed(draft: Any, tmp_path: Path) -> None:
    draft.comm_ops["kind"] = 99
    draft.rules["kind"] = 99
    path = draft.write(tmp_path / "a.foundry")
    out, error = run("verify", path, "--json")
    assert isinstance(error, ArchiveFormatError)
    assert len(json.loads(out)["violations"]) == 2
    assert "and 1 more" in str(error)
    out, _ = run("verify", path)
    assert "2 contradictions" in out


def test_inspection_shows_what_is_inside(sample: Path) -> None:
    out, error = run("inspect", sample, "--json")
    report = json.loads(out)
    assert error is None
    assert report["kind"] == "archive"
    assert report["identity"] == FACTS
    assert sum(report["stored_bytes"].values()) == report["bytes"] == sample.stat().st_size
    assert report["resident_bytes"] > report["bytes"]
    (variant,) = report["variants"]
    assert variant["name"] == "ep=8"
    assert variant["graphs"] == 4
    assert variant["templates"] == 1
    assert variant["keys"] == [["decode", 1], ["decode", 2], ["decode", 4], ["decode", 8]]
    assert variant["held_out"] == 3
    out, error = run("inspect", sample)
    assert error is None
    for text in ("ep=8", "0-7", "templates", "580.159.04"):
        assert text in out


@pytest.mark.parametrize(
    ("note", "said"),
    [
        (None, (4800, "", "", "")),
        ([9000, "it is odd"], (9000, "it is odd", "", "")),
        ([9000, "", 100, "it calls by address"], (9000, "", "", "it calls by address")),
        ([9000, "", 4200, "its ABI is not known", "cut"], (9000, "", "cut", "its ABI is not known")),
    ],
)
def test_inspection_says_of_images_what_their_archive_knew(draft: Any, tmp_path: Path, note: Any, said: Any) -> None:
    """Those that were written earlier know less."""
    notes = {} if note is None else {"ep=8": {"images": [note]}}
    draft.edit_index = lambda index: msgspec.structs.replace(index, notes=notes)
    out, error = run("inspect", draft.write(tmp_path / "a.foundry"), "--json")
    assert error is None
    module = json.loads(out)["variants"][0]["module_details"][0]
    assert tuple(module[k] for k in ("loaded_bytes", "whole_because", "cut", "uncut_because")) == said


def test_ranges_of_ranks_are_short() -> None:
    assert ranges([0, 1, 2, 3, 7]) == "0-3, 7"
    assert ranges([5]) == "5"
    assert ranges([]) == ""
