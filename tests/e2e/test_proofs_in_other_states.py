# SPDX-License-Identifier: Apache-2.0
"""A word that matters only once requests are under way is not taken for noise by an engine that can say so."""

from __future__ import annotations

# The engine gives attention another scale in every process.  Its capture ends with one cached position, where the scale
# is without effect.
PROGRAM = """
import os, random, sys
from foundryd.demo import engine, model, worker

original = model.Kernels.__init__

def loaded(self, *arguments):
    original(self, *arguments)
    attend, factor = self.attend, random.SystemRandom().uniform(0.5, 2.0)

    def scaled(items, params):
        params.scale *= factor
        attend(items, params)

    self.attend = scaled

model.Kernels.__init__ = loaded
if sys.argv[1] == "still":
    engine.Engine._vary = None
sys.exit(worker.main(sys.argv[2:]))
"""


def capture(e2e, folder, states):
    config = e2e.config_of("tp=1")
    flags = e2e.worker_command(config)
    program = [*flags[:2], "-c", PROGRAM, states, *flags[4:]]
    return e2e.run_command(
        "capture", "-o", folder / "noisy.foundry", "--variant", "tp=1", "--driver", "soft", "--json", "--", *program
    )


def test_it_passes_for_noise_where_memory_has_one_state(e2e, tmp_path):
    assert capture(e2e, tmp_path, "still").code == 0


def test_it_is_refused_where_the_engine_can_vary_its_state(e2e, tmp_path):
    done = capture(e2e, tmp_path, "varied")
    assert done.code != 0
    assert "attend" in done.err
    assert not (tmp_path / "noisy.foundry").exists()
