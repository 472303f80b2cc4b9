# SPDX-License-Identifier: Apache-2.0
"""The plain structs in an archive and the numbers in them, as the native bindings define them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from foundryd.errors import UsageError

noise_dtype = np.dtype([("block", "<u4"), ("offset", "<u4"), ("width", "<u4")])
"""Neighbouring bytes of a block on which nothing depends."""

template_noise_dtype = np.dtype([("template", "<u4"), ("offset", "<u4"), ("width", "<u4"), ("members", "<u4")])
"""Neighbouring bytes of a template's blocks on which nothing depends in so many of its members."""


@dataclass(frozen=True)
class Records:
    """What ``hook/include/foundryd/records.h`` and ``rankpatch/include/rankpatch/rule.h`` say, as far as archives go.

    Attributes
    ----------
    node, edge, attribute, allocation, window, comm_op, rule, relocation : dtypes.
    node_type, param_kind, arena, module_api, comm_op_kind, rule_kind : enumerations of the values of fields.
    none : "no such index" in every index field.
    reservation_first, reservation_strides : where an engine's own reservations lie, in strides of arenas.
    """

    node: np.dtype[Any]
    edge: np.dtype[Any]
    attribute: np.dtype[Any]
    allocation: np.dtype[Any]
    window: np.dtype[Any]
    comm_op: np.dtype[Any]
    rule: np.dtype[Any]
    relocation: np.dtype[Any]
    node_type: type[IntEnum]
    param_kind: type[IntEnum]
    arena: type[IntEnum]
    module_api: type[IntEnum]
    comm_op_kind: type[IntEnum]
    rule_kind: type[IntEnum]
    none: int
    reservation_first: int
    reservation_strides: int


@lru_cache(maxsize=1)
def records() -> Records:
    """Those of this build; raises ``UsageError`` if the native part is not installed."""
    hook, rankpatch = _load("foundryd._native._hook"), core()
    return Records(
        node=hook.node_dtype,
        edge=hook.edge_dtype,
        attribute=hook.attribute_dtype,
        allocation=hook.allocation_dtype,
        window=hook.window_dtype,
        comm_op=hook.comm_op_dtype,
        rule=rankpatch.rule_dtype,
        relocation=rankpatch.relocation_dtype,
        node_type=hook.NodeType,
        param_kind=hook.ParamKind,
        arena=hook.Arena,
        module_api=hook.ModuleApi,
        comm_op_kind=hook.CommOpKind,
        rule_kind=_load("foundryd.rankpatch.rules").RuleKind,
        none=hook.NONE,
        reservation_first=hook.RESERVATION_FIRST,
        reservation_strides=hook.RESERVATION_STRIDES,
    )


@lru_cache(maxsize=1)
def core() -> Any:
    """The core of rank patching, ``foundryd._native._rankpatch``; raises ``UsageError`` if it is not installed."""
    return _load("foundryd._native._rankpatch")


def _load(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"the module {name} cannot be loaded ({error}): install foundryd again from a complete build"
        ) from error
