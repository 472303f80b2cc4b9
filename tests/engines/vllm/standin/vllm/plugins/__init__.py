# SPDX-License-Identifier: Apache-2.0
"""Stands for the plug-ins of every process: each entry point's function is called once."""

from importlib.metadata import entry_points

_loaded = False


def load_general_plugins():
    global _loaded
    if not _loaded:
        _loaded = True
        for plugin in entry_points(group="vllm.general_plugins"):
            plugin.load()()
