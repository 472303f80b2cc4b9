# SPDX-License-Identifier: Apache-2.0
"""How much memory this process may still take, before it takes it.

A memfd lives on the kernel's own tmpfs, which has no size of its own: what bounds it is the machine's memory and the
memory limit of each control group above the process.  Going over the latter is not an error but a kill, so it is
checked up front.
"""

from __future__ import annotations

import time
from pathlib import Path

from foundryd.errors import NotEnoughMemory

# Left for the daemon itself and for what else runs in the same group.
SLACK = 32 << 20
# Of that, what plans have to leave.
SPARE = 8 << 20

GOOD_FOR = 1.0  # seconds that a look at the system serves plans


def available(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes that can be had, and the name of what limits them.  ``root`` is where ``proc`` and ``sys`` are mounted."""
    found = [(_mem_available(root), "the machine's free memory")]
    for folder in group_folders(root):
        limit, used = _group_memory(folder)
        if limit is not None:
            found.append((max(0, limit - used), f"the limit of {limit} bytes of the control group {folder}"))
    return min(found)


def check(size: int, what: str, *, room: tuple[int, str], spare: int = SLACK) -> None:
    """Raises ``NotEnoughMemory`` when ``size`` bytes for ``what`` do not fit into ``room`` beside what is spared."""
    free, limit = room
    if size + spare > free:
        raise NotEnoughMemory(
            f"{what} needs {size} bytes of memory and {spare} to spare, and {limit} leaves {free}: free memory or "
            "raise the limit"
        )


class Room:
    """What many small allocations may take, without a look at the system before each.

    It looks again every ``GOOD_FOR`` seconds, and when what it knows of is used up.
    """

    def __init__(self) -> None:
        self._left, self._limit = 0, ""
        self._looked = float("-inf")

    def check(self, size: int, what: str) -> None:
        """Raises ``NotEnoughMemory`` when ``size`` bytes for ``what`` do not fit beside what has to be spared."""
        if size + SPARE > self._left or time.monotonic() - self._looked > GOOD_FOR:
            self._left, self._limit = available()
            self._looked = time.monotonic()
        check(size, what, room=(self._left, self._limit), spare=SPARE)

    def take(self, size: int, what: str) -> None:
        """The same, and counts them as taken."""
        self.check(size, what)
        self._left -= size


def _mem_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 1 << 62  # no such line: nothing is known


def group_folders(root: Path) -> list[Path]:
    """Folders of the process's own memory control group and those above it, both versions of the interface."""
    places = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, place = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            places["cgroup2" if controllers == "" else "cgroup"] = place
    folders = []
    for line in _lines(root / "proc/self/mountinfo"):
        fields, _, tail = line.partition(" - ")
        kind, _, options = tail.split(" ", 2)
        if kind not in places or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        mounted, mount_point = fields.split(" ")[3:5]
        top = root / mount_point.lstrip("/")
        # In a container the mount may show only the subtree that this process is in.
        inside = Path(places[kind].removeprefix(mounted.rstrip("/")).lstrip("/"))
        folder = top / inside if (top / inside).is_dir() and ".." not in inside.parts else top
        folders.append(folder)
        while folder != top:
            folder = folder.parent
            folders.append(folder)
    return folders


def _group_memory(folder: Path) -> tuple[int | None, int]:
    """Limit (None: none) and what is used of it without page cache, which the kernel gives back."""
    for limit_name, used_name, prefix in (
        ("memory.max", "memory.current", ""),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ):
        text = "".join(_lines(folder / limit_name))
        if not text.isdigit() or int(text) >= 1 << 60:
            continue
        used = int("".join(_lines(folder / used_name)) or 0)
        stat = dict(line.split(" ", 1) for line in _lines(folder / "memory.stat"))
        cache = sum(int(stat.get(f"{prefix}{name}", 0)) for name in ("inactive_file", "active_file"))
        return int(text), max(0, used - cache)
    return None, 0


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
