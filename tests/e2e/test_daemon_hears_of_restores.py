# SPDX-License-Identifier: Apache-2.0
"""What the daemon's metrics say about restores and fallbacks of real ranks, and one id in both logs."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foundryd.daemon.launch import Started, start_daemon
from foundryd.daemon.messages import PHASES


@pytest.fixture
def served(pair, folder) -> Iterator[tuple[Path, Started]]:
    """A daemon that serves the archive of two ranks, with metrics."""
    started = start_daemon(folder / "run", [f"pair={pair.path}"], http=0, timeout=60)
    yield folder / "run", started
    started.process.kill()
    started.process.wait()


def samples(started: Started) -> dict[tuple[str, str], float]:
    """Samples by name and the label of phase or reason."""
    connection = http.client.HTTPConnection("127.0.0.1", started.status.http_port, timeout=20)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    families = text_string_to_metric_families(text)
    return {(s.name, s.labels.get("phase") or s.labels.get("reason", "")): s.value for f in families for s in f.samples}


def samples_with(started: Started, reports: int) -> dict[tuple[str, str], float]:
    """The samples once so many ranks have reported: what they said last may still be on its way when they end."""
    deadline = time.monotonic() + 20
    while True:
        now = samples(started)
        fallbacks = sum(value for (name, _), value in now.items() if name == "foundryd_fallback_total")
        if now.get(("foundryd_restore_seconds_count", "total"), 0) + fallbacks >= reports:
            return now
        assert time.monotonic() < deadline, now
        time.sleep(0.05)


def attach_ids(lines: list[dict[str, str]], words: str) -> set[str]:
    return {line["attach"] for line in lines if re.search(words, line["message"])}


def test_phases_of_every_rank_are_counted_and_its_id_is_in_both_logs(e2e, worlds, pair, served):
    run, started = served
    env = pair.env("pair", FOUNDRYD_RUNTIME_DIR=str(run), FOUNDRYD_LOG_FORMAT="json", FOUNDRYD_LOG="info")
    ranks = worlds.run(pair.config, env)
    assert e2e.right_tokens(pair.config, ranks)
    assert all(rank.result["restored"] for rank in ranks)
    now = samples_with(started, 2)
    for phase in (*PHASES, "total"):
        assert now["foundryd_restore_seconds_count", phase] == 2, phase
    assert ("foundryd_restore_seconds_count", "other") not in now
    phases = sum(sum(rank.result["restore"]["phases"].values()) for rank in ranks) / 1000
    assert now["foundryd_restore_seconds_sum", "total"] == pytest.approx(phases)
    assert now["foundryd_attach_total", "none"] == 2
    assert not [name for name, _ in now if name == "foundryd_fallback_total"]
    theirs = [json.loads(line) for line in (run / "daemon.log").read_text().splitlines()]
    mine = [json.loads(line) for rank in ranks for line in rank.err.splitlines() if line.startswith("{")]
    ids = attach_ids(mine, r"restored in")
    assert len(ids) == 2
    assert (
        ids
        == attach_ids(mine, r"attached to pair")
        == attach_ids(theirs, r"^lease \d+: rank")
        == attach_ids(theirs, r"restored in")
    )


def test_a_fallback_is_counted_by_its_reason_with_and_without_a_lease(e2e, worlds, pair, served):
    run, started = served
    env = pair.env("pair", FOUNDRYD_RUNTIME_DIR=str(run))
    ranks = worlds.run(pair.config, env, changes={1: e2e.Change(flags=["--disturb", "larger:kv"])})
    assert e2e.right_tokens(pair.config, ranks)
    now = samples_with(started, 2)
    assert now["foundryd_fallback_total", "layout_diverged"] == 1
    assert now["foundryd_fallback_total", "peer_failed"] == 1
    ranks = worlds.run(pair.config, env, changes={0: e2e.Change(env={"LD_PRELOAD": None})})
    assert e2e.right_tokens(pair.config, ranks)
    now = samples_with(started, 4)
    assert now["foundryd_fallback_total", "hook_missing"] == 1
    assert now["foundryd_fallback_total", "peer_failed"] == 2
    lines = [json.loads(line) for line in (run / "daemon.log").read_text().splitlines()]
    (line,) = [line for line in lines if "captures natively (hook_missing)" in line["message"]]
    # Without a format of its own a rank writes text, with the same id.
    assert f"(attach {line['attach']})" in ranks[0].err
