# SPDX-License-Identifier: Apache-2.0
"""Seams: places in an engine where a function is wrapped, each a row of a table."""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from foundryd.errors import EngineUnsupported

_MARK = "__foundryd_real__"


@dataclass(frozen=True)
class Seam:
    """One function of the engine.

    Attributes
    ----------
    module : where it is looked up, which for a function that was imported by name is the importing module.
    owner : its class, or empty.
    name : its name there.
    parameters : the names of its first parameters, which ``around`` relies on.
    around : called instead, with the real function before the arguments.
    """

    module: str
    owner: str
    name: str
    parameters: tuple[str, ...]
    around: Callable[..., Any]

    def __str__(self) -> str:
        return ".".join(part for part in (self.module, self.owner, self.name) if part)


def install(seams: Sequence[Seam]) -> None:
    """Wraps every seam, or none: raises ``EngineUnsupported`` if one is not as its row says.

    A seam that is wrapped already stays as it is.
    """
    found = [(seam, *_find(seam)) for seam in seams]
    for seam, owner, attribute in found:
        real = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
        if hasattr(real, _MARK):
            continue
        wrapped = _wrapped(seam, real)
        setattr(owner, seam.name, staticmethod(wrapped) if isinstance(attribute, staticmethod) else wrapped)


def remove(seams: Sequence[Seam]) -> None:
    """Puts every seam back as it was."""
    for seam in seams:
        owner, attribute = _find(seam)
        static = isinstance(attribute, staticmethod)
        wrapped = attribute.__func__ if static else attribute
        real = getattr(wrapped, _MARK, wrapped)
        setattr(owner, seam.name, staticmethod(real) if static else real)


def _find(seam: Seam) -> tuple[Any, Any]:
    """Where the seam's function is, and the function or static method itself."""
    try:
        owner: Any = importlib.import_module(seam.module)
        if seam.owner:
            owner = getattr(owner, seam.owner)
        attribute = inspect.getattr_static(owner, seam.name)
    except (ImportError, AttributeError) as error:
        raise EngineUnsupported(
            f"the engine has no {seam} ({error}), though its version should: install that release unchanged"
        ) from error
    function = attribute.__func__ if isinstance(attribute, staticmethod) else attribute
    function = getattr(function, _MARK, function)
    found = tuple(inspect.signature(function).parameters)
    if found[: len(seam.parameters)] != seam.parameters:
        raise EngineUnsupported(
            f"{seam} takes {', '.join(found)} and its version should take {', '.join(seam.parameters)} first: install "
            "that release unchanged"
        )
    return owner, attribute


def _wrapped(seam: Seam, real: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(real)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return seam.around(real, *arguments, **named)

    setattr(wrapper, _MARK, real)
    return wrapper
