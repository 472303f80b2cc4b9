# SPDX-License-Identifier: Apache-2.0
"""What of PyTorch must be the same where graphs are restored."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

import torch

from foundryd.archive.identity import Value


class TorchFacts:
    """Facts of the PyTorch in this process (a ``Provider`` of ``foundryd.archive.identity``)."""

    def identity_facts(self) -> Mapping[str, Value]:
        """``torch``, with the CUDA it was built for, and ``triton`` where it is installed."""
        facts: dict[str, Value] = {"torch": f"{torch.__version__} (CUDA {torch.version.cuda})"}
        with suppress(PackageNotFoundError):
            facts["triton"] = version("triton")
        return facts
