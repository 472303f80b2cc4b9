# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a device are hosts of their own to NCCL, which would refuse them otherwise."""

from __future__ import annotations

import os

import pytest

from foundryd.archive.identity import ENVIRONMENT_IGNORED
from foundryd.demo.nccl import share_devices


@pytest.fixture(autouse=True)
def host_of_ones_own(monkeypatch):
    monkeypatch.delenv("NCCL_HOSTID", raising=False)
    yield
    os.environ.pop("NCCL_HOSTID", None)


def hosts(world, devices):
    seen = []
    for rank in range(world):
        os.environ.pop("NCCL_HOSTID", None)
        share_devices(rank, world, devices)
        seen.append(os.environ.get("NCCL_HOSTID"))
    return seen


@pytest.mark.parametrize(("world", "devices"), [(2, 1), (8, 1), (8, 4)])
def test_each_rank_is_a_host_where_devices_are_too_few(world, devices):
    assert len(set(hosts(world, devices)) - {None}) == world
    assert ENVIRONMENT_IGNORED.fullmatch("NCCL_HOSTID")  # a restore is not refused for it


@pytest.mark.parametrize(("world", "devices"), [(1, 1), (2, 2), (8, 8), (2, 8)])
def test_nothing_is_said_where_every_rank_has_a_device(world, devices):
    assert set(hosts(world, devices)) == {None}


def test_a_host_that_the_user_named_stays(monkeypatch):
    monkeypatch.setenv("NCCL_HOSTID", "here")
    share_devices(1, 2, 1)
    assert os.environ["NCCL_HOSTID"] == "here"
