# SPDX-License-Identifier: Apache-2.0
"""Stands for the backend that splits a graph of the model and loads or compiles its pieces.

A model that drafts is compiled under another name than the one that answers.
"""

from contextlib import contextmanager

from vllm.log import note

model_tag = "backbone"


@contextmanager
def set_model_tag(tag):
    global model_tag
    model_tag, before = tag, model_tag
    yield
    model_tag = before


class VllmBackend:
    def __init__(self):
        self.prefix = model_tag

    def __call__(self, graph, example_inputs):
        note("compiled model")
        return self
