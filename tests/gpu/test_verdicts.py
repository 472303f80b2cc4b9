# SPDX-License-Identifier: Apache-2.0
"""What the GPU driver script takes for right and wrong, and how it ends ranks; none of it needs a GPU."""

from __future__ import annotations

import importlib
import json
import socket
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.fixture
def script(monkeypatch):
    """A module of the driver script, by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def report(**changes):
    return {"restored": True, "fallback": None, "digests": {"1": ["a", "b"], "2": ["c", "d"]}} | changes


def test_equal_digests_are_no_difference(script):
    assert script("matrix").differences([report(), report()], [report(), report()]) == []


@pytest.mark.parametrize(
    ("digests", "named"),
    [
        ({"1": ["a", "b"], "2": ["c", "x"]}, "graph 2: replay 1 of 2"),
        ({"1": ["a", "b"], "2": ["c"]}, "graph 2"),
        ({"1": ["a", "b"]}, "graphs"),
        ({"1": [], "2": ["c", "d"]}, "graph 1"),
    ],
)
def test_what_differs_on_one_rank_is_named(script, digests, named):
    (wrong,) = script("matrix").differences([report(), report(digests=digests)], [report(), report()])
    assert wrong.startswith("rank 1")
    assert named in wrong


def test_two_runs_that_put_nothing_out_are_not_equal(script):
    empty = report(digests={"1": []})
    assert script("matrix").differences([empty], [empty])


@pytest.mark.parametrize(
    "changes",
    [
        {"restored": False},
        {"fallback": "IdentityMismatch: another driver"},
        {"errors": {"sort": "NotInArchiveError"}},
        {"eager_collectives_wrong": 1},
    ],
)
def test_a_rank_with_a_fault_does_not_count_as_restored(script, changes):
    assert len(script("matrix").not_restored([report(), report(**changes)])) == 1
    assert script("matrix").not_restored([report()]) == []


def test_a_table_shows_every_row_under_its_columns(script):
    text = script("run_all").table([{"case": "one", "ms": 1.5}, {"case": "two", "ms": None}, {"other": 3}])
    assert text.split("\n") == ["case  ms", "one   1.50", "two   -", "", "other", "3", ""]


def python(source):
    return [sys.executable, "-P", "-c", source]


def test_reports_come_in_the_order_of_ranks(script):
    source = "import json, os, time; r = int(os.environ['RANK']); time.sleep(0.2 * (1 - r)); print('noise'); \
print(json.dumps({'rank': r, **{k: os.environ[k] for k in ('WORLD_SIZE', 'MASTER_PORT', 'GIVEN')}}))"
    reports = script("launch").run_ranks(python(source), 2, {"GIVEN": "yes"}, timeout=30)
    assert [r["rank"] for r in reports] == [0, 1]
    assert {(r["WORLD_SIZE"], r["GIVEN"]) for r in reports} == {("2", "yes")}
    assert reports[0]["MASTER_PORT"] == reports[1]["MASTER_PORT"]


@pytest.mark.parametrize(("gpus", "hosts"), [(1, ["host-of-rank-0", "host-of-rank-1"]), (2, [None, None])])
def test_ranks_that_share_a_gpu_are_of_different_hosts_to_nccl(script, monkeypatch, gpus, hosts):
    launch = script("launch")
    monkeypatch.setattr(launch, "devices", lambda: gpus)
    source = "import json, os; print(json.dumps({'host': os.environ.get('NCCL_HOSTID')}))"
    assert [r["host"] for r in launch.run_ranks(python(source), 2, {}, timeout=30)] == hosts


def test_a_reserved_port_is_for_who_asks_for_it_and_for_nobody_else(script):
    """A port that is only looked up may be another's before a rank listens there."""
    with script("launch").reserved_port() as port:
        with socket.socket() as refused, pytest.raises(ConnectionRefusedError):
            refused.connect(("127.0.0.1", port))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.create_server(("", port)) as server, socket.create_connection(("127.0.0.1", port)) as client:
            server.accept()[0].close()
            assert client.recv(1) == b""


@pytest.mark.parametrize(
    ("world", "crowded", "verdict"), [(4, True, "ok"), (8, True, "captured"), (4, False, "captured")]
)
def test_few_ranks_share_a_gpu(script, tmp_path, monkeypatch, world, crowded, verdict):
    matrix = script("matrix")
    ranks = list(range(world))
    monkeypatch.setattr(matrix, "capture", lambda *_, **__: {"captured_ranks": ranks, "heldout_ranks": []})
    monkeypatch.setattr(matrix, "foundryd", lambda *_, **__: "")
    monkeypatch.setattr(
        matrix, "_restore_and_compare", lambda case, archive, outcome, deadline: setattr(outcome, "verdict", "ok")
    )
    case = matrix.Case("several", f"tp={world}", script("launch").Program("decode.py"))
    assert matrix.run_case(case, 1, tmp_path, crowded=crowded).verdict == verdict


def test_a_rank_that_fails_ends_the_others_and_says_why(script):
    source = "import os, sys, time; time.sleep(60) if os.environ['RANK'] == '0' else sys.exit('no such weights')"
    started = time.monotonic()
    with pytest.raises(script("launch").RunFailed, match="rank 1 ended with 1: no such weights"):
        script("launch").run_ranks(python(source), 2, {}, timeout=50)
    assert time.monotonic() - started < 30


def test_ranks_that_are_late_are_ended(script, tmp_path):
    source = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    with pytest.raises(script("launch").RunFailed, match="rank 0 did not end in 2 s"):
        script("launch").run_ranks(python(source), 1, {}, timeout=2)
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_a_rank_without_a_report_has_failed(script):
    with pytest.raises(script("launch").RunFailed, match="without a report"):
        script("launch").run_ranks(python("print('done')"), 1, {}, timeout=30)


def test_a_case_that_cannot_be_captured_fails_and_says_why(script, tmp_path, monkeypatch):
    matrix, launch = script("matrix"), script("launch")
    monkeypatch.setattr(launch, "DRIVER", "soft")
    case = matrix.Case("absent", "tp=1", launch.Program("absent.py"))
    outcome = matrix.run_case(case, 1, tmp_path)
    assert outcome.verdict == "failed"
    assert "absent.py" in outcome.detail
    assert json.loads((tmp_path / "absent.json").read_text())["verdict"] == "failed"


def test_every_case_of_the_matrix_has_a_mesh_and_a_name_of_its_own(script):
    matrix = script("matrix")
    names = [case.name for case in matrix.CASES]
    assert len(set(names)) == len(names)
    for case in matrix.CASES:
        assert case.world >= 1
        assert (FOLDER / "programs" / case.program.name).exists()
