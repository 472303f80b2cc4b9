# SPDX-License-Identifier: Apache-2.0
"""The environment becomes one settings object, or one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from foundryd.errors import UsageError
from foundryd.settings import Fault, Mode, Settings, default_runtime_dir


def test_an_empty_environment_switches_everything_off():
    assert Settings.from_env({}).mode is Mode.OFF


def test_every_variable_is_read():
    got = Settings.from_env(
        {
            "FOUNDRYD_MODE": "restore",
            "FOUNDRYD_ARCHIVE": "model",
            "FOUNDRYD_GROUP": "replica-0",
            "FOUNDRYD_VARIANT": "ep=8",
            "FOUNDRYD_RECORDING": "/r",
            "FOUNDRYD_REFERENCE": "/a:/b",
            "FOUNDRYD_JOURNAL": "/j",
            "FOUNDRYD_STRAYS": "/s",
            "FOUNDRYD_ALLOW_OPAQUE_MODULES": "1",
            "FOUNDRYD_CUT": "cut",
            "FOUNDRYD_RUNTIME_DIR": "/run/x",
            "FOUNDRYD_LOG": "DEBUG",
            "FOUNDRYD_LOG_FORMAT": "JSON",
            "FOUNDRYD_HTTP": "9090",
            "FOUNDRYD_FAULT": "attach:error:2",
            "FOUNDRYD_MAX_CLIENTS": "7",
            "FOUNDRYD_MAX_ARCHIVES": "8",
            "FOUNDRYD_MAX_BYTES": "9",
            "FOUNDRYD_PLANS_AHEAD": "12",
            "FOUNDRYD_RESTORE_FIRST": '[["decode", 8], "prefill"]',
            "FOUNDRYD_RESTORE_BACKGROUND": "0",
            "FOUNDRYD_EXECUTABLES": "10",
            "FOUNDRYD_STARTUP_REPORT": "/reports",
            "FOUNDRYD_KV_RESERVE": "11",
            "FOUNDRYD_DRIVER_CLOCK": "1",
            "RANK": "3",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "FOUNDRYD_LOCAL_RANK_UNUSED": "1",
        }
    )
    assert got == Settings(
        Mode.RESTORE,
        "model",
        "replica-0",
        "ep=8",
        Path("/r"),
        (Path("/a"), Path("/b")),
        Path("/j"),
        Path("/s"),
        True,
        "cut",
        Path("/run/x"),
        "debug",
        Fault("attach", "error", 2),
        7,
        8,
        9,
        12,
        3,
        1,
        8,
        True,
        "json",
        9090,
        (["decode", 8], "prefill"),
        False,
        10,
        Path("/reports"),
        11,
        True,
    )


@pytest.mark.parametrize(
    "env",
    [
        {"FOUNDRYD_MODE": "save"},
        {"RANK": "x"},
        {"WORLD_SIZE": "-1"},
        {"FOUNDRYD_LOG": "loud"},
        {"FOUNDRYD_FAULT": "map:kill:0"},
        {"FOUNDRYD_LOG_FORMAT": "xml"},
        {"FOUNDRYD_HTTP": "65536"},
        {"FOUNDRYD_HTTP": "yes"},
        {"FOUNDRYD_RESTORE_FIRST": "decode"},
        {"FOUNDRYD_RESTORE_FIRST": '{"decode": 8}'},
        {"FOUNDRYD_RESTORE_BACKGROUND": "no"},
        {"FOUNDRYD_EXECUTABLES": "-2"},
        {"FOUNDRYD_KV_RESERVE": "some"},
        {"FOUNDRYD_DRIVER_CLOCK": "yes"},
        {"FOUNDRYD_CUT": "away"},
    ],
)
def test_an_impossible_value_is_named(env):
    (name, value), *_ = env.items()
    with pytest.raises(UsageError, match=name) as caught:
        Settings.from_env(env)
    assert value in str(caught.value).replace("-1", "-1")


def test_the_runtime_directory_is_what_the_environment_says():
    assert default_runtime_dir({"FOUNDRYD_RUNTIME_DIR": "/x/y"}) == Path("/x/y")


@pytest.mark.parametrize(("text", "port"), [("off", None), ("OFF", None), ("0", 0), ("65535", 65535)])
def test_http_is_off_or_a_port(text, port):
    assert Settings.from_env({"FOUNDRYD_HTTP": text}).http == port
    assert Settings.from_env({}).http is None
