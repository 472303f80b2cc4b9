# SPDX-License-Identifier: Apache-2.0
"""Stands for the switch that forbids wrappers to capture once the worker serves."""

cudagraph_capturing_enabled = True


def set_cudagraph_capturing_enabled(enabled):
    global cudagraph_capturing_enabled
    cudagraph_capturing_enabled = enabled
