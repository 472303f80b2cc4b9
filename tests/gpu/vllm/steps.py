# SPDX-License-Identifier: Apache-2.0
"""What one step of ``compare.py`` does: a capture, a start of vLLM natively or restored, several of them beside."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from launch import FOUNDRYD, Deadline, RunFailed, TimeUp, clean_environment, devices, foundryd, run
from results import FAILED, OK, Results, Row, differences
from setups import Setup

ANSWERS = Path(__file__).with_name("answers.py")
BATCHES, TOKENS = (1, 2, 5, 8, 16, 32), 64
FEW_BATCHES, FEW_TOKENS = (1, 3, 8), 16
PACED, ROUNDS, PACE_TOKENS = (1, 8, 32), 7, 64


@dataclass
class Context:
    """What steps share: where they write, what was found, and how long each may take.

    ``models`` writes the model of a setup and says where it is.  ``crowded``: where there are fewer ``gpus`` than
    ranks, these share the first one.
    """

    out: Path
    results: Results
    setups: Mapping[str, Setup]
    models: Callable[[Setup], Path]
    limit: float
    capture_deadline: float = 300.0
    jobs: int = 4
    crowded: bool = False
    gpus: int = field(default_factory=devices)

    def crowds(self, ranks: int) -> bool:
        """Whether as many ranks share a GPU."""
        return self.crowded and ranks > max(1, self.gpus)

    def started(self, setup: Setup) -> Setup:
        """The setup as vLLM is started with it, natively and restored: several ranks count replays themselves."""
        if self.crowds(setup.ranks):
            return setup.crowded(self.out / "compiled-crowded")
        return setup if setup.ranks == 1 else setup.counted()

    def setup_of(self, step: str) -> Setup:
        """The setup of a step, with what has to be written for it."""
        setup = self.setups[step.partition(".")[0]]
        return setup if setup.draft is None else setup.drafting(str(self.models(replace(setup, model=setup.draft))))

    def archive(self, setup: str) -> Path:
        """Where a setup's archive is; raises ``RunFailed`` if it was not captured."""
        path = self.out / f"{setup}.foundry"
        if not path.exists():
            raise RunFailed(f"there is no {path}: run {setup}.capture first")
        return path

    def environment(self, setup: Setup, label: str) -> dict[str, str]:
        """Variables of a start of vLLM, natively and restored."""
        shutil.rmtree(self.out / f"report-{label}", ignore_errors=True)
        shutil.rmtree(self.counts(label), ignore_errors=True)
        return clean_environment() | {
            # What a restore sets too, so that NCCL chooses alike.
            "NCCL_GRAPH_REGISTER": "0",
            "NCCL_RUNTIME_CONNECT": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "FOUNDRYD_LOG": "info",
            "FOUNDRYD_STARTUP_REPORT": str(self.out / f"report-{label}"),
            **setup.environment,
        }

    def comparable(self, setup: Setup) -> str:
        """The setup's native step; raises ``RunFailed`` if that had other GPUs than a restored start would have."""
        name = f"{setup.name}.native"
        theirs, crowded = self.results.of(name), self.crowds(setup.ranks)
        if theirs and bool(theirs.get("crowded")) != crowded:
            ways = {True: "all ranks on one GPU", False: "a GPU for each rank"}
            raise RunFailed(f"{name} had {ways[not crowded]} and this has {ways[crowded]}: run {name} again")
        return name

    def waited_for(self, label: str, workers: Sequence[str]) -> str:
        """Which workers of a start that is late have not started."""
        left = [worker for worker in workers if not (self.out / f"report-{label}" / f"{worker}.json").exists()]
        return f"not started: {', '.join(left)}" if left else f"all of {', '.join(workers)} have started"

    def counts(self, label: str) -> Path:
        """Where the workers of a start write how often they replayed graphs."""
        return self.out / f"replays-{label}"

    def replays(self, label: str, workers: Sequence[str]) -> dict[str, dict[str, int]]:
        """How often each worker of a start replayed graphs; raises ``RunFailed`` if one did not say so."""
        found = {}
        for worker in workers:
            path = self.counts(label) / f"{worker}.json"
            if not path.exists():
                raise RunFailed(f"{label}: {worker} has not counted its replays in {path}: run {label} again")
            found[worker] = json.loads(path.read_text())
        return found

    def report(self, label: str, workers: Sequence[str] = ("rank-0",)) -> Row:
        """How the workers of a start started: the first one's report, and all ways and reasons."""
        found = []
        for worker in workers:
            path = self.out / f"report-{label}" / f"{worker}.json"
            if not path.exists():
                raise RunFailed(f"{label}: {worker} left no start-up report, so the plug-in was not loaded")
            found.append(json.loads(path.read_text()))
        fallbacks = [report["fallback"] for report in found if report["fallback"]]
        return found[0] | {"ways": sorted({report["way"] for report in found}), "fallbacks": fallbacks}


