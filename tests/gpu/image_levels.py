# SPDX-License-Identifier: Apache-2.0
"""Loads the images of an archive with all and with less of their unused kernels, and says what that saves.

    python -P tests/gpu/image_levels.py model.foundry --repeats 5

Each image is loaded as the archive has it, and as each way of leaving out makes it; the ways take turns, and each has
the images of a variant loaded one behind the other, with the code of the functions that its graphs use.  Milliseconds
are of the fastest turn.  Compared with the image of the archive are, of every function, all attributes and where its
parameters lie, and of every variable the size and, where two loads of one image agree on it, the content.

The status is 1 if a driver refuses an image that was made or tells it from the archive's.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cu

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parent))

from run_all import table

from foundryd.archive.format import image_section
from foundryd.archive.index import Variant
from foundryd.archive.reader import ArchiveReader
from foundryd.capture.images import CUTS, capability, is_cubin, listings
from foundryd.errors import DriverCallFailed, UnreadableImage, UsageError
from foundryd.session.driver import call

ARCHIVED = "archived"
LIBRARY = 1  # fdy_module_api
ATTRIBUTES = [a for a in cu.CUfunction_attribute if a.name != "CU_FUNC_ATTRIBUTE_MAX"]


@dataclass(frozen=True)
class Image:
    """An image, by the way in which it was made, and the names that are asked of it."""

    api: int
    functions: list[str]
    variables: list[str]
    ways: dict[str, bytes]
    reasons: dict[str, str]  # why it was not made in a way


@dataclass
class Loaded:
    """What a load of an image showed, or the error that it ended with."""

    load_ms: float = 0.0
    code_ms: float = 0.0
    error: str = ""
    functions: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, bytes] = field(default_factory=dict)

    @property
    def ms(self) -> float:
        """Milliseconds of the load and of its functions' code."""
        return self.load_ms + self.code_ms


def images(reader: ArchiveReader, variant: Variant) -> list[Image]:
    """The images of a variant, those of its first rank where ranks have their own."""
    fact = reader.index.identity.get("compute_capability")
    out = []
    for number, module in enumerate(variant.modules):
        whole = bytes(reader.section(image_section(module.digests[0])))
        functions = sorted({f.name for f in variant.functions if f.module == number})
        ways, reasons = {ARCHIVED: whole}, {}
        for cut in CUTS if is_cubin(whole) else ():
            try:
                ways[cut.name] = cut.apply(whole, functions)
            except UnreadableImage as error:
                reasons[cut.name] = str(error)
        try:
            found = listings(whole, capability(str(fact.value if fact else "")))
            variables = sorted({name for listing in found for name in listing.names})
        except UnreadableImage:
            variables = []
        out.append(Image(module.api, functions, variables, ways, reasons))
    return out


def load(image: Image, way: str) -> Loaded:
    """Loads an image, looks at all of it, and unloads it."""
    out = Loaded()
    data, library = image.ways[way], image.api == LIBRARY
    started = time.perf_counter()
    try:
        handle = call("cuLibraryLoadData", data, [], [], 0, [], [], 0) if library else call("cuModuleLoadData", data)
    except DriverCallFailed as error:
        out.error = str(error)
        return out
    out.load_ms = (time.perf_counter() - started) * 1e3
    try:
        started = time.perf_counter()
        functions = {name: _function(handle, name, library) for name in image.functions}
        out.code_ms = (time.perf_counter() - started) * 1e3
        out.functions = {name: _traits(function) for name, function in functions.items()}
        for name in image.variables:
            code, at, size = (cu.cuLibraryGetGlobal if library else cu.cuModuleGetGlobal)(handle, name.encode())
            if code == cu.CUresult.CUDA_SUCCESS:
                content = bytearray(int(size))
                call("cuMemcpyDtoH", content, at, int(size))
                out.variables[name] = bytes(content)
    except DriverCallFailed as error:
        out.error = str(error)
    call("cuLibraryUnload" if library else "cuModuleUnload", handle)
    return out


def _function(handle: Any, name: str, library: bool) -> Any:
    if library:
        function = call("cuKernelGetFunction", call("cuLibraryGetKernel", handle, name.encode()))
    else:
        function = call("cuModuleGetFunction", handle, name.encode())
    call("cuFuncLoad", function)
    return function


