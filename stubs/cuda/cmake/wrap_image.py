# SPDX-License-Identifier: Apache-2.0
"""Wraps a shared object with kernels for the software driver in a fat-binary container.

The container is what a driver's loading calls take: a 16-byte header, then one entry of kind ELF for architecture
90 whose payload is padded to 8 bytes.  The same object gives the same bytes.
"""

from __future__ import annotations

import struct
import sys
from pathlib import Path

CONTAINER_MAGIC = 0xBA55ED50
KIND_ELF = 2
ARCHITECTURE = 90
FLAGS = 0x11  # 64-bit addresses, Linux


def wrap(elf: bytes) -> bytes:
    """The container around a shared object."""
    if elf[:4] != b"\x7fELF":
        raise SystemExit("not an ELF file: give the shared object that the image was linked to")
    payload = elf + bytes(-len(elf) % 8)
    # kind, version, header bytes, payload bytes, compressed bytes, options, minor, major, architecture,
    # name offset, name bytes, flags, reserved, uncompressed bytes
    entry = struct.pack(
        "<HHIQIIHHIIIQQQ", KIND_ELF, 0x0101, 64, len(payload), 0, 0, 0, 1, ARCHITECTURE, 0, 0, FLAGS, 0, 0
    )
    body = entry + payload
    return struct.pack("<IHHQ", CONTAINER_MAGIC, 1, 16, len(body)) + body


if __name__ == "__main__":
    source, target = (Path(argument) for argument in sys.argv[1:3])
    target.write_bytes(wrap(source.read_bytes()))
