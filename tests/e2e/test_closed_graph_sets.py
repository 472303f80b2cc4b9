# SPDX-License-Identifier: Apache-2.0
"""What is asked of a set of graphs after its end is an error: nothing is captured behind the engine's back."""

from __future__ import annotations

import pytest

PROGRAM = """
import json, os
from foundryd.demo import config
from foundryd.demo.device import Device
from foundryd.demo.engine import Engine
from foundryd.demo.rendezvous import FakeStore
from foundryd.demo.worker import parser
from foundryd.errors import FoundrydError
from foundryd.session.graphset import GraphSet
from foundryd.settings import settings

store, asked = FakeStore(), []
graphs = GraphSet.from_env(store=store)
finish = graphs.finish
graphs.finish = lambda **_: None
device = Device(0)
engine = Engine(config.from_args(parser().parse_args(), world=1), 0, device, graphs, store)
steps = os.environ["STEPS"].split()
if steps[0] == "prepare":
    engine.prepare()
restored = graphs.restored
for step in steps:
    if step == "finish":
        finish()
    if step == "close":
        graphs.close()
errors = []
for what in (lambda: graphs.capture_or_restore(("decode", 1), lambda: asked.append(1), stream=device.stream), finish):
    try:
        what()
    except FoundrydError as error:
        errors.append([type(error).__name__, str(error)])
graphs.close()
print(json.dumps({"restored": restored, "errors": errors, "asked": asked}), flush=True)
"""


@pytest.mark.parametrize("mode", ["restore", "off"])
@pytest.mark.parametrize("steps", ["prepare close", "prepare finish close", "nothing close"])
def test_a_closed_one_gives_no_graph(e2e, worlds, solo, mode, steps):
    env = solo.env(FOUNDRYD_MODE=mode, STEPS=steps)
    (rank,) = worlds.run(solo.config, env, every=e2e.Change(program=PROGRAM))
    assert rank.code == 0, rank.err
    assert rank.result["restored"] is (mode == "restore" and steps != "nothing close")
    assert rank.result["asked"] == []
    kinds, messages = zip(*rank.result["errors"], strict=True)
    assert kinds == ("UsageError", "UsageError")
    assert messages[0] == "the graph ('decode', 1) was asked for after close(): ask for every graph before"
    assert messages[1].startswith("finish() was called after close()")
