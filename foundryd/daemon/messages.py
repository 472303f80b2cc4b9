# SPDX-License-Identifier: Apache-2.0
"""Every message of both sockets, as one tagged union of typed structs.

A message is one msgpack map with the tag under ``type``.  Unknown fields are ignored, so a newer peer may add some;
whatever else does not fit the types is a ``ProtocolError``.  ``Hello`` and ``Refused`` never change: they are how two
peers of different versions find out that they are.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeVar, Union

import msgpack
import msgspec

from foundryd import __version__, errors
from foundryd.errors import DaemonError, FoundrydError, ProtocolError

# Versions of the protocol that this build speaks, both ends included.
OLDEST = 1
NEWEST = 2
BUILD = f"foundryd {__version__}"

MAX_REQUEST = 64 << 10  # bytes of what a client sends
MAX_ANSWER = 16 << 20  # bytes of what the daemon sends over control
MAX_DEPTH = 8
MAX_TEXT = 4096  # bytes of a string
MAX_ITEMS = 65536  # of a list

# The phases of a restore, in order; a report of another one counts as ``other``.
PHASES = (
    "attach", "join", "layout", "modules", "functions", "content", "agreement", "communication", "graphs", "done",
)  # fmt: skip

REPORTS = 2  # the version since which a rank may send ``Report``

# What connects the lines of a rank's log with those of the daemon's: the rank makes it, an older rank's is empty.
AttachId = Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[0-9A-Za-z_-]*$")]


class Message(msgspec.Struct, frozen=True, tag_field="type", tag=str.lower):
    """Base of all messages."""

    size_limit: ClassVar[int] = MAX_REQUEST


# --- what is said about things ---------------------------------------------------------------------------------------


class VariantState(msgspec.Struct, frozen=True):
    """One variant of an archive and the ranks that can be served."""

    name: str
    world: int
    ranks: int
    graphs: int


class ArchiveState(msgspec.Struct, frozen=True):
    """An archive that the daemon holds or is loading.

    ``bytes`` is its size in shared memory, 0 while it is loading; ``digest`` is empty as long as it is not known.
    ``source`` is ``rank`` when the memory came from a rank that held it, and no file was inflated.
    """

    name: str
    state: Literal["loading", "resident"]
    path: str
    digest: str = ""
    bytes: int = 0
    source: Literal["file", "rank"] = "file"
    variants: list[VariantState] = []


class LeaseState(msgspec.Struct, frozen=True):
    """One rank that is attached.

    ``pid`` is 0 when the process is in a PID namespace that the daemon does not see.  ``own_memory``: the rank was
    attached to an earlier daemon and maps that one's copy of the archive, not this daemon's.
    """

    number: int
    group: str
    rank: int
    variant: str
    archive: str
    digest: str
    pid: int
    uid: int
    generation: int
    own_memory: bool = False
    attach_id: str = ""
    outcome: str = ""  # what the rank reported last: ``restored`` or ``fallback``
    reason: str = ""  # of a fallback
    restore_ms: float = 0.0  # all phases of that report


# --- door, client to daemon ------------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """First packet on the door: the protocol versions that the client speaks, and its build."""

    oldest: int
    newest: int
    build: str


class Attach(Message, frozen=True):
    """Asks for a lease.  ``archive`` is a name or the beginning of a digest; empty texts mean the only one."""

    archive: str
    group: str
    rank: int
    variant: str
    attach_id: AttachId = ""


class Report(Message, frozen=True):
    """How a restore ended, since version 2.  Said by a rank with a lease, or instead of ``Attach`` by one without.

    ``phases`` are milliseconds of each phase that ended; ``reason`` is that of the error, empty when all went well.
    """

    outcome: Literal["restored", "fallback"]
    attach_id: AttachId
    group: Annotated[str, msgspec.Meta(max_length=256)]
    rank: int
    reason: Annotated[str, msgspec.Meta(max_length=64)] = ""
    message: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)] = ""
    phases: Annotated[dict[str, float], msgspec.Meta(max_length=32)] = {}

    def __post_init__(self) -> None:
        if not all(0 <= ms <= 1e9 for ms in self.phases.values()):  # so is not a number either
            raise ValueError("a phase of a report has no possible time")


class Reattach(Message, frozen=True):
    """From version 2: asks for the lease that an earlier daemon gave, without new memory.

    ``device`` and ``inode`` are of the archive's memory that the rank maps.
    """

    archive: str
    digest: str
    archive_bytes: int
    device: int
    inode: int
    group: str
    rank: int
    variant: str
    generation: int


class Offer(Message, frozen=True):
    """From version 2: answer to ``Wanted``, with one descriptor: the archive's memory."""


