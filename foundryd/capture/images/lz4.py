# SPDX-License-Identifier: Apache-2.0
"""Decoding of an LZ4 block: no frame, no checksum, as fat binaries hold it."""

from __future__ import annotations

from foundryd.errors import UnreadableImage

_SHORTEST_MATCH = 4


def decode_block(block: bytes, size: int) -> bytes:
    """The ``size`` bytes that a block stands for; raises ``UnreadableImage`` if it does not stand for as many."""
    out = bytearray()
    at = 0
    while at < len(block):
        token = block[at]
        count, at = _length(block, at + 1, token >> 4)
        _require(count <= len(block) - at and count <= size - len(out))
        out += block[at : at + count]
        at += count
        if at == len(block):  # the last sequence has no match
            break
        _require(len(block) - at >= 2)
        distance = block[at] | block[at + 1] << 8
        count, at = _length(block, at + 2, token & 15)
        count += _SHORTEST_MATCH
        _require(0 < distance <= len(out) and count <= size - len(out))
        source = bytes(out[len(out) - distance : len(out) - distance + count])
        # A match may reach into what it writes: then it repeats.
        out += source if len(source) == count else (source * (count // distance + 1))[:count]
    _require(len(out) == size)
    return bytes(out)


def _length(block: bytes, at: int, nibble: int) -> tuple[int, int]:
    """A length that starts with four bits of the token, and where it ends."""
    if nibble == 15:
        while True:
            _require(at < len(block))
            nibble += block[at]
            at += 1
            if block[at - 1] != 255:
                break
    return nibble, at


def _require(condition: bool) -> None:
    if not condition:
        raise UnreadableImage("its LZ4 data is damaged")
