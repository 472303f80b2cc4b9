# SPDX-License-Identifier: Apache-2.0
"""Memory that only ranks which no rule was made from have filled is left out where graphs write it before they read."""

from __future__ import annotations

# The engine has three buffers that each step copies, and that some ranks fill after their captures: as experts are
# busy on those ranks only to which the tokens of the warm-up went.
PROGRAM = """
import os, sys
import numpy as np
from cuda.bindings import driver
from foundryd.demo import engine, model, worker
from foundryd.demo.device import checked

step, vary, rank = model.Model.step, engine.Engine._vary, int(os.environ["RANK"])
buffers, copies = [], []

def stepped(self, rows):
    if not buffers:
        for list_ in (buffers, copies):
            list_.extend(self.device.allocate((64,)) for _ in range(3))
    for buffer, copy in zip(buffers, copies):
        if sys.argv[1] == "written":
            checked(driver.cuMemsetD32Async, buffer, 0, 64, self.device.stream)
        checked(driver.cuMemcpyDtoDAsync, copy, buffer, 256, self.device.stream)
    return step(self, rows)

def prepare(self):
    finish = self.graphs.finish

    def finished(vary):
        if buffers and rank in (4, 5, 6):
            self.device.upload(buffers[rank - 4], np.arange(1, 65, dtype=np.int32) * rank)
        finish(vary=vary)

    self.graphs.finish = finished
    prepared(self)

model.Model.step = stepped
prepared, engine.Engine.prepare = engine.Engine.prepare, prepare
sys.exit(worker.main(sys.argv[2:]))
"""


def capture(e2e, archive, steps):
    # Poison is content on every rank, so all of it would be offered to the first control.
    flags = e2e.worker_command(e2e.config_of("ep=8"))
    program = [*flags[:2], "-c", PROGRAM, steps, *flags[4:]]
    return e2e.run_command(
        "capture", "-o", archive, "--variant", "ep=8", "--driver", "soft", "--json", "--", *program,
        env={"SOFTCUDA_POISON": "off"}, timeout=120,
    )  # fmt: skip


def test_what_steps_write_first_is_proven_dead_and_every_rank_restores(e2e, worlds, tmp_path):
    archive = tmp_path / "scratch.foundry"
    done = capture(e2e, archive, "written")
    assert done.code == 0, done.err
    assert done.json["heldout_ranks"] == [4, 5, 6]
    assert "joins the samples" not in done.err
    assert "may be garbage" in done.err
    captured = e2e.Captured(archive, e2e.config_of("ep=8"), done.json)
    worker = e2e.Change(program=PROGRAM.replace("sys.argv[1]", "'written'").replace("sys.argv[2:]", ""))
    restored = worlds.run(captured.config, captured.env(), every=worker)
    assert e2e.right_tokens(captured.config, restored)
    assert all(rank.result["restored"] for rank in restored)


def test_what_steps_read_is_refused(e2e, tmp_path):
    archive = tmp_path / "read.foundry"
    done = capture(e2e, archive, "read")
    assert done.code != 0
    assert "did not prove it dead" in done.err
    assert not archive.exists()