# --- door, daemon to client ------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True):
    """Answer to ``Hello``: the version that both use from here on."""

    protocol: int
    build: str
    pid: int
    instance: str  # differs for each start of a daemon


class Granted(Message, frozen=True):
    """Answer to ``Attach``, with two descriptors: the archive's memory, then the plan's."""

    lease: int
    archive: str
    digest: str
    archive_bytes: int
    plan_bytes: int
    group: str
    rank: int
    variant: str
    generation: int


class Wanted(Message, frozen=True):
    """Answer to ``Reattach`` when the daemon could use the rank's memory: send it with ``Offer``."""


class Resumed(Message, frozen=True):
    """Answer to ``Reattach``, or to ``Offer``: the lease is there again.  ``own_memory`` as in ``LeaseState``."""

    lease: int
    generation: int
    own_memory: bool


class Ended(Message, frozen=True):
    """Last packet before the daemon closes a door connection on its own account."""

    reason: str
    message: str


# --- both sockets ----------------------------------------------------------------------------------------------------


class Refused(Message, frozen=True):
    """The answer when something cannot be done; ``reason`` is that of a class in ``foundryd.errors``."""

    reason: str
    message: str
    id: int = 0
    oldest: int = OLDEST
    newest: int = NEWEST
    build: str = BUILD


# --- control, client to daemon ---------------------------------------------------------------------------------------


class Request(Message, frozen=True):
    """Base of what is asked over control: ``id`` comes back in the answer, ``protocol`` is from ``Welcome``."""

    id: int
    protocol: int


class GetStatus(Request, frozen=True):
    """Asks for ``Status``."""


class ListArchives(Request, frozen=True):
    """Asks for ``Archives``."""


class LoadArchive(Request, frozen=True):
    """Loads a file under a name; ``Done`` comes when it is verified and resident.  For the daemon's own user."""

    path: str
    name: str = ""


class UnloadArchive(Request, frozen=True):
    """Forgets an archive that nobody has a lease on.  For the daemon's own user."""

    name: str


class Stop(Request, frozen=True):
    """Ends the daemon.  For the daemon's own user."""


class Subscribe(Request, frozen=True):
    """Asks for events from now on; the answer is ``Status``, whose ``event`` is the number to continue from."""


# --- control, daemon to client ---------------------------------------------------------------------------------------


class Status(Message, frozen=True):
    """Everything the daemon knows, as of event number ``event``."""

    size_limit: ClassVar[int] = MAX_ANSWER

    id: int
    instance: str
    event: int
    pid: int
    build: str
    protocol: int
    ready: bool
    started: float  # seconds since the epoch
    uptime_ms: float
    archives: list[ArchiveState]
    leases: list[LeaseState]
    http_port: int = 0  # of health and metrics on loopback; 0: not served
    resident_bytes: int = 0  # of archives and plans in shared memory


class Archives(Message, frozen=True):
    """Answer to ``ListArchives``."""

    size_limit: ClassVar[int] = MAX_ANSWER

    id: int
    archives: list[ArchiveState]


class Done(Message, frozen=True):
    """It was done.  ``pid`` is the daemon's, ``leases`` how many there were."""

    id: int
    pid: int
    leases: int


EventKind = Literal[
    "archive_loading",
    "archive_loaded",
    "archive_failed",
    "archive_unloaded",
    "lease_taken",
    "lease_ended",
    "ready",
    "stopping",
]


class Event(Message, frozen=True):
    """Something happened.  Numbers have no holes within an instance, so a hole means that the client missed some."""

    size_limit: ClassVar[int] = MAX_ANSWER

    instance: str
    number: int
    kind: EventKind
    archive: ArchiveState | None = None
    lease: LeaseState | None = None
    message: str = ""


class Tick(Message, frozen=True):
    """Sent to subscribers every second: the number of the last event, so that a lost last one is noticed too."""

    instance: str
    number: int


FromClient = Union[  # noqa: UP007 - a value that msgspec.convert takes
    Hello, Attach, Reattach, Offer, Report, GetStatus, ListArchives, LoadArchive, UnloadArchive, Stop, Subscribe
]
FromDaemon = Union[Welcome, Granted, Wanted, Resumed, Ended, Refused, Status, Archives, Done, Event, Tick]  # noqa: UP007

_T = TypeVar("_T")


