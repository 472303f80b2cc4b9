# SPDX-License-Identifier: Apache-2.0
"""Restore the CUDA graphs of LLM engines instead of capturing them."""

from foundryd.errors import FoundrydError

__all__ = ["FoundrydError", "__version__"]

__version__ = "0.1.0"
