# SPDX-License-Identifier: Apache-2.0
"""Stands for the backend that splits a graph of the model and loads or compiles its pieces."""

from vllm.log import note


class VllmBackend:
    def __call__(self, graph, example_inputs):
        note("compiled model")
        return self
