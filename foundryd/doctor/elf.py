# SPDX-License-Identifier: Apache-2.0
"""Which symbols a shared library defines, read from its file: nothing of it is run."""

from __future__ import annotations

import struct
from pathlib import Path

SHT_DYNSYM = 11
SHN_UNDEF = 0


def defines(path: Path, names: set[bytes]) -> set[bytes]:
    """Those of ``names`` that the 64-bit ELF file exports; empty for anything else, and for what cannot be read."""
    try:
        data = path.read_bytes()
        if data[:6] != b"\x7fELF\x02\x01":
            return set()
        (sections,) = struct.unpack_from("<Q", data, 40)
        entry, count = struct.unpack_from("<HH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, sections + i * entry) for i in range(count)]
        found = set()
        for _, kind, _, _, offset, length, link, _, _, each in headers:
            if kind != SHT_DYNSYM or not each:
                continue
            strings = headers[link][4]
            for at in range(offset, offset + length, each):
                name, _, _, section = struct.unpack_from("<IBBH", data, at)
                if section != SHN_UNDEF:
                    start = strings + name
                    found.add(data[start : data.index(b"\0", start)])
        return found & names
    except (OSError, struct.error, ValueError, IndexError, OverflowError):
        return set()
