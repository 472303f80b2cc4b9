# SPDX-License-Identifier: Apache-2.0
"""Every setting that comes from the environment, in one object, read once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, cast, get_args

from foundryd.errors import UsageError

FaultAction = Literal["kill", "error", "hang"]


class Mode(Enum):
    """What ``GraphSet`` does with a graph."""

    OFF = "off"
    CAPTURE = "capture"
    RESTORE = "restore"


FAULT_POINTS = frozenset({"publish", "attach", "map", "plan", "restore", "detach", "reattach"})


@dataclass(frozen=True)
class Fault:
    """A fault that tests arm: ``action`` at the ``number``-th pass of ``point``, and at no other."""

    point: str
    action: FaultAction
    number: int = 1

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From ``point:action`` or ``point:action:number``."""
        point, _, rest = text.partition(":")
        action, _, number = rest.partition(":")
        times = _integer({"the count of FOUNDRYD_FAULT": number}, "the count of FOUNDRYD_FAULT", 1)
        if times < 1 or point not in FAULT_POINTS or action not in get_args(FaultAction):
            raise UsageError(
                f"FOUNDRYD_FAULT is {text!r}, not POINT:ACTION[:N] with a point of {', '.join(sorted(FAULT_POINTS))} "
                "and kill, error or hang: unset it or correct it"
            )
        return cls(point, cast(FaultAction, action), times)


@dataclass(frozen=True)
class Settings:
    """The process's settings.

    Attributes
    ----------
    mode : ``FOUNDRYD_MODE``: unset, ``capture`` or ``restore``.
    archive : ``FOUNDRYD_ARCHIVE``: a name that the daemon knows, or the path of a file.
    group : ``FOUNDRYD_GROUP``: replicas on one node that serve together.
    variant : ``FOUNDRYD_VARIANT``: parallel configuration, ``ep=8`` or ``tp=2,ep=4``.
    recording : ``FOUNDRYD_RECORDING``: where a capture writes.
    references : ``FOUNDRYD_REFERENCE``: for a control run, the recordings it compares itself with, joined by colons.
    journal : ``FOUNDRYD_JOURNAL``: for a control run, where it keeps what it has tried.
    strays : ``FOUNDRYD_STRAYS``: for a control run, the file (JSON) of words to prove harmless beside what it finds.
    allow_opaque_modules : ``FOUNDRYD_ALLOW_OPAQUE_MODULES``: 1 captures modules whose globals cannot be listed.
    cut : ``FOUNDRYD_CUT``: what a capture leaves out of images at most: ``none`` (nothing of a cubin), ``cut`` (the
        code of unused kernels) or ``stripped`` (all of them, default).
    runtime_dir : ``FOUNDRYD_RUNTIME_DIR``, else ``/run/foundryd`` as root, else ``$XDG_RUNTIME_DIR/foundryd``.
    log : ``FOUNDRYD_LOG``: ``debug``, ``info``, ``warning`` (default) or ``error``.
    fault : ``FOUNDRYD_FAULT``: for tests, see ``foundryd.faults``.
    max_clients : ``FOUNDRYD_MAX_CLIENTS``: leases that a daemon gives at a time.
    max_archives : ``FOUNDRYD_MAX_ARCHIVES``: names that a daemon holds.
    max_bytes : ``FOUNDRYD_MAX_BYTES``: shared memory that a daemon's archives may take; 0: what the machine has.
    plans_ahead : ``FOUNDRYD_PLANS_AHEAD``: bytes of plans that a daemon computes before ranks ask for them; 0: none.
    rank, local_rank, world_size : ``RANK``, ``LOCAL_RANK`` (default: the rank), ``WORLD_SIZE``.
    local_rank_unused : ``FOUNDRYD_LOCAL_RANK_UNUSED``: 1 says that the engine tells no kernel its local rank, so that
        an archive may be restored where that is another number than the rank.
    log_format : ``FOUNDRYD_LOG_FORMAT``: ``json`` or ``text``; unset, the daemon writes JSON and ranks text.
    http : ``FOUNDRYD_HTTP``: loopback port of health and metrics, 0 for a free one; ``off`` (default): none.
    restore_first : ``FOUNDRYD_RESTORE_FIRST``: a JSON list of the keys that are ready when a restore returns, or
        ``all``; unset: the first that was captured.  Of this and the next two ``RestorePolicy`` is made by default.
    restore_background : ``FOUNDRYD_RESTORE_BACKGROUND``: 0 builds graphs when they are first replayed only.
    executables : ``FOUNDRYD_EXECUTABLES``: how many graphs may have an executable at a time; 0 (default): all.
    startup_report : ``FOUNDRYD_STARTUP_REPORT``: a folder in which each worker of an engine says, in ``rank-0.json``,
        how it started and how long each phase took.
    kv_reserve : ``FOUNDRYD_KV_RESERVE``: MiB that a capture of vLLM leaves out of the KV cache, for a restoring rank
        may find less memory; unset: 256, and 2048 where ranks communicate.
    driver_clock : ``FOUNDRYD_DRIVER_CLOCK``: 1 times the driver's calls of a restore apart, for benchmarks.
    """

    mode: Mode = Mode.OFF
    archive: str = ""
    group: str = "default"
    variant: str = ""
    recording: Path | None = None
    references: tuple[Path, ...] = ()
    journal: Path | None = None
    strays: Path | None = None
    allow_opaque_modules: bool = False
    cut: str = "stripped"
    runtime_dir: Path = Path("/run/foundryd")
    log: str = "warning"
    fault: Fault | None = None
    max_clients: int = 4096
    max_archives: int = 256
    max_bytes: int = 0
    plans_ahead: int = 256 << 20
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_rank_unused: bool = False
    log_format: str = ""
    http: int | None = None
    restore_first: tuple[Any, ...] | Literal["all"] | None = None
    restore_background: bool = True
    executables: int = 0
    startup_report: Path | None = None
    kv_reserve: int | None = None
    driver_clock: bool = False

    @classmethod
    def from_env(cls, env: Mapping[str, str] | None = None) -> Settings:
        """Reads the environment; raises ``UsageError`` for a value that cannot be."""
        env = os.environ if env is None else env
        mode = env.get("FOUNDRYD_MODE", "") or "off"
        if mode not in {m.value for m in Mode}:
            raise UsageError(f"FOUNDRYD_MODE is {mode!r}, not 'capture' or 'restore': unset it or correct it")
        log = env.get("FOUNDRYD_LOG", "warning").lower()
        if log not in {"debug", "info", "warning", "error"}:
            raise UsageError(f"FOUNDRYD_LOG is {log!r}, not debug, info, warning or error")
        log_format = env.get("FOUNDRYD_LOG_FORMAT", "").lower()
        if log_format not in {"", "json", "text"}:
            raise UsageError(f"FOUNDRYD_LOG_FORMAT is {log_format!r}, not 'json' or 'text': unset it or correct it")
        cut = env.get("FOUNDRYD_CUT", "") or cls.cut
        if cut not in {"none", "cut", "stripped"}:
            raise UsageError(f"FOUNDRYD_CUT is {cut!r}, not 'none', 'cut' or 'stripped': unset it or correct it")
        rank = _integer(env, "RANK", 0)
        return cls(
            mode=Mode(mode),
            archive=env.get("FOUNDRYD_ARCHIVE", ""),
            group=env.get("FOUNDRYD_GROUP", "default"),
            variant=env.get("FOUNDRYD_VARIANT", ""),
            recording=_path(env, "FOUNDRYD_RECORDING"),
            references=tuple(Path(p) for p in env.get("FOUNDRYD_REFERENCE", "").split(":") if p),
            journal=_path(env, "FOUNDRYD_JOURNAL"),
            strays=_path(env, "FOUNDRYD_STRAYS"),
            allow_opaque_modules=_integer(env, "FOUNDRYD_ALLOW_OPAQUE_MODULES", 0) != 0,
            cut=cut,
            runtime_dir=default_runtime_dir(env),
            log=log,
            fault=Fault.parse(env["FOUNDRYD_FAULT"]) if env.get("FOUNDRYD_FAULT") else None,
            max_clients=_integer(env, "FOUNDRYD_MAX_CLIENTS", cls.max_clients),
            max_archives=_integer(env, "FOUNDRYD_MAX_ARCHIVES", cls.max_archives),
            max_bytes=_integer(env, "FOUNDRYD_MAX_BYTES", cls.max_bytes),
            plans_ahead=_integer(env, "FOUNDRYD_PLANS_AHEAD", cls.plans_ahead),
            rank=rank,
            local_rank=_integer(env, "LOCAL_RANK", rank),
            world_size=_integer(env, "WORLD_SIZE", 1),
            local_rank_unused=_integer(env, "FOUNDRYD_LOCAL_RANK_UNUSED", 0) != 0,
            log_format=log_format,
            http=parse_http(env.get("FOUNDRYD_HTTP") or "off", "FOUNDRYD_HTTP"),
            restore_first=_first(env),
            restore_background=_integer(env, "FOUNDRYD_RESTORE_BACKGROUND", 1) != 0,
            executables=_integer(env, "FOUNDRYD_EXECUTABLES", 0),
            startup_report=_path(env, "FOUNDRYD_STARTUP_REPORT"),
            kv_reserve=_integer(env, "FOUNDRYD_KV_RESERVE", 0) if env.get("FOUNDRYD_KV_RESERVE") else None,
            driver_clock=_integer(env, "FOUNDRYD_DRIVER_CLOCK", 0) != 0,
        )


