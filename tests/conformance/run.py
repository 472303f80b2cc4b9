# SPDX-License-Identifier: Apache-2.0
"""Runs the conformance rows on whichever driver the process finds, and writes what it saw.

    python tests/conformance/run.py --json out.json            # observe
    python tests/conformance/run.py --check                    # compare with expected.json
    python tests/conformance/run.py --accept out.json --seen "H200, driver 580.159.04"

Each group of rows runs in a process of its own, each row under a deadline.  A row that crashes or hangs costs itself
and nothing else: the rows behind it go on in a fresh process.  No managed memory, no multicast, no illegal access.

``expected.json`` maps a row to ``value`` (what a driver answers) and ``gpu`` (the driver that was seen to answer so, or
``unseen``).  Where the software driver answers otherwise on purpose, ``soft`` has its answer and ``why`` the reason.
"""

from __future__ import annotations

import argparse
import importlib
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
EXPECTED = HERE / "expected.json"
PAGE = HERE.parents[1] / "docs" / "conformance.md"
TABLE_BEGINS, TABLE_ENDS = "<!-- table: run.py --table -->\n", "<!-- end of table -->\n"
ROW_SECONDS = 20
START_SECONDS = 60  # of a process: the interpreter, the context, the kernels


def load_rows() -> Any:
    """Imports the row files; they register themselves."""
    sys.path.insert(0, str(HERE))
    import bench

    for path in sorted(HERE.glob("rows_*.py")):
        importlib.import_module(path.stem)
    return bench


def run_rows(names: list[str], image: str | None) -> None:
    """Child: runs rows of one group, one JSON line each.  A row has ended when what it left behind is tidied up."""
    bench = load_rows()
    state = None
    for name in names:
        function = bench.ROWS[name.partition(".")[0]][name]
        before_init = name.endswith("uninitialised")
        if state is None and not before_init:
            state = bench.Bench(image)
        print(json.dumps(["begin", name]), flush=True)
        value = observe(function, None if before_init else state)
        if state is not None:
            state.tidy()
        print(json.dumps(["end", name, value], default=int), flush=True)


def observe(function: Any, state: Any) -> Any:
    """What a row saw, or how it failed."""
    try:
        return function(state)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def run_child(names: list[str], image: str, seen: dict[str, Any]) -> tuple[str | None, str]:
    """Runs rows in a child as far as it gets: the row in which it ended early, and how."""
    command = [sys.executable, "-P", str(HERE / "run.py"), "--rows", ",".join(names), "--image", image]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as child,
    ):
        assert child.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

        def read(pipe: IO[str]) -> None:
            for line in pipe:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, args=(child.stdout,), daemon=True).start()
        running: str | None = None
        seconds = START_SECONDS
        try:
            while (line := lines.get(timeout=seconds)) is not None:
                if not line.startswith("["):
                    continue
                what, name, *value = json.loads(line)
                running = name if what == "begin" else None
                if what == "end":
                    seen[name] = value[0]
                seconds = ROW_SECONDS if running is not None else START_SECONDS
            end = f"exit {child.wait(START_SECONDS)}"
        except (queue.Empty, subprocess.TimeoutExpired):
            child.kill()
            end = f"no end within {seconds} s"
        errors.seek(0)
        tail = errors.read().strip().splitlines()[-1:]
        return running, ": ".join([end, *tail])


def observe_all(image: str, only: str | None) -> dict[str, Any]:
    """Runs every group in a child process, and in another one after each row that ended its process."""
    bench = load_rows()
    seen: dict[str, Any] = {}
    for group, rows in bench.ROWS.items():
        left = list(rows) if only is None or group == only else []
        while left:
            running, end = run_child(left, image, seen)
            left = [name for name in left if name not in seen]
            if not left:
                break
            lost = [running] if running is not None else left  # no row began: the process cannot even start
            for name in lost:
                seen[name] = {"failed": f"the process ended here ({end})"}
            left = [name for name in left if name not in lost]
    return seen


def describe() -> dict[str, Any]:
    """The driver and device, for the record."""
    bench = load_rows()
    cu = bench.cu
    bench.ok(cu.cuInit(0))
    name = bench.ok(cu.cuDeviceGetName(128, 0)).split(b"\0")[0].decode().strip()
    return {"software": bench.is_software(), "version": bench.ok(cu.cuDriverGetVersion()), "device": name}


def expected_value(row: dict[str, Any], software: bool) -> Any:
    """What a driver of the given kind is expected to answer."""
    return row["soft"] if software and "soft" in row else row["value"]


def asked(table: dict[str, Any], only: str | None) -> dict[str, Any]:
    """The rows of the table that a run of that group asks; all without one."""
    return table if only is None else {name: row for name, row in table.items() if name.startswith(f"{only}.")}


