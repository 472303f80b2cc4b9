# SPDX-License-Identifier: Apache-2.0
"""The one error hierarchy.

Every message is one sentence: the cause, both values where two things differ, and what to do.  ``reason`` is a short
stable word for metrics and logs.
"""

from __future__ import annotations

from collections.abc import Sequence


class FoundrydError(Exception):
    """Base of everything foundryd raises."""

    reason = "error"


class UsageError(FoundrydError):
    """An argument or a setting is wrong."""

    reason = "usage"


class InjectedFault(FoundrydError):
    """A fault point was armed with ``error``; see ``foundryd.faults``."""

    reason = "injected"


# --- archive ---------------------------------------------------------------------------------------------------------


class ArchiveError(FoundrydError):
    """An archive cannot be read or written."""

    reason = "archive"


class ArchiveFormatError(ArchiveError):
    """The file is not an archive, is truncated, or says something impossible about itself."""

    reason = "archive_format"


class ArchiveVersionError(ArchiveError):
    """The file needs another reader."""

    reason = "archive_version"


class ArchiveDigestError(ArchiveError):
    """Bytes of the file are not those that were written."""

    reason = "archive_digest"


class NotInArchiveError(ArchiveError):
    """The archive does not have that variant, rank, graph or section."""

    reason = "not_in_archive"


class IdentityMismatch(FoundrydError):
    """This machine or process is not one that the archive can be restored on."""

    reason = "identity"


# --- capture ---------------------------------------------------------------------------------------------------------


class CaptureError(FoundrydError):
    """Recording an engine failed."""

    reason = "capture"


class UnexplainedWord(CaptureError):
    """A word differs between ranks and no rule explains it.

    ``block`` is that word's, -1 where only the message came over the wire.  ``proof_failed``: it differs between
    captures of one rank too, and was not proven harmless.  ``strays`` are the words, (block, offset, bytes), that
    follow no rule and may be garbage.
    """

    reason = "unexplained_word"

    def __init__(
        self, message: str, *, block: int = -1, proof_failed: bool = False, strays: Sequence[tuple[int, int, int]] = ()
    ) -> None:
        super().__init__(message)
        self.block = block
        self.proof_failed = proof_failed
        self.strays = list(strays)


class UnexplainedContent(CaptureError):
    """The content of an allocation differs between ranks, and it was not proven dead."""

    reason = "unexplained_content"


class HeldOutMismatch(CaptureError):
    """The inferred rules do not reproduce the rank that inference never saw.

    If all that they do not reproduce may be garbage, ``strays`` are the words, (block, offset, bytes), of graphs, and
    ``ranges`` the addresses of allocations with content that no other rank has.  ``beside_noise``: each word has noise
    in the same four bytes as what differs.
    """

    reason = "held_out"

    def __init__(
        self,
        message: str,
        *,
        strays: Sequence[tuple[int, int, int]] = (),
        ranges: Sequence[int] = (),
        beside_noise: bool = False,
    ) -> None:
        super().__init__(message)
        self.strays = list(strays)
        self.ranges = list(ranges)
        self.beside_noise = beside_noise


class StateLost(CaptureError):
    """A replay of the control run wrote memory that cannot be put back."""

    reason = "state_lost"


class UnreadableImage(CaptureError):
    """A module image is damaged or of a kind that is not known; the message says what of it."""

    reason = "unreadable_image"


class OpaqueModule(CaptureError):
    """The globals of a module cannot be listed, so a change of one could be missed."""

    reason = "opaque_module"


class UnsupportedNode(CaptureError):
    """A graph has a node that cannot be restored exactly."""

    reason = "unsupported_node"


# --- daemon ----------------------------------------------------------------------------------------------------------


class DaemonError(FoundrydError):
    """The daemon refused or failed."""

    reason = "daemon"


class DaemonNotRunning(DaemonError):
    """Nobody answers in the runtime directory."""

    reason = "daemon_not_running"


class DaemonAlreadyRunning(DaemonError):
    """Another daemon holds the runtime directory."""

    reason = "daemon_already_running"


class ProtocolError(DaemonError):
    """A peer said something that the protocol does not have."""

    reason = "protocol"


class PermissionRefused(DaemonError):
    """The peer is not a user that may do that."""

    reason = "permission"


class RankTaken(DaemonError):
    """Another living process holds that rank of the group."""

    reason = "rank_taken"


class NotEnoughMemory(DaemonError):
    """The archive does not fit into the memory that this process may use."""

    reason = "memory"


class LimitReached(DaemonError):
    """The daemon has as many clients or archives as it may."""

    reason = "limit"


class LeaseLost(DaemonError):
    """The lease ended: the door connection closed."""

    reason = "lease_lost"


# --- restore ---------------------------------------------------------------------------------------------------------


class RestoreError(FoundrydError):
    """A restore could not be done exactly; the engine captures natively instead."""

    reason = "restore"


class HookMissing(RestoreError):
    """The hook library is not preloaded into this process."""

    reason = "hook_missing"


class AttachTooLate(RestoreError):
    """A CUDA context existed before ``attach``."""

    reason = "attach_too_late"


class EngineUnsupported(RestoreError):
    """The version or the configuration of an engine is not one that its adapter knows."""

    reason = "engine_unsupported"


class LayoutDiverged(RestoreError):
    """The engine's allocations are not those of the recording."""

    reason = "layout_diverged"


class CommunicatorMismatch(RestoreError):
    """A communicator of this process is not the one in the archive."""

    reason = "communicator"


class OpListMismatch(RestoreError):
    """Two ranks of a communicator would issue different collectives."""

    reason = "op_list"


class WindowMissing(RestoreError):
    """Memory of another rank that graphs use was not opened here."""

    reason = "window_missing"


class PeerFailed(RestoreError):
    """Another rank of the group could not restore, so none may."""

    reason = "peer_failed"


class DeadlineExceeded(RestoreError):
    """Something that another rank owes did not come in time."""

    reason = "deadline"


class DriverCallFailed(RestoreError):
    """A CUDA driver or NCCL call failed.  ``code`` is the call's result, 0 where it is not known."""

    reason = "driver_call"
    code = 0


class GenerationFenced(RestoreError):
    """The handle belongs to a generation that the group has left."""

    reason = "generation_fenced"