@dataclass(frozen=True)
class Step:
    """One step: its name is ``setup.what``; ``seconds`` is what it takes on an H200, about.

    A ``shared`` step may run while others of its kind use the GPU.
    """

    name: str
    seconds: int
    does: Callable[[Context, str], Row]
    gpus: int = 1
    shared: bool = False
    about: str = field(default="")


def wanted_of(context: Context, setup: Setup, label: str, batches: Sequence[int], tokens: int) -> dict[str, Any]:
    """What ``answers.py`` is told."""
    out = context.out / f"{label}.json"
    out.unlink(missing_ok=True)
    return {
        "model": str(context.models(setup)),
        "options": dict(setup.options),
        "out": str(out),
        "batches": list(batches),
        "tokens": tokens,
        "socket": None,
        "calls": None,
        "checked": False,
        "replays": str(context.counts(label)),
        "worker": setup.workers[0] if setup.ranks == 1 else None,
        "adapters": [str(setup.model.adapter(context.out, number)) for number in range(setup.adapters)],
    }


def launched(wanted: Mapping[str, Any], archive: str | None) -> list[str]:
    """The command of one start; with an archive it restores."""
    command = [sys.executable, "-P", str(ANSWERS), json.dumps(wanted)]
    return command if archive is None else [*FOUNDRYD, "run", "--archive", archive, "--", *command]


def start(
    context: Context,
    setup: Setup,
    label: str,
    archive: str | None = None,
    *,
    limit: float | None = None,
    batches: Sequence[int] = BATCHES,
    tokens: int = TOKENS,
    environment: Mapping[str, str] | None = None,
    calls: Path | None = None,
    checked: bool = False,
) -> Row:
    """One start of vLLM with its answers; what it found, without them.

    ``calls`` is where it writes which functions took the time.  ``checked``: vLLM looks at the addresses of pieces.
    """
    setup = context.started(setup)
    wanted = wanted_of(context, setup, label, batches, tokens) | {"checked": checked}
    wanted["calls"] = None if calls is None else str(calls)
    given = context.environment(setup, label) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | dict(environment or {})
    # vLLM logs to standard output, which is not read.
    command = ["bash", "-c", 'exec "$@" >&2', "bash", *launched(wanted, archive)]
    try:
        run(label, command, given, timeout=limit or context.limit, log=context.out / f"{label}.log")
    except TimeUp as error:
        raise TimeUp(f"{error}; {context.waited_for(label, setup.workers)}") from error
    result = json.loads(Path(wanted["out"]).read_text())
    report = context.report(label, setup.workers)
    figures = {name: result[name] for name in ("import_s", "init_s", "ready_s", "generate_s")}
    kept = ("ways", "fallbacks", "graphs", "kv_blocks", "phases_ms", "restore_ms", "parts_ms", "collector_ms")
    answers = result["tokens"]
    found = {"answers": len(answers), "distinct": _distinct(answers), "by_adapter": result["by_adapter"]}
    found |= {"replays": context.replays(label, setup.workers)}
    if checked and not result["checked"]:
        raise RunFailed(f"{label}: vLLM has no pieces whose addresses it could look at")
    if setup.adapters and found["by_adapter"] <= setup.adapters:
        raise RunFailed(f"{label}: {setup.adapters} adapters and none gave one prompt {found['by_adapter']} answers")
    return figures | {name: report[name] for name in kept} | found


def found_by(context: Context, label: str) -> dict[str, Any]:
    """What a start answered; raises ``RunFailed`` if it did not."""
    path = context.out / f"{label}.json"
    if not path.exists():
        raise RunFailed(f"there is no {path} to compare with: run {label} first")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _distinct(answers: Sequence[Sequence[int]]) -> int:
    return len({token for answer in answers for token in answer})


