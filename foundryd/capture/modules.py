# SPDX-License-Identifier: Apache-2.0
"""The modules of a recording: their images, which globals the program changed, and where every global lies."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from foundryd._native import _hook
from foundryd.archive import index as ix
from foundryd.capture.images import Cut, Listing, capability, cuts, is_cubin, listings, pruned
from foundryd.capture.recording import ModuleRecord
from foundryd.errors import OpaqueModule, UnreadableImage

# Texts of assertions and the like, which compilers put into writable sections and no program can name or write.
_OF_COMPILER = re.compile(r"\$.*|__unnamed_\d+")

_COMPILES_ALWAYS = "env.CUDA_FORCE_PTX_JIT"


@dataclass(frozen=True)
class GlobalRange:
    """Where a global lies in this process."""

    address: int
    bytes: int
    symbol: ix.Symbol


@dataclass(frozen=True)
class WholeImage:
    """Of the image that the program loaded: its bytes, and why all of it is archived, empty if not.

    ``cut`` names the way in which kernels that are not used were left out, empty if in none, and ``cut_bytes`` of what
    the device takes are not archived for it.  ``uncut_because`` says of each way that would have left less why it
    cannot be known or did not load alike, empty if nothing was against one.
    """

    bytes: int
    kept_because: str
    cut_bytes: int = 0
    uncut_because: str = ""
    cut: str = ""


@dataclass
class RecordedModules:
    """Modules in the order of their numbers; ``opaque`` says of some why their globals cannot be listed."""

    records: list[ModuleRecord] = field(default_factory=list)
    ranges: list[GlobalRange] = field(default_factory=list)
    opaque: dict[int, str] = field(default_factory=dict)
    images: list[WholeImage] = field(default_factory=list)


def record_modules(
    hook: _hook.Hook,
    numbers: Mapping[int, int],
    users: Mapping[int, Sequence[str]],
    identity: Mapping[str, ix.IdentityField],
    *,
    allow_opaque: bool,
    cut: str,
) -> RecordedModules:
    """Records the modules that ``numbers`` has (the hook's number to the recording's).

    ``users`` names the functions of each that are used.  Of an image the code for other devices and kernels that are
    not used are left out where a load of what is left gives the same; ``cut`` is the way that leaves the least.
    Raises ``OpaqueModule`` for a module with a global that could have changed unseen, unless ``allow_opaque``.
    """
    apis = {int(m["id"]): int(m["api"]) for m in hook.modules()}
    out = RecordedModules()
    for identifier, slot in numbers.items():
        image = hook.module_image(identifier)
        found, reason = _listings(image, identity)
        names = sorted({name for listing in found for name in listing.names})
        known = _rows(hook.module_globals(identifier, names))
        changed = _rows(hook.changed_globals(identifier, names))
        reason = reason or _unseen(found, {name for name, _, _ in known}, {name for name, _, _ in changed})
        if reason:
            if not allow_opaque:
                raise OpaqueModule(
                    f"the globals of module {slot} ({len(image)} bytes, {_known_by(users[identifier])}) cannot "
                    f"all be seen, because {reason}: a value that only device code gave one of them would be lost, so "
                    "capture with --allow-opaque-modules if you know that no kernel of the module does so"
                )
            out.opaque[slot] = reason
        kept, whole = _archived(hook, identifier, image, users[identifier], names, identity, cuts(cut))
        out.images.append(whole)
        out.records.append(
            ModuleRecord(apis[identifier], kept, [(name, hook.download(at, size)) for name, at, size in changed])
        )
        out.ranges += [GlobalRange(at, size, ix.Symbol(slot, name)) for name, at, size in known]
    return out


def _known_by(functions: Sequence[str]) -> str:
    return f"with the kernel {functions[0]}" if functions else "of which a graph uses a global"


def _listings(image: bytes, identity: Mapping[str, ix.IdentityField]) -> tuple[list[Listing], str]:
    try:
        return listings(image, capability(str(identity["compute_capability"].value))), ""
    except UnreadableImage as error:
        return [], str(error)


def _archived(
    hook: _hook.Hook,
    identifier: int,
    image: bytes,
    functions: Sequence[str],
    names: Sequence[str],
    identity: Mapping[str, ix.IdentityField],
    ways: Sequence[Cut],
) -> tuple[bytes, WholeImage]:
    """The image to archive: the smallest that the driver says is the same."""
    if _COMPILES_ALWAYS in identity:
        because = "CUDA_FORCE_PTX_JIT is set, so that the driver takes other code than it would"
        return image, WholeImage(len(image), because)
    try:
        kept = pruned(image, capability(str(identity["compute_capability"].value)))
    except UnreadableImage as error:
        return image, WholeImage(len(image), str(error))
    refused: list[str] = []
    for cut in ways if functions and is_cubin(kept) else ():
        try:
            left = cut.apply(kept, functions)
            difference = hook.image_difference(identifier, left, functions, names) if left != kept else ""
        except UnreadableImage as error:
            refused.append(str(error))
            continue
        if left != kept and not difference:
            return left, WholeImage(len(image), "", len(kept) - len(left), _all(refused), cut.name)
        if difference:
            refused.append(f"without {cut.left_out} it {difference}")
    difference = hook.image_difference(identifier, kept, functions, names) if kept != image else ""
    if difference:
        return image, WholeImage(len(image), f"without the code for other devices it {difference}", 0, _all(refused))
    return kept, WholeImage(len(image), "", 0, _all(refused))


def _all(reasons: Sequence[str]) -> str:
    """Reasons in their order, each once."""
    return "; ".join(dict.fromkeys(reasons))


def _unseen(found: list[Listing], known: set[str], changed: set[str]) -> str:
    """Why some global may not have been compared; empty if all were.

    What a compiler made for itself needs no name.  Where the driver could have taken several pieces, it took one whose
    variables it all finds.
    """
    missing = [sorted(n for n in listing.names - known if not _OF_COMPILER.fullmatch(n)) for listing in found]
    if all(missing):
        return f"the driver does not find its global {min(missing, key=len)[0]}"
    code = sorted(v.name for listing in found for v in listing.variables if v.holds_code and v.name in changed)
    return f"its global {code[0]} holds addresses of code and is not as in a fresh load" if code else ""


def _rows(found: tuple[Any, list[str]]) -> list[tuple[str, int, int]]:
    """(name, address, bytes) of each, by name."""
    table, names = found
    return sorted((name, int(row["address"]), int(row["bytes"])) for row, name in zip(table, names, strict=True))
