# SPDX-License-Identifier: Apache-2.0
"""Modules, the functions in them, and symbols."""

from __future__ import annotations

import re

from foundryd.archive.checks.findings import Findings, in_range
from foundryd.archive.format import digest, image_section
from foundryd.archive.index import Module, Variant
from foundryd.errors import ArchiveFormatError

_DIGEST = re.compile(r"[0-9a-f]{64}")
_PARAM_BYTES = 32764  # most that a kernel takes
_INT32 = 2**31


def check_code(found: Findings, variant: Variant) -> None:
    """Modules, functions and symbols of a variant."""
    flat = 0
    for number, module in enumerate(variant.modules):
        flat = _check_module(found.inside(f"module {number}"), variant, module, flat)
    for number, function in enumerate(variant.functions):
        here = found.inside(f"function {number}")
        here.need(
            in_range(function.module, len(variant.modules)),
            f"is in module {function.module}, and there are {len(variant.modules)} modules",
        )
        here.need(bool(function.name) and "\0" not in function.name, f"has the impossible name {function.name!r}")
        here.need(
            0 <= function.param_bytes <= _PARAM_BYTES,
            f"takes {function.param_bytes} bytes of parameters, and a kernel takes at most {_PARAM_BYTES}",
        )
        end = 0
        for offset, size in function.fields:
            if not here.need(
                offset >= end and size > 0 and offset + size <= function.param_bytes,
                f"has a parameter of {size} bytes at {offset}, which is not behind byte {end} and within its "
                f"{function.param_bytes} bytes of parameters",
            ):
                break
            end = offset + size
        here.need(
            all(-_INT32 <= value < _INT32 for setting in function.settings for value in setting),
            "has a setting that is no 32-bit number",
        )
    for number, symbol in enumerate(variant.symbols):
        here = found.inside(f"symbol {number}")
        here.need(
            in_range(symbol.module, len(variant.modules)),
            f"is in module {symbol.module}, and there are {len(variant.modules)} modules",
        )
        here.need(bool(symbol.name) and "\0" not in symbol.name, f"has the impossible name {symbol.name!r}")


def check_images(found: Findings, variants: list[Variant]) -> None:
    """Whether each image is the one that its section is named for; the bytes are ``check_sections``' matter."""
    digests = {name for variant in variants for module in variant.modules for name in module.digests}
    for name in sorted(digests):
        entry = found.reader.sections.get(image_section(name))
        if entry is not None and entry.digest.hex() != name:
            found.add(f"section {entry.name} holds an image with another digest, {entry.digest.hex()[:16]}")


def check_sections(found: Findings) -> None:
    """Whether every section decodes to the bytes that its entry promises."""
    for entry in found.reader.sections.values():
        try:
            decoded = found.reader.decode(entry, check=False)
        except ArchiveFormatError as error:
            found.add(str(error))
            continue
        if entry.codec != "raw":  # the stored bytes are the reader's matter
            found.need(digest(decoded) == entry.digest, f"section {entry.name} decodes to bytes with another digest")


def _check_module(here: Findings, variant: Variant, module: Module, flat: int) -> int:
    apis = len(here.dtypes.module_api)
    here.need(in_range(module.api, apis), f"says load API {module.api}, and there are {apis}")
    here.need(bool(module.digests), "has no image")
    here.need(len(set(module.digests)) == len(module.digests), "names an image twice")
    for name in module.digests:
        if here.need(
            _DIGEST.fullmatch(name) is not None, f"has the digest {name!r}, which is not 64 hexadecimal digits"
        ):
            here.length(image_section(name), "images")
    if module.by_rank is None:
        here.need(len(module.digests) <= 1, f"has {len(module.digests)} images and does not say which rank loads which")
    else:
        here.need(
            len(module.by_rank) == variant.world,
            f"gives images to {len(module.by_rank)} ranks, and the world has {variant.world}",
        )
        here.need(
            all(-1 <= place < len(module.digests) for place in module.by_rank),
            f"gives some rank an image that is not one of its {len(module.digests)}",
        )
        here.need(
            all(
                in_range(rank, len(module.by_rank)) and module.by_rank[rank] >= 0
                for rank in variant.rank_class.captured
            ),
            "has no image for a rank that was captured",
        )
    names = [name.name for name in module.globals]
    here.need(len(set(names)) == len(names), "names a global twice")
    for number, variable in enumerate(module.globals, start=flat):
        inside = here.inside(f"global {variable.name}")
        if inside.need(
            in_range(variable.block, len(variant.blocks)),
            f"says block {variable.block}, and there are {len(variant.blocks)} blocks",
        ):
            block = variant.blocks[variable.block]
            inside.need(
                block.kind == "global" and block.index == number,
                f"is global {number} and says block {variable.block}, which is {block.kind} {block.index}",
            )
    return flat + len(names)
