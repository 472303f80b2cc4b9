# SPDX-License-Identifier: Apache-2.0
"""``foundryd capture`` and ``foundryd run`` around an engine's own command, with no daemon anywhere."""

from __future__ import annotations

import json
import shutil
import sys

import msgspec

# An engine's launcher: it starts its ranks itself, with the environment it was given.
LAUNCHER = """
import json, os, sys
from foundryd.demo.config import DemoConfig
from foundryd.demo.launch import launch_ranks
from foundryd.rankpatch.mesh import Mesh
layers, sizes, parallel = json.loads(sys.argv[1])
config = DemoConfig(layers=layers, batch_sizes=tuple(sizes), mesh=Mesh.parse(parallel))
print(json.dumps({"ranks": launch_ranks(config, os.environ)}))
"""


def launcher_of(config):
    text = json.dumps([config.layers, list(config.batch_sizes), str(config.mesh)])
    return [sys.executable, "-P", "-c", LAUNCHER, text]


def restored_by(e2e, foundryd, config, archive, *options):
    """Runs a world under ``foundryd run``; whether every rank restored and decoded the right tokens."""
    done = foundryd("run", "--driver", "soft", "--archive", archive, *options, "--", *launcher_of(config))
    assert done.code == 0, done.err
    ranks = [e2e.Ended(r["rank"], 0, r, done.err) for r in done.json["ranks"]]
    assert e2e.right_tokens(config, ranks)
    return [r.result["restored"] for r in ranks] == [True] * config.mesh.world


def test_a_world_of_one(e2e, foundryd, solo):
    done = foundryd("run", "--driver", "soft", "--archive", solo.path, "--", *e2e.worker_command(solo.config))
    assert done.code == 0, done.err
    assert done.json["restored"] is True
    assert e2e.right_tokens(solo.config, [e2e.Ended(0, 0, done.json, done.err)])


def test_a_world_of_two(e2e, foundryd, pair):
    assert restored_by(e2e, foundryd, pair.config, pair.path)


def test_the_captured_ranks_are_those_of_the_variant(solo, pair):
    assert solo.figures["captured_ranks"] == [0]
    assert pair.figures["captured_ranks"] == [0, 1]
    assert pair.figures["variant"] == "ep=2"
    assert pair.figures["archive_bytes"] == pair.path.stat().st_size
    assert pair.figures["heldout_ranks"] == []


def test_requested_ranks_are_captured_and_the_world_s_edges(e2e, tmp_path):
    config = e2e.config_of("ep=8", batch_sizes=(2,))
    captured = e2e.capture_archive(tmp_path / "eight.foundry", config, "--sample", "0,3,5")
    # Every rank in the end, for each has an image of its own, but the rules come from few.
    with e2e.ArchiveReader.open(captured.path) as reader:
        (variant,) = reader.index.variants
    seen = variant.rank_class.captured
    assert {0, 3, 5, 7} <= set(seen)
    assert 1 not in seen
    assert variant.rank_class.held_out == 1


def test_a_second_variant_is_appended_and_both_restore(e2e, foundryd, pair, tmp_path):
    both = tmp_path / "both.foundry"
    shutil.copy(pair.path, both)
    second = e2e.config_of("tp=2", layers=2)
    e2e.capture_archive(both, second, "--append")
    inspected = foundryd("inspect", both, "--json").json
    variants = {v["name"]: v for v in inspected["variants"]}
    assert sorted(variants) == ["ep=2", "tp=2"]
    (alone,) = foundryd("inspect", pair.path, "--json").json["variants"]
    assert variants["ep=2"]["noise_bytes"] == alone["noise_bytes"] > 0
    verified = foundryd("verify", both)
    assert verified.code == 0, verified.err
    assert restored_by(e2e, foundryd, pair.config, both, "--variant", "ep=2")
    assert restored_by(e2e, foundryd, second, both, "--variant", "tp=2")


UNEVEN = """
import os, sys
from foundryd.demo.worker import main
uneven = ["--disturb", "larger:kv"] if os.environ["RANK"] == "1" else []
sys.exit(main([*sys.argv[1:], *uneven]))
"""


def test_ranks_that_are_built_differently_each_get_what_is_theirs(e2e, worlds, tmp_path):
    config = e2e.config_of("ep=2")
    engine = [sys.executable, "-P", "-c", UNEVEN, *config.to_args()]
    captured = e2e.capture_archive(tmp_path / "uneven.foundry", config, engine=engine)
    with e2e.ArchiveReader.open(captured.path) as reader:
        assert [v.rank_class.ranks for v in reader.index.variants] == [[0], [1]]
    ranks = worlds.run(config, captured.env(), every=e2e.Change(program=UNEVEN))
    assert [r.result["restored"] for r in ranks] == [True, True]
    assert e2e.right_tokens(config, ranks)


def test_an_archive_with_several_variants_asks_which(e2e, foundryd, pair, tmp_path):
    def edit(recording, ranked):
        recording.variant = "tp=2"
        recording.communicators = [msgspec.structs.replace(c, axes=["tp"]) for c in recording.communicators]

    other = e2e.rewrite(pair.path, tmp_path / "other.foundry", edit=edit)
    both = e2e.join(tmp_path / "both.foundry", pair.path, other)
    done = foundryd("run", "--driver", "soft", "--archive", both, "--", *launcher_of(pair.config))
    assert done.code == 0, done.err
    for rank in done.json["ranks"]:
        message = rank["fallback"]["message"]
        assert "ep=2" in message
        assert "tp=2" in message
        assert e2e.sentence(message)


def test_a_command_that_does_not_exist(foundryd, e2e, solo):
    done = foundryd("run", "--driver", "soft", "--archive", solo.path, "--", "/no/such/engine")
    assert done.code == 1
    assert "/no/such/engine cannot be run" in done.err
