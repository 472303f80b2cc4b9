# SPDX-License-Identifier: Apache-2.0
"""Archives of a few bytes, and the daemon's program that serves them.  Run as a script it is that program."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import blake3

from foundryd.archive.index import Index, RankClass, Variant
from foundryd.daemon.tools import ArchiveTools
from foundryd.errors import ArchiveDigestError, ArchiveFormatError

MOST = 1 << 20  # bytes of a file


def write(path: Path, *, variants: dict[str, int] | None = None, bytes: int = 65536, **extra: Any) -> Path:
    """A file with these variants and worlds.

    ``delay`` makes loading slow, ``plan_delay`` planning; ``plan_bytes`` makes plans larger.
    """
    head = {"variants": variants or {"ep=8": 8}, "bytes": bytes, "name": path.stem, **extra}
    text = json.dumps(head).encode()
    path.write_bytes(blake3.blake3(text).hexdigest().encode() + text)
    return path


class Reader:
    def __init__(self, data: Any) -> None:
        data = memoryview(data)[:MOST].tobytes().rstrip(b"\0")
        self.digest = data[:64].decode()
        self.text = data[64:]
        try:
            self.head = json.loads(self.text)
        except ValueError as error:
            raise ArchiveFormatError("the file is not an archive: correct the path") from error
        self.index = Index(
            kind="archive",
            created="2026-01-01T00:00:00Z",
            writer="tiny",
            identity={},
            variants=[_variant(name, world) for name, world in self.head["variants"].items()],
        )

    def close(self) -> None:
        pass


def _variant(name: str, world: int) -> Variant:
    return Variant(
        name=name,
        world=world,
        rank_class=RankClass(list(range(world)), [0], None, None),
        arena_base=0,
        arena_stride=0,
        allocations="",
        functions=[],
        modules=[],
        symbols=[],
        templates=[],
        members=[],
        communicators=[],
        comm_ops="",
        contents=[],
        blocks=[],
        rules="",
        tables="",
        relocations="",
    )


def _verify(reader: Reader) -> None:
    time.sleep(reader.head.get("delay", 0))
    if blake3.blake3(reader.text).hexdigest() != reader.digest:
        raise ArchiveDigestError("the archive's bytes are not those that were written: fetch it again")


def _compare(original: Reader, copy: Reader) -> None:
    if (original.digest, original.text) != (copy.digest, copy.text):
        raise ArchiveDigestError("the memory is a copy of another archive")


def _plan(reader: Reader, variant: str, rank: int) -> list[bytes]:
    time.sleep(reader.head.get("plan_delay", 0))
    if reader.head.get("plan_fault"):
        raise ValueError("no such rule")
    return [f"{reader.head['name']} {variant} {rank}".encode(), bytes(reader.head.get("plan_bytes", 0))]


TOOLS = ArchiveTools(
    open=lambda path: Reader(path.read_bytes()),
    view=Reader,
    view_unverified=Reader,
    compare=_compare,
    digest=lambda reader: reader.digest,
    verify=_verify,
    verifying_bytes=lambda reader: len(reader.text),
    decoding_bytes=lambda reader: len(reader.text),
    inflated_size=lambda reader: reader.head["bytes"],
    inflate=lambda reader, fd: os.pwrite(fd, reader.digest.encode() + reader.text, 0),
    compute_plan=_plan,
)

if __name__ == "__main__":
    from foundryd.daemon.__main__ import main

    sys.exit(main(tools=TOOLS))
