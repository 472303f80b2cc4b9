# SPDX-License-Identifier: Apache-2.0
"""The kinds of rules, for those who read them and infer none."""

from __future__ import annotations

from enum import IntEnum


class RuleKind(IntEnum):
    """The numbers of ``fp_rule_kind``."""

    AFFINE = 0
    TABLE = 1
    NOISE = 2
    WORLD = 3
