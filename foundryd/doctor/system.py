# SPDX-License-Identifier: Apache-2.0
"""Memory, what is preloaded, the runtime directory, and the daemon."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from foundryd import _native
from foundryd.capture.runs import preload
from foundryd.daemon import limits
from foundryd.daemon.client import ControlClient
from foundryd.daemon.runtime import RuntimeDir
from foundryd.doctor.children import probe
from foundryd.doctor.elf import defines
from foundryd.doctor.finding import Finding, Level, Surroundings, same_file, size
from foundryd.errors import DaemonNotRunning, FoundrydError, UsageError

SMALL_SHM = 256 << 20  # NCCL puts its buffers between ranks there; containers get 64 MiB unless asked
SMALL_MEMORY = 1 << 30
HOOK = "libfoundryd_hook.so"
_NOT_PRELOADED = re.compile(r"object '([^']*)' from LD_PRELOAD cannot be preloaded \(([^)]*)\)")


def shared_memory(around: Surroundings) -> list[Finding]:
    """``/dev/shm``, through which NCCL joins the ranks of a node."""
    path = around.root / "dev/shm"
    try:
        there = os.statvfs(path)
    except OSError as error:
        fix = "mount a tmpfs there: NCCL shares memory between ranks through it"
        return [Finding("shm", Level.ERROR, f"{path} cannot be used ({error.strerror})", fix)]
    total, free = there.f_blocks * there.f_frsize, there.f_bavail * there.f_frsize
    facts = {"bytes": total, "free": free}
    if not os.access(path, os.W_OK | os.X_OK):
        return [Finding("shm", Level.ERROR, f"{path} is not writable for this user", f"chmod 1777 {path}", facts)]
    return [shm_size(path, total, free)]


def shm_size(path: Path, total: int, free: int) -> Finding:
    """Whether that is enough for a world of one node."""
    facts = {"bytes": total, "free": free}
    text = f"{path} has {size(free)} free of {size(total)}"
    if free < SMALL_SHM:
        fix = "start the container with --shm-size=1g or --ipc=host, or remove what lies there"
        return Finding("shm", Level.WARNING, f"{text}, and NCCL may need {size(SMALL_SHM)}", fix, facts)
    return Finding("shm", Level.OK, text, "", facts)


def memory(around: Surroundings) -> list[Finding]:
    """What the daemon may still take for archives: the machine's free memory and the limits of control groups."""
    room, limit = limits.available(around.root)
    room = max(0, room - limits.SLACK)
    facts = {"bytes": room, "limit": limit}
    text = f"archives may take {size(room)} more, as {limit} allows"
    if room < SMALL_MEMORY:
        fix = "raise the memory limit: an archive's inflated size (foundryd inspect) counts in full"
        return [Finding("memory", Level.WARNING, text, fix, facts)]
    return [Finding("memory", Level.OK, text, "", facts)]


def preloaded(around: Surroundings) -> list[Finding]:
    """``LD_PRELOAD`` as it is, and with the hook in front as ``foundryd run`` makes it."""
    entries = [e for e in around.env.get("LD_PRELOAD", "").replace(" ", ":").split(":") if e]
    try:
        hook = _native.hook_library()
        with_hook = around.child_environment(LD_PRELOAD=preload(around.env, hook))
    except UsageError as error:
        return [Finding("hook", Level.ERROR, str(error), "install foundryd again")]
    probed = probe("maps", with_hook, around.timeout)
    refused = dict(_NOT_PRELOADED.findall(probed.stderr))
    out = []
    for entry, why in refused.items():
        fix = "take it out of LD_PRELOAD, or correct the path"
        if entry != str(hook):
            out.append(Finding("preload", Level.ERROR, f"{entry} of LD_PRELOAD cannot be loaded ({why})", fix))
    if probed.failure or not any(same_file(path, hook) for path in probed.value["hook"]):
        why = refused.get(str(hook)) or probed.failure or "it is not in the process that asked for it"
        fix = "install foundryd for this system again, and take other libraries out of LD_PRELOAD"
        out.append(Finding("hook", Level.ERROR, f"the hook {hook} cannot be preloaded: {why}", fix))
    else:
        out.append(Finding("hook", Level.OK, f"the hook {hook} can be preloaded", "", {"path": str(hook)}))
    return [*out, *_order([e for e in entries if e not in refused], hook)]


