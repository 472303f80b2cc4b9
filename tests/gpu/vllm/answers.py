# SPDX-License-Identifier: Apache-2.0
"""One start of vLLM in this process: what it answers, how long it took, and how long a token takes.

Started by ``compare.py``, which says what it wants in one JSON object::

    answers.py '{"model": …, "options": {…}, "out": FILE, "batches": [1, 2, 5], "tokens": 64, "socket": 7 or null,
                 "calls": FILE or null, "adapters": [FOLDER, …], "checked": true or false,
                 "replays": FOLDER, "worker": "rank-0" or null}'

With a socket it stays, and answers each line ``{"batch": N, "tokens": M}`` with ``{"seconds": S}``.  With a file for
calls it writes there which functions took the time while the engine started.  Prompts have the LoRA adapters in turns,
and none; of one prompt it is counted how many answers they give it.  ``checked`` lets vLLM compare the addresses of the
inputs of each piece with those of its capture, as it does where it logs for debugging.  How often each worker replayed
graphs for the batches is written into a file of the folder ``replays``; ``worker`` names the one of this process, if
they have no processes of their own.
"""

from __future__ import annotations

import cProfile
import json
import pstats
import random
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Python runs with -P, which leaves a script's own folder out, and workers have theirs besides.
sys.path.insert(0, str(Path(__file__).with_name("workers")))

from replay_counts import ReplayCounts


def prompts(vocabulary: int, count: int) -> list[list[int]]:
    """The same ones in every run, of different lengths."""
    draw = random.Random(7)
    return [[draw.randrange(2, vocabulary) for _ in range(draw.randrange(3, 200))] for _ in range(count)]


class Engine:
    """The engine under test."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        started = time.perf_counter()
        from vllm import LLM

        self.import_s = time.perf_counter() - started
        started = time.perf_counter()
        self._llm = LLM(model=model, **options)
        self.init_s = time.perf_counter() - started

    def answer(
        self, batch: Sequence[list[int]], tokens: int, adapters: Sequence[tuple[int, str] | None] = ()
    ) -> list[list[int]]:
        """What follows each prompt, greedily; with the LoRA adapter of each prompt, if there are any."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        asked = [TokensPrompt(prompt_token_ids=p) for p in batch]
        chosen: Any = None
        if adapters:
            from vllm.lora.request import LoRARequest

            chosen = [found and LoRARequest(f"adapter-{found[0]}", found[0], found[1]) for found in adapters]
        results = self._llm.generate(asked, sampling, use_tqdm=False, lora_request=chosen)
        return [list(result.outputs[0].token_ids) for result in results]

    def check_addresses(self) -> int:
        """From now on vLLM compares the inputs of every replay of a piece; how many pieces there are."""
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        # The variable for logging would do, but is part of how the model is compiled, too.
        pieces = [w for w in CUDAGraphWrapper._all_instances if w.runtime_mode.name == "PIECEWISE"]
        for piece in pieces:
            piece.is_debugging_mode = True
        return len(pieces)

    @contextmanager
    def counting(self, folder: str, worker: str | None) -> Iterator[None]:
        """Counts replays inside, and writes them into the folder.

        ``worker`` is the name of the only one, which is in this process; without it each has its own, and counts there.
        """
        if worker is None:
            self._llm.collective_rpc("begin_replay_counts")
            yield
            self._llm.collective_rpc("write_replay_counts", args=(folder,))
            return
        counts = ReplayCounts()
        counts.begin()
        yield
        counts.write(Path(folder), worker)


@contextmanager
def followed(file: str | None) -> Iterator[None]:
    """Writes to ``file``, if there is one, which functions took the time inside; all of them take longer then."""
    if file is None:
        yield
        return
    profile = cProfile.Profile()
    profile.enable()
    try:
        yield
    finally:
        profile.disable()
        with Path(file).open("w", encoding="utf-8") as sink:
            for order in ("cumulative", "tottime"):
                pstats.Stats(profile, stream=sink).sort_stats(order).print_stats(120)


def serve(engine: Engine, waiting: list[list[int]], link: socket.socket) -> None:
    """Times batches as they are asked for, until the other end is closed."""
    with link.makefile("rw", encoding="utf-8") as lines:
        lines.write(json.dumps({"ready": True}) + "\n")
        lines.flush()
        for line in lines:
            wanted = json.loads(line)
            started = time.perf_counter()
            engine.answer([prompt[:8] for prompt in waiting[: wanted["batch"]]], wanted["tokens"])
            lines.write(json.dumps({"seconds": time.perf_counter() - started}) + "\n")
            lines.flush()


def main() -> None:
    """Starts, answers, and writes the result."""
    wanted = json.loads(sys.argv[1])
    begun = time.perf_counter()
    with followed(wanted["calls"]):
        engine = Engine(wanted["model"], wanted["options"])
    checked = engine.check_addresses() if wanted["checked"] else 0
    vocabulary = int(json.loads((Path(wanted["model"]) / "config.json").read_text())["vocab_size"])
    waiting, answers = prompts(vocabulary, max(64, sum(wanted["batches"]))), []
    ready = time.perf_counter()
    left = list(waiting)
    # Numbers of adapters begin at 1.  A batch of one has one, and a larger one also prompts without.
    turns = [*enumerate(wanted["adapters"], 1), None] if wanted["adapters"] else []
    with engine.counting(wanted["replays"], wanted["worker"]):
        for size in wanted["batches"]:
            batch, left = left[:size], left[size:]
            answers += engine.answer(batch, wanted["tokens"], (turns * size)[:size])
    alike = [engine.answer(waiting[:1], wanted["tokens"], [turn])[0] for turn in turns]
    result = {
        "by_adapter": len({tuple(answer) for answer in alike}),
        "import_s": engine.import_s,
        "init_s": engine.init_s,
        "ready_s": ready - begun,
        "generate_s": time.perf_counter() - ready,
        "tokens": answers,
        "checked": checked,
    }
    Path(wanted["out"]).write_text(json.dumps(result))
    if wanted["socket"] is not None:
        serve(engine, waiting, socket.socket(fileno=wanted["socket"]))


if __name__ == "__main__":
    main()
