# SPDX-License-Identifier: Apache-2.0
"""A real vLLM on GPUs: what it answers and how it starts, restored against natively.

It needs vLLM 0.22.1 (``pip install vllm==0.22.1``) and foundryd in one environment, and GPUs with FlashAttention 3::

    python -P tests/gpu/vllm/compare.py --out /tmp/vllm --list
    python -P tests/gpu/vllm/compare.py --out /tmp/vllm --steps 'decode.*,refuse.*' --limit 500

A step is ``setup.what``.  Each prints one line and keeps what it found in ``results.json``; so a run that is cut, by
``--limit`` or by a signal, loses nothing, and goes on with the steps that are named next.  ``refuse.*`` and ``serve.*``
share a GPU and run ``--jobs`` at a time.  The end is a table of all that was found so far, in this folder.

With ``--crowded``, ranks share the first GPU where there are fewer GPUs than ranks, natively and restored alike: each
is a host of its own to NCCL, which connects them by sockets.  Rows and tables say so, and times say nothing then.

Every worker counts its replays while prompts are answered, in its own process if it has one.  A restored start is ok
only if each rank's restored graphs answered about as often as its native ones did, and it captured none itself.

Models have Qwen3's shapes and random weights, which are written once: no network is needed.  Prompts are token numbers,
answers are greedy.  The exit code is 0 if every step that ran was ok.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

# Python runs with -P, which leaves a script's own folder out.
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from launch import STOP, Deadline, TimeUp
from replicas import replicas
from results import LATE, OK, Results, line, tables
from serving import same, served
from setups import GIB, Model, Setup, setups
from steps import Context, Step, calls, capture, daemon, native, pace, refusal, restore, timed

REFUSALS = {
    "model": (lambda s: s.changed(model=Model(3, s.model.vocabulary)), "identity", "model_config is "),
    "seqs": (lambda s: s.changed(max_num_seqs=16), "identity", "vllm.max_num_seqs is "),
    "memory": (lambda s: s.changed(gpu_memory_utilization=0.06), "identity", "vllm.gpu_memory_utilization is "),
    "kv": (lambda s: s.changed(kv_cache_memory_bytes=2 * GIB), "identity", "vllm.kv_cache_memory_bytes is "),
    "blocks": (lambda s: s.changed(num_gpu_blocks_override=500), "identity", "vllm.num_gpu_blocks_override is "),
    "attention": (
        lambda s: s.changed(attention_config={"backend": "TRITON_ATTN"}),
        "identity",
        "vllm.attention_backend is ",
    ),
    "runner": (
        lambda s: s.changed(environment={"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}),
        "identity",
        "vllm.model_runner is V1 and the archive has V2",
    ),
}
SERVED = (
    *(("native", "term"), ("run", "term"), ("plugin", "term"), ("daemon", "term")),
    *(("native", "kill"), ("plugin", "kill")),
)
# Setups with graphs of pieces, whose inputs vLLM itself can compare with those of the capture.
IN_PIECES = ("pieces", "moe_v1_pieces", "eagle")
ADDRESSES = "the same once more; vLLM looks at the addresses of every piece's inputs"
EVENTS = {"term": "SIGTERM", "kill": "its engine gets SIGKILL"}


def steps() -> list[Step]:
    """Every step, in the order in which they make sense."""
    found = [
        Step("decode.capture", 75, capture, about="FULL_DECODE_ONLY, --layers layers"),
        Step("decode.native", 30, native),
        Step("decode.restore", 25, restore, about="from the file; tokens as natively"),
        Step("decode.again", 25, restore, about="the same once more"),
        Step("decode.daemon", 50, daemon, about="from a daemon, which is stopped and started; restored again"),
        Step("decode.calls-native", 45, calls, about="which functions take the time of a start"),
        Step("decode.calls-restore", 40, calls, about="the same restored"),
        Step("decode.pace", 75, pace, about="time of a token: native, native again, restored, in turns"),
    ]
    others = (
        *(("full", "FULL"), ("pieces", "FULL_AND_PIECEWISE"), ("moe", "experts, V2 runner")),
        *(("moe_v1", "experts, V1 runner"), ("moe_v1_pieces", "the same, FULL_AND_PIECEWISE")),
        ("v1", "V1 runner"),
        *(("lora", "two adapters and none in turns, V1 runner"), ("lora_v2", "the same, V2 runner")),
        *(("ngram", "three drafts looked up in the prompt, V1 runner"), ("draft", "three drafts of a smaller model")),
        ("eagle", "a head that drafts, with graphs of pieces"),
    )
    for setup, mode in others:
        found += [
            Step(f"{setup}.capture", 60, capture, about=f"{mode}, 2 layers"),
            Step(f"{setup}.native", 25, native),
            Step(f"{setup}.restore", 25, restore),
        ]
        if setup in IN_PIECES:
            found.append(Step(f"{setup}.addresses", 30, partial(restore, checked=True), about=ADDRESSES))
    found += [
        Step("artifact.capture", 75, capture, about="decode with VLLM_USE_MEGA_AOT_ARTIFACT=1, --layers layers"),
        Step("artifact.native", 30, native),
        Step("artifact.restore", 25, restore),
    ]
    found.append(Step("small.capture", 50, capture, about="FULL_DECODE_ONLY, 2 layers: for what follows"))
    found += [
        Step(f"refuse.{name}", 60, refusal(*row), shared=True, about=f"refused with {row[2].strip()!r}, then native")
        for name, row in REFUSALS.items()
    ]
    found += [
        Step(f"serve.{way}-{what}", 60, served(what, way), shared=True, about=f"vllm serve, {way}: {EVENTS[what]}")
        for way, what in SERVED
    ]
    found += [Step(f"serve.same-{what}", 0, same(what), about="compares those") for what in ("term", "kill")]
    found += [
        Step("tp2.capture", 110, partial(capture, jobs=3), about="both ranks and a control on one GPU"),
        Step("tp2.native", 30, native, gpus=2),
        Step("tp2.restore", 30, restore, gpus=2),
        Step("tp2.daemon", 60, daemon, gpus=2, about="from a daemon, which is stopped and started; restored again"),
        Step("ep2.capture", 110, partial(capture, jobs=3), about="experts spread over both ranks, V1 runner"),
        Step("ep2.native", 30, native, gpus=2),
        Step("ep2.restore", 30, restore, gpus=2),
        Step("ep2.daemon", 60, daemon, gpus=2, about="from a daemon, which is stopped and started; restored again"),
        Step("dp2.capture", 60, capture, about="one of two replicas that share nothing"),
        Step("dp2.native", 60, replicas, gpus=2, about="vllm serve --data-parallel-size 2"),
        Step("dp2.restore", 60, replicas, gpus=2, about="both replicas from one archive of one rank"),
        Step("moe_dp2.capture", 110, partial(capture, jobs=3), about="attention of two replicas, experts of both"),
        Step("moe_dp2.native", 75, replicas, gpus=2, about="vllm serve --data-parallel-size 2, experts spread"),
        Step("moe_dp2.restore", 75, replicas, gpus=2),
        Step(
            "tp8.capture",
            200,
            partial(capture, sample="0,1,2,3,7", held_out="5", jobs=4),
            about="five of eight ranks on one GPU predict rank 5",
        ),
    ]
    return found


def chosen(every: Sequence[Step], patterns: str) -> list[Step]:
    """Steps whose names match one of the patterns, joined by commas; raises ``ValueError`` for one without a step."""
    found = []
    for pattern in patterns.split(","):
        matching = [step for step in every if fnmatch.fnmatchcase(step.name, pattern)]
        if not matching:
            raise ValueError(f"{pattern} is no step: --list shows them")
        found += matching
    return [step for step in every if step in found]


def run_all(context: Context, wanted: Sequence[Step], limit: float) -> bool:
    """Runs the steps, whether others fail or not; whether all were ok."""
    deadline, bad = Deadline(limit), []

    def one(step: Step) -> None:
        try:
            row = timed(step, replace(context, limit=deadline.left(context.limit)))
        except TimeUp as error:
            row = {"verdict": LATE, "detail": str(error), "seconds": 0.0}
        context.results.add(step.name, row)
        print(line(step.name, row), flush=True)
        if row["verdict"] != OK:
            bad.append(step.name)

    for shared, group in groupby(wanted, lambda step: step.shared):
        with ThreadPoolExecutor(context.jobs if shared else 1) as pool:
            list(pool.map(one, group))
    return not bad


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for models, archives, logs and results")
    parser.add_argument("--steps", default="*", help="names or patterns, joined by commas")
    parser.add_argument("--list", action="store_true", help="show the steps and what they take, and end")
    parser.add_argument("--layers", type=int, default=8, help="of the model of decode.*")
    parser.add_argument("--memory", type=float, default=0.25, help="gpu_memory_utilization of steps that are timed")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for all steps")
    parser.add_argument("--step-limit", type=float, default=400, help="seconds for one")
    parser.add_argument("--capture-deadline", type=float, default=300, help="seconds of one launch of a capture")
    parser.add_argument("--jobs", type=int, default=4, help="steps that share a GPU, at a time")
    parser.add_argument("--crowded", action="store_true", help="ranks share the first GPU where there are too few")
    given = parser.parse_args(arguments)
    every = steps()
    if given.list:
        for step in every:
            print(f"{step.name:18} {step.seconds:4} s, {step.gpus} GPU  {step.about}".rstrip())
        return 0
    try:
        wanted = chosen(every, given.steps)
    except ValueError as error:
        parser.error(str(error))
    given.out.mkdir(parents=True, exist_ok=True)
    out = given.out.resolve()
    writing = threading.Lock()

    def written(setup: Setup) -> Path:
        with writing:
            return setup.model.written(out)

    context = Context(
        out,
        Results(out),
        setups(given.layers, given.memory),
        written,
        given.step_limit,
        given.capture_deadline,
        given.jobs,
        given.crowded,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: STOP.set())
    good = run_all(context, wanted, given.limit)
    print(f"\n{tables(context.results.rows)}\n\n{out / 'results.json'}")
    print(json.dumps({name: row["verdict"] for name, row in context.results.rows.items()}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