def _order(entries: list[str], hook: Path) -> list[Finding]:
    """The hook wants to be first, to be the only one of its kind, and to be the installed one."""
    facts = {"entries": entries}
    place = next((i for i, e in enumerate(entries) if Path(e).name == HOOK), None)
    out = []
    if place is not None and not same_file(entries[place], hook):
        message = f"LD_PRELOAD has the hook {entries[place]}, which is not the installed {hook}"
        out.append(Finding("preload", Level.ERROR, message, "let foundryd run set LD_PRELOAD", facts))
    if place:
        message = f"the hook comes after {entries[place - 1]} in LD_PRELOAD, so it does not see every call"
        out.append(Finding("preload", Level.ERROR, message, "put it first, or let foundryd run do so", facts))
    for index, entry in enumerate(entries):
        if index == place or not defines(Path(entry), {b"dlsym"}):
            continue
        before = place is not None and index < place
        level = Level.ERROR if before else Level.WARNING
        message = f"{entry} of LD_PRELOAD replaces dlsym, as the hook does: one of them misses calls of the other"
        out.append(Finding("preload", level, message, "take it out of LD_PRELOAD for engines that restore", facts))
    if not out:
        text = f"LD_PRELOAD has {', '.join(entries)}" if entries else "LD_PRELOAD is empty: foundryd run sets it"
        out.append(Finding("preload", Level.OK, text, "", facts))
    return out


def runtime_directory(around: Surroundings) -> list[Finding]:
    """Whose it is, its mode, and whether its sockets' paths fit."""
    path = around.runtime_dir
    try:
        runtime = RuntimeDir(path)
    except UsageError as error:
        return [Finding("runtime", Level.ERROR, str(error), "use a shorter path")]
    length = len(os.fsencode(runtime.control))
    try:
        there = path.lstat()
    except FileNotFoundError:
        return [_absent(path)]
    except OSError as error:
        message = f"the runtime directory {path} cannot be looked at ({error.strerror})"
        return [Finding("runtime", Level.ERROR, message, "choose another with --runtime-dir or FOUNDRYD_RUNTIME_DIR")]
    mode, me = stat.S_IMODE(there.st_mode), os.geteuid()
    facts = {"path": str(path), "uid": there.st_uid, "mode": f"{mode:04o}", "socket_path_bytes": length}
    if not stat.S_ISDIR(there.st_mode):
        message = f"the runtime directory {path} is not a directory of its own"
        return [Finding("runtime", Level.ERROR, message, "remove it, or choose another with --runtime-dir", facts)]
    if mode & 0o022:
        message = f"the runtime directory {path} has mode {mode:04o}: others can put sockets there"
        return [Finding("runtime", Level.ERROR, message, f"chmod 0700 {path}", facts)]
    if there.st_uid != me:
        message = f"the runtime directory {path} belongs to user {there.st_uid} and this is user {me}"
        fix = "attach to that user's daemon with its --group, or choose an own directory to start one"
        return [Finding("runtime", Level.WARNING, message, fix, facts)]
    if mode not in (0o700, 0o750):
        message = f"the runtime directory {path} has mode {mode:04o}, not 0700 or 0750"
        return [Finding("runtime", Level.WARNING, message, f"chmod 0700 {path}", facts)]
    text = f"{path} belongs to this user, mode {mode:04o}; socket paths have {length} of 107 bytes"
    return [Finding("runtime", Level.OK, text, "", facts)]


def _absent(path: Path) -> Finding:
    above = next(p for p in path.parents if p.exists())
    facts = {"path": str(path)}
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        message = f"the runtime directory {path} does not exist, and {above} is not writable for this user"
        return Finding(
            "runtime", Level.ERROR, message, "choose another with --runtime-dir or FOUNDRYD_RUNTIME_DIR", facts
        )
    return Finding("runtime", Level.OK, f"{path} does not exist yet: foundryd start makes it", "", facts)


def daemon(around: Surroundings) -> list[Finding]:
    """Whether a daemon answers, and whether it has its archives."""
    fix = "look at foundryd logs"
    try:
        runtime = RuntimeDir(around.runtime_dir)
    except UsageError:
        return []  # said above
    try:
        with ControlClient(runtime.path, min(5.0, around.timeout)) as client:
            now = client.status()
    except DaemonNotRunning as error:
        if runtime.locked():
            info = runtime.info()
            message = (
                f"a daemon (pid {info.pid if info else 'unknown'}) holds {runtime.path} and nobody answers at its door"
            )
            return [Finding("daemon", Level.ERROR, message, fix)]
        return [Finding("daemon", Level.WARNING, str(error), f"foundryd start --runtime-dir {runtime.path} ARCHIVE")]
    except FoundrydError as error:
        return [Finding("daemon", Level.ERROR, str(error), fix)]
    facts = {"pid": now.pid, "build": now.build, "ready": now.ready, "http_port": now.http_port}
    loading = [a.name for a in now.archives if a.state == "loading"]
    text = f"{now.build} answers: pid {now.pid}, {len(now.archives)} archives, {len(now.leases)} ranks"
    if loading or not now.ready:
        return [Finding("daemon", Level.WARNING, f"{text}, still loading {', '.join(loading)}", "wait for it", facts)]
    return [Finding("daemon", Level.OK, text, "", facts)]
