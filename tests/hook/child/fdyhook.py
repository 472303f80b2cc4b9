# SPDX-License-Identifier: Apache-2.0
"""The memory part of the hook's table through ctypes, for children of the tests."""

from __future__ import annotations

import ctypes as c
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

# Where the arenas lie unless a test says otherwise.
BASE = int(os.environ.get("FOUNDRYD_ARENA_BASE", "0x600000000000"), 0)
STRIDE = int(text) if (text := os.environ.get("FOUNDRYD_ARENA_STRIDE", "")).isdigit() else 256 << 30
ARENAS = ("default", "weights", "kv", "io", "graph", "host")
DEFAULT, WEIGHTS, KV, IO, GRAPH, HOST = range(6)
KINDS = ("none", "size", "extra", "missing", "lifetime", "address")
STATUS = ("ok", "driver", "nccl", "invalid", "state", "diverged", "unsupported", "memory", "not_found")


class HookError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = STATUS[status]


class Allocation(NamedTuple):
    arena: int
    ordinal: int
    address: int
    bytes: int
    live: int


class _Error(c.Structure):
    _fields_ = (("status", c.c_int32), ("code", c.c_int32), ("call", c.c_char * 64), ("message", c.c_char * 512))


class _Counters(c.Structure):
    _fields_ = tuple(
        (name, c.c_uint64)
        for name in ("launches", "captures", "graph_launches", "instantiations", "module_loads", "allocations")
    )


class Report(c.Structure):
    _fields_ = (
        ("mode", c.c_uint32),
        ("rows_installed", c.c_uint32),
        ("contexts", c.c_uint32),
        ("reserved", c.c_uint32),
        ("arena_base", c.c_uint64),
        ("arena_stride", c.c_uint64),
        ("engine", _Counters),
        ("communication", _Counters),
        ("driver_ns", c.c_uint64),
        ("driver_calls", c.c_uint64),
    )


class _Buffer(c.Structure):
    _fields_ = (("data", c.c_void_p), ("bytes", c.c_uint64))


class _Allocation(c.Structure):
    _fields_ = (
        ("address", c.c_uint64),
        ("bytes", c.c_uint64),
        ("arena", c.c_uint32),
        ("ordinal", c.c_uint32),
        ("live", c.c_uint32),
        ("reserved", c.c_uint32),
    )


class _Window(c.Structure):
    _fields_ = (
        ("address", c.c_uint64),
        ("bytes", c.c_uint64),
        ("origin", c.c_uint64),
        ("rank", c.c_uint32),
        ("reserved", c.c_uint32),
    )


class _Layout(c.Structure):
    _fields_ = (
        ("base", c.c_uint64),
        ("stride", c.c_uint64),
        ("allocations", c.POINTER(_Allocation)),
        ("count", c.c_uint64),
    )


class Divergence(c.Structure):
    _fields_ = (
        ("kind", c.c_uint32),
        ("arena", c.c_uint32),
        ("ordinal", c.c_uint32),
        ("reserved", c.c_uint32),
        ("expected", c.c_uint64),
        ("actual", c.c_uint64),
    )


class _Table(c.Structure):
    _fields_ = (
        ("abi", c.c_uint32),
        ("bytes", c.c_uint32),
        ("last_error", c.CFUNCTYPE(None, c.POINTER(_Error))),
        ("free_buffer", c.CFUNCTYPE(None, c.POINTER(_Buffer))),
        ("report", c.CFUNCTYPE(c.c_int, c.POINTER(Report))),
        ("time_driver", c.CFUNCTYPE(c.c_int, c.c_uint32)),
        ("driver_enter", c.CFUNCTYPE(c.c_int)),
        ("driver_leave", c.CFUNCTYPE(c.c_int)),
        ("arena_push", c.CFUNCTYPE(c.c_int, c.c_uint32)),
        ("arena_pop", c.CFUNCTYPE(c.c_int)),
        ("set_layout", c.CFUNCTYPE(c.c_int, c.POINTER(_Layout))),
        ("allocations", c.CFUNCTYPE(c.c_int, c.POINTER(_Buffer))),
        ("divergence", c.CFUNCTYPE(c.c_int, c.POINTER(Divergence))),
        ("map_held", c.CFUNCTYPE(c.c_int)),
        ("release_held", c.CFUNCTYPE(c.c_int)),
        ("upload", c.CFUNCTYPE(c.c_int, c.c_uint64, c.c_char_p, c.c_uint64)),
        ("download", c.CFUNCTYPE(c.c_int, c.c_uint64, c.c_void_p, c.c_uint64)),
        ("set_rank", c.CFUNCTYPE(c.c_int, c.c_uint32)),
        ("ipc_peer_handle", c.CFUNCTYPE(c.c_int, c.c_char_p, c.c_uint32, c.c_void_p)),
        ("windows", c.CFUNCTYPE(c.c_int, c.POINTER(_Buffer))),
    )


