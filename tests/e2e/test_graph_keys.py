# SPDX-License-Identifier: Apache-2.0
"""Two graphs of an archive never have keys by which one could be given for the other."""

from __future__ import annotations

import pytest

CAPTURE = """
import sys
from foundryd.demo import worker
from foundryd.session.graphset import GraphSet

ask = GraphSet.capture_or_restore
KEYS = iter(%s)
GraphSet.capture_or_restore = lambda self, key, fn, *, stream: ask(self, next(KEYS), fn, stream=stream)
sys.exit(worker.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ([("decode", 1), ["decode", 1]], "the graph ['decode', 1] was captured twice: "),
        ([("decode", 1), ("decode", {2})], "{2} cannot name a graph: "),
    ],
    ids=["list and tuple", "set"],
)
def test_a_capture_refuses_keys_that_a_restore_could_not_tell_apart(e2e, foundryd, tmp_path, keys, said):
    python, isolated, _, _, *flags = e2e.worker_command(e2e.config_of("tp=1"))
    archive = tmp_path / "keys.foundry"
    engine = [python, isolated, "-c", CAPTURE % repr(keys), *flags]
    done = foundryd("capture", "-o", archive, "--variant", "tp=1", "--driver", "soft", "--", *engine)
    assert done.code == 1
    assert said in done.err
    assert not archive.exists()


def test_an_archive_with_two_graphs_of_one_key_is_not_restored(e2e, worlds, solo, tmp_path):
    def edit(recording, _ranked):
        recording.graphs[0].key = ("decode", True)

    archive = e2e.rewrite(solo.path, tmp_path / "twins.foundry", edit=edit)
    (rank,) = worlds.run(solo.config, solo.env(archive))
    assert e2e.right_tokens(solo.config, [rank])
    reason, message = rank.fallback
    assert reason == "archive_format"
    assert "two graphs with the key" in message
    assert e2e.sentence(message)
