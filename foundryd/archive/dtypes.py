# SPDX-License-Identifier: Apache-2.0
"""NumPy dtypes of the plain structs in an archive, as the native bindings define them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from foundryd.errors import UsageError


@dataclass(frozen=True)
class Records:
    """The dtypes of ``hook/include/foundryd/records.h`` and ``rankpatch/include/rankpatch/rule.h`` in archives."""

    node: np.dtype[Any]
    edge: np.dtype[Any]
    attribute: np.dtype[Any]
    allocation: np.dtype[Any]
    comm_op: np.dtype[Any]
    rule: np.dtype[Any]
    relocation: np.dtype[Any]


@lru_cache(maxsize=1)
def records() -> Records:
    """The dtypes of this build; raises ``UsageError`` if the native part is not installed."""
    hook, rankpatch = _native("_hook"), _native("_rankpatch")
    return Records(
        node=hook.node_dtype,
        edge=hook.edge_dtype,
        attribute=hook.attribute_dtype,
        allocation=hook.allocation_dtype,
        comm_op=hook.comm_op_dtype,
        rule=rankpatch.rule_dtype,
        relocation=rankpatch.relocation_dtype,
    )


def _native(name: str) -> Any:
    try:
        return importlib.import_module(f"foundryd._native.{name}")
    except ImportError as error:
        raise UsageError(
            f"the native module {name} cannot be loaded ({error}): install foundryd again from a complete build"
        ) from error
