# SPDX-License-Identifier: Apache-2.0
"""Ways to damage an archive: its bytes, its frame, its sections, its index; the last three with digests that fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack
import msgspec

from foundryd.archive.format import ALIGNMENT, HEADER, MINOR, Header, align, digest
from foundryd.archive.reader import ArchiveReader

# What words of a damaged section and numbers of a damaged index become.
WORDS = (0, 1, 3, 0x7F, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFE, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63)
NUMBERS = (*WORDS, -1, -(1 << 31), -(1 << 63), (1 << 64) - 1, 1 << 16, 1 << 20, 1 << 40, 1 << 62)
TEXTS = ("", "x", "\0", "ep=8", "tp=2,ep=4", "ep=99999999", "é" * 200, "module/", "a" * 3000, "0" * 64)
OTHERS: tuple[Any, ...] = (None, True, 1.5, float("nan"), b"bytes", [], {}, [[]], {"": 0}, "text", 7)


@dataclass(frozen=True)
class Damage:
    """One damaged file.

    Attributes
    ----------
    kind : the way it was damaged; ``what`` says more.
    always_refused : whether no reader may accept it.
    """

    kind: str
    what: str
    data: bytes
    always_refused: bool


@dataclass
class Parts:
    """An archive taken apart: what a hostile writer starts from.

    Attributes
    ----------
    file : the whole file.
    header, entries, index : header, section entries and index, the last two as plain objects.
    stored : the stored bytes of each section.
    decoded : its decoded bytes.
    """

    file: bytes
    header: Header
    entries: list[dict[str, Any]]
    index: dict[str, Any]
    stored: list[bytes]
    decoded: list[bytes]

    @classmethod
    def of(cls, file: bytes) -> Parts:
        """The parts of a good archive."""
        reader = ArchiveReader(file)
        found = list(reader.sections.values())
        return cls(
            file,
            reader.header,
            [msgspec.to_builtins(entry, builtin_types=(bytes,)) for entry in found],
            reader.raw_index(),
            [bytes(reader.stored(entry)) for entry in found],
            [bytes(reader.decode(entry)) for entry in found],
        )

    def copy(self) -> Parts:
        """Parts that may be changed."""
        return Parts(
            self.file,
            self.header,
            copy.deepcopy(self.entries),
            copy.deepcopy(self.index),
            list(self.stored),
            list(self.decoded),
        )

    def put(self, place: int, decoded: bytes) -> None:
        """Gives a section other bytes, stored raw, with digests that fit."""
        entry = self.entries[place]
        entry |= {"codec": "raw", "params": {}, "length": len(decoded), "stored": len(decoded)}
        entry["digest"] = entry["stored_digest"] = digest(decoded)
        self.stored[place] = decoded

    def lay_out(self) -> None:
        """Places the sections one after another, as the format wants it."""
        end = HEADER.size
        for entry, stored in zip(self.entries, self.stored, strict=True):
            entry["offset"] = align(end)
            end = entry["offset"] + len(stored)

    def join(self, **header: Any) -> bytes:
        """The file, every digest right whatever else is; ``header`` replaces fields of the header."""
        directory = msgpack.packb({"sections": self.entries, "index": self.index})
        places, end = [], HEADER.size
        for stored in self.stored:
            places.append(align(end))
            end = places[-1] + len(stored)
        offset = align(end)
        made = {
            **vars(self.header),
            "file_length": offset + len(directory),
            "index_offset": offset,
            "index_length": len(directory),
            "index_digest": digest(directory)[:16],
        }
        file = bytearray(offset + len(directory))
        for place, stored in zip(places, self.stored, strict=True):
            file[place : place + len(stored)] = stored
        file[offset:] = directory
        file[: HEADER.size] = Header(**(made | header)).pack()
        return bytes(file)


def make(whole: Parts, rng: Random) -> Damage:
    """One damage, chosen by ``rng``; never the file as it was."""
    while True:
        kind, way, always = rng.choices(_WAYS, weights=[weight for *_, weight in _WAYS])[0][:3]
        parts = whole.copy() if kind.split()[0] != "bytes" else whole
        what, data = way(parts, rng)
        if data != whole.file:
            return Damage(kind, f"{kind}: {what}"[:300], data, always)


# --- bytes: no digest fits -------------------------------------------------------------------------------------------


def _range(data: bytes, rng: Random) -> tuple[int, int]:
    """A range, short or long, that is not all padding."""
    size = min(rng.choice((1, 2, 8, 64, 1024, ALIGNMENT, 3 * ALIGNMENT)), len(data) - 1)
    start = rng.randrange(len(data) - size)
    return start, start + size


def _flip(parts: Parts, rng: Random) -> tuple[str, bytes]:
    data = bytearray(parts.file)
    places = [rng.randrange(len(data)) for _ in range(rng.choice((1, 1, 2, 8)))]
    if rng.random() < 0.2:
        places[0] = rng.randrange(HEADER.size)
    for place in places:
        data[place] ^= 1 << rng.randrange(8)
    return f"bits at {places}", bytes(data)


def _cut(parts: Parts, rng: Random) -> tuple[str, bytes]:
    size = rng.choice((rng.randrange(len(parts.file)), rng.randrange(HEADER.size + 2), len(parts.file) - 1))
    return f"to {size}", parts.file[:size]


def _tail(parts: Parts, rng: Random) -> tuple[str, bytes]:
    tail = rng.choice((b"\0", bytes(ALIGNMENT), rng.randbytes(100), parts.file))
    return f"{len(tail)} bytes behind", parts.file + tail


def _overwrite(parts: Parts, rng: Random) -> tuple[str, bytes]:
    data = bytearray(parts.file)
    start, end = _range(parts.file, rng)
    data[start:end] = rng.choice((bytes(end - start), b"\xff" * (end - start), rng.randbytes(end - start)))
    return f"{start} to {end}", bytes(data)


def _swap(parts: Parts, rng: Random) -> tuple[str, bytes]:
    data = bytearray(parts.file)
    start, end = _range(parts.file, rng)
    other = rng.randrange(len(data) - (end - start))
    if rng.random() < 0.5:  # whole pages, as a file system could
        start, other = start // ALIGNMENT * ALIGNMENT, other // ALIGNMENT * ALIGNMENT
    size = min(end - start, abs(start - other))
    data[start : start + size], data[other : other + size] = data[other : other + size], data[start : start + size]
    return f"{size} bytes at {start} and {other}", bytes(data)


def _repeat(parts: Parts, rng: Random) -> tuple[str, bytes]:
    data = bytearray(parts.file)
    start, end = _range(parts.file, rng)
    target = rng.randrange(len(data))
    if rng.random() < 0.5:
        data[target:target] = data[start:end]
    else:
        data[target : target + end - start] = data[start:end]
    return f"{start} to {end} at {target}", bytes(data)


def _remove(parts: Parts, rng: Random) -> tuple[str, bytes]:
    start, end = _range(parts.file, rng)
    return f"{start} to {end}", parts.file[:start] + parts.file[end:]


# --- frame: places, lengths and codecs that cannot be, under digests that fit ----------------------------------------


def _near(value: int, rng: Random) -> int:
    """Another number than ``value``, from 0."""
    shift = rng.choice((1, 4, 8, 4095, 4096, 1 << 20))
    near = rng.choice((value + shift, max(value - shift, 0), value * 2, value // 2, abs(rng.choice(NUMBERS))))
    return near if near != value else value + 1


def _entry(parts: Parts, rng: Random) -> tuple[str, bytes]:
    entry = rng.choice(parts.entries)
    name = rng.choice(("offset", "stored", "length"))
    entry[name] = min(_near(entry[name], rng), 1 << 63)
    return f"{name} of {entry['name']} is {entry[name]}", parts.join()


def _codec(parts: Parts, rng: Random) -> tuple[str, bytes]:
    entry = rng.choice([entry for entry in parts.entries if entry["length"]])
    if entry["codec"] == "columns" and rng.random() < 0.7:
        name = rng.choice(("rows", "cols", "by_column", "shuffled"))
        entry["params"][name] = _near(entry["params"][name], rng) if name in ("rows", "cols") else rng.choice((2, 9))
    else:
        entry["codec"] = rng.choice([codec for codec in ("raw", "zstd", "columns") if codec != entry["codec"]])
        entry["params"] = rng.choice(({"x": 1}, {"rows": entry["length"], "cols": 1, "by_column": 0, "shuffled": 1}))
    return f"{entry['name']} is {entry['codec']} {entry['params']}", parts.join()


def _recoded(parts: Parts, rng: Random) -> tuple[str, bytes]:
    """A codec that could be: the bytes are others then, unless all are alike."""
    entry = rng.choice([entry for entry in parts.entries if entry["codec"] != "raw"])
    if entry["codec"] == "columns" and rng.random() < 0.5:
        entry["params"] |= {"by_column": rng.randrange(2), "shuffled": rng.randrange(2)}
        entry["params"]["rows"], entry["params"]["cols"] = entry["params"]["cols"], entry["params"]["rows"]
    else:
        shape = {"rows": entry["length"] // 4, "cols": 1, "by_column": 0, "shuffled": rng.randrange(2)}
        entry["codec"], entry["params"] = ("zstd", {}) if entry["codec"] == "columns" else ("columns", shape)
    return f"{entry['name']} is {entry['codec']} {entry['params']}", parts.join()


def _lying_stream(parts: Parts, rng: Random) -> tuple[str, bytes]:
    """A zstd frame whose header agrees with the entry, and whose blocks do not."""
    place = rng.randrange(len(parts.entries))
    length = rng.choice((1, 4, 4096, 1 << 20, 1 << 30, 12 << 30, 16 << 30, (16 << 30) + 4, 1 << 60))
    blocks = rng.choice((b"", b"\x01\x00\x00", rng.randbytes(200), parts.stored[place][8:]))
    stored = b"\x28\xb5\x2f\xfd\xe0" + length.to_bytes(8, "little") + blocks
    entry = parts.entries[place]
    entry |= {"codec": "zstd", "params": {}, "length": length, "stored": len(stored), "stored_digest": digest(stored)}
    if rng.random() < 0.4:
        entry["codec"] = "columns"
        entry["params"] = {"rows": length // 4, "cols": 1, "by_column": 0, "shuffled": rng.randrange(2)}
    parts.stored[place] = stored
    parts.lay_out()
    return f"{entry['name']} of {length} bytes from {len(stored)}", parts.join()


def _order(parts: Parts, rng: Random) -> tuple[str, bytes]:
    full = [place for place, stored in enumerate(parts.stored) if stored]
    first, second = rng.sample(full, 2)
    way = rng.choice(("swapped", "dropped", "twice"))
    if way == "swapped":
        parts.entries[first], parts.entries[second] = parts.entries[second], parts.entries[first]
    elif way == "dropped":
        del parts.entries[first]
    else:
        parts.entries.insert(second, parts.entries[first])
    return f"entry {first} {way}", parts.join()


def _header(parts: Parts, rng: Random) -> tuple[str, bytes]:
    good = Header.unpack(memoryview(parts.join()), "")
    name = rng.choice(("file_length", "index_offset", "index_length", "index_digest", "major", "min_reader"))
    if name == "index_digest":
        value: Any = rng.randbytes(16)
    elif name in ("major", "min_reader"):
        value = rng.choice((0, 2, 9, 0xFFFF)) if name == "major" else rng.choice((MINOR + 1, 9, 0xFFFF))
    else:
        value = min(_near(getattr(good, name), rng), (1 << 64) - 1)
    return f"{name} is {value}", parts.join(**{name: value})


# --- sections: other content -----------------------------------------------------------------------------------------


def _words(parts: Parts, rng: Random) -> tuple[str, bytes]:
    place = rng.choice([place for place, data in enumerate(parts.decoded) if data])
    data = bytearray(parts.decoded[place])
    width = rng.choice((1, 2, 4, 8))
    said = []
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(max(len(data) - width, 0) // width + 1) * width
        old = int.from_bytes(data[at : at + width], "little")
        new = rng.choice((*WORDS, old + 1, old - 1, old << 1, rng.getrandbits(64))) % (1 << (8 * width))
        data[at : at + width] = new.to_bytes(width, "little")
        said.append(f"{new:#x} at {at}")
    parts.put(place, bytes(data))
    parts.lay_out()
    return f"{parts.entries[place]['name']}: {', '.join(said)}", parts.join()


def _resized(parts: Parts, rng: Random) -> tuple[str, bytes]:
    place = rng.choice([place for place, data in enumerate(parts.decoded)])
    data = parts.decoded[place]
    step = rng.choice((1, 4, 8, 24, 32, 40, len(data) // 2, len(data)))
    data = rng.choice((data[:-step] if step else data, data[step:], data + data[:step], data + bytes(step), data * 2))
    parts.put(place, data)
    parts.lay_out()
    return f"{parts.entries[place]['name']} has {len(data)} bytes", parts.join()


def _exchanged(parts: Parts, rng: Random) -> tuple[str, bytes]:
    first, second = rng.sample(range(len(parts.decoded)), 2)
    parts.put(first, parts.decoded[second])
    if rng.random() < 0.5:
        parts.put(second, parts.decoded[first])
    parts.lay_out()
    return f"{parts.entries[first]['name']} has the bytes of {parts.entries[second]['name']}", parts.join()


# --- index: other values ---------------------------------------------------------------------------------------------


def _holders(value: Any, where: str = "index") -> list[tuple[str, Any, Any]]:
    """Every place below ``value`` as (path, container, key)."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = []
    for key, child in pairs:
        found.append((f"{where}.{key}", value, key))
        found += _holders(child, f"{where}.{key}")
    return found


