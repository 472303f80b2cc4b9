# SPDX-License-Identifier: Apache-2.0
"""A rank's plan: everything about a variant that depends on the rank, worked out and in one piece of memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from foundryd._native import _rankpatch
from foundryd.archive.index import Communicator, Index, Module, Variant
from foundryd.errors import ArchiveFormatError, NotInArchiveError, UsageError
from foundryd.rankpatch.mesh import MAX_WORLD, Coordinate, Mesh

if TYPE_CHECKING:
    from typing_extensions import Buffer

_MAGIC = b"fdyplan\x01"
_PREFIX = Struct("<8sII")  # magic, bytes of the header, number of writes
_ALIGNMENT = 16


class ArchiveReader(Protocol):
    """What is needed of an open archive."""

    @property
    def index(self) -> Index:
        """The typed index."""

    def array(self, name: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """A section as an array of plain structs."""


class _Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    variant: str
    place: int
    rank: int
    world: int
    coordinates: list[int]
    modules: list[str]
    communicators: list[list[int]]


@dataclass(frozen=True, eq=False)
class Plan:
    """What one rank of a variant has of its own.

    Attributes
    ----------
    variant : canonical mesh text.
    place : place of the variant, of the rank's class, in the index.
    rank, world : world rank and number of ranks.
    coordinates : values of ``Coordinate``, in its order.
    modules : for each module of the variant the digest of the image to load.
    communicators : for each communicator its world ranks, in the order of its own ranks.
    writes : ``write_dtype``, ascending by (block, offset).
    """

    variant: str
    place: int
    rank: int
    world: int
    coordinates: tuple[int, ...]
    modules: tuple[str, ...]
    communicators: tuple[tuple[int, ...], ...]
    writes: npt.NDArray[np.void]

    @cached_property
    def _bounds(self) -> dict[int, tuple[int, int]]:
        blocks = np.ascontiguousarray(self.writes["block"])
        edges = [0, *(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1).tolist(), len(blocks)]
        return {int(blocks[a]): (a, b) for a, b in pairwise(edges) if a < b}

    def writes_of(self, block: int) -> npt.NDArray[np.void]:
        """The writes of one block, a view."""
        begin, end = self._bounds.get(block, (0, 0))
        return self.writes[begin:end]

    def apply(self, block: int, content: npt.NDArray[np.uint8]) -> None:
        """Stores the writes of ``block`` into its bytes, in place; raises ``ArchiveFormatError`` if they do not fit."""
        try:
            _rankpatch.apply(content, self.writes_of(block))
        except ValueError as error:
            raise ArchiveFormatError(f"the plan of rank {self.rank} does not fit: {error}; capture again") from error

    def to_bytes(self) -> bytes:
        """The plan as one piece of memory, for ``from_buffer``."""
        return b"".join(self.pieces())

    def pieces(self) -> tuple[bytes, memoryview]:
        """The same as what lies before the writes, and the writes as they are: a large plan is copied only once."""
        header = msgspec.msgpack.encode(
            _Header(
                self.variant,
                self.place,
                self.rank,
                self.world,
                list(self.coordinates),
                list(self.modules),
                [list(ranks) for ranks in self.communicators],
            )
        )
        prefix = _PREFIX.pack(_MAGIC, len(header), len(self.writes))
        padding = bytes(-(len(prefix) + len(header)) % _ALIGNMENT)
        return b"".join((prefix, header, padding)), np.ascontiguousarray(self.writes).view(np.uint8).data

    @classmethod
    def from_buffer(cls, buffer: Buffer) -> Plan:
        """Reads what ``to_bytes`` wrote; the writes are a view of ``buffer``.

        Raises
        ------
        ArchiveFormatError : the bytes are not exactly a plan.
        """
        memory = memoryview(buffer).cast("B")
        if len(memory) < _PREFIX.size:
            raise _malformed(f"it has {len(memory)} bytes, fewer than the {_PREFIX.size} of its beginning")
        magic, header_bytes, count = _PREFIX.unpack_from(memory)
        if magic != _MAGIC:
            raise _malformed(f"it begins with {magic!r}, not {_MAGIC!r}")
        header_end = _PREFIX.size + header_bytes
        begin = header_end + -header_end % _ALIGNMENT
        expected = begin + count * _rankpatch.write_dtype.itemsize
        if len(memory) != expected:
            raise _malformed(f"it has {len(memory)} bytes and says that it has {expected}")
        if any(memory[header_end:begin]):
            raise _malformed("its padding is not zero")
        try:
            header = msgspec.msgpack.decode(memory[_PREFIX.size : header_end], type=_Header)
        except msgspec.DecodeError as error:
            raise _malformed(str(error)) from error
        _check_header(header)
        writes = np.frombuffer(memory, dtype=_rankpatch.write_dtype, count=count, offset=begin)
        try:
            _rankpatch.check_writes(writes)
        except ValueError as error:
            raise _malformed(str(error)) from error
        return cls(
            header.variant,
            header.place,
            header.rank,
            header.world,
            tuple(header.coordinates),
            tuple(header.modules),
            tuple(tuple(ranks) for ranks in header.communicators),
            writes,
        )


def _malformed(reason: str) -> ArchiveFormatError:
    return ArchiveFormatError(f"these bytes are no plan: {reason}; ask for the plan again")


def _check_header(header: _Header) -> None:
    if not 1 <= header.world <= MAX_WORLD or not 0 <= header.rank < header.world or header.place < 0:
        raise _malformed(f"it is for rank {header.rank} of {header.world}, variant {header.place}")
    if (
        len(header.coordinates) != len(Coordinate)
        or header.coordinates[Coordinate.RANK] != header.rank
        or not all(0 <= c < header.world for c in header.coordinates)
    ):
        raise _malformed(f"rank {header.rank} of {header.world} cannot have coordinates {header.coordinates}")
    for slot, ranks in enumerate(header.communicators):
        if len(set(ranks)) != len(ranks) or header.rank not in ranks or not all(0 <= r < header.world for r in ranks):
            raise _malformed(f"communicator {slot} of rank {header.rank} of {header.world} cannot have ranks {ranks}")


def compute_plan(reader: ArchiveReader, variant_name: str, rank: int, *, local_size: int = 0) -> Plan:
    """Works out the plan of ``rank``.

    Parameters
    ----------
    reader : an open archive.
    variant_name : the mesh, ``tp=2,ep=4``; axes may come in any order.
    rank : world rank.
    local_size : ranks of one node, needed where rules follow the local rank; 0 if all ranks share one.

    Raises
    ------
    NotInArchiveError : the archive lacks the variant, the rank, or an image for it; the message says what it has.
    ArchiveFormatError : the index or the rules contradict themselves.
    UsageError : rules follow the local rank and ``local_size`` is 0.
    """
    place, variant = _find(reader.index, variant_name, rank)
    try:
        mesh = Mesh.parse(variant.name, local_size=local_size)
    except UsageError as error:
        raise ArchiveFormatError(f"the archive names a variant that is none: {error}") from error
    if mesh.world != variant.world or rank >= mesh.world:
        raise ArchiveFormatError(
            f"the variant {variant.name} has {mesh.world} ranks by its name, {variant.world} by its index, and lists "
            f"rank {rank}: capture again"
        )
    rules = reader.array(variant.rules, _rankpatch.rule_dtype)
    tables = reader.array(variant.tables, np.uint64)
    coordinates = mesh.coordinates(rank)
    known = list(coordinates)
    if not local_size:
        known[Coordinate.LOCAL_RANK] = _rankpatch.UNKNOWN
    try:
        writes = _rankpatch.plan(rules, tables, known, mesh.world)
    except _rankpatch.UnknownCoordinate as error:
        raise UsageError(f"rules of {variant.name} follow the local rank: say how many ranks a node has") from error
    except ValueError as error:
        raise ArchiveFormatError(f"rules of the variant {variant.name} cannot be: {error}; capture again") from error
    return Plan(
        variant.name,
        place,
        rank,
        mesh.world,
        coordinates,
        tuple(_digest(m, i, rank, mesh) for i, m in enumerate(variant.modules)),
        tuple(_ranks(c, i, rank, mesh) for i, c in enumerate(variant.communicators)),
        writes,
    )


def _find(index: Index, name: str, rank: int) -> tuple[int, Variant]:
    """The variant with that name whose rank class has ``rank``."""
    try:
        canonical = str(Mesh.parse(name))
    except UsageError:
        canonical = name
    named = [(i, v) for i, v in enumerate(index.variants) if v.name in (name, canonical)]
    if not named:
        names = ", ".join(sorted({v.name for v in index.variants})) or "none"
        raise NotInArchiveError(f"the archive has no variant {name!r}: use one of {names}, or capture this one")
    for place, variant in named:
        if rank in variant.rank_class.ranks:
            return place, variant
    served = sorted({r for _, v in named for r in v.rank_class.ranks})
    raise NotInArchiveError(
        f"the archive serves ranks {_spans(served)} of the variant {canonical}, which has {named[0][1].world} ranks, "
        f"but not rank {rank}: use a rank that it serves or capture this one"
    )


def _spans(ranks: list[int]) -> str:
    """``0-2, 5`` for 0, 1, 2, 5."""
    parts: list[tuple[int, int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1] = (parts[-1][0], rank)
        else:
            parts.append((rank, rank))
    return ", ".join(f"{a}-{b}" if a != b else str(a) for a, b in parts) or "none"


def _digest(module: Module, number: int, rank: int, mesh: Mesh) -> str:
    if module.by_rank is None:
        if len(module.digests) != 1:
            raise ArchiveFormatError(
                f"module {number} has {len(module.digests)} images and does not say which is whose: capture again"
            )
        return module.digests[0]
    if len(module.by_rank) != mesh.world:
        raise ArchiveFormatError(
            f"module {number} names images for {len(module.by_rank)} ranks of {mesh.world}: capture again"
        )
    place = module.by_rank[rank]
    if place == -1:
        raise NotInArchiveError(
            f"the code of module {number} differs by rank and rank {rank} was not captured: capture it as well"
        )
    if not 0 <= place < len(module.digests):
        raise ArchiveFormatError(
            f"module {number} names image {place} of {len(module.digests)} for rank {rank}: capture again"
        )
    return module.digests[place]


def _ranks(communicator: Communicator, slot: int, rank: int, mesh: Mesh) -> tuple[int, ...]:
    if communicator.axes is not None:
        try:
            ranks = mesh.group(rank, tuple(communicator.axes))
        except UsageError as error:
            raise ArchiveFormatError(f"communicator {slot} cannot be: {error}") from error
    else:
        ranks = tuple(communicator.members or ())
    if len(ranks) != communicator.size or len(set(ranks)) != len(ranks) or any(not 0 <= r < mesh.world for r in ranks):
        raise ArchiveFormatError(
            f"communicator {slot} has {communicator.size} ranks and lists {list(ranks)} of {mesh.world}: capture again"
        )
    if rank not in ranks:
        raise NotInArchiveError(
            f"communicator {slot} was captured with ranks {list(ranks)}, which are no group of the mesh {mesh}, and "
            f"rank {rank} is none of them: declare its ranks along axes of the mesh"
        )
    return ranks
