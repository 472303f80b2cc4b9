# SPDX-License-Identifier: Apache-2.0
"""What the hook costs driver calls: the same program without it, with it idle, and with it capturing and restoring.

The last line of standard output is the report, one JSON object; nanoseconds a call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from foundryd import _native
from foundryd.capture.runs import preload
from foundryd.cli.environment import driver_environment

HERE = Path(__file__).parent
INCLUDE = HERE.parents[3] / "hook" / "include"
WAYS = ("without", "idle", "capture", "restore")
DEADLINE = 300.0  # seconds, of one run of the program

# A kernel that does nothing, with the parameters of the one that the software driver has.
PTX = """
.version 7.8
.target sm_70
.address_size 64
.visible .entry add_value(.param .u64 words, .param .u32 value, .param .u32 count) { ret; }
"""


def build(folder: Path, include: Path) -> Path:
    """Compiles the program with the header ``foundryd/hook.h`` of the folder ``include``.

    The software driver's library stands in for the linker; any driver serves to run.
    """
    if not (include / "foundryd" / "hook.h").exists():
        raise FileNotFoundError(
            f"{include} has no foundryd/hook.h: give --include with the folder hook/include of the sources, or --binary"
        )
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler: build hook_cost.cpp elsewhere and give --binary")
    binary = folder / "hook_cost"
    flags = ["-O2", "-std=c++20", "-I", str(include), "-o", str(binary)]
    driver = ["-L", str(_native.soft_folder()), "-l:libcuda.so.1", "-Wl,--allow-shlib-undefined", "-ldl"]
    subprocess.run([compiler, *flags, str(HERE / "hook_cost.cpp"), *driver], check=True, timeout=DEADLINE)
    return binary


def environment(way: str, driver: str) -> dict[str, str]:
    """This process's environment, with the hook as ``way`` says."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("FOUNDRYD_")}
    env |= driver_environment(driver, env)
    if way != "without":
        env["LD_PRELOAD"] = preload(env, _native.hook_library())
    if way in ("capture", "restore"):
        env["FOUNDRYD_MODE"] = way
    return env


def measure(binary: Path, image: Path, way: str, driver: str) -> dict[str, list[float]]:
    """Percentiles of each call in one process."""
    done = subprocess.run(
        [str(binary), str(image)],
        env=environment(way, driver),
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{way}: the program ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    rows = (line.split() for line in done.stdout.splitlines())
    return {name: [float(v) for v in values] for name, *values in rows}


def compare(binary: Path, driver: str, repeats: int, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """By call and way: the median over processes of each one's median, and the lowest and highest of these."""
    image = folder / "empty.ptx"
    image.write_text(PTX)
    if driver == "soft":
        image = _native.image("conformance")
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(repeats):
        # In turn, so that a machine that slows down does so for all.
        for way in WAYS:
            for name, (_, median, _) in measure(binary, image, way, driver).items():
                found.setdefault(name, {}).setdefault(way, []).append(median)
    return {
        name: {
            way: {"median_ns": statistics.median(values), "lowest_ns": min(values), "highest_ns": max(values)}
            for way, values in ways.items()
        }
        for name, ways in found.items()
    }


def table(costs: dict[str, dict[str, dict[str, float]]]) -> str:
    """Medians, a line for each call."""
    lines = [f"{'ns a call':<26}" + "".join(f"{way:>12}" for way in WAYS)]
    for name, ways in costs.items():
        lines.append(f"{name:<26}" + "".join(f"{ways[way]['median_ns']:>12.0f}" for way in WAYS))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binary", type=Path, help="the program, if it is built already")
    parser.add_argument("--build", type=Path, metavar="FOLDER", help="only build the program, into this folder")
    parser.add_argument("--include", type=Path, default=INCLUDE, help="folder of foundryd/hook.h, to build the program")
    parser.add_argument("--driver", choices=("cuda", "soft"), default="cuda")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to write the report too")
    args = parser.parse_args()
    if args.build:
        print(build(args.build, args.include))
        return
    with tempfile.TemporaryDirectory(prefix="foundryd-hook-cost-") as folder:
        binary = args.binary or build(Path(folder), args.include)
        costs = compare(binary, args.driver, args.repeats, Path(folder))
    text = json.dumps({"driver": args.driver, "repeats": args.repeats, "costs": costs})
    if args.json:
        args.json.write_text(text)
    print(table(costs), file=sys.stderr)
    print(text)


if __name__ == "__main__":
    main()