def _index(parts: Parts, rng: Random) -> tuple[str, bytes]:
    places = _holders(parts.index)
    said = []
    for _ in range(rng.choice((1, 1, 1, 2))):
        where, holder, key = rng.choice(places)
        old = holder.get(key) if isinstance(holder, dict) else holder[key] if key < len(holder) else None
        new = _other(old, parts, rng)
        if isinstance(holder, list) and key >= len(holder):
            continue
        holder[key] = new
        said.append(f"{where} is {json.dumps(new, default=repr)[:80]}")
    return ", ".join(said), parts.join()


def _other(old: Any, parts: Parts, rng: Random) -> Any:
    if rng.random() < 0.1:
        return rng.choice(OTHERS)
    if isinstance(old, bool) or old is None:
        return rng.choice((True, False, None, 0, 1 << 63))
    if isinstance(old, int):
        return max(-(1 << 63), min(rng.choice((*NUMBERS, old + 1, old - 1, old * 2)), (1 << 64) - 1))
    if isinstance(old, str):
        return rng.choice((*TEXTS, rng.choice(parts.entries)["name"], old + "x", old[:-1]))
    if isinstance(old, list):
        items = list(old)
        way = rng.randrange(5)
        if not items or way == 0:
            return []
        if way == 1:
            return items[::-1]
        if way == 2:
            return [*items, rng.choice(items)]
        del items[rng.randrange(len(items))]
        return items if way == 3 else old * 50
    if isinstance(old, dict):
        kept = dict(old)
        if kept and rng.random() < 0.7:
            del kept[rng.choice(list(kept))]
        else:
            kept["invention"] = 1
        return kept
    return rng.choice(OTHERS)


Way = Callable[[Parts, Random], tuple[str, bytes]]
# kind, way, whether it is always refused, weight
_WAYS: tuple[tuple[str, Way, bool, int], ...] = (
    ("bytes flipped", _flip, True, 4),
    ("bytes cut", _cut, True, 2),
    ("bytes behind", _tail, True, 1),
    ("bytes overwritten", _overwrite, True, 3),
    ("bytes swapped", _swap, True, 2),
    ("bytes repeated", _repeat, True, 2),
    ("bytes removed", _remove, True, 2),
    ("frame entry", _entry, True, 4),
    ("frame codec", _codec, True, 3),
    ("frame recoded", _recoded, False, 2),
    ("frame stream", _lying_stream, True, 3),
    ("frame order", _order, True, 2),
    ("frame header", _header, True, 3),
    ("section words", _words, False, 10),
    ("section resized", _resized, False, 4),
    ("section exchanged", _exchanged, False, 3),
    ("index", _index, False, 12),
)
