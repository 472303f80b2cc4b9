# SPDX-License-Identifier: Apache-2.0
"""Stands for the workspace of layers, which must not move once graphs refer to it."""

from vllm.log import note


def lock_workspace():
    note("workspace locked")
