# SPDX-License-Identifier: Apache-2.0
"""The rows of ``.nv.info``, which say facts of kernels: where in them symbols are meant.

A row is a format, an attribute and 16 bits; with format 4 these count the bytes that follow.  Only these have room for
the number of a symbol, which takes a word.  Which attributes have some is what NVIDIA's disassembler (13.4) prints.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from foundryd.errors import UnreadableImage

_HEAD = struct.Struct("<BBH")
_WORD = struct.Struct("<I")
_NOTHING, _BYTE, _HALF, _SIZED = 1, 2, 3, 4  # formats
# The first word is a symbol's number: images and samplers, PARAM_CBANK, sizes of frames and stacks, KPARAM_INFO,
# LOAD_CACHE_REQUEST, REGCOUNT, SAM_REGION_STACK_SIZE, KPARAM_INFO_V2.
_FIRST = {2, 6, 7, 8, 9, 0xA, 0x11, 0x12, 0x13, 0x14, 0x17, 0x23, 0x26, 0x2F, 0x3B, 0x45}
_EVERY = {0xF, 0x5D}  # each word is one: EXTERNS, SYSCALLS_FALLBACK
# No symbol: offsets in the code of the kernel, sizes, numbers and flags.  Not here is what only graphics and tools
# have, and what has no name; 35, 36, 47 (workarounds) and 5f (a version) have one in other lists alone.
_NONE = set(
    bytes.fromhex(
        "01 04 05 0b 0c 0d 10 18 19 1a 1b 1c 1d 1e 1f 20 21 22 24 25 27 28 29 2b 2c 2d 2e 31 32 33 34 35 36 37 38 39"
        "3a 3c 3d 3e 3f 40 41 42 44 46 47 4c 4d 4e 50 51 52 53 54 55 57 59 5b 5c 5e 5f 62 64 65 66 68 69 6c 6d"
    )
)


@dataclass(frozen=True)
class Fact:
    """One row; ``about`` is the symbol that its first word means, ``names`` those that all of its words mean."""

    raw: bytes
    about: int | None = None
    names: tuple[int, ...] = ()

    def renumbered(self, number: Callable[[int], int]) -> bytes:
        """The row with other numbers for its symbols."""
        if self.about is not None:
            return self.raw[: _HEAD.size] + _WORD.pack(number(self.about)) + self.raw[_HEAD.size + _WORD.size :]
        return self.raw[: len(self.raw) - _WORD.size * len(self.names)] + b"".join(
            _WORD.pack(number(n)) for n in self.names
        )


def facts(data: bytes) -> Iterator[Fact]:
    """The rows of a section; raises ``UnreadableImage`` for one of which it is not known whether it means symbols."""
    at = 0
    while at < len(data):
        if len(data) - at < _HEAD.size:
            raise UnreadableImage(f"its facts of kernels end within a row at {at}")
        form, attribute, size = _HEAD.unpack_from(data, at)
        raw = data[at : at + _HEAD.size + (size if form == _SIZED else 0)]
        words = len(raw) // _WORD.size - 1
        if form not in (_NOTHING, _BYTE, _HALF, _SIZED) or (form == _SIZED and (size % 4 or words * 4 != size)):
            raise UnreadableImage(f"it has a fact of kernels of format {form} and {size} bytes at {at}")
        if attribute in _NONE or (form != _SIZED and attribute not in _FIRST | _EVERY):
            yield Fact(raw)
        elif attribute in _FIRST and form == _SIZED and words:
            yield Fact(raw, about=_WORD.unpack_from(raw, _HEAD.size)[0])
        elif attribute in _EVERY and form == _SIZED:
            yield Fact(raw, names=struct.unpack_from(f"<{words}I", raw, _HEAD.size))
        else:
            raise UnreadableImage(
                f"it has a fact of kernels {attribute:#x} of format {form}, and whether that means symbols is not known"
            )
        at += len(raw)
