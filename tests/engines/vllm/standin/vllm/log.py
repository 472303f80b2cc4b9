# SPDX-License-Identifier: Apache-2.0
"""Not of vLLM: what happened in this process, and in which arena, for tests to read."""

events = []
arena = ["default"]


def note(what):
    events.append((what, arena[-1]))
