# SPDX-License-Identifier: Apache-2.0
"""Steps in which ``vllm serve`` has several replicas, each of which answers every prompt."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

from answers import prompts
from launch import FOUNDRYD, Deadline, RunFailed, TimeUp
from results import FAILED, OK, Row, differences
from servers import CALLABLE, Server
from serving import command_of
from steps import Context, counted, graphless, unused

PROMPTS, TOKENS = 8, 32


def replicas(context: Context, name: str) -> Row:
    """A server of the setup, natively or restored as the step's name ends; restored, it answers as natively.

    A prompt is asked alone, so that a batch never depends on time: the other replicas then have none, and those that
    share experts run steps without requests.  In the end all prompts are asked of all replicas at once, for which only
    the number of tokens is compared.  Each worker counts its replays for all of them.
    """
    setup = context.started(context.setup_of(name))
    restoring = name.endswith("restore")
    native = context.results.of(context.comparable(setup)) if restoring else {}
    if restoring and "served" not in native:
        raise RunFailed(f"there is nothing to compare with: run {setup.name}.native first")
    model, deadline = str(context.models(setup)), Deadline(context.limit)
    command = ["vllm", "serve", model, *setup.flags]
    if restoring:
        command = [*FOUNDRYD, "run", "--archive", str(context.archive(setup.name)), "--", *command]
    asked = prompts(setup.model.vocabulary, PROMPTS)
    given = context.environment(setup, name) | CALLABLE
    with Server(command_of(command), given, context.out / f"{name}.log") as server:
        started = time.monotonic()
        try:
            server.wait_ready(deadline.left())
        except TimeUp as error:
            raise TimeUp(f"{error}; {context.waited_for(name, setup.workers)}") from error
        report = context.report(name, setup.workers)
        row: Row = {"ready_s": time.monotonic() - started, "ways": report["ways"], "fallbacks": report["fallbacks"]}
        server.call("begin_replay_counts", seconds=deadline.left(60))
        row["served"] = [
            server.complete(model, [prompt], TOKENS, deadline.left(60), replica)[0]
            for replica in range(setup.replicas)
            for prompt in asked
        ]
        with ThreadPoolExecutor(setup.replicas) as pool:
            jobs = [
                pool.submit(server.complete, model, asked, TOKENS, deadline.left(60), replica)
                for replica in range(setup.replicas)
            ]
            together = [len(answer) for job in jobs for answer in job.result()]
        server.call("write_replay_counts", [str(context.counts(name))], deadline.left(60))
    row["replays"] = context.replays(name, setup.workers)
    wrong = [] if row["ways"] == ["restored" if restoring else "native"] else [f"{row['ways']}: {row['fallbacks']}"]
    if restoring:
        wrong += differences(row["served"], native["served"])[:3]
        wrong += unused(row["replays"], context.replays(f"{setup.name}.native", setup.workers))
    else:
        wrong += graphless(row["replays"])
    if together != [TOKENS] * (PROMPTS * setup.replicas):
        wrong.append(f"asked at once, replicas answered with {together} tokens")
    said = f"ready after {row['ready_s']:.1f} s, {len(setup.workers)} workers, {len(row['served'])} answers"
    said += f", {counted(row['replays'], 'restored' if restoring else 'native')}"
    return row | {"verdict": FAILED if wrong else OK, "detail": "; ".join([*wrong, said])}
