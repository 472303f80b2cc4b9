# SPDX-License-Identifier: Apache-2.0
"""A word that matters only once requests are under way is not taken for noise by an engine that can say so."""

from __future__ import annotations

import json

import pytest

from foundryd.archive.dtypes import records, template_noise_dtype
from foundryd.archive.reader import ArchiveReader

# The engine gives attention another scale in every process.  Its capture ends with one cached position, where the scale
# is without effect.
PROGRAM = """
import itertools, os, random, sys
from foundryd.capture import rehearsal
from foundryd.demo import engine, model, worker
from foundryd.session.arena import arena
from foundryd.session.driver import call

original = model.Kernels.__init__

def loaded(self, *arguments):
    original(self, *arguments)
    attend, factor = self.attend, random.SystemRandom().uniform(0.5, 2.0)

    def scaled(items, params):
        params.scale *= factor
        attend(items, params)

    self.attend = scaled

model.Kernels.__init__ = loaded
if sys.argv[1] in ("still", "described"):
    engine.Engine._vary = None
if sys.argv[1] == "described":
    engine.GraphSet._describe_engine = lambda self: {"z": {"y": 1, "x": [2]}, "a": (3,)}
if sys.argv[1] == "unsteady":
    finish, replay, count = engine.GraphSet.finish, rehearsal.Rehearsal.replay, itertools.count()

    def disturbed(self, vary):
        with arena("io"):
            buffer = int(call("cuMemAlloc", 4096))

        def replayed(self, params):
            replay(self, params)
            call("cuMemsetD32", buffer, next(count), 1)

        rehearsal.Rehearsal.replay = replayed
        finish(self, vary)

    engine.GraphSet.finish = disturbed
if sys.argv[1] == "by-graph":
    finish = engine.GraphSet.finish
    engine.GraphSet.finish = lambda self, vary: finish(self, vary_graph=lambda key, seed: vary(seed))
sys.exit(worker.main(sys.argv[2:]))
"""


def capture(e2e, folder, states, *options):
    config = e2e.config_of("tp=1")
    flags = e2e.worker_command(config)
    program = [*flags[:2], "-c", PROGRAM, states, *flags[4:]]
    return e2e.run_command(
        "capture", "-o", folder / "noisy.foundry", "--variant", "tp=1", "--driver", "soft", "--json", *options,
        "--", *program,
    )  # fmt: skip


@pytest.mark.parametrize("states", ["still", "described"])
def test_it_passes_for_noise_where_memory_has_one_state(e2e, tmp_path, states):
    """What an adapter says of its engine has no order that would keep a control from its proofs."""
    done = capture(e2e, tmp_path, states)
    assert done.code == 0, done.err


def test_graphs_that_do_not_do_the_same_twice_are_named(e2e, tmp_path):
    """Every replay leaves a number of its own in memory."""
    done = capture(e2e, tmp_path, "unsteady")
    assert done.code != 0
    assert "do not do the same twice from the same memory" in done.err
    assert "is noise that was not proven harmless" in done.err
    assert "two replays of it from the same memory differ" in done.err
    # It would be no better with other caches.
    assert "cold caches" not in done.err


@pytest.mark.parametrize("options", [(), ("--jobs", "3", "--controls", "2")])
@pytest.mark.parametrize("states", ["varied", "by-graph"])
def test_it_is_refused_where_the_engine_can_vary_its_state(e2e, tmp_path, states, options):
    done = capture(e2e, tmp_path, states, *options)
    assert done.code != 0
    assert "attend" in done.err
    assert not (tmp_path / "noisy.foundry").exists()


# Every rank gives a word of the struct of attention its own value, which follows no coordinate, in every process.
BY_RANK = """
import os, sys
from foundryd.demo import model, worker

original = model.Kernels.__init__

def loaded(self, *arguments):
    original(self, *arguments)
    attend, square = self.attend, int(os.environ["RANK"]) ** 2

    def changed(items, params):
        if sys.argv[1] == "unused":
            params.slopes = 0x1000 + 64 * square
        elif sys.argv[1] == "address":
            params.slopes = 0x7F01 + square << 32 | int.from_bytes(os.urandom(4))
        else:
            params.scale *= 1 + square / 64
        attend(items, params)

    self.attend = changed

model.Kernels.__init__ = loaded
sys.exit(worker.main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("word", ["unused", "scale"])
def test_a_word_that_follows_no_rule_is_noise_only_if_nothing_depends_on_it(e2e, tmp_path, word):
    config = e2e.config_of("ep=8")
    flags = e2e.worker_command(config)
    program = [*flags[:2], "-c", BY_RANK, word, *flags[4:]]
    archive = tmp_path / "ranked.foundry"
    done = e2e.run_command(
        "capture", "-o", archive, "--variant", "ep=8", "--driver", "soft", "--json", "--", *program, timeout=400
    )
    assert done.code == 0, done.err
    report = json.loads(done.out.splitlines()[-1])
    assert e2e.run_command("verify", archive).code == 0
    if word == "scale":
        # It was not taken for noise.  Code differs between these ranks, so that all had to be captured anyhow, and each
        # one's value is known.
        assert "all 8 ranks are sampled, for their code differs: " in done.err
        assert "follow no rule and are noise" not in done.err
        assert report["captured_ranks"] == list(range(8))
        assert sum(words for rule, words in report["rules"].items() if rule.startswith("table")) > 0
        return
    assert "follow no rule and are noise" in done.err
    assert report["heldout_ranks"]


def test_heaps_within_four_gigabytes_by_chance_leave_no_rule(e2e, tmp_path):
    """Both captures of a rank have the same high half of a stale address, which another rank has not."""
    flags = e2e.worker_command(e2e.config_of("ep=2"))
    program = [*flags[:2], "-c", BY_RANK, "address", *flags[4:]]
    archive = tmp_path / "near.foundry"
    done = e2e.run_command("capture", "-o", archive, "--variant", "ep=2", "--driver", "soft", "--", *program)
    assert done.code == 0, done.err
    with ArchiveReader.open(archive) as reader:
        (variant,) = reader.index.variants
        rules = reader.array(variant.rules, records().rule)
        noise = reader.array(variant.template_noise, template_noise_dtype)
    words = {(int(row["template"]), int(row["offset"]) // 8) for row in noise}
    assert len(variant.templates) == 1
    assert len(words) >= 3
    assert not [rule for rule in rules.tolist() if rule[0] < 2 and (0, rule[1] // 8) in words]
