# SPDX-License-Identifier: Apache-2.0
"""What a capture of vLLM leaves in caches is good for the device that it was made for."""

from __future__ import annotations

import dataclasses

import pytest

from foundryd.engines.vllm.capture import environment
from foundryd.errors import UsageError
from foundryd.settings import Mode, Settings


def config(mode, world):
    return dataclasses.replace(Settings.from_env({}), mode=mode, world_size=world)


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ({"VLLM_CACHE_ROOT": "/fast/vllm"}, "/fast/vllm"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/vllm"),
        ({"HOME": "/home/user"}, "/home/user/.cache/vllm"),
        ({"HOME": "/home/user", "VLLM_CACHE_ROOT": "~/vllm"}, "/home/user/vllm"),
    ],
)
def test_ranks_of_many_compile_where_no_server_looks(monkeypatch, given, root):
    """All of them have the first device here; a server's rank has its own, and would load what was made for another."""
    for name in ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert environment(config(Mode.CAPTURE, 2))["VLLM_CACHE_ROOT"] == f"{root}/foundryd-capture"
    assert "VLLM_CACHE_ROOT" not in environment(config(Mode.CAPTURE, 1))


def test_only_a_capture_has_such_variables():
    with pytest.raises(UsageError, match="this only captures"):
        environment(config(Mode.RESTORE, 2))
