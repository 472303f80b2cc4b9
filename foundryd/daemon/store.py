# SPDX-License-Identifier: Apache-2.0
"""Archives in sealed memory, one copy of each content.  A library: it works without a daemon."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from foundryd.archive.index import Index, Variant
from foundryd.daemon import limits
from foundryd.daemon.offers import Offers
from foundryd.daemon.resident import Resident, free
from foundryd.daemon.sealed import Sealed
from foundryd.daemon.tools import ArchiveTools, Reader
from foundryd.errors import (
    ArchiveError,
    DaemonError,
    FoundrydError,
    LimitReached,
    NotEnoughMemory,
    NotInArchiveError,
    UsageError,
)
from foundryd.faults import fault
from foundryd.rankpatch.mesh import Mesh
from foundryd.settings import Settings

MIN_DIGEST = 6  # characters of a digest that may stand for an archive


class Store:
    """Loads archives and finds them; every method may be called from any thread.

    Parameters
    ----------
    tools : functions on archives; None means those of ``foundryd.archive``.
    room : gives the bytes that can be had and the name of their limit.
    max_archives, max_bytes : what may be held; 0 bytes: no limit but ``room``.
    """

    def __init__(
        self,
        tools: ArchiveTools | None = None,
        room: Callable[[], tuple[int, str]] = limits.available,
        max_archives: int = Settings.max_archives,
        max_bytes: int = 0,
    ) -> None:
        self._tools = tools
        self._room = room
        self._max_archives = max_archives
        self._max_bytes = max_bytes
        self._residents: dict[str, Resident] = {}
        self._lock = threading.Lock()
        self.offers = Offers()

    @property
    def tools(self) -> ArchiveTools:
        """Functions on archives, imported at their first use: a daemon without archives needs none."""
        if self._tools is None:
            self._tools = ArchiveTools.default()
        return self._tools

    def load(self, path: Path, name: str = "") -> Resident:
        """Verifies a file and inflates it into sealed memory, unless the same content is there already.

        Raises
        ------
        ArchiveError : the file is not a good archive.
        NotEnoughMemory : it does not fit; nothing was copied.
        LimitReached : there are as many archives as there may be.
        UsageError : the name is taken by another content.
        """
        name = name or archive_name(path)
        try:
            reader = self.tools.open(path)
        except OSError as error:
            raise ArchiveError(f"the archive {path} cannot be opened ({error.strerror}): correct the path") from error
        inflated = None
        try:
            digest = self.tools.digest(reader)
            there = self._same_content(name, digest)
            if there is None:
                self._check_bytes(self.tools.inflated_size(reader), path)
                there = self.offers.taken(digest)
            if there is None:
                limits.check(self.tools.verifying_bytes(reader), f"verifying the archive {path}", room=self._room())
                self.tools.verify(reader)
                there = self.offers.taken(digest)
            if there is None:
                there = inflated = self._inflate(reader, path, name, digest)
        finally:
            reader.close()
        try:
            fault("publish")
        except BaseException:
            if inflated is not None:
                free(inflated)
            raise
        # Memory that was offered while this was inflated is what ranks map, so it is the one to keep.
        offered = self.offers.close(digest)
        if offered is not None and inflated is not None:
            free(inflated)
            there = offered
        loaded = replace(there, name=name, path=path)
        with self._lock:
            self._residents[name] = loaded
        return loaded

    def holding(self, digest: str) -> Resident | None:
        """An archive of this content, if there is one."""
        with self._lock:
            return next((r for r in self._residents.values() if r.digest == digest), None)

    def examine(self, memory: Sealed, digest: str, files: Iterable[Path]) -> None:
        """Looks at memory that somebody offers as the content ``digest`` of one of ``files``; owns it from here on.

        It becomes the copy that ``load`` finds, unless that has ended meanwhile.  Only what is byte for byte as if it
        had been inflated from the file is taken: the one who offers it may be anybody that may attach.

        Raises
        ------
        ArchiveError : it is something else, or no file has that content.
        """
        try:
            fault("restore")
            original, path = self._open(digest, files)
            try:
                size = self.tools.inflated_size(original)
                if memory.size != size:
                    raise ArchiveError(
                        f"memory of {memory.size} bytes is offered for the archive {path}, which has {size} when it "
                        "is inflated: it is another archive's"
                    )
                mapping = memory.map()
                copy = self.tools.view_unverified(memoryview(mapping))
                try:
                    self.tools.compare(original, copy)
                    self.tools.verify(copy)
                finally:
                    copy.close()
            finally:
                original.close()
            reader = self.tools.view(memoryview(mapping))
            resident = Resident("", path, digest, memory, reader, mapping, "rank")
        except BaseException:
            memory.close()
            raise
        if not self.offers.put(resident):
            free(resident)

    def find(self, wanted: str) -> Resident:
        """The archive of a name or of the beginning of a digest; an empty text means the only one."""
        with self._lock:
            residents = list(self._residents.values())
        if not wanted:
            if len({r.digest for r in residents}) == 1:
                return residents[0]
            raise UsageError(f"no archive is named and the daemon holds {_listed(residents)}: name one of them")
        for resident in residents:
            if resident.name == wanted:
                return resident
        by_digest = [r for r in residents if len(wanted) >= MIN_DIGEST and r.digest.startswith(wanted.lower())]
        if len({r.digest for r in by_digest}) == 1:
            return by_digest[0]
        raise NotInArchiveError(
            f"the daemon holds no archive {wanted!r} but {_listed(residents)}: use such a name, or start the "
            "daemon with that archive"
        )

    def remove(self, name: str) -> tuple[Resident, bool]:
        """Forgets a name; says whether it was the last one of its content, which the caller then frees."""
        with self._lock:
            resident = self._residents.pop(name, None)
            if resident is None:
                raise DaemonError(f"no archive {name!r} is loaded: use a name that `foundryd ls` shows")
            return resident, not any(r.memory is resident.memory for r in self._residents.values())

    def residents(self) -> list[Resident]:
        """All archives, in the order of loading."""
        with self._lock:
            return list(self._residents.values())

    def close(self) -> None:
        """Forgets everything."""
        self.offers.free()
        for resident in self.residents():
            _, last = self.remove(resident.name)
            if last:
                free(resident)

    def _same_content(self, name: str, digest: str) -> Resident | None:
        with self._lock:
            taken = self._residents.get(name)
            if taken is None and len(self._residents) >= self._max_archives:
                raise LimitReached(
                    f"the daemon holds {len(self._residents)} archives and may hold {self._max_archives}: unload one, "
                    "or raise FOUNDRYD_MAX_ARCHIVES"
                )
            if taken is not None and taken.digest != digest:
                raise UsageError(
                    f"the name {name!r} already stands for the archive {taken.path} with digest {taken.digest[:12]}, "
                    f"not {digest[:12]}: give the new one another name, as in other={name}.foundry"
                )
            return next((r for r in self._residents.values() if r.digest == digest), None)

    def _inflate(self, reader: Reader, path: Path, name: str, digest: str) -> Resident:
        size = self.tools.inflated_size(reader)
        needed = size + self.tools.decoding_bytes(reader)
        limits.check(needed, f"inflating the archive {path}", room=self._room())
        memory = Sealed.create(f"foundryd:{name}", size, lambda fd: self.tools.inflate(reader, fd))
        try:
            fault("map")
            mapping = memory.map()
            return Resident(name, path, digest, memory, self.tools.view(memoryview(mapping)), mapping)
        except BaseException:
            memory.close()
            raise

    def _check_bytes(self, size: int, path: Path) -> None:
        held = sum({r.digest: r.memory.size for r in self.residents()}.values())
        if self._max_bytes and held + size > self._max_bytes:
            raise NotEnoughMemory(
                f"the archive {path} needs {size} bytes of memory, and the {held} of other archives leave "
                f"{max(0, self._max_bytes - held)} of the {self._max_bytes} that archives may take: unload one, or "
                "raise FOUNDRYD_MAX_BYTES"
            )

    def _open(self, digest: str, files: Iterable[Path]) -> tuple[Any, Path]:
        """Reader and path of the file with that content."""
        for path in files:
            try:
                reader = self.tools.open(path)
            except (OSError, ArchiveError):
                continue  # the loading of that file says so
            if self.tools.digest(reader) == digest:
                return reader, path
            reader.close()
        raise NotInArchiveError(
            f"no archive that the daemon loads has the digest {digest[:12]}: start it with the archive of the ranks"
        )


def archive_name(path: Path) -> str:
    """The name of a file that was given none: its stem."""
    return path.stem


def parse_archives(texts: Iterable[str]) -> list[tuple[str, Path]]:
    """Names and absolute paths of ``PATH`` or ``NAME=PATH``; raises ``UsageError`` when a name occurs twice."""
    found: dict[str, Path] = {}
    for text in texts:
        # A path may contain "=" itself, and so may a name that is a file's stem (model-ep=8): before an absolute path
        # all of it is the name.  A name has no slash.
        cut = text.find("=/") if "=/" in text else text.find("=")
        name = text[:cut] if cut > 0 else ""
        named = name and "/" not in name and not Path(text).exists()
        path = Path(text[cut + 1 :] if named else text).absolute()
        name = name if named else archive_name(path)
        if name in found:
            raise UsageError(
                f"the archives {found[name]} and {path} would both be named {name!r}: write one of them as NAME={path}"
            )
        found[name] = path
    return list(found.items())


def find_variant(index: Index, archive: str, wanted: str, rank: int) -> Variant:
    """The variant of this name, in any spelling of its mesh, whose rank class has ``rank``.

    Raises
    ------
    NotInArchiveError : there is none; the message says what there is.
    """
    names = list(dict.fromkeys(v.name for v in index.variants))
    name = wanted
    if not wanted and len(names) == 1:
        name = names[0]
    elif wanted not in names:
        try:
            name = str(Mesh.parse(wanted)) if wanted else ""
        except FoundrydError:
            name = ""
    of_name = [v for v in index.variants if v.name == name]
    if not of_name:
        raise NotInArchiveError(
            f"the archive {archive} has the variants {', '.join(names) or 'none'} and {wanted or 'no name'!r} is asked "
            "for: use one of them, or capture this one with --append"
        )
    for variant in of_name:
        if rank in variant.rank_class.ranks:
            return variant
    ranks = sorted(r for v in of_name for r in v.rank_class.ranks)
    raise NotInArchiveError(
        f"the variant {name} of the archive {archive} has the ranks {spans(ranks)} and rank {rank} is asked for: "
        "correct RANK or the variant"
    )


def spans(ranks: list[int]) -> str:
    """``0-3, 6`` for sorted ranks."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ", ".join(f"{a}-{b}" if b > a else str(a) for a, b in parts) or "none"


def _listed(residents: list[Resident]) -> str:
    return ", ".join(r.name for r in residents) or "none"