def default_runtime_dir(env: Mapping[str, str]) -> Path:
    """The runtime directory by the rules above; it need not exist."""
    if env.get("FOUNDRYD_RUNTIME_DIR"):
        return Path(env["FOUNDRYD_RUNTIME_DIR"])
    if os.geteuid() != 0 and env.get("XDG_RUNTIME_DIR"):
        return Path(env["XDG_RUNTIME_DIR"]) / "foundryd"
    return Path("/run/foundryd")


def parse_http(text: str, name: str) -> int | None:
    """A port, 0 for one that the kernel picks, or None for ``off``; raises ``UsageError`` with the setting's name."""
    if text.lower() == "off":
        return None
    if not text.isascii() or not text.isdigit() or int(text) > 65535:
        raise UsageError(f"{name} is {text!r}, not a port from 0 to 65535 or 'off': correct it")
    return int(text)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, "")
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise UsageError(f"{name} is {text!r}, not a number from 0: correct it")
    return value


def _first(env: Mapping[str, str]) -> tuple[Any, ...] | Literal["all"] | None:
    text = env.get("FOUNDRYD_RESTORE_FIRST", "")
    if not text:
        return None
    if text == "all":
        return "all"
    try:
        keys = json.loads(text)
    except ValueError:
        keys = None
    if not isinstance(keys, list):
        raise UsageError(f"FOUNDRYD_RESTORE_FIRST is {text!r}, not 'all' or a JSON list of keys: correct it")
    return tuple(keys)


def _path(env: Mapping[str, str], name: str) -> Path | None:
    return Path(env[name]) if env.get(name) else None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The process's settings, read from the environment at the first call."""
    return Settings.from_env()