def judged(context: Context, row: Row, label: str, native: str, *, restored: bool = True) -> Row:
    """The row with its verdict: graphs came as they should, and every answer is that of the native start."""
    theirs = found_by(context, native)
    expected = theirs["tokens"]
    different = differences(found_by(context, label)["tokens"], expected)
    wrong = []
    if restored and row["ways"] != ["restored"]:
        wrong.append(f"{', '.join(row['ways'])}: {[fallback['message'] for fallback in row['fallbacks']]}")
    elif restored:
        wrong += unused(row["replays"], context.replays(native, list(row["replays"])))
    if different:
        wrong.append(f"{len(different)} of {len(expected)} answers differ: {'; '.join(different[:3])}")
    if row["distinct"] < 8:
        wrong.append(f"only {row['distinct']} tokens occur, which proves little")
    row |= {"equal": len(expected) - len(different), "verdict": FAILED if wrong else OK}
    said = f"{row['equal']} of {len(expected)} answers equal, {row['graphs']} graphs, init {row['init_s']:.1f} s"
    said += f", {counted(row['replays'], 'restored')}" if restored else ""
    return row | {"detail": "; ".join([*wrong, said])}


def unused(ours: Mapping[str, Mapping[str, int]], native: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What shows that restored graphs were not what answered, for each worker."""
    wrong = []
    for worker, found in ours.items():
        if found["captured"] or found["native"]:
            graphs, replays = found["captured"], found["native"]
            wrong.append(f"{worker}: vLLM captured {graphs} graphs itself and replayed such {replays} times")
        # How steps follow one another may vary a little, whether a step has a graph may not.
        expected = native[worker]["native"]
        if found["restored"] < 0.9 * expected:
            replays = found["restored"]
            wrong.append(f"{worker}: {replays} replays of restored graphs, where the native start had {expected}")
    return wrong


def graphless(native: Mapping[str, Mapping[str, int]]) -> list[str]:
    """The same for a native start, with which there is nothing to compare if vLLM ran without graphs."""
    return [
        f"{worker}: vLLM ran without graphs, so there is nothing to compare with"
        for worker, found in native.items()
        if not (found["native"] and found["captured"])
    ]


def counted(replays: Mapping[str, Mapping[str, int]], kind: str) -> str:
    """Each worker's replays of graphs of that kind, in words."""
    return f"{' + '.join(str(found[kind]) for found in replays.values())} replays"


# --- steps ------------------------------------------------------------------------------------------------------------


def capture(
    context: Context, name: str, *, sample: str = "", held_out: str = "", jobs: int = 1, more: Sequence[str] = ()
) -> Row:
    """Captures a setup as docs/vllm.md says; on one GPU, however many ranks it has."""
    setup = context.setup_of(name)
    archive = context.out / f"{setup.name}.foundry"
    logs = context.out / f"logs-{setup.name}"
    shutil.rmtree(logs, ignore_errors=True)
    options = ["-o", str(archive), "--variant", setup.variant, "--json", "--logs", str(logs)]
    options += ["--deadline", str(context.capture_deadline), "--jobs", str(jobs)]
    options += ["--sample", sample] if sample else []
    options += ["--held-out", held_out] if held_out else []
    engine = [sys.executable, "-P", "-m", "foundryd.engines.vllm.capture", str(context.models(setup)), *setup.flags]
    given = context.environment(setup, name)
    log = context.out / f"{name}.log"
    said = foundryd("capture", *options, *more, "--", *engine, timeout=context.limit, log=log, environment=given)
    figures = json.loads(said.splitlines()[-1])
    row = {"verdict": OK, "capture": figures}
    parts = [f"{figures['archive_bytes']:,} bytes", f"ranks {figures['captured_ranks']}"]
    if held_out:
        row |= predicted(figures, [int(rank) for rank in held_out.split(",")], setup.ranks)
        parts.append(str(row["detail"]))
    return row | {"detail": ", ".join(parts)}


def predicted(figures: Mapping[str, Any], held_out: Sequence[int], ranks: int) -> Row:
    """Whether rules predicted the ranks that were held out, word for word."""
    if set(held_out) <= set(figures["heldout_ranks"]):
        return {"verdict": OK, "detail": f"predicted ranks {figures['heldout_ranks']}"}
    every = figures["captured_ranks"] == list(range(ranks))
    why = ": every rank was captured, since code and launches differ" if every else ""
    return {"verdict": FAILED, "detail": f"did not predict ranks {list(held_out)}{why}"}


def native(context: Context, name: str) -> Row:
    """vLLM without the hook."""
    setup = context.setup_of(name)
    row = start(context, setup, name)
    wrong = graphless(row["replays"])
    right = row["ways"] == ["native"] and not wrong
    said = f"init {row['init_s']:.1f} s, {row['ways'][0]}, {counted(row['replays'], 'native')}"
    return row | {"verdict": OK if right else FAILED, "detail": "; ".join([*wrong, said])}


def restore(context: Context, name: str, *, checked: bool = False) -> Row:
    """vLLM from the archive's file; ``checked``: it looks at the addresses of every piece's inputs."""
    setup = context.setup_of(name)
    native = context.comparable(setup)
    row = start(context, setup, name, str(context.archive(setup.name)), checked=checked)
    return judged(context, row, name, native)


def calls(context: Context, name: str) -> Row:
    """Which functions take the time while vLLM starts, natively or restored as the step's name ends."""
    setup = context.setup_of(name)
    archive = str(context.archive(setup.name)) if name.endswith("restore") else None
    file = context.out / f"{name}.txt"
    row = start(context, setup, name, archive, batches=FEW_BATCHES, tokens=FEW_TOKENS, calls=file)
    right = row["ways"] == ["native" if archive is None else "restored"]
    return row | {"verdict": OK if right else FAILED, "detail": f"{row['ways'][0]}: see {file}"}


def daemon(context: Context, name: str) -> Row:
    """vLLM from a daemon, and from another one after that was stopped."""
    setup = context.setup_of(name)
    archive, runtime = context.archive(setup.name), context.out / f"run-{setup.name}"
    deadline, rows = Deadline(context.limit), []
    for number in (1, 2):
        label = f"{name}-{number}"
        foundryd("start", "--runtime-dir", str(runtime), str(archive), timeout=deadline.left(60))
        try:
            given = {"FOUNDRYD_RUNTIME_DIR": str(runtime)}
            row = start(context, setup, label, archive.stem, limit=deadline.left(), environment=given)
            rows.append(judged(context, row, label, f"{setup.name}.native"))
        finally:
            foundryd("stop", "--runtime-dir", str(runtime), timeout=30, stoppable=False)
    verdict = OK if all(row["verdict"] == OK for row in rows) else FAILED
    return rows[-1] | {"verdict": verdict, "detail": " | ".join(row["detail"] for row in rows), "first": rows[0]}


def refusal(change: Callable[[Setup], Setup], reason: str, words: str) -> Callable[[Context, str], Row]:
    """A step in which vLLM is started otherwise than it was captured: refused by name, then native with its answers."""

    def refused(context: Context, name: str) -> Row:
        captured = context.setups["small"]
        setup, deadline = change(captured), Deadline(context.limit)
        few: dict[str, Any] = {"batches": FEW_BATCHES, "tokens": FEW_TOKENS}
        start(context, setup, f"{name}-native", limit=deadline.left(), **few)
        row = start(context, setup, name, str(context.archive(captured.name)), limit=deadline.left(), **few)
        row = judged(context, row, name, f"{name}-native", restored=False)
        said = [fallback["message"] for fallback in row["fallbacks"]]
        wrong = []
        if row["ways"] != ["native"]:
            wrong.append(f"it was {row['ways'][0]}")
        if [fallback["reason"] for fallback in row["fallbacks"]] != [reason] or words not in "".join(said):
            wrong.append(f"refused with {row['fallbacks']} and not for {reason}: {words}")
        detail = "; ".join([*wrong, row["detail"], *said])
        return row | {"verdict": FAILED if wrong else row["verdict"], "detail": detail}

    return refused


# --- time of a token --------------------------------------------------------------------------------------------------


class Follower:
    """A start of vLLM that stays and times batches when it is asked to."""

    def __init__(self, context: Context, setup: Setup, label: str, archive: str | None) -> None:
        self.label = label
        ours, theirs = socket.socketpair()
        wanted = wanted_of(context, setup, label, (1,), 2) | {"socket": theirs.fileno()}
        given = context.environment(setup, label) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        self._log = context.out / f"{label}.log"
        with self._log.open("wb") as sink, theirs:
            self._process = subprocess.Popen(
                launched(wanted, archive),
                env=given,
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._lines = ours.makefile("rw", encoding="utf-8")

    def hear(self, seconds: float) -> dict[str, Any]:
        """The next line of the process."""
        self._socket.settimeout(seconds)
        try:
            said = self._lines.readline()
        except TimeoutError:
            raise TimeUp(f"{self.label} said nothing for {seconds:.0f} s: {self._tail()}") from None
        if not said:
            raise RunFailed(f"{self.label} ended: {self._tail()}")
        answer: dict[str, Any] = json.loads(said)
        return answer

    def seconds(self, batch: int, tokens: int, limit: float) -> float:
        """How long that batch takes."""
        self._lines.write(json.dumps({"batch": batch, "tokens": tokens}) + "\n")
        self._lines.flush()
        return float(self.hear(limit)["seconds"])

    def close(self) -> None:
        """Ends the process."""
        self._lines.close()
        self._socket.close()
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=10)

    def _tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def pace(context: Context, name: str) -> Row:
    """Milliseconds of a token: native, native again and restored side by side on one GPU, in turns."""
    setup = context.setup_of(name)
    ways = {"native": None, "again": None, "restored": str(context.archive(setup.name))}
    deadline = Deadline(context.limit)
    with ExitStack() as stack:
        followers: dict[str, Follower] = {}
        for way, archive in ways.items():
            # One after another, since each measures what memory is free.
            follower = Follower(context, setup, f"{name}-{way}", archive)
            stack.callback(follower.close)
            follower.hear(deadline.left())
            followers[way] = follower
        report = context.report(f"{name}-restored")
        found: dict[str, Any] = {}
        for batch in PACED:
            found[str(batch)] = compared(_rounds(followers, batch, deadline))
    slower = [batch for batch, row in found.items() if row["restored_ratio"] > max(row["again_ratios"])]
    right = report["ways"] == ["restored"] and not slower
    detail = ", ".join(f"batch {batch}: {row['restored_ratio']:.3f} of native" for batch, row in found.items())
    detail += f"; slower than native ever was: batch {', '.join(slower)}" if slower else ""
    return {"verdict": OK if right else FAILED, "detail": f"{detail} ({report['ways'][0]})", "pace": found}


def _rounds(followers: Mapping[str, Follower], batch: int, deadline: Deadline) -> dict[str, list[float]]:
    """Milliseconds of a token in each round; what comes before decoding is taken off."""
    times: dict[str, list[float]] = {way: [] for way in followers}
    for number in range(ROUNDS + 1):
        order = list(followers)
        for way in order[number % len(order) :] + order[: number % len(order)]:
            one = followers[way].seconds(batch, 1, deadline.left(60))
            all_of_them = followers[way].seconds(batch, PACE_TOKENS + 1, deadline.left(60))
            if number:  # the first round meets what was never used
                times[way].append((all_of_them - one) * 1000 / PACE_TOKENS)
    return times


def compared(times: Mapping[str, Sequence[float]]) -> Row:
    """Medians, and each round's times in proportion to native's of that round."""
    row: Row = {way: median(found) for way, found in times.items()}
    for way in ("again", "restored"):
        ratios = [ours / theirs for ours, theirs in zip(times[way], times["native"], strict=True)]
        row |= {f"{way}_ratios": ratios, f"{way}_ratio": median(ratios)}
    return row


def timed(step: Step, context: Context) -> Row:
    """Runs a step; its row, which says why if it failed, and whether ranks shared a GPU."""
    started = time.monotonic()
    crowded = context.crowds(step.gpus)
    try:
        if step.gpus > max(1, context.gpus) and not crowded:
            raise RunFailed(
                f"it takes {step.gpus} GPUs and this host has {context.gpus}: add --crowded, and ranks share the first"
            )
        row = step.does(context, step.name)
    except TimeUp as error:
        row = {"verdict": "late", "detail": str(error)}
    except (RunFailed, OSError, ValueError, KeyError) as error:
        row = {"verdict": FAILED, "detail": f"{type(error).__name__}: {error}"}
    said = str(row.get("detail", ""))
    row |= {"crowded": True} if crowded else {}
    return row | {"detail": said.strip().replace("\n", " | ")[-600:], "seconds": time.monotonic() - started}
