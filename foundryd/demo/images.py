# SPDX-License-Identifier: Apache-2.0
"""The demo's kernels as loadable images: built ones for the software driver, NVRTC's for a GPU."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foundryd import _native
from foundryd.errors import UsageError

SOURCES = Path(__file__).parent / "kernels"
BAKED = "baked"  # the image that differs by rank
_MARK = b"foundryd-baked-1"  # in kernels/baked.cu, followed by two int32


@dataclass(frozen=True)
class Baking:
    """The numbers that go into the code of the ``baked`` image."""

    first_token: int
    first_expert: int


class Images(Protocol):
    """Where images come from: ``SoftImages`` or ``CompiledImages``."""

    def image(self, name: str, baking: Baking) -> bytes: ...


class SoftImages:
    """Images that CMake built; baking overwrites the numbers behind the mark."""

    def image(self, name: str, baking: Baking) -> bytes:
        built = _native.image(f"demo_{name}").read_bytes()
        if name != BAKED:
            return built
        if built.count(_MARK) != 1:
            raise UsageError(f"the image {name} has its mark {built.count(_MARK)} times, not once: build it again")
        at = built.index(_MARK) + len(_MARK)
        numbers = struct.pack("<ii", baking.first_token, baking.first_expert)
        return built[:at] + numbers + built[at + len(numbers) :]


class CompiledImages:
    """Images that NVRTC compiles from the same sources; baking is two definitions.

    Parameters
    ----------
    capability : of the device, ``90`` for example.

    Raises
    ------
    UsageError : NVRTC is missing or does not compile a source.
    """

    def __init__(self, capability: str) -> None:
        self._capability = capability

    def image(self, name: str, baking: Baking) -> bytes:
        options = [f"--gpu-architecture=sm_{self._capability}", "--std=c++17", "--fmad=false"]
        if name == BAKED:
            options += [
                f"-DFOUNDRYD_FIRST_TOKEN={baking.first_token}",
                f"-DFOUNDRYD_FIRST_EXPERT={baking.first_expert}",
            ]
        return _compile(name, tuple(options))


def _compile(name: str, options: tuple[str, ...]) -> bytes:
    from cuda.bindings import nvrtc

    def checked(status: nvrtc.nvrtcResult, *results: object) -> object:
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise UsageError(f"NVRTC answered {status.name} for {name}.cu: {log()}")
        return results[0] if results else None

    def log() -> str:
        status, size = nvrtc.nvrtcGetProgramLogSize(program)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            return "it gave no log"
        text = b" " * size
        nvrtc.nvrtcGetProgramLog(program, text)
        return str(text, errors="replace").strip(" \0\n")

    header = (SOURCES / "portable.h").read_bytes()
    source = (SOURCES / f"{name}.cu").read_bytes()
    try:
        status, program = nvrtc.nvrtcCreateProgram(source, f"{name}.cu".encode(), 1, [header], [b"portable.h"])
    except RuntimeError as error:  # the library is not there
        raise UsageError(f"NVRTC cannot be loaded ({error}): install the extra cu12 or cu13") from None
    checked(status)
    flags = [option.encode() for option in options]
    checked(*nvrtc.nvrtcCompileProgram(program, len(flags), flags))
    size = checked(*nvrtc.nvrtcGetCUBINSize(program))
    assert isinstance(size, int)
    image = b" " * size
    checked(*nvrtc.nvrtcGetCUBIN(program, image))
    nvrtc.nvrtcDestroyProgram(program)
    return image