def differences(seen: dict[str, Any], software: bool, only: str | None = None) -> list[str]:
    """Rows that differ from the table, or are on one side only, of those that were asked."""
    table = asked(json.loads(EXPECTED.read_text()), only)
    out = []
    for name in sorted(table.keys() | seen.keys()):
        if name not in table:
            out.append(f"{name}: not in {EXPECTED.name}, saw {json.dumps(seen[name])}")
        elif name not in seen:
            out.append(f"{name}: in {EXPECTED.name}, but there is no such row")
        elif expected_value(table[name], software) != seen[name]:
            want = json.dumps(expected_value(table[name], software))
            out.append(f"{name} ({table[name]['gpu']}): expected {want}, saw {json.dumps(seen[name])}")
    return out


def accept(path: str, label: str) -> None:
    """Marks the rows that a GPU answered as the table says, takes the mark from those that it did not, lists these.

    Rows that were not asked stay as they are.
    """
    report = json.loads(Path(path).read_text())
    if report["driver"]["software"]:
        raise SystemExit("this report is from the software driver: it says nothing of a GPU")
    table = json.loads(EXPECTED.read_text())
    for name, row in asked(table, report.get("only")).items():
        agrees = name in report["rows"] and report["rows"][name] == row["value"]
        if agrees or row["gpu"] == label:
            row["gpu"] = label if agrees else "unseen"
    EXPECTED.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    found = differences(report["rows"], software=False, only=report.get("only"))
    print("\n".join(found) or "every row as expected")


def write_table(seen: dict[str, Any]) -> None:
    """Puts rows into the table that are not in it yet, as unseen on a GPU, and takes out rows that are no more."""
    table = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for name, value in seen.items():
        table.setdefault(name, {"value": value, "gpu": "unseen"})
    known = {name for rows in load_rows().ROWS.values() for name in rows}
    table = {name: row for name, row in table.items() if name in known}
    EXPECTED.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def summary() -> str:
    """The table of docs/conformance.md: rows by file."""
    bench = load_rows()
    table = json.loads(EXPECTED.read_text())
    files: dict[str, list[dict[str, Any]]] = {}
    for rows in bench.ROWS.values():
        for name, function in rows.items():
            files.setdefault(function.__module__, []).append(table[name])
    lines = ["| rows about | rows | seen on a GPU | differing on purpose |", "|---|---|---|---|"]
    for file, entries in sorted(files.items()):
        about = (
            (sys.modules[file].__doc__ or "")
            .strip()
            .splitlines()[0]
            .removeprefix("Rows about ")
            .partition(":")[0]
            .rstrip(".")
        )
        seen = sum(entry["gpu"] != "unseen" for entry in entries)
        lines.append(f"| {about} | {len(entries)} | {seen} | {sum('soft' in entry for entry in entries)} |")
    everything = [entry for entries in files.values() for entry in entries]
    seen = sum(entry["gpu"] != "unseen" for entry in everything)
    lines.append(f"| all | {len(everything)} | {seen} | {sum('soft' in entry for entry in everything)} |")
    return "\n".join(lines)


def refresh_page() -> None:
    """Puts the table of expected.json into the page."""
    before, _, rest = PAGE.read_text().partition(TABLE_BEGINS)
    _, _, after = rest.partition(TABLE_ENDS)
    PAGE.write_text(before + TABLE_BEGINS + summary() + "\n" + TABLE_ENDS + after)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write what was seen to this file")
    parser.add_argument("--check", action="store_true", help="compare with expected.json")
    parser.add_argument("--image", help="kernels to load (default: the installed image, or compiled with NVRTC)")
    parser.add_argument("--only", help="run one group")
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    parser.add_argument("--add", action="store_true", help="add rows that are new to expected.json, as unseen")
    parser.add_argument("--table", action="store_true", help="print the table of docs/conformance.md")
    parser.add_argument("--accept", help="a report of a GPU: mark the rows that agree as seen")
    parser.add_argument("--seen", default="", help="which GPU and driver, for --accept")
    arguments = parser.parse_args()
    if arguments.rows is not None:
        run_rows(arguments.rows.split(","), arguments.image)
        return 0
    if arguments.table:
        print(summary())
        return 0
    if arguments.accept is not None:
        accept(arguments.accept, arguments.seen)
        refresh_page()
        return 0
    began = time.monotonic()
    driver = describe()
    with tempfile.NamedTemporaryFile(suffix=".image") as compiled:
        if arguments.image is None:  # once, not in each group
            compiled.write(load_rows().image(None))
            compiled.flush()
        seen = observe_all(arguments.image or compiled.name, arguments.only)
    if arguments.json is not None:
        report = {"driver": driver, "seconds": round(time.monotonic() - began, 1), "rows": seen}
        if arguments.only is not None:
            report["only"] = arguments.only
        Path(arguments.json).write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
    failed = [name for name, value in seen.items() if isinstance(value, dict) and "failed" in value]
    print(f"{driver['device']}: {len(seen)} rows, {len(failed)} failed, {time.monotonic() - began:.1f} s")
    for name in failed:
        print(f"  {name}: {seen[name]['failed']}")
    if arguments.add:
        write_table({name: value for name, value in seen.items() if name not in failed})
        refresh_page()
    if arguments.check:
        found = differences(seen, driver["software"], arguments.only)
        print("\n".join(found) or "every row as expected")
        return 1 if found else 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
