# SPDX-License-Identifier: Apache-2.0
"""Wraps a shared object with kernels for the software driver in a fat-binary container.

The container is what a driver's loading calls take: a 16-byte header, then entries of kind ELF whose payloads are
padded to 8 bytes.  That for architecture 90 is the object.  Those for others, as a toolchain puts them beside it, are
its bytes inverted: as large, and nothing that could be taken for the object.  The same object gives the same bytes.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

CONTAINER_MAGIC = 0xBA55ED50
KIND_ELF = 2
ARCHITECTURES = (80, 90, 100)
OWN = 90  # of the software driver's device
FLAGS = 0x11  # 64-bit addresses, Linux


def wrap(elf: bytes) -> bytes:
    """The container around a shared object."""
    if elf[:4] != b"\x7fELF":
        raise SystemExit("not an ELF file: give the shared object that the image was linked to")
    other = bytes(byte ^ 0xFF for byte in elf)
    body = b"".join(entry(elf if architecture == OWN else other, architecture) for architecture in ARCHITECTURES)
    return struct.pack("<IHHQ", CONTAINER_MAGIC, 1, 16, len(body)) + body


def entry(code: bytes, architecture: int) -> bytes:
    """An entry that is not compressed."""
    payload = code + bytes(-len(code) % 8)
    # kind, version, header bytes, payload bytes, compressed bytes, options, minor, major, architecture,
    # name offset, name bytes, flags, reserved, uncompressed bytes
    head = struct.pack(
        "<HHIQIIHHIIIQQQ", KIND_ELF, 0x0101, 64, len(payload), 0, 0, 0, 1, architecture, 0, 0, FLAGS, 0, 0
    )
    return head + payload


if __name__ == "__main__":
    source, target = (Path(argument) for argument in sys.argv[1:3])
    target.write_bytes(wrap(source.read_bytes()))