def encode(message: Message) -> bytes:
    """Bytes of a message; raises ``ProtocolError`` when they exceed the limit of its kind."""
    data = msgspec.msgpack.encode(message)
    if len(data) > message.size_limit:
        raise ProtocolError(
            f"a {type(message).__name__} has {len(data)} bytes and may have {message.size_limit}: shorten its texts"
        )
    return data


def decode_request(data: bytes) -> FromClient:
    """What a client said; raises ``ProtocolError`` for everything that is not such a message."""
    return _decode(data, FromClient, MAX_REQUEST)  # type: ignore[arg-type]


def decode_answer(data: bytes) -> FromDaemon:
    """What the daemon said; raises ``ProtocolError`` for everything that is not such a message."""
    return _decode(data, FromDaemon, MAX_ANSWER)  # type: ignore[arg-type]


def request_id(data: bytes) -> int:
    """The ``id`` of a request that could not be decoded, for the refusal; 0 when there is none."""
    try:
        value = _plain(data, MAX_REQUEST)
    except ProtocolError:
        return 0
    number = value.get("id", 0) if isinstance(value, dict) else 0
    return number if type(number) is int else 0


def refusal(error: FoundrydError, id: int = 0) -> Refused:
    """The message that carries an error to the peer."""
    return Refused(reason=error.reason, message=printable(error)[:MAX_TEXT], id=id)


def printable(value: object) -> str:
    """Text that msgpack can carry: a path may hold bytes that are not UTF-8."""
    return str(value).encode("utf-8", "replace").decode()


def error_of(refused: Refused) -> FoundrydError:
    """The error that a refusal stands for, of the class that the daemon raised."""
    return _BY_REASON.get(refused.reason, DaemonError)(refused.message)


def agree(oldest: int, newest: int, build: str) -> int:
    """The newest version that both speak; raises ``ProtocolError`` when there is none."""
    version = min(newest, NEWEST)
    if version < max(oldest, OLDEST):
        raise ProtocolError(
            f"{build} speaks protocol versions {oldest} to {newest} and this daemon, {BUILD}, speaks {OLDEST} to "
            f"{NEWEST}: install the same foundryd on both sides"
        )
    return version


def _decode(data: bytes, kind: type[_T], limit: int) -> _T:
    value = _plain(data, limit)
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, RecursionError) as error:
        raise ProtocolError(f"a message does not fit the protocol ({error}): the peer must be corrected") from error


def _plain(data: bytes, limit: int) -> Any:
    if len(data) > limit:
        raise ProtocolError(f"a message has {len(data)} bytes and may have {limit}: the peer must be corrected")
    try:
        # This decoder makes room for elements as they come, the other one for as many as a list says that it has: a
        # thousand long lists in one another would be half a gigabyte.
        msgspec.msgpack.decode(data)
        value = msgpack.unpackb(
            data,
            strict_map_key=True,
            object_pairs_hook=_unique_keys,
            ext_hook=_no_extension,
            max_str_len=MAX_TEXT * 4,
            max_bin_len=0,
            max_ext_len=0,
            max_array_len=MAX_ITEMS,
            max_map_len=64,
        )
    except (ValueError, TypeError, RecursionError, msgspec.DecodeError, msgpack.UnpackException) as error:
        raise ProtocolError(f"a message is not msgpack ({error!r:.200}): the peer must be corrected") from error
    if _depth(value) > MAX_DEPTH:
        raise ProtocolError(f"a message is nested deeper than {MAX_DEPTH} levels: the peer must be corrected")
    return value


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a map has a key twice")
    if not all(isinstance(key, str) for key in result):
        raise ValueError("a map has a key that is no text")
    return result


def _no_extension(code: int, data: bytes) -> Any:
    raise ValueError(f"extension type {code}")


def _depth(value: Any) -> int:
    """Levels of nesting, without recursion; stops counting above the limit."""
    level: list[Any] = [value]
    depth = 0
    while level and depth <= MAX_DEPTH:
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        depth += 1
        level = below
    return depth


def _subclasses(kind: type[FoundrydError]) -> dict[str, type[FoundrydError]]:
    found = {kind.reason: kind}
    for child in kind.__subclasses__():
        found |= _subclasses(child)
    return found


def reason_label(reason: str) -> str:
    """The reason, if some class of ``foundryd.errors`` has it, else ``other``: a metric has few label values."""
    return reason if reason in _BY_REASON else "other"


_BY_REASON = {k: v for k, v in _subclasses(FoundrydError).items() if v.__module__ == errors.__name__}

# What msgspec works out about a union at its first use takes longer than all else of an attach: done with the imports.
for _union in (FromClient, FromDaemon):
    msgspec.msgpack.Decoder(_union)