def _table() -> Any:
    entry = c.CDLL(None).fdy_hook_api
    entry.restype = c.POINTER(_Table)
    entry.argtypes = (c.c_uint32,)
    return entry(6).contents


_hook = _table()


def _check(status: int) -> None:
    if status:
        error = _Error()
        _hook.last_error(c.byref(error))
        raise HookError(status, error.message.decode())


def last_error() -> str:
    error = _Error()
    _hook.last_error(c.byref(error))
    return bytes(error.message).decode()


def report() -> Report:
    out = Report()
    _check(_hook.report(c.byref(out)))
    return out


def push(arena: int) -> None:
    _check(_hook.arena_push(arena))


def pop() -> None:
    _check(_hook.arena_pop())


@contextmanager
def arena(which: int) -> Iterator[None]:
    push(which)
    try:
        yield
    finally:
        pop()


def allocations() -> list[Allocation]:
    out = _Buffer()
    _check(_hook.allocations(c.byref(out)))
    array = (_Allocation * (out.bytes // c.sizeof(_Allocation))).from_address(out.data) if out.bytes else []
    found = [Allocation(a.arena, a.ordinal, a.address, a.bytes, a.live) for a in array]
    _hook.free_buffer(c.byref(out))
    return found


def set_layout(base: int, stride: int, recorded: list[Any]) -> None:
    rows = [Allocation(*one) for one in recorded]
    array = (_Allocation * max(len(rows), 1))(
        *[_Allocation(r.address, r.bytes, r.arena, r.ordinal, r.live, 0) for r in rows]
    )
    _check(_hook.set_layout(c.byref(_Layout(base, stride, array, len(rows)))))


def divergence() -> tuple[str, str, int, int, int]:
    out = Divergence()
    _check(_hook.divergence(c.byref(out)))
    return KINDS[out.kind], ARENAS[out.arena], out.ordinal, out.expected, out.actual


def map_held() -> None:
    _check(_hook.map_held())


def release_held() -> None:
    _check(_hook.release_held())


def upload(address: int, data: bytes) -> None:
    _check(_hook.upload(address, data, len(data)))


def download(address: int, size: int) -> bytes:
    out = c.create_string_buffer(size)
    _check(_hook.download(address, out, size))
    return out.raw


def set_rank(rank: int) -> None:
    _check(_hook.set_rank(rank))


def ipc_peer_handle(own: bytes, rank: int) -> bytes:
    out = c.create_string_buffer(64)
    _check(_hook.ipc_peer_handle(own, rank, out))
    return out.raw


def windows() -> list[tuple[int, int, int, int]]:
    """(rank, address, bytes, origin) of what is open of peers' memory."""
    out = _Buffer()
    _check(_hook.windows(c.byref(out)))
    array = (_Window * (out.bytes // c.sizeof(_Window))).from_address(out.data) if out.bytes else []
    found = [(w.rank, w.address, w.bytes, w.origin) for w in array]
    _hook.free_buffer(c.byref(out))
    return found


def answer(value: object) -> None:
    """Hands a result to the test."""
    json.dump(value, sys.stdout)
    sys.stdout.flush()


def given() -> Any:
    """What the test gave."""
    return json.load(sys.stdin)