def _traits(function: Any) -> list[Any]:
    """Every attribute, and (offset, bytes) of every parameter."""
    out: list[Any] = [[int(code), value] for code, value in (cu.cuFuncGetAttribute(a, function) for a in ATTRIBUTES)]
    place = 0
    while (found := cu.cuFuncGetParamInfo(function, place))[0] == cu.CUresult.CUDA_SUCCESS:
        out.append([int(n) for n in found[1:]])
        place += 1
    return out


def difference(seen: Loaded, again: Loaded, other: Loaded) -> str:
    """How a load is unlike two of the archive's image; empty if it is not."""
    if other.error:
        return other.error
    for name, traits in seen.functions.items():
        if other.functions.get(name) != traits:
            return f"the function {name} is another"
    for name, content in seen.variables.items():
        found = other.variables.get(name)
        if found is None or len(found) != len(content):
            return f"the variable {name} has {'no' if found is None else len(found)} bytes, not {len(content)}"
        # One that holds an address has another in each load.
        if content == again.variables.get(name) and found != content:
            return f"the variable {name} starts otherwise"
    return ""


def measure(found: Sequence[Image], ways: Sequence[str], repeats: int) -> list[dict[str, list[Loaded]]]:
    """Loads of each image, by way; a way that it was not made in has none."""
    out: list[dict[str, list[Loaded]]] = [{way: [] for way in ways} for _ in found]
    for turn in range(repeats):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            for image, loads in zip(found, out, strict=True):
                if way in image.ways:
                    loads[way].append(load(image, way))
    return out


def rows(found: Sequence[Image], measured: Sequence[Mapping[str, list[Loaded]]], ways: Sequence[str]) -> list[Any]:
    """A row for each image and one for all; ``verdict`` says what of it differs."""
    out = []
    for number, (image, loads) in enumerate(zip(found, measured, strict=True)):
        seen, again, *_ = loads[ARCHIVED]
        verdict = f"{ARCHIVED}: {seen.error}" if seen.error else ""
        for way in ways[1:]:
            unlike = [d for other in loads[way] if (d := difference(seen, again, other))] if not verdict else []
            verdict = verdict or (f"{way}: {unlike[0]}" if unlike else "")
        row: dict[str, Any] = {"image": number, "functions": len(image.functions)}
        for way in ways:
            row[f"{way} bytes"] = len(image.ways[way]) if way in image.ways else None
            row[f"{way} ms"] = min(one.ms for one in loads[way]) if loads[way] else None
        out.append(row | {"verdict": verdict or "same", "why not": "; ".join(dict.fromkeys(image.reasons.values()))})
    total: dict[str, Any] = {"image": "all", "functions": sum(len(i.functions) for i in found)}
    for way in ways:
        # Where an image was not made in a way, the one of the archive is loaded.
        total[f"{way} bytes"] = sum(len(i.ways.get(way, i.ways[ARCHIVED])) for i in found)
        turns = range(min(len(loads[ARCHIVED]) for loads in measured))
        total[f"{way} ms"] = min(sum((loads[way] or loads[ARCHIVED])[turn].ms for loads in measured) for turn in turns)
    bad = [row["image"] for row in out if row["verdict"] != "same"]
    return [*out, total | {"verdict": f"not the same: {bad}" if bad else "same", "why not": ""}]


def main() -> int:
    """Prints a table, or a JSON list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--variant", help="by default the first")
    parser.add_argument("--repeats", type=int, default=3, help="turns, at least two")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    ways = [ARCHIVED, *(cut.name for cut in reversed(CUTS))]
    with ArchiveReader.open(given.archive) as reader:
        variants = {v.name: v for v in reader.index.variants}
        name = given.variant or next(iter(variants))
        if name not in variants:
            raise UsageError(f"{given.archive} has no variant {name}: choose among {sorted(variants)}")
        found = images(reader, variants[name])
    call("cuInit", 0)
    device = call("cuDeviceGet", 0)
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", device))
    report = rows(found, measure(found, ways, max(2, given.repeats)), ways)
    call("cuDevicePrimaryCtxRelease", device)
    print(json.dumps(report) if given.json else table(report))
    return report[-1]["verdict"] != "same"


if __name__ == "__main__":
    raise SystemExit(main())
