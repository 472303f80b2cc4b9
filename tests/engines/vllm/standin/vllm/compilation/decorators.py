# SPDX-License-Identifier: Apache-2.0
"""Stands for what the first forward pass does: loads the compiled model from the cache."""

from vllm.compilation.backends import VllmBackend


def _try_load_aot_compiled_fn(model, aot_compilation_path):
    return VllmBackend()(model, [])


def compiled(model):
    if not getattr(model, "compiled", False):
        model.compiled = _try_load_aot_compiled_fn(model, "model") is not None
