# SPDX-License-Identifier: Apache-2.0
"""Stands for the workspace that layers share, which grows while the worker starts and then must not move."""

import torch

from vllm.log import note

_manager = None


class WorkspaceManager:
    def __init__(self):
        self._current_workspaces, self.locked = [None], False

    def _ensure_workspace_size(self, required_bytes):
        current = self._current_workspaces[0]
        if current is None or current.numel() < required_bytes:
            assert not self.locked
            note("workspace")
            self._current_workspaces[0] = torch.empty(required_bytes, dtype=torch.uint8)
        else:
            note("workspace as it is")
        return self._current_workspaces[0]


def init_workspace_manager():
    global _manager
    _manager = WorkspaceManager()


def is_workspace_manager_initialized():
    return _manager is not None


def current_workspace_manager():
    return _manager


def lock_workspace():
    note("workspace locked")
    _manager.locked = True
