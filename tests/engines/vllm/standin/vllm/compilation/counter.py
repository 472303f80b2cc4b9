# SPDX-License-Identifier: Apache-2.0
"""Stands for what vLLM counts of its compilations."""

from types import SimpleNamespace

compilation_counter = SimpleNamespace(num_aot_compiles=0, num_compiled_artifacts_saved=0)
