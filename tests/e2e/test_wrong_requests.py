# SPDX-License-Identifier: Apache-2.0
"""What cannot be served is refused with a typed error in one sentence, and the engine captures; nothing hangs."""

from __future__ import annotations

import json

import pytest

from foundryd.archive.reader import ArchiveReader
from foundryd.daemon.runtime import RuntimeDir


@pytest.fixture
def runtime(foundryd, tmp_path_factory):
    """A runtime directory whose daemon ends with the test."""
    folder = tmp_path_factory.mktemp("r") / "run"
    yield folder
    if RuntimeDir(folder).locked():
        assert foundryd("stop", "--runtime-dir", folder).code == 0


def check_refusal(e2e, captured, ranks, reason, *words):
    """Every rank decoded the right tokens natively, for this reason, in one sentence with these words."""
    assert e2e.right_tokens(captured.config, ranks)
    for rank in ranks:
        found, message = rank.fallback
        assert found == reason, message
        assert e2e.sentence(message)
        for word in words:
            assert word in message


def test_a_variant_that_is_not_in_the_archive(e2e, worlds, pair):
    ranks = worlds.run(pair.config, pair.env(FOUNDRYD_VARIANT="tp=2"))
    check_refusal(e2e, pair, ranks, "not_in_archive", "tp=2", "ep=2")


def test_a_larger_world_than_the_variant_s(e2e, worlds, pair):
    """Some ranks are in the archive and the world does not fit; the others are not in it at all."""
    config = e2e.config_of("ep=4")
    ranks = worlds.run(config, pair.env(FOUNDRYD_NCCL_TIMEOUT="60"))
    assert e2e.right_tokens(config, ranks)
    assert [r.fallback[0] for r in ranks] == ["usage"] * 2 + ["not_in_archive"] * 2
    assert "2 ranks and WORLD_SIZE is 4" in ranks[0].fallback[1]
    assert "rank 3" in ranks[3].fallback[1]
    assert all(e2e.sentence(r.fallback[1]) for r in ranks)


def test_a_rank_outside_the_world(e2e, worlds, solo):
    (rank,) = worlds.run(solo.config, solo.env(), every=e2e.Change(program=e2e.ATTACH, env={"RANK": "5"}))
    assert rank.result["type"] == "NotInArchiveError", rank
    assert "rank 5" in rank.result["message"]
    assert e2e.sentence(rank.result["message"])


def test_a_daemon_that_does_not_run(e2e, worlds, pair, tmp_path):
    ranks = worlds.run(pair.config, pair.env("demo", FOUNDRYD_RUNTIME_DIR=str(tmp_path / "nobody")))
    check_refusal(e2e, pair, ranks, "daemon_not_running", "foundryd start")


def test_an_archive_that_the_daemon_does_not_have(e2e, foundryd, worlds, pair, runtime):
    started = foundryd("start", f"demo={pair.path}", "--runtime-dir", runtime)
    assert started.code == 0, started.err
    env = {"FOUNDRYD_RUNTIME_DIR": str(runtime)}
    ranks = worlds.run(pair.config, pair.env("other", **env))
    check_refusal(e2e, pair, ranks, "not_in_archive", "other", "demo")
    # And the same daemon serves what it has.
    ranks = worlds.run(pair.config, pair.env("demo", **env))
    assert [r.result["restored"] for r in ranks] == [True, True]
    assert e2e.right_tokens(pair.config, ranks)


def test_a_missing_file(e2e, worlds, solo, tmp_path):
    ranks = worlds.run(solo.config, solo.env(tmp_path / "no.foundry"))
    check_refusal(e2e, solo, ranks, "archive", "no.foundry")


def damaged(pair, tmp_path, how):
    """A damaged copy of the archive."""
    data = bytearray(pair.path.read_bytes())
    with ArchiveReader.open(pair.path) as reader:
        header = reader.header
        section = max(reader.sections.values(), key=lambda s: s.stored)
    if how == "cut":
        del data[len(data) * 2 // 3 :]
    elif how == "empty":
        data.clear()
    elif how == "magic":
        data[0] ^= 0xFF
    else:
        at = {"header": 12, "section": section.offset + section.stored // 2, "index": header.index_offset + 40}[how]
        data[at] ^= 0x10
    path = tmp_path / "bad.foundry"
    path.write_bytes(data)
    return path


DAMAGES = ("cut", "empty", "magic", "header", "section", "index")
REASONS = ("archive_format", "archive_version", "archive_digest", "archive")


@pytest.mark.parametrize("how", ["cut", "section", "index"])
def test_a_damaged_archive_given_to_start(foundryd, e2e, pair, runtime, tmp_path, how):
    bad = damaged(pair, tmp_path, how)
    done = foundryd("start", bad, "--runtime-dir", runtime, "--timeout", "30")
    assert done.code == 1
    assert e2e.sentence(done.err.strip()), done.err
    assert "bad.foundry" in done.err
    # Nobody is left behind who would serve it.
    assert not RuntimeDir(runtime).locked()


@pytest.mark.parametrize("how", DAMAGES)
def test_a_damaged_archive_given_to_run(foundryd, e2e, solo, tmp_path, how):
    bad = damaged(solo, tmp_path, how)
    done = foundryd("run", "--driver", "soft", "--archive", bad, "--", *e2e.worker_command(solo.config))
    assert done.code == 0, done.err
    rank = e2e.Ended(0, done.code, json.loads(done.out.splitlines()[-1]), done.err)
    assert e2e.right_tokens(solo.config, [rank])
    reason, message = rank.fallback
    assert reason in REASONS
    assert "bad.foundry" in message
    assert e2e.sentence(message)
